"""`bert-fast mine`, and what its rows are for: a cross-encoder by which `bert-fast search` orders results."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_fast import BertForSequenceClassification
from bert_fast.cli import main
from bert_fast.testing.tolerances import ABSOLUTE
from bert_fast.training.recipes import Embedder, Limits, mine
from tests.cli.test_search import TEXTS, save_model

ROWS = [{"query": "a b", "positive": "a b c", "id": 7}, {"query": "e f", "positive": "d e f", "id": None}]
CORPUS = [text for text in TEXTS if text]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("models")
    return {
        "encoder": str(save_model(path / "encoder", 0)),
        "cross": str(save_model(path / "cross", 2, BertForSequenceClassification, num_labels=1)),
    }


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.txt").write_text("\r\n".join(TEXTS[:5]) + "\r\n")
    Path("x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[5:]))
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def read(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_rows_with_negatives(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["mine", models["encoder"], "rows.jsonl", "-o", "out.jsonl", "--corpus", "x.txt", "x.jsonl"]
    assert main.main([*command, "--count", "2", "--first", "1", "--teacher", models["cross"]]) == 0
    assert capsys.readouterr().out == f"out.jsonl: 2 rows with 2 negatives of {len(CORPUS)} texts\n"
    found = read("out.jsonl")
    embedder = Embedder.from_pretrained(models["encoder"])
    expected = mine(embedder, ROWS, CORPUS, count=2, limits=Limits(first=1)).rows
    for row in found:
        assert len(row.pop("teacher")) == 3
    assert found == expected and [row["id"] for row in found] == [7, None]


def test_rows_that_are_left_out_are_named(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """All texts but its own are seven: a query with two positives has six."""
    with open("rows.jsonl", "a") as file:
        file.write(json.dumps({"query": "a b", "positive": "h", "id": 1}) + "\n")
    command = ["mine", models["encoder"], "rows.jsonl", "-o", "out.jsonl", "--corpus", "x.txt", "x.jsonl"]
    assert main.main([*command, "--count", "7"]) == 0
    said = "out.jsonl: 1 rows with 7 negatives of 8 texts; 2 left out, which have fewer: rows.jsonl: line 1, ...\n"
    assert capsys.readouterr().out == said
    (row,) = read("out.jsonl")
    assert row["query"] == "e f" and {row[f"negative_{k}"] for k in range(1, 8)} == {*CORPUS} - {"d e f"}


def test_vectors_of_embed_are_not_made_again(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    files = ["x.txt", "x.jsonl"]
    assert main.main(["embed", models["encoder"], *files, "-o", "v.npy", "--pooling", "cls", "--quiet"]) == 0
    command = ["mine", models["encoder"], "rows.jsonl", "-o", "out.jsonl", "--corpus", *files, "--count", "2"]
    capsys.readouterr()
    assert main.main([*command, "--index", "v.npy"]) == 0
    assert capsys.readouterr() == (f"out.jsonl: 2 rows with 2 negatives of {len(CORPUS)} texts\n", "")
    found = read("out.jsonl")
    assert found == mine(Embedder.from_pretrained(models["encoder"], pooling="cls"), ROWS, CORPUS, count=2).rows
    Path("out.jsonl").unlink()
    assert main.main([*command, "--index", "v.npy", "--corpus", "x.txt"]) == 1
    said = "index: expected as many vectors as the corpus has texts, 5, got 9"
    assert capsys.readouterr().err == f"bert-fast mine: {said}\n"
    command[1] = models["cross"]
    assert main.main([*command, "--index", "v.npy"]) == 1
    error = capsys.readouterr().err
    said = (
        f"index: expected vectors of MODEL {models['cross']}, got ones of another model, {models['encoder']}: weights"
    )
    assert error.startswith(f"bert-fast mine: {said}") and error.count("\n") == 1 and not Path("out.jsonl").exists()
    Path("v.npy.json").unlink()  # of this model, but pooled in another way than its files say
    assert main.main([*command[:1], models["encoder"], *command[2:], "--index", "v.npy"]) == 1
    error = capsys.readouterr().err
    assert (
        "whether the vectors are of this model is not known" in error and "index: row 0: expected the vector" in error
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-o", "out.jsonl", "--index", "v.npy"], "--index: expected --corpus beside it"),
        (["-o", "out.tsv"], "--output: expected a name that ends in .jsonl, got out.tsv"),
        (["-o", "out.jsonl", "--query", "text"], "rows.jsonl: expected a column 'text'"),
        (["-o", "out.jsonl", "--corpus", "none.txt"], "none.txt"),
        (["-o", "out.jsonl", "--margin", "3"], "margin: expected a number from 0 to 2, got 3.0"),
        (["-o", "out.jsonl", "--depth", "2"], "depth: expected at least first"),
        (["-o", "out.jsonl", "--count", "50"], "rows.jsonl: expected at least one row with 50 negatives"),
    ],
    ids=["index", "output", "column", "corpus", "margin", "depth", "count"],
)
def test_problems(flags: list[str], message: str, models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["mine", models["encoder"], "rows.jsonl", *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith("bert-fast mine: ") and message in error and not Path("out.jsonl").exists()


def test_mined_rows_train_what_orders_results(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Queries, their passages and a corpus: mined, learned, searched, each by its command."""
    main.main(["mine", models["encoder"], "rows.jsonl", "-o", "out.jsonl", "--corpus", "x.txt", "--count", "2"])
    flags = ["--negatives", "negative_1", "negative_2", "--max-length", "16", "--epochs", "2", "--quiet"]
    learn = ["finetune", "rerank", "--model", models["encoder"], "--train", "out.jsonl", "--output-dir", "run"]
    assert (
        main.main([*learn, *flags, "--dry-run"]) == 0
        and "rerank: BertForSequenceClassification" in capsys.readouterr().out
    )
    assert main.main([*learn, *flags]) == 0
    assert main.main(["evaluate", "run", "out.jsonl", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert metrics.keys() == {"loss", "mrr@10", "ndcg@10", "map"}
    Path("ask.jsonl").write_text(json.dumps({"query": "a b", "document": CORPUS}) + "\n")
    assert main.main(["predict", "run", "ask.jsonl"]) == 0
    scores = {row["document"]: row["score"] for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert main.main(["embed", models["encoder"], "x.txt", "x.jsonl", "-o", "v.npy", "--quiet"]) == 0
    Path("queries.txt").write_text("a b\n")
    capsys.readouterr()
    search = ["search", models["encoder"], "v.npy", "queries.txt", "--texts", "x.txt", "x.jsonl", "--top-k", "5"]
    assert main.main([*search, "--rerank", "run/model"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert len(results) == 5
    found = [one["score"] for one in results]
    assert found == sorted(found, reverse=True)
    for one in results:
        if one["text"]:
            assert one["score"] == pytest.approx(scores[one["text"]], abs=ABSOLUTE["minilm_embeddings"])
