"""Recipes: both sides read, learn and judge alike; the page shows what is stored; commands are those that ran."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kit.markdown import page_with
from benchmarks.kit.results import ROOT
from benchmarks.recipes import cases, data, report
from benchmarks.recipes.__main__ import STUDY
from benchmarks.recipes.cases import RECIPES, flags_of, our_run

pytest.importorskip("accelerate")
pytest.importorskip("seqeval")
pytest.importorskip("yaml")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoint(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of 32 with large random weights, so that what it says differs from example to example."""
    from bert_fast import BertModel, BertTokenizer
    from bert_fast.cli.pretrain import make_config

    directory = tmp_path_factory.mktemp("checkpoint")
    tokenizer = BertTokenizer.from_pretrained(shared_data / "vocab" / "bert-base-uncased" / "vocab.txt")
    config = make_config(
        "tiny", len(tokenizer), num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    BertModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def slices(name: str, shared: Path, directory: Path) -> dict[str, Any]:
    """Few examples of a recipe's files: the flags that name them."""
    paths = {part: directory / f"{name}_{part}" for part in ("train_file", "validation_file")}

    def take(file: str, unit: str, header: int = 0, count: int = 24) -> dict[str, Any]:
        units = (shared / file).read_text(encoding="utf-8").split(unit)
        head, rest = units[:header], units[header:]
        found = {}
        for part, few in zip(paths, (rest[:count], rest[24:64]), strict=True):
            found[part] = paths[part].with_suffix(Path(file).suffix)
            found[part].write_text(unit.join([*head, *few]) + "\n", encoding="utf-8")
        return found

    if name == "sms":
        return take("classification/sms_spam/SMSSpamCollection.tsv", "\n")
    if name == "polarity":
        return take("classification/sentence_polarity/dev.tsv", "\n", header=1)
    if name == "wnut17":
        return take("sequence_labelling/wnut17_en/dev.conll", "\n\n", count=64)  # in which all labels are
    if name == "uner_zh":
        return take("sequence_labelling/uner_zh/dev.conll", "\n\n")
    if name == "xquad":
        squad = json.loads((shared / "question_answering" / "xquad.en.json").read_text(encoding="utf-8"))
        found = {}
        for part, article in zip(paths, squad["data"][:2], strict=True):
            found[part] = paths[part].with_suffix(".json")
            few = article | {"paragraphs": article["paragraphs"][:2]}
            found[part].write_text(json.dumps({"version": "1.1", "data": [few]}), encoding="utf-8")
        return found | {"max_seq_length": 96, "doc_stride": 32}  # several windows a paragraph
    folder = shared / "multiple_choice" / "swag"
    return dict(zip(paths, (folder / "allennlp_fixture.csv", folder / "transformers_sample.jsonl"), strict=True))


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if "theirs" in recipe.sides])
def test_both_sides_read_and_judge_alike(name: str, shared_data: Path, checkpoint: Path, tmp_path: Path) -> None:
    """A step so small that nothing is learned: all that is left to differ are examples, labels and metrics."""
    from benchmarks.recipes.theirs import their_run

    recipe = RECIPES[name]
    changes = slices(name, shared_data, tmp_path)
    changes |= {"model_name_or_path": checkpoint, "output_dir": tmp_path / "run", "max_steps": -1}
    changes |= {"num_train_epochs": 1, "per_device_train_batch_size": 8, "learning_rate": 1e-30, "weight_decay": 0.0}
    flags = flags_of(recipe, 0, **changes)
    ours, theirs = our_run(recipe, flags), their_run(recipe, flags)
    assert not (tmp_path / "run").exists()
    for key in ("steps", "tokens", "threads"):
        assert ours[key] == theirs[key] > 0
    assert theirs["padded_tokens"] > theirs["tokens"]
    for metric in recipe.metrics:
        assert round(ours["metrics"][metric], 9) == round(theirs["metrics"][metric], 9), metric
    if recipe.task != "qa":  # transformers' softmax has padding in it there
        assert round(ours["metrics"]["loss"], 1) == round(theirs["metrics"]["loss"], 1)
    assert min(run["cpu_seconds"] for run in (ours, theirs)) > 0


def test_pretraining(shared_data: Path, tmp_path: Path) -> None:
    documents = (shared_data / "pretrain_en" / "books_tiny.txt").read_text(encoding="utf-8").split("\n\n")
    corpora = []
    for part, few in (("train", documents[1:]), ("valid", documents[:2])):
        corpora.append([str(tmp_path / f"{part}.txt")])
        Path(corpora[-1][0]).write_text("\n\n".join("\n".join(document.split("\n")[:50]) for document in few))
    vocabulary = str(shared_data / "vocab" / "bert-base-uncased" / "vocab.txt")
    flags = flags_of(
        RECIPES["books"], 0, model_name_or_path="tiny", train_file=corpora[0], validation_file=corpora[1],
        tokenizer_name=vocabulary, max_steps=6, max_seq_length=32, per_device_train_batch_tokens=512,
    )  # fmt: skip
    found = our_run(RECIPES["books"], flags)
    assert found["steps"] == 6 and 6 * 400 < found["tokens"] <= 6 * 512
    assert set(RECIPES["books"].metrics) <= found["metrics"].keys()
    assert found["metrics"]["unigram_entropy"] < found["metrics"]["masked_lm"] < 11  # ln 30522 = 10.3


