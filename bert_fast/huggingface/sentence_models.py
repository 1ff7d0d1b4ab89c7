"""sentence-transformers' models around a fused encoder: texts stay packed from the tokenizer to their vectors.

`encode` and `predict` are theirs; the batches that they make of texts are tokenized by `same_tokenizer` without padding
where nothing speaks against it, and `forward` pools packed tokens, whether a batch came packed or padded. SPLADE's
vectors are made from them without the scores of all tokens (`ops.splade`).
"""

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any

import sentence_transformers
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling
from torch import Tensor, nn
from transformers.tokenization_utils_base import PaddingStrategy, TruncationStrategy

from bert_fast.huggingface.flattened import OFFSETS
from bert_fast.huggingface.fused import Fused, FusedAround, runs
from bert_fast.huggingface.heads import FusedForSequenceClassification
from bert_fast.huggingface.models import encode_arguments, is_fused_model
from bert_fast.huggingface.reasons import has_noticing_hooks, reasons
from bert_fast.huggingface.same_tokenizer import same_tokenizer
from bert_fast.huggingface.sentence_pooling import TokenFeatures, pool
from bert_fast.huggingface.word_heads import FusedForMaskedLM
from bert_fast.modules.call import Call, first_rows, first_tokens
from bert_fast.modules.originals import GLOBAL_HOOKS, Originals
from bert_fast.ops._autocast import autocast_dtype
from bert_fast.tokenization import PackedBatch


def originals(*paths: str) -> Originals:
    """Those functions of sentence-transformers that the installed version has."""
    known = []
    for path in paths:
        *modules, cls, name = path.split(".")
        owner = reduce(getattr, modules, sentence_transformers)
        if hasattr(getattr(owner, cls, None), name):
            known.append(path)
    return Originals(sentence_transformers, known)


_ORIGINALS = originals(
    "SentenceTransformer.forward", "SentenceTransformer.preprocess", "SentenceTransformer._inference",
    "CrossEncoder.forward", "CrossEncoder.preprocess", "CrossEncoder._inference",
    "SparseEncoder.forward", "SparseEncoder.preprocess", "SparseEncoder._inference",
    "base.modules.Transformer.forward", "base.modules.Transformer.preprocess",
    "sentence_transformer.modules.Pooling.forward", "sparse_encoder.modules.SpladePooling.forward",
)  # fmt: skip
_HAS_INFERENCE = hasattr(SentenceTransformer, "_inference")  # from 6.2: what makes batches of texts and runs them
PACK = "_pack"  # passed from `_inference` to `preprocess` and `forward` alone: callers never see a packed batch
_NO_LIMIT = int(1e20)  # transformers' own: a greater model_max_length is none
BESIDE = frozenset(("modality", "prompt_length", "sentence_embedding", "task", "token_embeddings"))  # not the model's


class _OfTheOriginal:
    """A class method of the class that a fused one replaces: other processes find it by that name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        replaced = next(cls for cls in owner.__mro__ if issubclass(cls, nn.Module) and not issubclass(cls, Fused))
        return getattr(replaced, self._name)


class PackingModel(FusedAround):
    """What all kinds of models have in common: batches of their own loops are packed."""

    vectors = "sentence_embedding"  # the features that are packed
    _modules: dict[str, Any]
    _multi_process_worker = _OfTheOriginal()

    def _inference(self, inputs: list[Any], **options: Any) -> Any:
        """As sentence-transformers' own, on packed batches where nothing speaks against it."""
        shows_vectors = options.get("output_value", self.vectors) == self.vectors
        if shows_vectors and next(self.reasons_around(), None) is None:
            options[PACK] = True
        return super()._inference(inputs, **options)  # type: ignore[misc]

    def preprocess(self, inputs: Any, prompt: str | None = None, **kwargs: Any) -> Any:
        """As sentence-transformers' own; padded, but for `_inference`."""
        if kwargs.pop(PACK, False) and not (prompt and self._leaves_prompts_out()):
            batch = _packed(self[0], inputs, prompt, kwargs)  # type: ignore[index]
            if batch is not None and not reasons(self._bert(), batch):
                return batch
        return super().preprocess(inputs, prompt=prompt, **kwargs)  # type: ignore[misc]

    def forward(self, input: Any, **kwargs: Any) -> Any:
        """As sentence-transformers' own."""
        kwargs.pop(PACK, None)
        return super().forward(input, **kwargs)  # type: ignore[misc]

    def _bert(self) -> Any:
        """The model without a head."""
        raise NotImplementedError

    def _leaves_prompts_out(self) -> bool:
        """Whether a vector is made without the prompt's tokens."""
        return False

    def _reasons_of_modules(self) -> Iterator[str]:
        """Why calls are not packed up to the vectors, or scores."""
        raise NotImplementedError

    def reasons_around(self) -> Iterator[str]:
        """Why texts are not packed from the tokenizer on: what lies in this model."""
        found = list(self._reasons_of_modules())
        yield from found
        if found:
            return
        if not _HAS_INFERENCE:
            yield "sentence_transformers: a version before 6.2, whose models pad texts themselves"
        for name in ("_inference", "preprocess", "forward"):
            if name in vars(self) or not getattr(getattr(type(self), name), "is_ours", False):
                yield f"{name}: it is replaced"
        if getattr(self, "_compiled_call_impl", None) is not None:
            yield "the model is compiled"
        if has_noticing_hooks(self):  # type: ignore[arg-type]
            yield "hooks are registered at the model"
        yield from _reasons_of_texts(self[0])  # type: ignore[index]

    _inference.is_ours = preprocess.is_ours = forward.is_ours = True  # type: ignore[attr-defined]


