"""The figures of docs/scaling.md follow from the models' sizes and its formulas; its flags are read."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from bert_fast import BertForPreTraining
from bert_fast.cli.pretrain import make_config

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
WORDS = 30522


def cells(start: str) -> list[str]:
    """The cells of the one line of a table that begins with `start`."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {start} |") and line.count("|") > 5]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def sizes(size: str) -> tuple[int, int, int]:
    """(parameters, those in layers, those of word embeddings) of a BertForPreTraining."""
    with torch.device("meta"):
        model = BertForPreTraining(make_config(size, WORDS))
    return (
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in model.bert.encoder.layer.parameters()),
        model.bert.embeddings.word_embeddings.weight.numel(),
    )


@pytest.mark.parametrize("size", ["base", "large"])
def test_bytes_of_a_step(size: str) -> None:
    parameters, in_layers, words = sizes(size)
    once = 4 * parameters / 1e6  # megabytes
    sharded = 4 * (3 * in_layers + 2 * (parameters - in_layers)) / 1e6
    figures = (2 * 1 / 2 * once, 2 * 7 / 8 * once, 2 * once, 7 / 8 * sharded, sharded)
    expected = [f"{parameters:,}", f"{in_layers:,}", *(f"{figure:,.1f}" for figure in figures)]
    assert cells(f"BERT-{size}") == expected
    assert f"{4 * words / 1e6:.1f} MB" in PAGE
    assert f"{12 * parameters / 1e9:.2f}" in PAGE  # a checkpoint
    gathered = 4 * (parameters - in_layers + 2 * in_layers / make_config(size, WORDS).num_hidden_layers) / 1e9
    memory = f"{16 * parameters / 1e9:.2f} GB | {2 * parameters / 1e9:.2f} GB with 8 GPUs, and {gathered:.2f} |"
    assert f"| BERT-{size} | {memory}" in PAGE


def test_the_two_phases_make_the_batches_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("yaml")
    pytest.importorskip("transformers", minversion="5")
    from bert_fast.cli.arguments import ModelArguments, make_parser, parsed
    from bert_fast.training import TrainingArguments
    from bert_fast.training.tasks.pretraining import PretrainingArguments

    monkeypatch.chdir(tmp_path)
    (phase,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "phase1.yaml").write_text(phase)
    (line,) = re.findall(r"-m bert_fast pretrain (--config phase1.yaml .*?)```", PAGE, flags=re.DOTALL)
    parser = make_parser("pretrain", "", (ModelArguments, PretrainingArguments, TrainingArguments))
    found = []
    for flags in ("--config phase1.yaml", line.replace("\\\n", " ")):
        _, data, training = parsed(parser, shlex.split(flags, comments=True))
        sequences = training.per_device_train_batch_size * training.gradient_accumulation_steps * 32
        found.append((sequences, data.max_seq_length, training.max_steps))
        assert training.lamb and training.lr_scheduler_kwargs == {"power": 0.5}
    assert found == [(65_536, 128, 7037), (32_768, 512, 1562)]
    assert sum(steps for _, _, steps in found) == 8599
