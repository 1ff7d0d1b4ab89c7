"""SparseEncoder fused: SPLADE's vectors and gradients are theirs, texts stay packed, no scores of all tokens exist."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bert_fast import fuse, unfuse, why_not
from bert_fast.testing.tolerances import ABSOLUTE
from tests.huggingface.sentence_folders import TEXTS, make_checkpoint

library = pytest.importorskip("sentence_transformers")
transformers = pytest.importorskip("transformers")
losses = pytest.importorskip("sentence_transformers.sparse_encoder.losses")
from sentence_transformers.base.modules import Normalize, Transformer  # noqa: E402
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling  # noqa: E402

FAMILIES = ["Bert", "Roberta", "DistilBert", "MPNet", "Electra"]
QUERIES, ANSWERS = TEXTS[:3], ["red", "a house on the hill", "text"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """From a family's prefix to a checkpoint of random weights that predicts words, without dropout."""
    made: dict[str, Path] = {}

    def make(prefix: str = "Bert") -> Path:
        if prefix not in made:
            made[prefix] = tmp_path_factory.mktemp(prefix)
            names = ("dropout", "attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob")
            config = transformers.AutoConfig.for_model(prefix.lower())
            without = {name: 0.0 for name in names if hasattr(config, name)}
            make_checkpoint(prefix, made[prefix], "ForMaskedLM", **without)
        return made[prefix]

    return make


def sparse(folder: Path, *others: nn.Module, **pooling: Any) -> Any:
    """A model on the checkpoint, untouched."""
    encoder = Transformer(str(folder), transformer_task="fill-mask")
    return library.SparseEncoder(modules=[encoder, SpladePooling(**pooling), *others], device="cpu")


def close(found: Any, wanted: Any) -> None:
    if isinstance(wanted, list):
        assert isinstance(found, list)
        found, wanted = torch.stack(found), torch.stack(wanted)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype and found.layout == wanted.layout
    found, wanted = found.detach().to_dense(), wanted.detach().to_dense()
    atol = 20 * ABSOLUTE["sentence_embeddings"] * max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("prefix", FAMILIES)
@pytest.mark.parametrize("activation", SpladePooling.SPLADE_ACTIVATION)
def test_encode_packs_texts_of_every_family(
    folder: Callable[[str], Path], padded: list[str], prefix: str, activation: str
) -> None:
    untouched, fused = (sparse(folder(prefix), activation_function=activation) for _ in range(2))
    wanted = untouched.encode(TEXTS)
    assert "__call__" in padded
    padded.clear()
    fuse(fused)
    close(fused.encode(TEXTS), wanted)
    assert why_not(fused) == [] and not padded
    assert fused[1].embedding_dimension == wanted.shape[1]


ENCODE: dict[str, dict[str, Any]] = {
    "dense": {"convert_to_sparse_tensor": False},
    "list": {"convert_to_tensor": False},
    "few": {"max_active_dims": 5},
    "prompt": {"prompt": "a red "},
    "batches": {"batch_size": 2},
    "on the host": {"save_to_cpu": True},
}


@pytest.mark.parametrize("name", ENCODE)
def test_options_of_encode(folder: Callable[[], Path], padded: list[str], name: str) -> None:
    wanted, fused = sparse(folder()).encode(TEXTS, **ENCODE[name]), fuse(sparse(folder()))
    padded.clear()
    close(fused.encode(TEXTS, **ENCODE[name]), wanted)
    assert not padded
    close(fused.encode(TEXTS[0]), sparse(folder()).encode(TEXTS[0]))
    close(fused.encode_query(TEXTS), sparse(folder()).encode_query(TEXTS))


@pytest.mark.parametrize("prefix", FAMILIES)
@pytest.mark.parametrize("is_cached", [False, True])
def test_losses_and_gradients(folder: Callable[[str], Path], prefix: str, is_cached: bool) -> None:
    values, gradients = [], []
    for change in (lambda model: model, fuse):
        model = change(sparse(folder(prefix))).train()
        ranking = losses.SparseMultipleNegativesRankingLoss(model)
        cut = {"mini_batch_size": 2} if is_cached else {}
        kind = losses.CachedSpladeLoss if is_cached else losses.SpladeLoss
        loss = kind(model, ranking, document_regularizer_weight=3e-2, query_regularizer_weight=5e-2, **cut)
        made = loss([dict(model.preprocess(texts)) for texts in (QUERIES, ANSWERS)], None)
        total = torch.stack(list(made.values())).sum()
        total.backward()
        values.append(total)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    close(*values)
    for name, wanted in gradients[0].items():
        found = gradients[1][name]
        assert (found is None) == (wanted is None), name
        if wanted is not None and found is not None:
            close(found, wanted)


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_features_that_come_back_give_the_same_bits(folder: Callable[[], Path], pooling: str) -> None:
    """As those of cached losses, which hold the first call's results; also where scores of all tokens are made."""
    model = fuse(sparse(folder(), pooling_strategy=pooling)).train()
    features = dict(model.preprocess(TEXTS))
    first = model(features)
    assert why_not(model[0].model, **{name: t for name, t in first.items() if name != "modality"}) == []
    again = dict(first)
    assert "token_embeddings" in again
    assert torch.equal(model(again)["sentence_embedding"], first["sentence_embedding"])
    assert torch.equal(model(features)["sentence_embedding"], first["sentence_embedding"])


