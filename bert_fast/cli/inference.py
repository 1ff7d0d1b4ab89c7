"""What `evaluate` and `predict` share: which model, and settings that are others than in training."""

import argparse
import contextlib
import json
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bert_fast.cli.common import is_main_process
from bert_fast.terminal import printable

if TYPE_CHECKING:
    from bert_fast.training.recipes.inference import TrainedModel

__all__ = ["add_arguments", "load", "problems"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model, and what changes its settings."""
    parser.add_argument("model", metavar="RUN", help="a run's directory, its model or a checkpoint of it; or any model")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="changes", type=_change,
        help="a setting that is not as in training, such as text=sentence; of a model without a run: task=classify",
    )  # fmt: skip
    parser.add_argument(
        "--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the model; default: %(default)s"
    )


def load(arguments: argparse.Namespace) -> "TrainedModel":
    """The model that the arguments name."""
    from bert_fast.training.recipes.inference import TrainedModel

    if not is_main_process():
        warnings.simplefilter("ignore")  # the main process says the same
    return TrainedModel.load(arguments.model, dict(arguments.changes), arguments.precision)


@contextlib.contextmanager
def problems(command: str) -> Iterator[list[str]]:
    """Prints, in the main process, what is wrong with files and settings; the list then holds it."""
    from bert_fast.training.recipes.settings import SettingsError

    found: list[str] = []
    try:
        yield found
    except BrokenPipeError:
        raise
    except (SettingsError, OSError, ImportError) as error:
        found.append(str(error))
        if is_main_process():
            print(printable(f"bert-fast {command}: {error}"), file=sys.stderr)


def _change(text: str) -> tuple[str, Any]:
    """A name and its value: true, false, null and lists as in JSON, all else as text."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    if value in ("true", "false", "null") or value.startswith("["):
        try:
            return name.replace("-", "_"), json.loads(value)
        except (ValueError, RecursionError) as error:
            raise argparse.ArgumentTypeError(f"{value!r} is no list as in JSON: {error}") from None
    return name.replace("-", "_"), value
