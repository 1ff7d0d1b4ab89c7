"""Names of the hub in place of folders, by commands; the cache is made up, and the hub is never asked."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from bert_fast.cli import main
from tests.cli.conftest import error_of, finetune, flags
from tests.hub_names import NAME, cached


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def test_a_name_takes_the_place_of_a_folder(
    cache: Path, tiny_model: Path, reviews: Path, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cached(cache, lambda path: shutil.copytree(tiny_model, path))
    assert main.main(finetune("classify", NAME, reviews / "train.tsv", Path("run"))) == 0  # type: ignore[arg-type]
    Path("text.txt").write_text("the film\n\nthe house\n")
    assert main.main(["tokenize", "text.txt", "-o", "store", "--tokenizer", NAME]) == 0
    values: dict[str, Any] = dict(
        model_name_or_path=NAME, train_file="text.txt", output_dir="new", max_steps=1, max_seq_length=40
    )
    assert main.main(["pretrain", *flags(**values)]) == 0
    shutil.rmtree(cache)
    cached(cache, lambda path: shutil.copytree(runs["classify"], path))
    capsys.readouterr()
    assert main.main(["predict", NAME, str(reviews / "valid.tsv")]) == 0
    assert capsys.readouterr().out.count('"label": "positive"') == 20


def test_what_is_not_in_the_cache_is_one_line(cache: Path, reviews: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = f"{NAME}: no such file or directory; the cache of the hub, {cache}, has nothing of this name, and the hub"
    file = reviews / "train.tsv"
    for command in (
        finetune("classify", NAME, file, Path("run")),  # type: ignore[arg-type]
        ["predict", NAME, str(file)],
        ["tokenize", str(file), "-o", "store", "--tokenizer", NAME],
    ):
        assert error_of(command, capsys).startswith(said), command
    command = ["pretrain", *flags(model_name_or_path=NAME, train_file=file, output_dir="new")]
    assert error_of(command, capsys).startswith(said)  # of its tokenizer
    command += ["--tokenizer_name", "vocab.txt"]
    Path("vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    sizes = "tiny, mini, small, medium, base, large"
    assert error_of(command, capsys).startswith(
        f"model_name_or_path: expected one of {sizes}, a config.json or a model; {said}"
    )
