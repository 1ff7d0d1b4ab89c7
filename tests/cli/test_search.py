"""`bert-fast search`: results against the model and NumPy by hand; indices of other models; cross-encoders."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast import BertConfig, BertForSequenceClassification, BertModel, BertTokenizer
from bert_fast.cli import main
from bert_fast.testing.tolerances import ABSOLUTE
from bert_fast.training.recipes.embedding import Embedder
from bert_fast.training.recipes.embedding_files import find_texts
from bert_fast.training.recipes.reranking import CrossEncoder
from bert_fast.training.recipes.text_rows import read_rows
from tests.cli.test_tokenize import stdin_of

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "é", "."]
TEXTS = ["a b c", "", "d e f", "g h .", "a a a a a", "é b", "c d e f g h", "h", "b c . b c"]
QUERIES = ["a b", "e f g", "é"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def save_model(path: Path, seed: int, kind: type = BertModel, **options: Any) -> Path:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, initializer_range=0.5, **options,
    )  # fmt: skip
    kind(config).save_pretrained(path)
    BertTokenizer(WORDS, do_lower_case=False).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An encoder, another one, and a cross-encoder."""
    path = tmp_path_factory.mktemp("models")
    return {
        "encoder": str(save_model(path / "encoder", 0)),
        "other": str(save_model(path / "other", 1)),
        "cross": str(save_model(path / "cross", 2, BertForSequenceClassification, num_labels=1)),
        "three labels": str(save_model(path / "three", 2, BertForSequenceClassification, num_labels=3)),
    }


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.txt").write_text("\r\n".join(TEXTS[:5]) + "\r\n")
    Path("x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[5:]))
    Path("queries.txt").write_text("\n".join(QUERIES))


def embed(models: dict[str, str], *arguments: str) -> None:
    assert main.main(["embed", models["encoder"], "x.txt", "x.jsonl", "--quiet", *arguments]) == 0


def answers(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize(
    ("output", "pooling", "normalize"),
    [("v.npy", "mean", False), ("v.parquet", "cls", True), ("v.arrow", "max", False)],
)
def test_results(
    models: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    output: str,
    pooling: Any,
    normalize: bool,
    similarity: str,
) -> None:
    """Queries are pooled as the index says."""
    if not output.endswith(".npy"):
        pytest.importorskip("pyarrow")
    embed(models, "-o", output, "--pooling", pooling, *(["--normalize"] if normalize else []))
    capsys.readouterr()
    flags = ["--top-k", "4", "--similarity", similarity, "--texts", "x.txt", "x.jsonl"]
    assert main.main(["search", models["encoder"], output, "queries.txt", *flags]) == 0
    captured = capsys.readouterr()
    found = answers(captured.out)
    assert captured.err == "" and [answer["query"] for answer in found] == QUERIES
    embedder = Embedder.from_pretrained(models["encoder"], pooling=pooling, normalize=normalize)
    texts, queries = embedder.embed(TEXTS), embedder.embed(QUERIES)
    scores = queries.astype(np.float64) @ texts.T.astype(np.float64)
    if similarity == "cosine":
        scores /= np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(texts, axis=1)
    for answer, row_scores in zip(found, scores, strict=True):
        results = answer["results"]
        assert [one["row"] for one in results] == np.argsort(-row_scores)[:4].tolist()
        assert all(one["text"] == TEXTS[one["row"]] for one in results)
        size = np.abs(row_scores).max()
        assert all(abs(one["score"] - row_scores[one["row"]]) < ABSOLUTE["minilm_embeddings"] * size for one in results)


def test_stdin_to_a_file_without_texts(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    embed(models, "-o", "v.npy")
    capsys.readouterr()
    with stdin_of(b"a b\n\n"):
        assert main.main(["search", models["encoder"], "v.npy", "-", "--top-k", "100", "-o", "out.jsonl"]) == 0
    assert capsys.readouterr().out == ""
    found = answers(Path("out.jsonl").read_text())
    assert [answer["query"] for answer in found] == ["a b", ""]
    assert [set(one) for one in found[0]["results"]] == [{"row", "score"}] * len(TEXTS)
    assert (
        found[1]["results"][0]["row"] == 1 and abs(found[1]["results"][0]["score"] - 1) < ABSOLUTE["minilm_embeddings"]
    )


def test_reranked(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Against the classifier on one padded pair at a time."""
    embed(models, "-o", "v.npy")
    capsys.readouterr()
    search = ["search", models["encoder"], "v.npy", "queries.txt", "--top-k", "5", "--texts", "x.txt", "x.jsonl"]
    assert main.main(search) == 0
    plain = answers(capsys.readouterr().out)
    assert main.main([*search, "--rerank", models["cross"], "--batch-tokens", "20"]) == 0
    found = answers(capsys.readouterr().out)
    model = BertForSequenceClassification.from_pretrained(models["cross"]).eval()
    tokenizer = BertTokenizer.from_pretrained(models["cross"])
    for before, after in zip(plain, found, strict=True):
        assert {one["row"]: one["score"] for one in before["results"]} == {
            one["row"]: one["similarity"] for one in after["results"]
        }
        scores = [one["score"] for one in after["results"]]
        assert scores == sorted(scores, reverse=True)
        for one in after["results"]:
            with torch.inference_mode():
                logits = model(**tokenizer(after["query"], one["text"], return_tensors="pt")).logits
            assert abs(one["score"] - logits.item()) < ABSOLUTE["minilm_embeddings"]
    assert any(
        [one["row"] for one in before["results"]] != [one["row"] for one in after["results"]]
        for before, after in zip(plain, found, strict=True)
    )


def test_cross_encoder_cuts_long_pairs(models: dict[str, str]) -> None:
    model = CrossEncoder.from_pretrained(models["cross"], batch_tokens=1)
    long, short = "a b c d " * 50, "e f"
    ids = model.tokenizer(long, short, truncation=True, max_length=32, return_tensors="pt")
    with torch.inference_mode():
        expected = model.model(**ids).logits.item()
    found = model.scores([long, short], [short, short])
    assert abs(found[0] - expected) < ABSOLUTE["minilm_embeddings"]
    assert model.scores([], []).shape == (0,)
    with pytest.raises(ValueError, match="pairs: expected 1, as many as texts, got 2"):
        model.scores(["a"], ["b", "c"])


def test_another_model_is_noticed(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    embed(models, "-o", "v.npy")
    capsys.readouterr()
    assert main.main(["search", models["other"], "v.npy", "queries.txt"]) == 1
    error = capsys.readouterr().err
    expected = (
        f"index: expected vectors of MODEL {models['other']}, got ones of another model, {models['encoder']}: weights"
    )
    assert error.startswith(f"bert-fast search: {expected}") and error.count("\n") == 1
    Path("v.npy.json").unlink()
    assert main.main(["search", models["other"], "v.npy", "queries.txt"]) == 0
    assert "whether the vectors are of this model is not known" in capsys.readouterr().err


def test_another_vocabulary_is_noticed(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    path = save_model(Path("same weights").absolute(), 0)
    embed(models, "-o", "v.npy")
    assert main.main(["search", str(path), "v.npy", "queries.txt"]) == 0  # a copy is the same model
    BertTokenizer([*WORDS[:-2], *WORDS[:-3:-1]], do_lower_case=False).save_pretrained(path)
    capsys.readouterr()
    assert main.main(["search", str(path), "v.npy", "queries.txt"]) == 1
    assert "another model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.npy", "queries.txt"], "No such file or directory: 'none.npy'"),
        (["queries.txt", "queries.txt"], "path: expected a name that ends in .npy, .parquet, .arrow, got queries.txt"),
        (["v.npy", "none.txt"], "No such file or directory: 'none.txt'"),
        (["v.npy", "queries.txt", "--rerank", "cross"], "--rerank: expected --texts beside it"),
        (["v.npy", "queries.txt", "--texts", "x.txt"], "texts: expected those that were embedded, more than"),
        (["v.npy", "queries.txt", "--texts", "-"], "--texts: expected files"),
        (["v.npy", "queries.txt", "--texts", "x.txt", "--rerank", "three labels"], "num_labels 1, got 3"),
        (["v.npy", "queries.txt", "-o", "none/out.jsonl"], "No such file or directory"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_line(
    models: dict[str, str], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    embed(models, "-o", "v.npy")
    capsys.readouterr()
    arguments = [models.get(argument, argument) for argument in arguments]
    assert main.main(["search", models["encoder"], *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("bert-fast search: ") and message in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""


def test_vectors_that_are_not_those_of_the_json_file(
    models: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    embed(models, "-o", "v.npy")
    np.save("v.npy", np.load("v.npy")[:-1])
    capsys.readouterr()
    assert main.main(["search", models["encoder"], "v.npy", "queries.txt"]) == 1
    assert "expected [9, 16] by the JSON file beside it, got [8, 16]" in capsys.readouterr().err
    Path("v.npy.json").write_text("{}")
    assert main.main(["search", models["encoder"], "v.npy", "queries.txt"]) == 1
    assert "expected what embed writes beside vectors" in capsys.readouterr().err


def test_rows_are_read_up_to_the_last_that_is_asked_for(models: dict[str, str]) -> None:
    sources = find_texts(["x.txt", "x.jsonl"], "auto", "text")
    assert read_rows(sources, [8, 0, 5, 0]) == {8: "b c . b c", 0: "a b c", 5: "é b"}
    assert read_rows(sources, []) == {}
    Path("x.jsonl").write_text("no JSON")
    assert read_rows(find_texts(["x.txt", "x.jsonl"], "auto", "text"), [1, 4]) == {1: "", 4: "a a a a a"}
