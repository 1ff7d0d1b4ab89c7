"""MultiVectorEncoder fused: vectors of tokens, scores and gradients are theirs, and texts stay packed."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_fast import fuse, unfuse, why_not
from bert_fast.losses import colbert_scores
from bert_fast.testing.tolerances import ABSOLUTE
from tests.huggingface.sentence_folders import TEXTS, make_checkpoint

library = pytest.importorskip("sentence_transformers", minversion="6.1")
transformers = pytest.importorskip("transformers")
losses = pytest.importorskip("sentence_transformers.multi_vector_encoder.losses")
from sentence_transformers.base.modules import Dense, Normalize, Transformer  # noqa: E402
from sentence_transformers.multi_vector_encoder.modules import (  # noqa: E402
    HierarchicalTokenPooling,
    MultiVectorMask,
)

from bert_fast.huggingface import multi_vector  # noqa: E402
from bert_fast.huggingface.models import FusedModel  # noqa: E402

FAMILIES = ["Bert", "Roberta", "DistilBert", "MPNet", "NomicBert"]
QUERIES = ["red", "a house on the hill", "text"]
TASKS = ["query", "document"]
SKIPPED = ["red", "\N{LOWER ONE EIGHTH BLOCK}red"]  # of word pieces, and of unigrams
OF_TOKENS = {"module_input_name": "token_embeddings"}
# query_expansion -> whether its queries run packed
EXPANSIONS: list[tuple[dict[str, Any], bool]] = [
    ({"strategy": "fixed", "attend": False, "length": 12}, False),
    ({"strategy": "fixed", "attend": True, "length": 12}, True),
    ({"strategy": "min", "attend": False, "length": 12}, False),
    ({"strategy": "min", "attend": True, "length": 12}, True),
    ({"strategy": "fixed", "attend": False, "length": 12, "token": "a"}, False),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """From a family's prefix to a checkpoint of random weights, without dropout."""
    made: dict[str, Path] = {}

    def make(prefix: str = "Bert") -> Path:
        if prefix not in made:
            made[prefix] = tmp_path_factory.mktemp(prefix)
            names = ("dropout", "attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob")
            config = getattr(transformers, f"{prefix}Config")()
            make_checkpoint(prefix, made[prefix], **{name: 0.0 for name in names if hasattr(config, name)})
        return made[prefix]

    return make


def late(folder: Path, *others: nn.Module, expansion: Any = None, skipped: Any = None) -> Any:
    """A model on the checkpoint, untouched: its projection, mask and normalisation, or others."""
    torch.manual_seed(5)
    encoder = Transformer(str(folder), query_expansion=expansion)
    usual = Dense(32, 8, activation_function=nn.Tanh(), **OF_TOKENS), MultiVectorMask(skipped), Normalize(**OF_TOKENS)
    return library.MultiVectorEncoder(modules=[encoder, *(others or usual)], device="cpu")


def close(found: Any, wanted: Any) -> None:
    if isinstance(wanted, list):
        assert isinstance(found, list) and len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            close(one, other)
        return
    found, wanted = torch.as_tensor(found).detach(), torch.as_tensor(wanted).detach()
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    atol = 20 * ABSOLUTE["sentence_embeddings"] * max(1.0, float(wanted.abs().max()) if wanted.numel() else 0.0)
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("prefix", FAMILIES)
@pytest.mark.parametrize("task", TASKS)
def test_encode_packs_texts_of_every_family(
    folder: Callable[..., Path], padded: list[str], prefix: str, task: str
) -> None:
    untouched, fused = (late(folder(prefix), skipped=SKIPPED) for _ in range(2))
    wanted = untouched.encode(TEXTS, task=task)
    assert "__call__" in padded
    padded.clear()
    fuse(fused)
    close(fused.encode(TEXTS, task=task), wanted)
    assert why_not(fused) == [] and not padded


ENCODE: dict[str, dict[str, Any]] = {
    "arrays": {"convert_to_numpy": True},
    "normalised": {"normalize_embeddings": True},
    "prompt": {"prompt": "a red "},
    "batches": {"batch_size": 2},
    "fewer tokens": {"token_pooling": HierarchicalTokenPooling(pool_factor=2)},
}


@pytest.mark.parametrize("name", ENCODE)
def test_options_of_encode(folder: Callable[..., Path], padded: list[str], name: str) -> None:
    wanted, fused = late(folder()).encode_document(TEXTS, **ENCODE[name]), fuse(late(folder()))
    padded.clear()
    close(fused.encode_document(TEXTS, **ENCODE[name]), wanted)
    assert not padded
    close(fused.encode_query(TEXTS[0]), late(folder()).encode_query(TEXTS[0]))


def test_skipped_words_count_in_queries_only(folder: Callable[..., Path], padded: list[str]) -> None:
    fused = fuse(late(folder(), skipped=SKIPPED))
    query, document = fused.encode_query("a small red house"), fused.encode_document("a small red house")
    assert len(query) == len(document) + 1 and not padded


