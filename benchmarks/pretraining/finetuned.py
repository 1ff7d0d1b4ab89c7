"""Fine-tuning from the pre-trained model beside random weights, the learning rate of each searched in one way."""

import tempfile
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.pretraining.cases import Case
from benchmarks.pretraining.starts import STARTS, Starts, write_texts
from bert_fast.training import TrainingResult
from bert_fast.training.recipes import Settings, run

SEEDS = 3
RATES = (3e-4, 1e-3, 3e-3)
_HELD_OUT = 5  # of so many examples one is kept back while rates are compared


def finetuned(case: Case, starts: Starts, seeds: Iterable[int] = range(SEEDS)) -> Iterator[dict[str, Any]]:
    """The lines to store: start, seed, learning_rate, rates ({rate: accuracy}), adaptation_steps, steps, metrics.

    The learning rate of a start is the one of `RATES` that is best on examples kept back from those to learn from, in
    each fold others, learned from the rest. With it all of them are learned from, once with every seed; what is judged
    by is looked at only then, after the last step. Seeds change random weights, the masks of an adaptation, the new
    head and the order of the examples.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        runs = _Runs(case, starts, Path(name))
        for start in case.starts:
            rates = {rate: runs.held_out_accuracy(start, rate) for rate in RATES}
            best = max(rates, key=rates.__getitem__)
            for seed in seeds:
                result = runs.run(start, seed, best)
                yield {
                    "start": start,
                    "seed": seed,
                    "learning_rate": best,
                    "rates": {f"{rate:g}": round(value, 4) for rate, value in rates.items()},
                    "adaptation_steps": starts.steps if STARTS[start].is_adapted else 0,
                    "steps": result.step,
                    "metrics": result.metrics,
                }


class _Runs:
    """Those of a case, in a folder."""

    def __init__(self, case: Case, starts: Starts, folder: Path) -> None:
        self.case, self.starts, self.folder, self.numbers = case, starts, folder, count()
        self.texts = write_texts(folder / f"{case.folder.name}.txt", case.unlabelled())
        examples = case.examples()
        self.files = case.write(folder / "whole", examples), str(case.folder / case.valid)
        self.folds = [
            (
                case.write(folder / f"rest-{fold}", [one for n, one in enumerate(examples) if n % _HELD_OUT != fold]),
                case.write(folder / f"kept-{fold}", examples[fold::_HELD_OUT]),
            )
            for fold in range(case.folds)
        ]

    def held_out_accuracy(self, start: str, rate: float) -> float:
        """Mean of the folds, each with a seed of its own."""
        found = [self.run(start, fold, rate, files).metrics for fold, files in enumerate(self.folds)]
        return fmean(metrics["accuracy"] for metrics in found)

    def run(self, start: str, seed: int, rate: float, files: tuple[str, str] | None = None) -> TrainingResult:
        """One run, on all examples or on the files given."""
        train, valid = files or self.files
        values = self.case.settings | {
            "model": str(self.starts.model(start, seed, self.texts)),
            "train": train,
            "valid": valid,
            "learning_rate": rate,
            "warmup": 0.1,
            "seed": seed,
            "max_length": self.starts.positions,
            "eval_every": 1e9,  # after the last step alone
            "keep_checkpoints": 0,
            "output_dir": str(self.folder / f"run-{next(self.numbers)}"),
        }
        return run(Settings.of(self.case.task, values), quiet=True)
