"""The snippets and commands of docs/training.md run unchanged."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_fast import BertConfig, BertForMaskedLM
from bert_fast.cli import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers", minversion="5")
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20,
        max_position_embeddings=128,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained("path/to/model")
    for name in ("path/to/model/vocab.txt", "vocab.txt"):
        Path(name).write_text("\n".join(WORDS) + "\n")
    for name in ("train.tsv", "dev.tsv"):
        Path(name).write_text("sentence\tlabel\n" + "good film\tpos\nbad film\tneg\n" * 10)
    Path("new.tsv").write_text("sentence\ngood film\n")
    Path("books.txt").write_text("good film\nbad film\n\n" * 40)
    return tmp_path


@pytest.mark.filterwarnings("ignore")  # a head that a masked-LM checkpoint lacks
def test_python(folder: Path) -> None:
    given: dict[str, Any] = {}
    exec("\n".join(blocks("python")), given)
    assert 0 <= given["accuracy"] <= 1
    assert (folder / "runs/fused/checkpoint-4/model.safetensors").is_file()


@pytest.mark.filterwarnings("ignore")
def test_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml")
    (settings,) = blocks("yaml")
    Path("run.yaml").write_text(settings)
    commands = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("bert-fast ")]
    assert len(commands) == 4
    for command in commands:
        more = ["--max_steps", "2"] if "pretrain" in command else []
        assert main.main([*shlex.split(command)[1:], *more]) == 0, capsys.readouterr().err
    left = PAGE.split("## What a run leaves")[1].split("\n##")[0]
    for name in re.findall(r"`([a-z_]+\.(?:safetensors|json|png))`", left):
        assert (folder / "runs/reviews" / name).is_file(), name
    assert json.loads((folder / "answers.jsonl").read_text())["label"] in ("pos", "neg")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["eval_accuracy"] >= 0


def test_flags_that_the_page_names_are_there() -> None:
    pytest.importorskip("transformers", minversion="5")
    from transformers import HfArgumentParser

    from bert_fast.cli.arguments import ModelArguments
    from bert_fast.training import TrainingArguments
    from bert_fast.training.tasks.classification import ClassificationArguments

    parser = HfArgumentParser([ModelArguments, ClassificationArguments, TrainingArguments])
    flags = {option for action in parser._actions for option in action.option_strings}
    named = {f"--{name}" for name in re.findall(r"`--([a-z_]+)", PAGE)}
    assert len(named) >= 8 and named - flags == {"--config", "--evaluate"}
