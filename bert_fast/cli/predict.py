"""`bert-fast predict`: what a trained model says about examples, of a file or as they come."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bert_fast.cli import inference
from bert_fast.errors import SourceError
from bert_fast.terminal import printable

if TYPE_CHECKING:
    from bert_fast.training.recipes.inference import TrainedModel

__all__ = ["add_arguments", "run"]

_CHUNK_BYTES = 1 << 18  # read from stdin at a time, if so much is there


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `bert-fast predict`."""
    parser.description = (
        "Asks the model of a run about examples without labels: a file as those it was trained on, or lines of stdin, "
        "answered as they come. A line is, for classify, a text (of pairs: two, with a tab between them); for ner, "
        "words with spaces between them; for qa and choice, a JSON object."
    )
    inference.add_arguments(parser)
    parser.add_argument("file", metavar="FILE", help="examples; - is stdin")
    parser.add_argument(
        "-o", "--output", metavar="PATH",
        help="without an ending: files in the form that the task has for predictions; default: JSON lines on stdout",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Predicts; returns 0, or 1 where a file or a line is wrong."""
    with inference.problems("predict") as problems:
        model = inference.load(arguments)
        if arguments.output is not None:
            if arguments.file == "-":
                examples: Any = [row for rows in _stdin(model) for row in rows]
            else:
                examples = arguments.file
            for path in model.write_answers(model.read(examples), arguments.output):
                if model.processes.is_main:
                    print(printable(str(path)))
        elif arguments.file == "-":
            done = 0
            for rows in _stdin(model):
                _print(model, rows, done)
                done += len(rows)
        else:
            _print(model, arguments.file)
    return 1 if problems else 0


def _print(model: "TrainedModel", examples: Any, done: int = 0) -> None:
    """Prints what the model says; `done` examples came before these."""
    for answer in model.answers(model.read(examples)):
        if "index" in answer:
            answer["index"] += done
        if model.processes.is_main:
            sys.stdout.write(printable(json.dumps(answer, ensure_ascii=False)) + "\n")
    sys.stdout.flush()


def _stdin(model: "TrainedModel") -> Iterator[list[dict[str, Any]]]:
    """Examples from the lines of stdin: all that are there, then all that have come meanwhile, and so on."""
    number, rest = 0, b""
    while chunk := os.read(0, _CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        if lines:
            yield [_example(model, line, number + index) for index, line in enumerate(lines, 1)]
            number += len(lines)
    if rest:
        yield [_example(model, rest, number + 1)]  # the last line need not have an end


def _example(model: "TrainedModel", line: bytes, number: int) -> dict[str, Any]:
    place = f"-: line {number}"
    try:
        text = line.removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{place}: not UTF-8: byte {error.start} of the line is 0x{line[error.start]:02x}") from None
    try:
        return model.settings.data.parse_line(text, number)
    except ValueError as error:
        raise SourceError(f"{place}: {error}") from None