def test_scores_of_tokens_are_made_when_asked_for(folder: Callable[[], Path], padded: list[str]) -> None:
    untouched, fused = sparse(folder()).train(), fuse(sparse(folder())).train()
    theirs, features = untouched(dict(untouched.preprocess(TEXTS))), dict(fused.preprocess(TEXTS))
    padded.clear()
    ours = fused(features)
    assert not padded and "token_embeddings" not in features
    kept = theirs["attention_mask"].bool()
    close(ours["token_embeddings"][kept], theirs["token_embeddings"][kept])
    assert padded == ["unpack"] and not ours["token_embeddings"][~kept].any()
    (mine,), (wanted,) = (
        torch.autograd.grad(f["token_embeddings"][kept].sin().sum(), model[0].model.get_output_embeddings().weight)
        for f, model in ((ours, fused), (theirs, untouched))
    )
    close(mine, wanted)


class _Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return made


def test_nothing_of_the_size_of_all_scores_is_made_in_training(folder: Callable[[], Path]) -> None:
    most = {}
    for change in (lambda model: model, fuse):
        model = change(sparse(folder())).train()
        model[0].model.resize_token_embeddings(3000)
        features = dict(model.preprocess(["a small red house on the hill"] * 32))
        with _Largest() as largest:
            model(features)["sentence_embedding"].sum().backward()
        most[change is fuse] = largest.elements
    assert most[False] >= 32 * 9 * 3000 and most[True] <= 32 * 3000


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("way", ["autocast", "bf16"])
def test_half_precision_has_the_dtypes_of_theirs(folder: Callable[[], Path], way: str, training: bool) -> None:
    made = []
    for change in (lambda model: model, fuse):
        model = change(sparse(folder())).train(training)
        model = model.bfloat16() if way == "bf16" else model
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            made.append(model(dict(model.preprocess(TEXTS)))["sentence_embedding"])
    assert made[0].dtype == made[1].dtype == torch.bfloat16
    assert (made[1].float() - made[0].float()).abs().max() < 0.1 * made[0].abs().max()


def _doubled(module: Any, args: Any, output: Any) -> Any:
    return output * 2


def _pooling_forward(model: Any) -> None:
    original = model[1].forward
    model[1].forward = lambda features: original(features)


class _Linear(nn.Linear):
    """Another class of decoder."""


# how a reason begins -> what is done to the model
CHANGES: dict[str, Callable[[Any], Any]] = {
    "pooling_strategy: 'sum'": lambda m: setattr(m[1], "pooling_strategy", "sum"),
    "pooling: hooks are registered": lambda m: m[1].register_forward_pre_hook(lambda *_: None),
    "pooling: its forward is replaced": _pooling_forward,
    "the encoder's forward is replaced, or hooks": lambda m: m[0].model.register_forward_hook(lambda *_: None),
    "bert, or the head: it is replaced": lambda m: m[0].model.cls.register_forward_hook(_doubled),
    "the decoder is no nn.Linear alone": lambda m: m[0].model.cls.predictions.decoder.register_forward_hook(_doubled),
    "config.output_hidden_states": lambda m: setattr(m[0].model.config, "output_hidden_states", True),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_what_keeps_a_model_from_packing_is_said(folder: Callable[[], Path], padded: list[str], reason: str) -> None:
    untouched, fused = sparse(folder()), fuse(sparse(folder()))
    for model in (untouched, fused):
        CHANGES[reason](model)
    assert reason in [found[: len(reason)] for found in why_not(fused)]
    wanted = untouched.encode(TEXTS)
    padded.clear()
    close(fused.encode(TEXTS), wanted)
    assert "__call__" in padded


def test_other_modules_and_other_models(folder: Callable[[], Path], padded: list[str]) -> None:
    found = fuse(library.SparseEncoder(modules=[Transformer(str(folder()), transformer_task="fill-mask")]))
    assert why_not(found) == ["modules: Transformer, not Transformer, SpladePooling, ..."]
    untouched, fused = sparse(folder(), Normalize()), fuse(sparse(folder(), Normalize()))
    wanted = untouched.encode(TEXTS)
    padded.clear()
    close(fused.encode(TEXTS), wanted)
    assert not padded
    legacy = [MLMTransformer(str(folder()), _from_auto_load=True), SpladePooling(chunk_size=3)]
    fused = fuse(library.SparseEncoder(modules=legacy, device="cpu"))
    assert why_not(fused) == []
    close(fused.encode(TEXTS), sparse(folder(), chunk_size=3).encode(TEXTS))


def test_copies_files_and_unfused_models(folder: Callable[[], Path], tmp_path: Path) -> None:
    fused, wanted = fuse(sparse(folder())), sparse(folder()).encode(TEXTS)
    close(fused.encode(TEXTS), wanted)  # the pooling knows its dimension from now on
    for model in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert why_not(model) == []
        close(model.encode(TEXTS), wanted)
    fused.save(str(tmp_path))
    loaded = library.SparseEncoder(str(tmp_path), device="cpu")
    assert type(loaded[1]) is SpladePooling and loaded[1].embedding_dimension == wanted.shape[1]
    close(loaded.encode(TEXTS), wanted)
    assert type(unfuse(fused)) is library.SparseEncoder
    close(fused.encode(TEXTS), wanted)
