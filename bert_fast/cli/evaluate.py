"""`bert-fast evaluate`: how good a trained model is on labelled examples."""

import argparse
import json
import sys

from bert_fast.cli import inference
from bert_fast.terminal import printable

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `bert-fast evaluate`."""
    parser.description = (
        "Judges the model of a run by labelled examples: a file as those it was trained on (of pre-training: text "
        "files, or a token store). Prints loss and metrics."
    )
    inference.add_arguments(parser)
    parser.add_argument("files", nargs="+", metavar="FILE", help="labelled examples; one file, but for pre-training")
    parser.add_argument("--json", action="store_true", help="print the metrics as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Evaluates; returns 0, or 1 where a file is missing or wrong."""
    with inference.problems("evaluate") as problems:
        model = inference.load(arguments)
        metrics = model.evaluate(arguments.files)
        if model.processes.is_main:
            lines = [f"{name:24} {value:.6g}" for name, value in metrics.items()]
            print(json.dumps(metrics) if arguments.json else printable("\n".join(lines)))
            sys.stdout.flush()
    return 1 if problems else 0
