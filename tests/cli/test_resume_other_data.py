"""Going on with other data than a run began with: refused, with what is other, and nothing of the run is changed."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bert_fast import BertTokenizer
from bert_fast.cli.main import main
from tests.cli.conftest import VOCABULARY

pytest.importorskip("accelerate")


def flipped(lines: list[str]) -> list[str]:
    other = {"positive": "negative", "negative": "positive"}
    return [f"{text}\t{other[label]}" for text, label in (line.split("\t") for line in lines)]


def renamed(lines: list[str]) -> list[str]:
    return [line.replace("\tnegative", "\tbad").replace("\tpositive", "\tgood") for line in lines]


def of_kept(run: Path) -> dict[str, str]:
    """Digests of what a run that is refused must not change."""
    folders = [run / "model", run / "checkpoints"]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in [*files, run / "metrics.jsonl"]}


def refusal(run: Path, capsys: pytest.CaptureFixture[str], *changes: str) -> str:
    before = of_kept(run)
    capsys.readouterr()
    command = ["finetune", "classify", "--config", str(run / "config.yaml"), "--quiet", "--output-dir", str(run)]
    assert main([*command, *changes]) == 1
    assert of_kept(run) == before
    return capsys.readouterr().err


@pytest.fixture
def run(classify_run: Path, tmp_path: Path) -> Path:
    """A run that was cut off after its first checkpoint."""
    copy = shutil.copytree(classify_run, tmp_path / "run")
    shutil.rmtree(max((copy / "checkpoints").iterdir()))
    return copy


@pytest.mark.parametrize(
    ("file", "change", "names"),
    [
        ("train", flipped, ["digests.train"]),
        ("train", lambda lines: lines[1:] + lines[:1], ["digests.train"]),
        ("train", lambda lines: [line.replace("film", "house") for line in lines], ["digests.train"]),
        ("valid", flipped, ["digests.valid"]),
        ("both", renamed, ["labels.0", "labels.1", "model.id2label.0"]),
    ],
    ids=["flipped labels", "another order", "other words", "flipped labels to judge by", "other names of labels"],
)
def test_other_examples(
    run: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str,
    change: Callable[..., list[str]], names: list[str],
) -> None:  # fmt: skip
    options = []
    for name in ("train", "valid"):
        header, *lines = (reviews / f"{name}.tsv").read_text().splitlines()
        lines = change(lines) if file in (name, "both") else lines
        (tmp_path / f"{name}.tsv").write_text("\n".join([header, *lines]) + "\n")
        options += [f"--{name}", str(tmp_path / f"{name}.tsv")]
    error = refusal(run, capsys, *options)
    assert "was made by another run: " in error
    assert all(f"{name} is " in error for name in names)
    assert ("digests.train" in error) == ("digests.train" in names)


def test_another_tokenizer(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*VOCABULARY[:5], *reversed(VOCABULARY[5:])]
    BertTokenizer(words, do_lower_case=False).save_pretrained(tmp_path / "other")
    error = refusal(run, capsys, "--tokenizer", str(tmp_path / "other"))
    assert "digests.train is " in error and "digests.tokenizer is " in error
    words = [*VOCABULARY[:-1], "never-seen"]  # no example has the word that is another one
    BertTokenizer(words, do_lower_case=False).save_pretrained(tmp_path / "nearly")
    assert "digests.tokenizer is " in refusal(run, capsys, "--tokenizer", str(tmp_path / "nearly"))


def test_the_same_data_elsewhere_goes_on(
    run: Path, reviews: Path, classify_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["finetune", "classify", "--config", str(run / "config.yaml"), "--quiet", "--output-dir", str(run)]
    moved = [str(shutil.copy(reviews / name, tmp_path / f"moved-{name}")) for name in ("train.tsv", "valid.tsv")]
    assert main([*command, "--train", moved[0], "--valid", moved[1]]) == 0
    weights = [(path / "model/model.safetensors").read_bytes() for path in (run, classify_run)]
    assert weights[0] == weights[1]


def test_checkpoints_of_earlier_versions_go_on(run: Path, classify_run: Path) -> None:
    for file in (run / "checkpoints").glob("*/state.json"):
        state = json.loads(file.read_text())
        for name in ("digest", "digests"):
            del state[name]
        for name in ("labels", "digests"):
            del state["agreement"][name]
        file.write_text(json.dumps(state))
    command = ["finetune", "classify", "--config", str(run / "config.yaml"), "--quiet", "--output-dir", str(run)]
    assert main(command) == 0
    weights = [(path / "model/model.safetensors").read_bytes() for path in (run, classify_run)]
    assert weights[0] == weights[1]
