"""`bert-fast report`: the page of a training run, made again from its metrics."""

import argparse
from pathlib import Path

from bert_fast.terminal import printable

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `bert-fast report`."""
    parser.description = (
        "Writes report.html into the directory of a training run, from its run.json and metrics.jsonl alone; "
        "the run may still be going on."
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="what training wrote")


def run(arguments: argparse.Namespace) -> int:
    """Writes the page and says where it is; returns 0."""
    from bert_fast.training.reporting import write_report

    print(printable(str(write_report(arguments.run_dir))))
    return 0
