"""SentenceTransformer and CrossEncoder fused: what they return, and that texts stay packed up to it."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bert_fast
from bert_fast import fuse, unfuse, why_not
from bert_fast.ops.packing import Packing
from bert_fast.testing.tolerances import ABSOLUTE
from tests.process_server import CONTEXT, start_server

library = pytest.importorskip("sentence_transformers")
transformers = pytest.importorskip("transformers")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
from sentence_transformers.base.modules import Dense, Normalize, Transformer  # noqa: E402

TEXTS = [
    "Where is the small red house?",
    "",
    "The hill. " * 300,  # longer than the model takes
    "naïve Straße 日本語, and\tmore [MASK] here",
    "on",
    "https://example.org/picture.png",
]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "small", "red", "house", "on", "the", "hill", "##s", "."]
SMALL = ["a small red house", "the hills", "", "on the house . " * 20, "a b c"]
MODES = ["mean", "cls", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens"]


@pytest.fixture(scope="module")
def untouched(minilm_dir: Path) -> Any:
    return library.SentenceTransformer(str(minilm_dir), device="cpu", prompts={"query": "query: "})


@pytest.fixture(scope="module")
def fused(minilm_dir: Path) -> Any:
    return fuse(library.SentenceTransformer(str(minilm_dir), device="cpu", prompts={"query": "query: "}))


@pytest.fixture(scope="module")
def small_dir(make: Callable[..., nn.Module], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random encoder with a tokenizer."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    make(vocab_size=len(WORDS)).save_pretrained(folder)
    transformers.BertTokenizer(str(folder / "vocab.txt"), model_max_length=24).save_pretrained(folder)
    return folder


@pytest.fixture
def small(small_dir: Path) -> Callable[..., Any]:
    """A function from a pooling and further modules to a model of them."""

    def make(mode: Any = "mean", *others: nn.Module, include_prompt: bool = True) -> Any:
        pooling = modules.Pooling(32, mode, include_prompt=include_prompt)
        return library.SentenceTransformer(modules=[Transformer(str(small_dir)), pooling, *others], device="cpu")

    return make


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was called that makes padded batches or outputs."""
    found: list[str] = []

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, method)

    watch(Packing, "unpack")
    watch(transformers.PreTrainedTokenizerBase, "__call__")
    watch(modules.Pooling, "_forward_padded")  # `forward` itself is one of those that a fused model looks at
    return found


def close(found: Any, wanted: Any, slack: float = 1.0) -> None:
    assert type(found) is type(wanted)
    if isinstance(found, list):
        assert len(found) == len(wanted)
        found, wanted = torch.stack(found), torch.stack(wanted)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    found, wanted = torch.as_tensor(found), torch.as_tensor(wanted)
    torch.testing.assert_close(found, wanted, rtol=0, atol=slack * ABSOLUTE["sentence_embeddings"])


ENCODE: dict[str, dict[str, Any]] = {
    "plain": {},
    "tensor": {"convert_to_tensor": True},
    "list": {"convert_to_numpy": False},
    "normalized": {"normalize_embeddings": True},
    "cut": {"truncate_dim": 100},
    "prompt": {"prompt": "Represent: "},
    "prompt_name": {"prompt_name": "query"},
    "batches": {"batch_size": 2, "show_progress_bar": True},
    "device": {"device": "cpu"},
}


@pytest.mark.parametrize("name", ENCODE)
def test_encode(untouched: Any, fused: Any, padded: list[str], name: str) -> None:
    wanted = untouched.encode(TEXTS, **ENCODE[name])
    assert {"__call__", "_forward_padded"} <= set(padded), "what is watched is what the untouched model does"
    padded.clear()
    close(fused.encode(TEXTS, **ENCODE[name]), wanted)
    assert not padded


@pytest.mark.parametrize("method", ["encode_query", "encode_document"])
def test_queries_and_documents(untouched: Any, fused: Any, padded: list[str], method: str) -> None:
    wanted = getattr(untouched, method)(TEXTS)
    padded.clear()
    close(getattr(fused, method)(TEXTS), wanted)
    assert not padded


