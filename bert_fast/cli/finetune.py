"""`bert-fast finetune`: a pre-trained model that learns a task from examples."""

import argparse

from bert_fast.cli import training

__all__ = ["SUMMARIES", "add_arguments", "run"]

# task -> what `bert-fast finetune --help` says
SUMMARIES = {
    "classify": "a class, or a number, for a text or a pair of texts: TSV, CSV, JSON lines, Parquet",
    "ner": "a tag for every word, such as names of persons and places: CoNLL columns",
    "qa": "the span of a text that answers a question: JSON as SQuAD has it",
    "choice": "the right one of several answers or endings: CSV or JSON lines, as SWAG and COPA have them",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the tasks of `bert-fast finetune`, each with its options."""
    parser.description = (
        "Trains a checkpoint on examples of a task, judges it by others, and keeps the best. Everything goes to "
        "--output-dir; the same command goes on where an interrupted run was."
    )
    tasks = parser.add_subparsers(dest="task", metavar="task", required=True)
    for task, summary in SUMMARIES.items():
        training.add_arguments(tasks.add_parser(task, help=summary, description=f"Learns {summary}."), task)


def run(arguments: argparse.Namespace) -> int:
    """Trains; see `training.run`."""
    return training.run(arguments, arguments.task)
