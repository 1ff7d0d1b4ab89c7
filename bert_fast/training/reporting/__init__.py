"""What a person sees of a run: progress, curves, a page, and a directory that explains itself."""

from pathlib import Path

from bert_fast.training.events import Observer
from bert_fast.training.reporting.flops import model_flops, peak_flops
from bert_fast.training.reporting.metrics_log import MetricsLog, read_metrics
from bert_fast.training.reporting.progress import ProgressLine
from bert_fast.training.reporting.run_directory import RunDirectory

__all__ = [
    "MetricsLog",
    "ProgressLine",
    "RunDirectory",
    "default_observers",
    "model_flops",
    "peak_flops",
    "read_metrics",
]


def default_observers(output_dir: str | Path, quiet: bool = False) -> list[Observer]:
    """Those who keep a run's record, and a line on the terminal unless it is to be quiet.

    Args:
        output_dir: the run's directory.
        quiet: write nothing to the terminal.
    """
    run = RunDirectory(output_dir)
    observers: list[Observer] = [run, MetricsLog(run.metrics)]
    if not quiet:
        observers.append(ProgressLine())
    return observers