@pytest.mark.parametrize(("expansion", "packs"), EXPANSIONS)
def test_queries_with_expansion_have_their_vectors(
    folder: Callable[..., Path],
    padded: list[str],
    monkeypatch: pytest.MonkeyPatch,
    expansion: dict[str, Any],
    packs: bool,
) -> None:
    """Expansion tokens are scored though the mask of attention leaves them out: they are no padding."""
    untouched, fused = (late(folder(), expansion=expansion) for _ in range(2))
    wanted = untouched.encode_query(TEXTS), untouched.encode_document(TEXTS)
    assert min(map(len, wanted[0])) == 12
    fuse(fused)
    padded.clear()
    close(fused.encode_document(TEXTS), wanted[1])
    assert why_not(fused) == [] and not padded
    close(fused.encode_query(TEXTS), wanted[0])
    encoded: list[int] = []
    original = FusedModel.encode
    monkeypatch.setattr(FusedModel, "encode", lambda *a, **k: encoded.append(1) or original(*a, **k))
    features = fused.preprocess(TEXTS, task="query")
    found, theirs = (m(dict(features), task="query") for m in (fused, untouched))
    kept = theirs["attention_mask"]
    assert torch.equal(found["attention_mask"], kept)
    close(found["token_embeddings"][kept], theirs["token_embeddings"][kept])
    assert bool(encoded) is packs


@pytest.mark.parametrize("attend", [False, True])
@pytest.mark.parametrize("prefix", ["Bert", "MPNet"])
def test_losses_and_gradients(folder: Callable[..., Path], prefix: str, attend: bool) -> None:
    expansion = {"strategy": "fixed", "attend": attend, "length": 8}
    answers, values, gradients = [TEXTS[0], TEXTS[2], TEXTS[5]], [], []
    for change, scores in ((lambda model: model, None), (fuse, None), (fuse, colbert_scores)):
        model = change(late(folder(prefix), expansion=expansion)).train()
        loss = losses.MultiVectorMultipleNegativesRankingLoss(model, similarity_fct=scores)
        features = [dict(model.preprocess(t, task=task)) for t, task in zip((QUERIES, answers), TASKS, strict=True)]
        value = loss(features, None)
        value.backward()
        values.append(value)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for value, found in zip(values[1:], gradients[1:], strict=True):
        close(value, values[0])
        for name, wanted in gradients[0].items():
            assert (found[name] is None) == (wanted is None), name
            if wanted is not None:
                close(found[name], wanted)


def test_padded_features_give_padded_vectors(folder: Callable[..., Path], padded: list[str]) -> None:
    """Those of a trainer: what the loss reads is theirs, and vectors of padding are 0."""
    pooling = HierarchicalTokenPooling(pool_factor=2)
    dense = Dense(32, 8, bias=True, **OF_TOKENS)
    for others in ((dense, MultiVectorMask(SKIPPED)), (dense, MultiVectorMask(), Normalize(**OF_TOKENS), pooling)):
        untouched, fused = late(folder(), *others).train(), fuse(late(folder(), *others)).train()
        untouched.load_state_dict(fused.state_dict())
        for task in TASKS:  # tokens of documents only are pooled
            features = fused.preprocess(TEXTS, task=task)
            ours, theirs = (model(dict(features), task=task) for model in (fused, untouched))
            kept = theirs["attention_mask"].bool()
            assert torch.equal(ours["attention_mask"], theirs["attention_mask"])
            close(ours["token_embeddings"][kept], theirs["token_embeddings"][kept])
            assert not ours["token_embeddings"][features["attention_mask"][:, : kept.shape[1]] == 0].any()
    assert "unpack" in padded


