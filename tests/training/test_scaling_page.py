"""The figures of docs/scaling.md follow from the models' sizes, the goals and its formulas; its settings are read."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks.goals import GOALS
from bert_fast import BertForPreTraining
from bert_fast.training.recipes import make_config
from bert_fast.training.recipes.settings import Settings

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


@pytest.mark.parametrize(
    ("row", "size", "sequences", "goal"),
    [
        ("BERT-base, 256 x 128 tokens", "base", 256, "training steps of BERT-base at 128"),
        ("BERT-base, 64 x 512 tokens", "base", 64, "training steps of BERT-base at 512"),
        ("BERT-large, 64 x 256 tokens (mean)", "large", 64, "training steps of BERT-large, even lengths"),
    ],
)
def test_expected_efficiency(row: str, size: str, sequences: int, goal: str) -> None:
    (rate,) = [one.bound for one in GOALS if one.title == goal]
    seconds, processes = sequences / rate, 64
    parameters, _, words = sizes(size)

    def efficiency(gigabytes: int, accumulation: int) -> float:
        exchange = [2 * (processes - 1) / processes * 4 * p / (gigabytes * 1e9) for p in (words, parameters)]
        exposed = max(exchange[0], exchange[1] - 2 / 3 * seconds)
        return accumulation * seconds / (accumulation * seconds + exposed)

    found = [efficiency(*case) for case in ((300, 1), (40, 1), (40, 8), (10, 1), (10, 8))]
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {row} |")]
    assert line == f"| {row} | {1e3 * seconds:.1f} | {' | '.join(f'{one:.0%}'.replace('%', ' %') for one in found)} |"


def test_the_two_phases_make_the_batches_that_are_named(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    blocks = re.findall(r"```yaml\n(# (\S+): .*?)```", PAGE, flags=re.DOTALL)
    found = []
    for text, name in blocks:
        (tmp_path / name).write_text(text)
        settings = Settings.load("pretrain", tmp_path / name, {})
        training = settings.training
        assert training.batch_size is not None
        assert training.batch_tokens == training.batch_size * settings.data.max_length
        found.append((training.batch_size * training.gradient_accumulation * 32, training.steps, training.optimizer))
    assert found == [(65_536, 7037, "lamb"), (32_768, 1562, "lamb")]
    assert sum(steps or 0 for _, steps, _ in found) == 8599
