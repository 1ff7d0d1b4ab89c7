"""What `pretrain` and `finetune` share: flags made from the settings, and a run from them."""

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_fast.cli.common import is_main_process
from bert_fast.terminal import printable

if TYPE_CHECKING:
    from bert_fast.training.recipes.settings import Field

__all__ = ["add_arguments", "run"]

_INTERRUPTED = {"SIGINT": 130, "SIGTERM": 143}  # as shells have it: 128 + the number of the signal


def add_arguments(parser: argparse.ArgumentParser, task: str) -> None:
    """Adds a flag for every setting of a task, and those that say how to run it."""
    from bert_fast.training.config import TrainingConfig
    from bert_fast.training.recipes.settings import TASKS, ModelSettings, fields_of, settings_fields

    fields = settings_fields(task)
    shows_all = _ShowsAll(parser)
    parser.usage = "%(prog)s [--config FILE] --model MODEL --train FILE --output-dir DIR [option ...]"
    run_group = parser.add_argument_group("run")
    run_group.add_argument("--config", metavar="FILE", help="settings in YAML, under the names of the flags; flags win")
    run_group.add_argument(
        "--resume", choices=["auto", "never", "must"], default="auto",
        help="go on with the run in --output-dir: if there is one (auto, the default), never, or always (must)",
    )  # fmt: skip
    run_group.add_argument(
        "--dry-run", action="store_true", help="show the plan and a batch; train nothing, write nothing"
    )
    run_group.add_argument("--quiet", action="store_true", help="no progress, only how it ended")
    for name, part in (("model", ModelSettings), ("data", TASKS[task]), ("training", TrainingConfig)):
        group = parser.add_argument_group(name)
        for entry in fields_of(part):
            shows_all.add(_add_flag(group, task, fields[entry]), entry in _SHORT)


class _ShowsAll:
    """`--help-all`, beside a `--help` that shows what most runs set, so that it fits a screen."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        hidden: list[tuple[argparse.Action, str | None]] = []

        class Show(argparse.Action):
            def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
                for action, text in hidden:
                    action.help = text
                parser.print_help()
                parser.exit()

        text = "show every option and exit; here are the usual ones"
        parser.add_argument("--help-all", action=Show, nargs=0, help=text)
        self._hidden = hidden

    def add(self, action: argparse.Action, is_usual: bool) -> None:
        """An option that `--help` shows only where it is usual."""
        if not is_usual:
            self._hidden.append((action, action.help))
            action.help = argparse.SUPPRESS


# Settings that most runs set, by name: all that a task needs, and what decides how well and how long it learns.
_SHORT = {
    "model", "tokenizer", "train", "valid", "text", "text_pair", "label", "output_dir",
    "epochs", "steps", "batch_size", "max_length", "learning_rate", "precision", "seed", "eval_every",
}  # fmt: skip


def _add_flag(group: Any, task: str, field: "Field") -> argparse.Action:
    from bert_fast.training.recipes.settings import MISSING, default_of

    default = default_of(task, field)
    says = [field.help] if field.help else []
    if default is MISSING:
        says.append("needed")
    elif isinstance(default, bool):
        says.append(f"default: {'yes' if default else 'no'}")
    elif default is not None:
        says.append(f"default: {' '.join(map(str, default)) if isinstance(default, tuple) else default}")
    # What is not on the command line is not in the namespace: then the file or the default counts.
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": "; ".join(says).replace("%", "%%")}
    if field.kind is bool:
        return group.add_argument(field.flag, action=argparse.BooleanOptionalAction, **options)
    options["metavar"] = "{" + ",".join(field.choices) + "}" if field.choices else _METAVARS.get(field.kind, "TEXT")
    if field.is_list:
        options["nargs"] = field.count or "+"
    return group.add_argument(field.flag, type=_reader(field), **options)


_METAVARS: dict[type, str] = {int: "N", float: "X", Path: "DIR"}


def _reader(field: "Field") -> Callable[[str], Any]:
    """Text of the flag to one value; argparse puts several together."""

    def read(text: str) -> Any:
        try:
            return field.read_one(text) if field.is_list else field.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{field.name}: ")) from None

    return read


def run(arguments: argparse.Namespace, task: str) -> int:
    """Trains; returns 0, 1 where a setting or a file is wrong, 130 or 143 when a signal ended it after a checkpoint."""
    from bert_fast.training.recipes.runs import plan_text
    from bert_fast.training.recipes.runs import run as run_settings
    from bert_fast.training.recipes.settings import Settings, SettingsError, settings_fields

    if not is_main_process():
        warnings.simplefilter("ignore")  # the main process says the same
    try:
        flags = {name: getattr(arguments, name) for name in settings_fields(task) if hasattr(arguments, name)}
        settings = Settings.load(task, arguments.config, flags)
        if arguments.dry_run:
            text = plan_text(settings)
            if is_main_process():
                print(printable(text))
            return 0
        result = run_settings(settings, resume=arguments.resume, quiet=arguments.quiet or not is_main_process())
    except (SettingsError, OSError, ImportError) as error:
        if is_main_process():
            print(printable(f"bert-fast {arguments.command}: {error}"), file=sys.stderr)
        return 1
    if is_main_process():
        text = f"{settings.training.output_dir}: {result.outcome} after {result.step:,} steps; "
        if result.outcome.startswith("interrupted"):
            text += "at the last evaluation" if result.metrics else "no evaluation yet"
        else:
            of = f", that of step {result.best_step:,}" if result.best_step is not None else ""
            text += f"model in {result.model_dir}{of}"
        if result.metrics:
            text += ": " + ", ".join(f"{name} {value:.4g}" for name, value in result.metrics.items())
        print(printable(text))
    if not result.outcome.startswith("interrupted"):
        return 0
    return _INTERRUPTED.get(result.outcome.rpartition(" ")[2], 143)