class TestSimilarity:
    @pytest.mark.parametrize("kind", ["maxsim", "meanmaxsim"])
    @pytest.mark.parametrize("at_once", [1, 200, 10**8])
    def test_scores_of_lists(
        self, folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, kind: str, at_once: int
    ) -> None:
        monkeypatch.setattr(multi_vector, "_AT_ONCE", at_once)
        untouched, fused = late(folder()), fuse(late(folder()))
        for model in (untouched, fused):
            model.similarity_fn_name = kind
        queries, documents = untouched.encode_query(QUERIES), untouched.encode_document(TEXTS)
        called: list[int] = []
        monkeypatch.setattr(multi_vector, "maxsim", lambda *a, **k: called.append(1) or _maxsim(*a, **k))
        close(fused.similarity(queries, documents), untouched.similarity(queries, documents))
        assert len(called) == {1: len(TEXTS), 10**8: 1}.get(at_once, len(called)) and called
        nothing = torch.zeros(0, 8)
        close(
            fused.similarity([nothing, *queries], [*documents, nothing]),
            untouched.similarity([nothing, *queries], [*documents, nothing]),
        )
        close(fused.similarity(queries, [nothing]), untouched.similarity(queries, [nothing]))

    def test_gradients(self, folder: Callable[..., Path]) -> None:
        fused, untouched = fuse(late(folder())), late(folder())
        lists = [[torch.randn(n, 8, requires_grad=True) for n in lengths] for lengths in ((2, 3), (4, 1, 5))]
        leaves = [one for each in lists for one in each]
        made = [torch.autograd.grad(m.similarity(*lists).sin().sum(), leaves) for m in (fused, untouched)]
        close(list(made[0]), list(made[1]))

    def test_other_arguments_are_theirs(self, folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
        fused, untouched = fuse(late(folder())), late(folder())
        queries, documents = untouched.encode_query(QUERIES), untouched.encode_document(TEXTS)
        wanted = untouched.similarity(queries, documents)
        monkeypatch.setattr(multi_vector, "maxsim", None)  # a call would fail
        close(fused.similarity(queries, documents, chunk_elements=100), wanted)
        close(fused.similarity([q.numpy() for q in queries], documents), wanted)
        close(fused.similarity(queries[0], documents), wanted[:1])
        close(fused.similarity(queries, documents[2][None]), wanted[:, 2:3])
        assert fused.similarity([], documents).shape == (0, len(documents))
        fused._similarity = lambda *_: "own"
        assert fused.similarity(queries, documents) == "own"


_maxsim = multi_vector.maxsim


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("way", ["autocast", "bf16"])
def test_half_precision_has_the_dtypes_of_theirs(folder: Callable[..., Path], way: str, training: bool) -> None:
    made: list[Tensor] = []
    for change in (lambda model: model, fuse):
        model = change(late(folder())).train(training)
        model = model.bfloat16() if way == "bf16" else model
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            features = model(dict(model.preprocess(TEXTS, task="document")), task="document")
            made.append(features["token_embeddings"][features["attention_mask"]])
    assert made[0].dtype == made[1].dtype
    assert (made[1].float() - made[0].float()).abs().max() < 0.1


def _dense_forward(model: Any) -> None:
    original = model[1].forward
    model[1].forward = lambda features: original(features)


# how a reason begins -> what is done to the model
CHANGES: dict[str, Callable[[Any], Any]] = {
    "module 1: hooks are registered": lambda m: m[1].linear.register_forward_hook(lambda _, args, out: out * 2),
    "module 1: its forward is replaced": _dense_forward,
    "module 2: hooks are registered": lambda m: m[2].register_forward_pre_hook(lambda *_: None),
    "the encoder's forward is replaced, or hooks": lambda m: m[0].model.register_forward_hook(lambda *_: None),
    "config.output_hidden_states": lambda m: setattr(m[0].model.config, "output_hidden_states", True),
    "modules: Transformer, Dense": lambda m: setattr(m[1], "activation_function", nn.Softmax(1)),
    "modules: Transformer, Dense, Multi": lambda m: setattr(m[1], "module_output_name", "other"),
    "processing_kwargs, unpad_inputs": lambda m: setattr(m[0], "processing_kwargs", {"text": {"max_length": 9}}),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_what_keeps_a_model_from_packing_is_said(folder: Callable[..., Path], padded: list[str], reason: str) -> None:
    untouched, fused = late(folder()), fuse(late(folder()))
    for model in (untouched, fused):
        CHANGES[reason](model)
    assert reason in [found[: len(reason)] for found in why_not(fused)]
    if "Softmax" in str(fused):  # over the tokens of a text, padding too: no result is right
        return
    wanted = untouched.encode(TEXTS)
    padded.clear()
    close(fused.encode(TEXTS), wanted)
    assert "__call__" in padded


def test_what_a_module_or_the_encoder_says_of_a_call_is_theirs_to_say(folder: Callable[..., Path]) -> None:
    for change, error in (
        (lambda m: None, KeyError),
        (lambda m: setattr(m, "module_kwargs", {"1": ["task"]}), TypeError),
    ):
        for model in (late(folder()), fuse(late(folder()))):
            change(model)
            features = dict(model.preprocess(TEXTS, task="query"))
            if error is KeyError:
                features["modality"] = "image"
            with pytest.raises(error, match="image" if error is KeyError else "task"):
                model(features, task="query")
    twice = [Transformer(str(folder())), Transformer(str(folder())), MultiVectorMask()]
    found = why_not(fuse(library.MultiVectorEncoder(modules=twice, device="cpu")))
    assert found[0].startswith("modules: Transformer, Transformer, MultiVectorMask, not")


def test_replaced_functions_of_the_library_are_called(
    folder: Callable[..., Path], padded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = fuse(late(folder()))
    monkeypatch.setattr(MultiVectorMask, "forward", lambda self, features, task=None: features)
    assert why_not(fused) == [
        "sentence_transformers.multi_vector_encoder.modules.MultiVectorMask.forward: replaced for the whole process"
    ]
    padded.clear()
    fused.encode(TEXTS)
    assert "__call__" in padded


def test_copies_files_and_unfused_models(folder: Callable[..., Path], tmp_path: Path) -> None:
    fused, wanted = fuse(late(folder())), late(folder()).encode(TEXTS)
    for model in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert why_not(model) == []
        close(model.encode(TEXTS), wanted)
    fused.save(str(tmp_path))
    loaded = library.MultiVectorEncoder(str(tmp_path), device="cpu")
    close(loaded.encode(TEXTS), wanted)
    assert type(unfuse(fused)) is library.MultiVectorEncoder
    close(fused.encode(TEXTS), wanted)
