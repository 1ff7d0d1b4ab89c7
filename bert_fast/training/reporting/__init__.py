"""What a person sees of a run: progress, curves, a page, and a directory that explains itself."""

import importlib.util
from pathlib import Path

from bert_fast.checks import check_flag
from bert_fast.training.observers import Observer
from bert_fast.training.reporting.flops import model_flops, peak_flops
from bert_fast.training.reporting.loggers import MetricsLog, TensorBoardLog, read_metrics
from bert_fast.training.reporting.progress import ProgressLine
from bert_fast.training.reporting.report import ReportPage, write_report
from bert_fast.training.reporting.run_directory import RunDirectory

__all__ = [
    "MetricsLog",
    "ProgressLine",
    "ReportPage",
    "RunDirectory",
    "TensorBoardLog",
    "default_observers",
    "model_flops",
    "peak_flops",
    "read_metrics",
    "write_report",
]


def default_observers(output_dir: str | Path, quiet: bool = False) -> list[Observer]:
    """Those who keep a run's record, those who show it, and a line on the terminal unless it is to be quiet.

    TensorBoard's log is kept where tensorboard is installed and can write to the directory, whose name must be UTF-8.

    Args:
        output_dir: the run's directory.
        quiet: write nothing to the terminal.
    """
    check_flag("quiet", quiet)
    run = RunDirectory(output_dir)
    observers: list[Observer] = [run, MetricsLog(run.metrics)]
    if importlib.util.find_spec("tensorboard") is not None and _is_unicode(str(output_dir)):
        observers.append(TensorBoardLog(run.tensorboard))
    observers.append(ReportPage(output_dir))
    if not quiet:
        observers.append(ProgressLine())
    return observers


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