def test_a_run_that_fails_is_not_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="sms: the command ended with status 1"):
        our_run(RECIPES["sms"], flags_of(RECIPES["sms"], 0, model_name_or_path=tmp_path))
    assert str(tmp_path) in capsys.readouterr().err


def test_splits_are_disjoint_and_complete(shared_data: Path, minilm_dir: Path, tmp_path: Path) -> None:
    data.prepare(tmp_path)
    whole = (shared_data / "classification" / "sms_spam" / "SMSSpamCollection.tsv").read_bytes().splitlines()
    train, valid = ((tmp_path / f"sms_{part}.tsv").read_bytes().splitlines() for part in ("train", "valid"))
    assert (len(train), len(valid)) == (5017, 557) and sorted(train + valid) == sorted(whole)
    assert valid == whole[9::10]
    squad = json.loads((shared_data / "question_answering" / "xquad.en.json").read_text(encoding="utf-8"))
    parts = [json.loads((tmp_path / f"xquad_{part}.json").read_text(encoding="utf-8")) for part in ("train", "valid")]
    assert [len(part["data"]) for part in parts] == [40, 8]
    assert parts[0]["data"] + parts[1]["data"] == squad["data"]
    assert (tmp_path / "minilm").resolve() == minilm_dir.resolve()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    data.prepare(tmp_path)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_every_example_is_a_recipe_that_the_page_has() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.yaml")} == set(RECIPES)
    page = report.PAGE.read_text(encoding="utf-8")
    for recipe in RECIPES.values():
        flags = flags_of(recipe, 3)
        assert flags["seed"] == 3 and flags["output_dir"] == f"build/recipes/{recipe.name}"
        assert recipe.command in page and f"\n## {recipe.name}\n" in page


def test_the_page_shows_what_is_stored() -> None:
    made = report.tables(report.stored(STUDY.file))
    page = report.PAGE.read_text(encoding="utf-8")
    assert all(f"<!-- table: {name} -->" in page for name in made)
    assert page_with(page, made) == page, "run `python -m benchmarks.recipes --tables --write`"


def stored_line(side: str, seed: int, f1: float, **others: Any) -> dict[str, Any]:
    metrics = {"f1": f1, "precision": 0.5, "recall": 0.25, "loss": 1.5}
    line = {"kind": "recipe", "case": "wnut17", "side": side, "seed": seed, "metrics": metrics, "steps": 1000}
    cost = {"tokens": 1234, "cpu_seconds": 90.0, "seconds": 100.4, "threads": 1, "time": "2026-01-02T03"}
    return line | cost | others


def test_tables(tmp_path: Path) -> None:
    lines = [
        stored_line("ours", 0, 0.1), stored_line("ours", 0, 0.4), stored_line("ours", 1, 0.5),
        stored_line("theirs", 0, 0.3, padded_tokens=2000),
        {"kind": "cpu", "case": "other"}, {**stored_line("ours", 0, 0.9), "case": "a recipe that has gone"},
    ]  # fmt: skip
    file = tmp_path / "recipes.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = report.tables(report.stored(file))
    assert "| [wnut17](#wnut17) | f1 | 0.45 ± 0.071 (2) | 1.5 | 0.3 | 1.5 |" in made["all"]
    assert made["wnut17"].splitlines()[2:] == [
        "| bert_fast | 0.45 ± 0.071 (2) | 0.5 ± 0 (2) | 0.25 ± 0 (2) | 1.5 ± 0 (2) | 1,000 | 1,234 |  | 90 |",
        "| transformers | 0.3 | 0.5 | 0.25 | 1.5 | 1,000 | 1,234 | 2,000 | 90 |",
    ]
    assert made["swag"] == "Nothing is stored."
    assert report.stored(tmp_path / "none.jsonl") == {}
    with pytest.raises(ValueError, match="table: expected one of all, taken, books"):
        page_with("<!-- table: other -->\n<!-- end of table -->", made)


def test_the_command_stores_a_line_for_each_side_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.recipes import theirs

    def run(side: str) -> Any:
        def of(recipe: Any, flags: Any) -> dict[str, Any]:
            return {"metrics": {"f1": 0.5}, "ran": side, "steps": flags["seed"]}

        return of

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "prepare", lambda: None)
    monkeypatch.setattr(cases, "our_run", run("ours"))
    monkeypatch.setattr(theirs, "their_run", run("theirs"))
    study = dataclasses.replace(STUDY, file=tmp_path / "recipes.jsonl")
    assert study.main(["--only", "wnut17", "--rounds", "2"]) == study.main(["--only", "books"]) == 0
    assert study.main(["--prepare"]) == 0
    expected = [("ours", 0), ("theirs", 0), ("ours", 1), ("theirs", 1), ("ours", 0), ("ours", 1), ("ours", 2)]
    stored = [json.loads(line) for line in study.file.read_text().splitlines()]
    assert [(line["side"], line["seed"]) for line in stored] == expected
    assert all((line["ran"], line["steps"]) == (line["side"], line["seed"]) for line in stored)


def test_commands_are_what_a_reader_types() -> None:
    assert RECIPES["xquad"].command == "bert-fast finetune qa --config examples/xquad.yaml"
    assert RECIPES["books"].command == "bert-fast pretrain --config examples/books.yaml"
    assert dataclasses.replace(RECIPES["sms"], task="choice").command.startswith("bert-fast finetune choice ")