@pytest.mark.parametrize("length", ["query_length", "document_length"])
def test_lengths_of_tasks(small: Callable[..., Any], padded: list[str], length: str) -> None:
    models = small(), fuse(small())
    for model in models:
        setattr(model[0], length, 7)
    method = "encode_" + length.removesuffix("_length")
    wanted = getattr(models[0], method)(SMALL)
    assert np.abs(wanted - models[0].encode(SMALL)).max() > 0.01, "the length counts"
    padded.clear()
    close(getattr(models[1], method)(SMALL), wanted, slack=4.0)
    assert not padded


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_precisions(untouched: Any, fused: Any, precision: str) -> None:
    found, wanted = fused.encode(TEXTS, precision=precision), untouched.encode(TEXTS, precision=precision)
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    # A value on the border between two steps may be one step off, a sign none of these.
    allowed = 0 if "binary" in precision else 1
    assert np.abs(found.astype(int) - wanted.astype(int)).max() <= allowed


@pytest.mark.parametrize("options", [{}, {"convert_to_tensor": True}, {"convert_to_numpy": False}])
@pytest.mark.parametrize("texts", [[], "on the hill", "", ["one"], ("a", "tuple"), np.array(["an", "array"])])
def test_numbers_of_texts(untouched: Any, fused: Any, texts: Any, options: dict[str, Any]) -> None:
    wanted, found = untouched.encode(texts, **options), fused.encode(texts, **options)
    if isinstance(wanted, list) and not wanted:
        assert found == []
    else:
        close(found, wanted)


def test_pairs_of_texts(untouched: Any, fused: Any, padded: list[str]) -> None:
    pairs = [("a house", "on the hill"), ("", "x" * 50), ("long " * 300, "longer " * 400)]
    for options in ({}, {"prompt": "first: "}):
        wanted = untouched.encode(pairs, **options)
        padded.clear()
        close(fused.encode(pairs, **options), wanted)
        assert not padded


def test_half_a_surrogate_pair_is_left_to_their_tokenizer(untouched: Any, fused: Any) -> None:
    errors = []
    for model in (untouched, fused):
        with pytest.raises(Exception) as caught:
            model.encode(["a \ud800 b"])
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


