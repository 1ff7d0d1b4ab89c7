"""The recipes: settings of `examples/`, and our run of them."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.kit.record import ROOT
from bert_fast.training.recipes.runs import phases, run
from bert_fast.training.recipes.settings import Settings
from bert_fast.training.reporting import read_metrics


@dataclass(frozen=True)
class Recipe:
    """One of `examples/`.

    name: of the file. task: as in the settings. metrics: those to compare, the main one first.
    has_peer: whether transformers' Trainer runs it, too.
    has_masked: whether transformers also runs it with padding kept out of the softmax over a window's positions.
    """

    name: str
    task: str
    metrics: tuple[str, ...]
    has_peer: bool = True
    has_masked: bool = False

    @property
    def sides(self) -> tuple[str, ...]:
        """Who runs it: "ours", "theirs", "masked"."""
        return ("ours", *(("theirs",) if self.has_peer else ()), *(("masked",) if self.has_masked else ()))

    @property
    def command(self) -> str:
        """What a reader types."""
        verb = "pretrain" if self.task == "pretrain" else f"finetune {self.task}"
        return f"bert-fast {verb} --config examples/{self.name}.yaml"


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("books", "pretrain", ("masked_lm", "context_free_loss", "next_sentence_accuracy"), has_peer=False),
        Recipe("sms", "classify", ("accuracy", "f1", "matthews_correlation")),
        Recipe("polarity", "classify", ("accuracy", "f1", "matthews_correlation")),
        Recipe("wnut17", "ner", ("f1", "precision", "recall")),
        Recipe("uner_zh", "ner", ("f1", "precision", "recall")),
        Recipe("xquad", "qa", ("f1", "exact_match"), has_masked=True),
        Recipe("swag", "choice", ("accuracy",)),
    )
}


class Clock:
    """Seconds of wall and of all threads' CPU that a block took."""

    seconds: float
    cpu_seconds: float

    @contextmanager
    def running(self) -> Iterator[None]:
        began, cpu_began = time.perf_counter(), time.process_time()
        yield
        self.seconds, self.cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began


def settings_of(recipe: Recipe, seed: int, **changes: Any) -> Settings:
    """The settings of the file, paths and all, with another seed; `changes` replace others (as flags would)."""
    return Settings.load(recipe.task, ROOT / "examples" / f"{recipe.name}.yaml", {"seed": seed, **changes})


def our_run(settings: Settings) -> dict[str, Any]:
    """What the command does, in a directory that is forgotten: figures of the last evaluation, time and tokens.

    Raises:
        KeyboardInterrupt: a signal ended it early.
    """
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        changed = Settings.load(settings.task, None, _values(settings) | {"output_dir": directory})
        with clock.running():
            result = run(changed, quiet=True)
        if result.outcome.startswith("interrupted"):
            raise KeyboardInterrupt(result.outcome)
        lines = [line for phase in phases(changed) for line in _steps(phase.training.output_dir)]
    return {
        "metrics": result.metrics,
        "steps": sum(line["num_steps"] for line in lines),
        "tokens": sum(line["tokens"] for line in lines),
        "seconds": round(clock.seconds, 1),
        "cpu_seconds": round(clock.cpu_seconds, 1),
        "threads": torch.get_num_threads(),
    }


def _values(settings: Settings) -> dict[str, Any]:
    return {name: value for name, value in settings.as_dict().items() if name != "task" and value is not None}


def _steps(directory: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(directory / "metrics.jsonl") if line["kind"] == "step"]
