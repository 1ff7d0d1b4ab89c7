"""`bert-fast pretrain`: a model that learns to fill in words from plain text."""

import argparse

from bert_fast.cli import training

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `bert-fast pretrain`."""
    parser.description = (
        "Trains a model to fill in masked words and to tell whether a sentence follows another, from text files or a "
        "token store, with random weights or those of a checkpoint. Everything goes to --output-dir; the same command "
        "goes on where an interrupted run was."
    )
    training.add_arguments(parser, "pretrain")


def run(arguments: argparse.Namespace) -> int:
    """Trains; see `training.run`."""
    return training.run(arguments, "pretrain")
