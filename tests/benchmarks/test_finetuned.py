"""Fine-tuning beside random weights: what is learned from, what is judged by, and where runs start."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.pretraining import __main__ as command
from benchmarks.pretraining import finetuned as module
from benchmarks.pretraining import starts as starts_module
from benchmarks.pretraining import tables
from benchmarks.pretraining.cases import CASES, Case
from benchmarks.pretraining.finetuned import RATES, finetuned
from benchmarks.pretraining.starts import Starts, write_texts
from bert_fast import BertConfig, BertForPreTraining, BertTokenizer
from bert_fast.models.checkpoint import load_checkpoint
from bert_fast.training.recipes.build import build

WORDS = [f"word{number}" for number in range(30)]


@pytest.fixture
def rows(tmp_path: Path) -> Case:
    """20 rows, of which every second is learned from."""
    lines = [f"{number % 2}\t{WORDS[number]} and\t{WORDS[number]}" for number in range(20)]
    (tmp_path / "train.tsv").write_text("\n".join(["label\tone\tother", *lines]) + "\n")
    (tmp_path / "dev.tsv").write_text("label\tone\tother\n1\tword and\tword\n")
    settings = {"text": "one", "text_pair": "other"}
    return Case("rows", tmp_path, "train.tsv", "dev.tsv", "classify", settings, ("one", "other"), every=2, folds=3)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "model"
    tokenizer = BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(9)
    BertForPreTraining(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def test_rows_of_a_case(rows: Case, tmp_path: Path) -> None:
    examples = rows.examples()
    assert len(examples) == 10 and examples[1] == "0\tword2 and\tword2"
    assert rows.unlabelled()[2:4] == ["word1 and", "word1"] and len(rows.unlabelled()) == 40
    path = rows.write(tmp_path / "some", examples[:2])
    assert path.endswith("some.tsv")
    assert Path(path).read_text() == "label\tone\tother\n0\tword0 and\tword0\n0\tword2 and\tword2\n"


def test_sentences_of_a_case(tmp_path: Path) -> None:
    whole = "a\tX\nb\tY\n\nc\tX\n\nd\tY\ne\tX\n"
    (tmp_path / "train.conll").write_text(f"{whole}\n")
    case = Case("sentences", tmp_path, "train.conll", "dev.conll", "ner", {}, every=2)
    assert case.examples() == ["a\tX\nb\tY", "d\tY\ne\tX"] and case.unlabelled() == ["a b", "c", "d e"]
    assert Path(dataclasses.replace(case, every=1).write(tmp_path / "all", case._parts()[1])).read_text() == whole


def test_cases_learn_from_other_examples_than_they_are_judged_by(shared_data: Path) -> None:
    for name, most in {"all": 0, "pairs": 0, "tags": 40}.items():  # of 2,077 sentences; short ones, as "Thanks ."
        case = CASES[name]
        judged = dataclasses.replace(case, train=case.valid).examples()
        assert len(set(judged) & set(case.examples())) <= most < 0.02 * len(judged)
    films = CASES["few"]
    assert not set(films.unlabelled()) & set(dataclasses.replace(films, train=films.valid).unlabelled())
    counts = {name: len(case.examples()) for name, case in CASES.items()}
    assert counts == {"few": 960, "all": 9596, "tags-few": 201, "tags": 2001, "pairs": 1833}


def test_rates_are_searched_on_what_is_kept_back(rows: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, int, float, str, str]] = []

    def run(settings: Any, quiet: bool) -> Any:
        train, valid = Path(settings.data.train), Path(settings.data.valid)
        ran.append((settings.model.model, settings.training.seed, settings.training.learning_rate,
                    train.read_text(), valid.read_text()))  # fmt: skip
        assert settings.training.eval_every > 1e6 and settings.training.keep_checkpoints == 0
        best = RATES[2] if settings.model.model == "random" else RATES[0]
        return SimpleNamespace(step=7, metrics={"accuracy": 1.0 - abs(settings.training.learning_rate - best)})

    starts = SimpleNamespace(model=lambda name, seed, texts: Path(name), positions=64, steps=5)
    monkeypatch.setattr(module, "run", run)
    lines = list(finetuned(rows, starts, range(2)))  # type: ignore[arg-type]
    assert [(line["start"], line["seed"], line["learning_rate"]) for line in lines] == [
        ("random", 0, RATES[2]), ("random", 1, RATES[2]), ("pre-trained", 0, RATES[0]), ("pre-trained", 1, RATES[0]),
    ]  # fmt: skip
    assert all(line["adaptation_steps"] == 0 and len(line["rates"]) == len(RATES) for line in lines)
    dev, learned = (rows.folder / "dev.tsv").read_text(), set(rows.examples())
    search = [one for one in ran if one[4] != dev]
    assert len(search) == 2 * 3 * len(RATES) and len(ran) == len(search) + 4
    for _, fold, _, train, kept in search:
        rest, back = (set(text.splitlines()[1:]) for text in (train, kept))
        assert rest | back == learned and not rest & back and back == set(rows.examples()[fold::5])
    for _, _, _, train, valid in ran:
        assert valid != dev or set(train.splitlines()[1:]) == learned


def test_starts(pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = write_texts(tmp_path / "texts.txt", ["word1 word2", "word3", "word1 word2"])
    assert texts.read_text() == "word1 word2\nword3\n"
    starts = Starts(pretrained, tmp_path / "kept", steps=2)
    assert starts.positions == 64
    ran: list[Any] = []

    def run(settings: Any, quiet: bool) -> None:
        ran.append(settings)
        build(settings).model.save_pretrained(settings.training.output_dir / "model")

    monkeypatch.setattr(starts_module, "run", run)

    def weights(name: str, seed: int = 0) -> torch.Tensor:
        return load_checkpoint(starts.model(name, seed, texts))["bert.embeddings.word_embeddings.weight"]

    random, other, given = weights("random"), weights("random", 1), weights("pre-trained")
    assert not torch.equal(random, other) and not torch.equal(random, given) and not ran
    assert starts.model("pre-trained", 1, texts) == pretrained
    assert torch.equal(weights("pre-trained, task's texts", 1), given)
    assert torch.equal(weights("random, task's texts", 1), other)
    assert torch.equal(weights("random, task's texts", 1), other) and len(ran) == 2, "made once"
    for settings in ran:
        assert settings.data.train == (str(texts),) and not settings.data.next_sentence
        assert (settings.training.steps, settings.training.seed) == (2, 1)


def test_the_table_has_the_newest_runs_of_searched_rates(tmp_path: Path) -> None:
    def line(start: str, seed: int, accuracy: float, **others: Any) -> dict[str, Any]:
        return {
            "kind": "finetuned",
            "case": "tags",
            "start": start,
            "seed": seed,
            "metrics": {"accuracy": accuracy},
        } | others

    lines = [line("random", 0, 0.1), line("random", 0, 0.2, learning_rate=1e-3)]
    lines += [line("random", 0, 0.5, learning_rate=3e-3), line("random", 1, 0.7, learning_rate=3e-3)]
    lines += [line("pre-trained", 0, 0.25), line("pre-trained", 1, 0.75)]
    stored = tmp_path / "stored.jsonl"
    stored.write_text("".join(json.dumps(one) + "\n" for one in lines))
    rows = tables.tables(stored)["finetuned"].splitlines()[2:]
    assert rows == [
        "| parts of speech, 2,001 sentences | random | 0.003 | 0.500, 0.700 | 0.600 ± 0.141 |",
        "| parts of speech, 2,001 sentences | pre-trained | given | 0.250, 0.750 | 0.500 ± 0.354 |",
    ]


def test_an_unknown_case_is_refused(pretrained: Path) -> None:
    with pytest.raises(SystemExit, match=r"cases: expected some of few, all, .*; got other"):
        command.main(["--dry-run", "finetuned", str(pretrained.parent), "other"])


def test_an_unknown_ablation_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"names: expected some of as in the recipe, .*; got other"):
        command.main(["--dry-run", "ablations", "other"])
