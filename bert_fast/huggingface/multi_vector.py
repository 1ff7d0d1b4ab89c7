"""sentence-transformers' models of late interaction (ColBERT) around a fused encoder: a vector for every token.

Texts stay packed from the tokenizer through the projection to normalised vectors, which are padded at the end, since
the vectors of a call are [B, S, D]. Scores of packed vectors are those of `ops.maxsim`.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import BaseTokenPooling, MultiVectorMask
from sentence_transformers.util.similarity import maxsim as theirs_maxsim
from sentence_transformers.util.similarity import mean_maxsim as theirs_mean_maxsim
from torch import Tensor, nn

from bert_fast.huggingface.models import Asked, FusedModel, asked_in_call, encode_arguments, is_fused_model
from bert_fast.huggingface.reasons import reasons
from bert_fast.huggingface.sentence_models import (
    BESIDE,
    PACK,
    PackingModel,
    originals,
    reasons_of_encoder,
    reasons_of_module,
    reasons_of_process,
)
from bert_fast.ops.maxsim import maxsim
from bert_fast.ops.packing import Packing

_ORIGINALS = originals(
    "MultiVectorEncoder.forward", "MultiVectorEncoder.preprocess", "MultiVectorEncoder._inference",
    "base.modules.Transformer.forward", "base.modules.Transformer.preprocess", "base.modules.Dense.forward",
    "base.modules.Normalize.forward", "multi_vector_encoder.modules.MultiVectorMask.forward",
)  # fmt: skip
_TOKENS, _MASK, _EXPANDED = "token_embeddings", "attention_mask", "query_expansion_positions"
# Activations of a Dense that read one token at a time.
_OF_A_TOKEN = (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid)
_AT_ONCE = 10**8  # elements of documents and of maxima that `similarity` holds, as many as sentence-transformers' own


class FusedMultiVectorEncoder(PackingModel, MultiVectorEncoder):
    """Vectors of all tokens, and scores of late interaction, without padding."""

    vectors = _TOKENS

    def forward(self, input: Any, **kwargs: Any) -> Any:
        """As sentence-transformers' own; takes packed features, too. `token_embeddings` of padding are 0."""
        if _EXPANDED in input:
            # Tokens that are scored but, as a rule, not attended to: the encoder must not take them for padding.
            with asked_in_call.set(Asked(self._expanding(), None, True, lambda kept: kept[input[_EXPANDED].bool()])):
                return super().forward(input, **kwargs)
        kwargs.pop(PACK, None)
        if torch.compiler.is_compiling() or next(self._reasons_of_call(input, kwargs), None) is not None:
            return super().forward(input, **kwargs)
        bert = self._bert()
        arguments = {name: value for name, value in input.items() if name not in BESIDE}
        if reasons(bert, arguments):
            return super().forward(input, **kwargs)
        encoded = bert.encode(**encode_arguments(bert, arguments))
        packing: Packing = encoded.packing
        ids = input["input_ids"]
        made = {_TOKENS: encoded.hidden, "input_ids": ids, _MASK: input.get(_MASK, ids.new_ones(ids.shape))}
        _, *others = self._modules.values()
        poolings = [module for module in others if isinstance(module, BaseTokenPooling)]
        for module in others[: len(others) - len(poolings)]:
            made = module(made, task=kwargs.get("task")) if isinstance(module, MultiVectorMask) else module(made)
        input[_TOKENS] = _padded(packing, made[_TOKENS])
        input[_MASK] = made[_MASK] if made[_MASK].dim() == 2 else _padded(packing, made[_MASK])
        for module in poolings:
            input = module(input, task=kwargs.get("task"))
        return input

    forward.is_ours = True  # type: ignore[attr-defined]

    def similarity(self, embeddings1: Any, embeddings2: Any, **kwargs: Any) -> Tensor:
        """As sentence-transformers' own: of lists of vectors by `ops.maxsim`, whose operands are not padded."""
        self.similarity_fn_name  # noqa: B018  # chooses the function
        is_mean = self._similarity is theirs_mean_maxsim
        if kwargs or not (is_mean or self._similarity is theirs_maxsim) or not _are_packable(embeddings1, embeddings2):
            return super().similarity(embeddings1, embeddings2, **kwargs)
        lengths = [len(query) for query in embeddings1]
        queries, of_queries = torch.cat(embeddings1), _offsets(lengths, embeddings1[0])
        parts = []
        for some in _parts(embeddings2, len(queries)):
            of_documents = [len(document) for document in some]
            parts.append(
                maxsim(
                    queries, torch.cat(some), cu_seqlens_q=of_queries,
                    cu_seqlens_d=_offsets(of_documents, queries), max_seqlen_d=max(of_documents),
                ).float()
            )  # fmt: skip
        scores = torch.cat(parts, 1)
        return scores / scores.new_tensor(lengths).clamp_(min=1).unsqueeze(1) if is_mean else scores

    def _bert(self) -> Any:
        return self[0].model

    def _expanding(self) -> Any:
        """The fused model that queries with expansion tokens go through."""
        expanding = (each for each in self.modules() if getattr(each, "query_expansion", None) is not None)
        return next((one for each in expanding for one in each.modules() if isinstance(one, FusedModel)), None)

    def _reasons_of_modules(self) -> Iterator[str]:
        yield from reasons_of_process(_ORIGINALS)
        modules = list(self._modules.values())
        kinds = [_kind(module) for module in modules]
        if not kinds or kinds != sorted(kinds) or kinds[0] != 0 or kinds.count(0) > 1 or kinds[-1] > 2:
            shown = ", ".join(type(each).__name__ for each in modules)
            yield f"modules: {shown}, not Transformer, then Dense, Normalize and MultiVectorMask of tokens"
            return
        yield from reasons_of_encoder(modules[0], _TOKENS, "last_hidden_state")
        for name, module in list(self._modules.items())[1:]:
            for one in module.modules():
                yield from reasons_of_module(f"module {name}", one)
        if not is_fused_model(modules[0].model):
            yield f"the encoder is a {type(modules[0].model).__name__}, no fused model"
        elif modules[0].model.config.output_hidden_states:
            yield "config.output_hidden_states: the features hold those of all layers"

    def _reasons_of_call(self, features: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Iterator[str]:
        yield from self._reasons_of_modules()
        if features.get("modality", "text") != "text":
            yield f"modality: {features['modality']!r}"
        if "input_ids" not in features or ("cu_seqlens" not in features and _MASK not in features):
            yield "features: no input_ids, or no mask, as of texts that are flattened"
        if self.module_kwargs and any(kwargs.keys() & names for names in self.module_kwargs.values()):
            yield "module_kwargs: a module takes an argument of the call"


def _kind(module: nn.Module) -> int:
    """Where a module may stand: 0 in front, 1 where tokens are packed, 2 behind, 3 nowhere."""
    names = getattr(module, "module_input_name", None), getattr(module, "module_output_name", None)
    is_of_tokens = names == (_TOKENS, _TOKENS)
    if type(module) is Transformer:
        return 0
    if type(module) is Dense:
        return 1 if is_of_tokens and type(module.activation_function) in _OF_A_TOKEN else 3
    if type(module) is MultiVectorMask or (type(module) is Normalize and is_of_tokens):
        return 1
    return 2 if isinstance(module, BaseTokenPooling) else 3


def _padded(packing: Packing, tokens: Tensor) -> Tensor:
    """[T, ...] to [B, S, ...] with zeros, also where the batch came packed."""
    if packing.padded_shape is not None:
        return packing.unpack(tokens)
    lengths = packing.cu_seqlens.diff().tolist()
    return nn.utils.rnn.pad_sequence(tokens.split(lengths), batch_first=True)


def _are_packable(queries: Any, documents: Any) -> bool:
    """Whether both are lists of vectors [tokens, D] that one call of `maxsim` takes."""
    if type(queries) is not list or type(documents) is not list or not queries or not documents:
        return False
    first = queries[0]
    if type(first) is not Tensor or not first.is_floating_point():
        return False
    known = first.dtype, first.device, first.shape[-1:]
    both = (*queries, *documents)
    return all(type(x) is Tensor and x.dim() == 2 and (x.dtype, x.device, x.shape[-1:]) == known for x in both)


def _offsets(lengths: list[int], like: Tensor) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(like.device)


def _parts(documents: list[Tensor], num_tokens: int) -> Iterator[list[Tensor]]:
    """As many documents at a time as `_AT_ONCE` allows, and at least one, for queries of `num_tokens`."""
    some: list[Tensor] = []
    held = 0
    for document in documents:
        needed = document.numel() + num_tokens
        if some and held + needed > _AT_ONCE:
            yield some
            some, held = [], 0
        some.append(document)
        held += needed
    yield some
