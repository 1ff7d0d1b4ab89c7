"""`bert-fast finetune`: a pre-trained model that learns a task from examples."""

import argparse

from bert_fast.cli import training

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the tasks of `bert-fast finetune`, each with its options."""
    from bert_fast.training.tasks import TASKS

    parser.description = (
        "Trains a checkpoint on examples of a task, judges it by others, and keeps the best. Everything goes to "
        "--output-dir; the same command goes on where an interrupted run was."
    )
    tasks = parser.add_subparsers(dest="task", metavar="task", required=True)
    for task, settings in TASKS.items():
        if not settings.is_pretraining:
            learns = tasks.add_parser(task, help=settings.summary, description=f"Learns {settings.summary}.")
            training.add_arguments(learns, task)


def run(arguments: argparse.Namespace) -> int:
    """Trains; see `training.run`."""
    return training.run(arguments, arguments.task)