def test_whole_outputs(untouched: Any, fused: Any) -> None:
    for wanted, found in zip(
        *(m.encode(TEXTS, output_value="token_embeddings") for m in (untouched, fused)), strict=True
    ):
        close(found, wanted, slack=20.0)
    for wanted, found in zip(*(m.encode(TEXTS, output_value=None) for m in (untouched, fused)), strict=True):
        assert set(found) == set(wanted)
        close(found["sentence_embedding"], wanted["sentence_embedding"])
        kept = wanted["attention_mask"].bool()
        close(found["token_embeddings"][kept], wanted["token_embeddings"][kept], slack=20.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(small: Callable[..., Any], dtype: torch.dtype) -> None:
    models = small("weightedmean").to(dtype), fuse(small("weightedmean").to(dtype))
    wanted, found = (model.encode(SMALL, convert_to_tensor=True) for model in models)
    assert found.dtype == wanted.dtype == dtype
    truth = small("weightedmean").double().encode(SMALL, convert_to_tensor=True)
    error = (found.double() - truth).abs().mean()
    assert error <= max(2 * (wanted.double() - truth).abs().mean(), ABSOLUTE["sentence_embeddings"])


@pytest.mark.parametrize("mode", [*MODES, ("cls", "mean", "max"), tuple(MODES)], ids=str)
def test_poolings(small: Callable[..., Any], padded: list[str], mode: Any) -> None:
    wanted = small(mode).encode(SMALL)
    model = fuse(small(mode))
    assert why_not(model) == []
    padded.clear()
    close(model.encode(SMALL), wanted, slack=np.abs(wanted).max() * 2)
    assert not padded


@pytest.mark.parametrize("mode", MODES)
def test_padded_features(small: Callable[..., Any], batch: dict[str, Tensor], padded: list[str], mode: str) -> None:
    """Masks of any form: forward and all gradients, and nothing padded in between."""
    features = {**batch, "input_ids": batch["input_ids"] % len(WORDS)}
    features["attention_mask"][2, :3] = 0  # on the left, beside a hole and a padded end
    untouched, model = small(mode, Normalize()).train(), fuse(small(mode, Normalize())).train()
    wanted = untouched(dict(features))
    padded.clear()
    found = model(given := dict(features))
    assert not padded and found["sentence_embedding"] is given["sentence_embedding"]
    close(found["sentence_embedding"], wanted["sentence_embedding"], slack=4.0)
    upstream = torch.randn_like(wanted["sentence_embedding"])
    wanted["sentence_embedding"].backward(upstream)
    found["sentence_embedding"].backward(upstream)
    compare_gradients(model, untouched)
    kept = features["attention_mask"].bool()
    close(found["token_embeddings"][kept], wanted["token_embeddings"][kept], slack=10.0)
    assert padded == ["unpack"]


def compare_gradients(model: nn.Module, untouched: nn.Module) -> None:
    theirs = dict(untouched.named_parameters())
    seen = 0
    for name, parameter in model.named_parameters():
        wanted = theirs[name].grad
        assert (parameter.grad is None) == (wanted is None), name
        if wanted is not None:
            seen += 1
            scale = wanted.abs().max().clamp(min=1.0).item()
            close(parameter.grad, wanted, slack=20.0 * scale)
    assert seen > 30


def test_modules_behind_the_pooling(small: Callable[..., Any], padded: list[str]) -> None:
    torch.manual_seed(0)
    others = [Dense(32, 8), Normalize()]
    for mode in ("cls", "mean"):
        wanted = small(mode, *copy.deepcopy(others)).encode(SMALL)
        padded.clear()
        close(fuse(small(mode, *copy.deepcopy(others))).encode(SMALL), wanted)
        assert not padded


def test_a_module_that_reads_tokens(small: Callable[..., Any]) -> None:
    """Behind a pooling of first tokens, of which else only these would be computed."""

    class Reader(nn.Module):
        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            features["sentence_embedding"] = features["token_embeddings"].sum(-2).reshape(-1, 32)[:1].clone()
            return features

    torch.manual_seed(0)
    wanted, found = (model.encode(["the hill"]) for model in (small("cls", Reader()), fuse(small("cls", Reader()))))
    close(found, wanted, slack=40.0)


@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts_in_the_pooling(small: Callable[..., Any], padded: list[str], include_prompt: bool) -> None:
    models = [small("mean", include_prompt=include_prompt) for _ in range(2)]
    wanted = models[0].encode(SMALL, prompt="the red ")
    fuse(models[1])
    padded.clear()
    close(models[1].encode(SMALL, prompt="the red "), wanted, slack=4.0)
    assert bool(padded) is not include_prompt
    padded.clear()
    close(models[1].encode(SMALL), models[0].encode(SMALL), slack=4.0)


def test_packed_features(fused: Any, minilm_dir: Path) -> None:
    packed = bert_fast.BertTokenizer.from_pretrained(minilm_dir).pack(TEXTS, max_length=256)
    with torch.no_grad():
        found = fused(dict(packed))
    close(found["sentence_embedding"].numpy(), fused.encode(TEXTS))
    assert found["token_embeddings"].shape == (len(packed.input_ids), 384)


@pytest.fixture(scope="module")
def rerankers(minilm_dir: Path) -> tuple[Any, Any]:
    """Cross-encoders on the real encoder, with a random head: untouched, fused."""
    torch.manual_seed(5)
    model = library.CrossEncoder(str(minilm_dir), num_labels=1, device="cpu", max_length=128)
    return model, fuse(copy.deepcopy(model))


@pytest.mark.parametrize(
    "options", [{}, {"convert_to_tensor": True}, {"batch_size": 2}, {"activation_fn": nn.Identity()}, {"prompt": "q: "}]
)
def test_predict(rerankers: tuple[Any, Any], padded: list[str], options: dict[str, Any]) -> None:
    pairs = [["a house", text] for text in TEXTS] + [("b " * 200, "c " * 300)]
    wanted = rerankers[0].predict(pairs, **options)
    padded.clear()
    close(rerankers[1].predict(pairs, **options), wanted, slack=4.0)
    assert not padded
    assert why_not(rerankers[1]) == []


def test_predict_of_few(rerankers: tuple[Any, Any]) -> None:
    for pairs in (["one", "pair"], ("one", "pair"), []):
        wanted, found = (model.predict(pairs) for model in rerankers)
        assert type(found) is type(wanted) and np.shape(found) == np.shape(wanted)
        assert np.allclose(found, wanted, rtol=0, atol=4 * ABSOLUTE["sentence_embeddings"])


def test_rank(rerankers: tuple[Any, Any], padded: list[str]) -> None:
    wanted = rerankers[0].rank("where is the house", TEXTS, return_documents=True, top_k=4)
    padded.clear()
    found = rerankers[1].rank("where is the house", TEXTS, return_documents=True, top_k=4)
    assert not padded
    assert [(one["corpus_id"], one["text"]) for one in found] == [(one["corpus_id"], one["text"]) for one in wanted]
    scores = [[one["score"] for one in each] for each in (found, wanted)]
    assert np.allclose(*scores, rtol=0, atol=4 * ABSOLUTE["sentence_embeddings"])


def test_classes_of_pairs(minilm_dir: Path) -> None:
    torch.manual_seed(5)
    model = library.CrossEncoder(str(minilm_dir), num_labels=3, device="cpu")
    pairs = [("a", "b"), ("c d", "e")]
    wanted = model.predict(pairs, apply_softmax=True)
    close(fuse(model).predict(pairs, apply_softmax=True), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["embeddings", "scores"])
def test_pools_of_processes(
    fused: Any, untouched: Any, rerankers: tuple[Any, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_server()
    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda method: CONTEXT)  # not one that imports all anew
    model, other = (fused, untouched) if kind == "embeddings" else rerankers[::-1]
    inputs = TEXTS * 2 if kind == "embeddings" else [("q", text) for text in TEXTS]
    pool = model.start_multi_process_pool(["cpu"])
    try:
        call = "encode" if kind == "embeddings" else "predict"
        found = getattr(model, call)(inputs, pool=pool, chunk_size=5)
    finally:
        model.stop_multi_process_pool(pool)
    close(found, getattr(other, call)(inputs), slack=4.0)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_saved_files(small: Callable[..., Any], rerankers: tuple[Any, Any], tmp_path: Path) -> None:
    for kind, pair in (("encoder", (small("cls", Normalize()), fuse(small("cls", Normalize())))), ("cross", rerankers)):
        for name, model in zip(("untouched", "fused"), pair, strict=True):
            model.encode(SMALL) if kind == "encoder" else model.predict([("a", "b")])
            model.save_pretrained(str(tmp_path / kind / name))
        assert files(tmp_path / kind / "fused") == files(tmp_path / kind / "untouched")
        assert any(name.endswith("modules.json") for name in files(tmp_path / kind / "fused"))


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_copies_are_fused(small: Callable[..., Any], padded: list[str], way: str) -> None:
    model = fuse(small())
    wanted = model.encode(SMALL)
    again = pickle.loads(pickle.dumps(model)) if way == "pickle" else copy.deepcopy(model)
    assert type(again) is type(model) and why_not(again) == []
    assert np.array_equal(again.encode(SMALL), wanted) and not padded


def test_unfuse_restores(small: Callable[..., Any], padded: list[str]) -> None:
    model, other = small(), small()
    state = {name: dict(vars(module)) for name, module in model.named_modules()}
    fuse(model).encode(SMALL)
    unfuse(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in other.modules()]
    assert type(model) is library.SentenceTransformer
    for name, module in model.named_modules():
        assert vars(module).keys() == state[name].keys()
    padded.clear()
    assert np.array_equal(model.encode(SMALL), other.encode(SMALL)) and "_forward_padded" in padded


def test_derived_classes(small_dir: Path, padded: list[str]) -> None:
    class Own(library.SentenceTransformer):
        """Somebody's."""

        calls = 0

        def forward(self, input: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return super().forward(input, **kwargs)

    parts = [Transformer(str(small_dir)), modules.Pooling(32)]
    model = fuse(Own(modules=parts, device="cpu"))
    assert isinstance(model, Own) and why_not(model) == ["forward: it is replaced"]
    model.encode(SMALL)
    assert model.calls == 1 and "_forward_padded" not in padded, "what is left to the base pools packed tokens"
    assert type(unfuse(model)) is Own


def test_patched(small_dir: Path) -> None:
    def make() -> Any:
        return library.SentenceTransformer(modules=[Transformer(str(small_dir)), modules.Pooling(32)], device="cpu")

    with bert_fast.patch_transformers():
        model = make()
    assert why_not(model) == [] and type(make()) is library.SentenceTransformer


def test_features_that_come_back_stay_packed(fused: Any) -> None:
    """A dictionary of features holds what the first call made of it; the second call has the same bits."""
    model, features = fused, fused.preprocess(TEXTS)
    with torch.no_grad():
        first = dict(model(features))
        again = model({**first, "all_layer_embeddings": (first["token_embeddings"],)})
        assert torch.equal(first["sentence_embedding"], again["sentence_embedding"])
        arguments = {name: value for name, value in again.items() if name not in ("modality", "prompt_length")}
        assert why_not(model, **arguments) == []