class _VectorModel(PackingModel):
    """Models whose second module makes vectors of tokens."""

    module_kwargs: dict[str, list[str]] | None

    def forward(self, input: Any, **kwargs: Any) -> Any:
        """As sentence-transformers' own; takes packed features, too.

        `token_embeddings` of what it returns are made when they are read.
        """
        is_own = kwargs.pop(PACK, False)
        if torch.compiler.is_compiling() or next(self._reasons_of_call(input, kwargs), None) is not None:
            return super().forward(input, **kwargs)
        bert = self._bert()
        arguments = {name: value for name, value in input.items() if name not in BESIDE}
        if reasons(bert, arguments):
            return super().forward(input, **kwargs)
        features = self._pooled(bert, arguments, input, is_own)
        for module in list(self._modules.values())[2:]:
            features = module(features)
        input["sentence_embedding"] = features["sentence_embedding"]
        return features

    forward.is_ours = True  # type: ignore[attr-defined]

    def _pooled(self, bert: Any, arguments: Mapping[str, Any], features: Mapping[str, Any], is_own: bool) -> Any:
        """The features that the first two modules return; is_own: only this model uses them."""
        raise NotImplementedError

    def _reasons_of_call(self, features: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Iterator[str]:
        yield from self._reasons_of_modules()
        if features.get("modality", "text") != "text":
            yield f"modality: {features['modality']!r}"
        if "cu_seq_lens_q" in features:
            yield "cu_seq_lens_q: texts are flattened, and pooled as such"
        if "prompt_length" in features and self._leaves_prompts_out():
            yield "include_prompt: the pooling leaves a prompt out"
        for name, module in self._modules.items():
            named = (self.module_kwargs or {}).get(name, [])
            if any(key in named or key in getattr(module, "forward_kwargs", ()) for key in kwargs):
                yield f"{name}: takes an argument of the call"


class FusedSentenceTransformer(_VectorModel, SentenceTransformer):
    """Vectors of texts, pooled from packed tokens."""

    def _pooled(self, bert: Any, arguments: Mapping[str, Any], features: Mapping[str, Any], is_own: bool) -> Any:
        pooling, *others = list(self._modules.values())[1:]
        # If only the first token is read, the last layer computes only that row of each text.
        is_first = is_own and pooling.pooling_mode == "cls" and all(map(_reads_vectors, others))
        encoded = bert.encode(**encode_arguments(bert, arguments), rows=first_rows if is_first else None)
        if is_first:
            pooled = TokenFeatures(features)
            pooled["sentence_embedding"] = first_tokens(encoded.packing, encoded.hidden, encoded.rows)
            return pooled
        pooled = TokenFeatures(features, _later(lambda: encoded.packing.unpack(encoded.hidden)))
        pooled["sentence_embedding"] = pool(encoded.hidden, encoded.packing, pooling.pooling_mode)
        return pooled

    def _bert(self) -> Any:
        return self[0].model

    def _leaves_prompts_out(self) -> bool:
        return not self[1].include_prompt

    def _reasons_of_modules(self) -> Iterator[str]:
        yield from reasons_of_process()
        modules = list(self._modules.values())
        if len(modules) < 2 or type(modules[0]) is not Transformer or type(modules[1]) is not Pooling:
            yield f"modules: {', '.join(type(each).__name__ for each in modules)}, not Transformer, Pooling, ..."
            return
        yield from reasons_of_encoder(modules[0], "token_embeddings", "last_hidden_state")
        yield from reasons_of_module("pooling", modules[1])
        if not is_fused_model(modules[0].model):
            yield f"the encoder is a {type(modules[0].model).__name__}, no fused model"
        elif modules[0].model.config.output_hidden_states:
            yield "config.output_hidden_states: the features hold those of all layers"


class FusedSparseEncoder(_VectorModel, SparseEncoder):
    """SPLADE's vectors of texts, from packed tokens, without the scores of all of them."""

    def _pooled(self, bert: Any, arguments: Mapping[str, Any], features: Mapping[str, Any], is_own: bool) -> Any:
        pooling, head = self[1], bert.head()
        encoded = bert.inner.encode(**encode_arguments(bert.inner, arguments))
        call = Call(encoded.packing, encoded.seed)
        vectors = head.word_vectors(encoded.hidden, pooling.activation_function, call=call)
        pooled = TokenFeatures(features, _later(lambda: encoded.packing.unpack(head(encoded.hidden, call=call))))
        pooled["sentence_embedding"] = _as_theirs(vectors, pooling.training)
        if pooling.embedding_dimension is None:
            pooling.embedding_dimension = vectors.shape[1]
        return pooled

    def _bert(self) -> Any:
        """The model with its head: what is registered there counts, too."""
        return self[0].model

    def _reasons_of_modules(self) -> Iterator[str]:
        yield from reasons_of_process()
        modules = list(self._modules.values())
        is_known = len(modules) > 1 and type(modules[0]) in (Transformer, MLMTransformer)
        if not is_known or type(modules[1]) is not SpladePooling:
            yield f"modules: {', '.join(type(each).__name__ for each in modules)}, not Transformer, SpladePooling, ..."
            return
        yield from reasons_of_encoder(modules[0], "token_embeddings", "logits")
        yield from reasons_of_module("pooling", modules[1])
        if modules[1].pooling_strategy != "max":
            yield f"pooling_strategy: {modules[1].pooling_strategy!r} needs the scores of all tokens"
        model = modules[0].model
        if not runs(model, FusedForMaskedLM):
            yield f"the model is a {type(model).__name__}, no fused model of masked words"
        elif not is_fused_model(model.inner) or any(map(has_noticing_hooks, (model.inner, *model.word_modules()))):
            yield f"{model.fused_family.inner}, or the head: it is replaced, or hooks are registered"
        elif model.head().scoring() is None:
            yield "the decoder is no nn.Linear alone"
        elif model.config.output_hidden_states:
            yield "config.output_hidden_states: the features hold those of all layers"


class FusedCrossEncoder(PackingModel, CrossEncoder):
    """Scores of pairs of texts, on packed tokens."""

    def _bert(self) -> Any:
        return self[0].model.inner

    def _reasons_of_modules(self) -> Iterator[str]:
        yield from reasons_of_process()
        modules = list(self._modules.values())
        if len(modules) != 1 or type(modules[0]) is not Transformer:
            yield f"modules: {', '.join(type(each).__name__ for each in modules)}, not Transformer alone"
            return
        yield from reasons_of_encoder(modules[0], "scores", "logits")
        model = modules[0].model
        if not runs(model, FusedForSequenceClassification):
            yield f"the model is a {type(model).__name__}, no fused model of sequence classes"
        elif not is_fused_model(model.inner) or has_noticing_hooks(model.inner):
            yield f"{model.fused_family.inner}: it is replaced, or hooks are registered"
        elif model.fused_family.unknown_arguments.issuperset(OFFSETS):
            yield f"the head of a {type(model).__name__} does not pass the offsets of packed texts to its encoder"


def _later(make: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The function, which records gradients if they are recorded now."""
    records = torch.is_grad_enabled()

    def run() -> Tensor:
        with torch.set_grad_enabled(records):
            return make()

    return run


def _as_theirs(vectors: Tensor, training: bool) -> Tensor:
    """Vectors in the dtype of SpladePooling's: under autocast that of the scores, unless log1p widens it.

    CUDA's autocast takes log1p in fp32, but not the one in place that evaluation takes.
    """
    dtype = autocast_dtype(vectors)
    return vectors if dtype is None or (training and vectors.is_cuda) else vectors.to(dtype)


def reasons_of_process(originals: Originals = _ORIGINALS) -> Iterator[str]:
    """Functions of sentence-transformers that were replaced, and hooks of every module."""
    yield from (f"sentence_transformers.{path}: replaced for the whole process" for path in originals.replaced())
    if any(GLOBAL_HOOKS):
        yield "hooks of every module are registered (torch.nn.modules.module)"


def reasons_of_encoder(encoder: Any, output: str, of_model: str) -> Iterator[str]:
    """Why a `Transformer` must be called on padded features; `output` is what it returns, `of_model` whence."""
    yield from reasons_of_module("transformer", encoder)
    if has_noticing_hooks(encoder.model) or "forward" in vars(encoder.model):
        yield "the encoder's forward is replaced, or hooks are registered"
    if encoder.module_output_name != output:
        yield f"module_output_name: {encoder.module_output_name!r}"
    if (encoder.modality_config or {}).get("text") not in _calls(of_model):
        yield "modality_config: texts take another way through the encoder"
    if encoder.model_forward_params is not None:
        yield "model_forward_params: arguments of the encoder are filtered"


def _calls(output: str) -> tuple[dict[str, Any], ...]:
    """How a modality's configuration says that texts go through `forward`, of which `output` counts."""
    return tuple({"method": "forward", "method_output_name": name} for name in (output, (output,), [output]))


def reasons_of_module(name: str, module: nn.Module) -> Iterator[str]:
    """Why a module must be called as it is."""
    if "forward" in vars(module) or getattr(module, "_compiled_call_impl", None) is not None:
        yield f"{name}: its forward is replaced"
    if has_noticing_hooks(module):
        yield f"{name}: hooks are registered"


def _reasons_of_texts(encoder: Any) -> Iterator[str]:
    """Why a `Transformer` must tokenize."""
    if "preprocess" in vars(encoder):
        yield "transformer: its preprocess is replaced"
    if list(encoder.modality_config) != ["text"]:
        yield "modality_config: there are others than texts"
    if encoder.processing_kwargs or encoder.can_flatten_inputs:
        yield "processing_kwargs, unpad_inputs: texts are prepared in another way"
    if encoder.processor is not encoder.tokenizer or encoder.tokenizer is None:
        yield f"processor: a {type(encoder.processor).__name__}, no tokenizer"
    elif isinstance(reason := same_tokenizer(encoder.tokenizer), str):
        yield f"tokenizer: {reason}"


def _reads_vectors(module: nn.Module) -> bool:
    """Whether a module behind the pooling is known to read nothing but its vectors."""
    return type(module) in (Dense, Normalize) and module.module_input_name == "sentence_embedding"


def _packed(encoder: Any, inputs: Any, prompt: str | None, kwargs: Mapping[str, Any]) -> PackedBatch | None:
    """The packed batch of texts, or of pairs, which `encoder.preprocess` would pad; None where it must do it."""
    if not inputs or any(value for name, value in kwargs.items() if name != "task"):
        return None
    if encoder.query_expansion is not None and kwargs.get("task") == "query":
        return None  # which it fills up to a length
    is_paired = type(inputs[0]) is not str
    if is_paired and not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in inputs):
        return None
    texts = [text for pair in inputs for text in pair] if is_paired else inputs
    if not all(type(text) is str for text in texts) or not _is_encodable(texts):
        return None
    if is_paired:
        inputs = [((prompt or "") + first, second) for first, second in inputs]
    elif prompt:
        inputs = [prompt + text for text in inputs]
    theirs = encoder.tokenizer
    tokenizer = same_tokenizer(theirs)
    length = {"query": encoder.query_length, "document": encoder.document_length}.get(kwargs.get("task") or "")
    length = theirs.model_max_length if length is None else length
    if isinstance(tokenizer, str) or not isinstance(length, int) or length <= tokenizer.form.num_special(True):
        return None
    if theirs.pad_token is None:  # of which they have something to say
        return None
    is_cut = length <= _NO_LIMIT
    batch = tokenizer.pack(inputs, max_length=length if is_cut else None)
    # What a call of theirs leaves behind goes into its tokenizer.json.
    cut = TruncationStrategy.LONGEST_FIRST if is_cut else TruncationStrategy.DO_NOT_TRUNCATE
    theirs.set_truncation_and_padding(PaddingStrategy.LONGEST, cut, length, 0, None, None)
    batch.pop("position_ids", None)  # which the model counts
    if "token_type_ids" not in theirs.model_input_names:
        del batch["token_type_ids"]
    return batch


def _is_encodable(texts: list[str]) -> bool:
    """Whether no text holds half of a surrogate pair, of which each tokenizer thinks its own."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True
