"""Tiny models, examples and finished runs for the tests of commands that train and predict."""

import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_fast import BertConfig, BertForPreTraining, BertTokenizer
from bert_fast.cli import main

TEXT = "a the film was good bad very not red blue is house who lives in Oslo Paris John Mary ran . ?"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *TEXT.split()]


def flags(**values: Any) -> list[str]:
    """Arguments of a command; a value of None leaves its flag out."""
    found = []
    for name, value in values.items():
        if value is not None:
            found += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return found


def finetune(task: str, model: Path, train: Path, output: Path, **changes: Any) -> list[str]:
    """A command of a few steps."""
    values = dict(
        model_name_or_path=model, train_file=train, output_dir=output, max_seq_length=40, max_steps=4,
        learning_rate=1e-2, per_device_train_batch_size=16, logging_steps=2, save_strategy="no",
    )  # fmt: skip
    return ["finetune", task, *flags(**values | changes)]


def error_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command ends with that cannot do its work."""
    capsys.readouterr()
    assert main.main(argv) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith(f"bert-fast {argv[0]}: ") and shown.err.count("\n") == 1, shown.err
    return shown.err.removeprefix(f"bert-fast {argv[0]}: ").rstrip("\n")


@contextlib.contextmanager
def no_pictures() -> Iterator[None]:
    """A file in place of curves, whose drawing takes longer than the runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bert_fast.training.curves.draw_curves", lambda history, path: path.write_text("drawn"))
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_pictures() -> Iterator[None]:
    with no_pictures():
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pre-trained model, two layers of 16, and its tokenizer."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(VOCABULARY), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, initializer_range=0.2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertForPreTraining(config).save_pretrained(path)
    BertTokenizer(VOCABULARY, do_lower_case=False).save_pretrained(path)
    return path


@pytest.fixture
def damaged(tiny_model: Path, tmp_path: Path) -> Any:
    """Makes copies of `tiny_model` under a name, whose config.json has other fields."""

    def make(name: str, **fields: Any) -> Path:
        path = shutil.copytree(tiny_model, tmp_path / name)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | fields))
        return path

    return make


@pytest.fixture(scope="session")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.tsv and valid.tsv: sentences that are positive where they hold "good", negative where they hold "bad"."""
    path = tmp_path_factory.mktemp("reviews")
    draw = random.Random(0)
    for name, count in (("train.tsv", 160), ("valid.tsv", 40)):
        rows = []
        for index in range(count):
            words = draw.choices(["a", "the", "film", "was", "very", "red", "house"], k=draw.randint(1, 8))
            words.insert(draw.randint(0, len(words)), "good" if index % 2 else "bad")
            rows.append(f"{' '.join(words)}\t{'positive' if index % 2 else 'negative'}\n")
        (path / name).write_text("text\tlabel\n" + "".join(rows))
    return path


@pytest.fixture(scope="session")
def task_files(reviews: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Examples to learn from, by task."""
    path = tmp_path_factory.mktemp("tasks")
    draw = random.Random(0)
    tags = {"John": "B-PER", "Mary": "B-PER", "Oslo": "B-LOC", "Paris": "B-LOC"}
    sentences = [[draw.choice([*tags, "lives", "in", "a", "house", "."]) for _ in range(6)] for _ in range(60)]
    text = "\n".join("".join(f"{word}\t{tags.get(word, 'O')}\n" for word in sentence) for sentence in sentences)
    (path / "train.conll").write_text(text)
    questions = [
        {"id": f"q{index}", "question": "who ?", "context": f"{who} lives in {where} . the house is red ."}
        | {"answers": {"text": [who], "answer_start": [0]}}
        for index, (who, where) in enumerate([("John", "Oslo"), ("Mary", "Paris"), ("John", "Paris")] * 8)
    ]
    choices = [
        {"sent1": "the film was good .", "sent2": "John", "label": index % 4}
        | {f"ending{choice}": "ran ." if choice == index % 4 else "is bad ." for choice in range(4)}
        for index in range(20)
    ]
    for name, rows in (("questions", questions), ("choices", choices)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "classify": reviews / "train.tsv", "ner": path / "train.conll", "qa": path / "questions.jsonl",
        "choice": path / "choices.jsonl",
    }  # fmt: skip


@pytest.fixture(scope="session")
def runs(tiny_model: Path, task_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished runs by task: folders of models that know their examples."""
    folders = tmp_path_factory.mktemp("runs")
    for task, file in task_files.items():
        command = finetune(
            task, tiny_model, file, folders / task, validation_file=file, max_steps=60, logging_steps=60,
            learning_rate=5e-3, warmup_steps=5,
        )  # fmt: skip
        with no_pictures():
            assert main.main(command) == 0
    return {task: folders / task for task in task_files}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.txt and valid.txt: documents of sentences, one a line."""
    path = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    for name, count in (("train.txt", 30), ("valid.txt", 5)):
        documents = []
        for _ in range(count):
            people = [(draw.choice(["John", "Mary"]), draw.choice(["Oslo", "Paris"])) for _ in range(12)]
            documents.append("".join(f"{who} lives in {where} .\n" for who, where in people))
        (path / name).write_text("\n".join(documents))
    return path
