"""The command `bert-fast`: one table of subcommands, each a module of this folder that is imported when it is called.

A subcommand is a line in `COMMANDS` and a module with `add_arguments(parser)` and `run(arguments) -> exit status`; in
`TRAINING`, with `run(argv)` alone: flags are made of transformers' dataclasses there.
"""

import argparse
import atexit
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from bert_fast._version import __version__
from bert_fast.cli.common import check_flags, is_main_process, nearest, say
from bert_fast.errors import BackendError, CheckpointError, StoreError, TrainingError
from bert_fast.terminal import printable

# name (also the module's) -> what `bert-fast --help` says
COMMANDS = {
    "bench": "Times bert_fast.fuse beside transformers on this machine, and draws a picture.",
    "tokenize": "Turns text of any size into a token store, which training maps into memory.",
    "pretrain": "Trains a model to fill in words, from plain text.",
    "finetune": "Trains a model for a task, from examples: classify, ner, qa, choice.",
    "predict": "Prints what a trained model says about examples, or how good it is.",
    "doctor": "Says what is installed, what can run here, and what to do about the rest.",
}

TRAINING = ("pretrain", "finetune", "predict")

_OF_ONE_PROCESS = (BackendError, CheckpointError, TrainingError)

_OVERVIEW = """\
bert_fast {version}: trains and runs BERT-shaped encoders in less time. Four things it does:

  compare    what bert_fast.fuse gives on this machine, beside transformers
             bert-fast bench

  train      from files to a model that transformers opens; runs go on where they were interrupted
             bert-fast finetune classify --model_name_or_path DIR --train_file reviews.tsv --output_dir run

  use        what a trained model says about new examples, and how good it is on labelled ones
             bert-fast predict run new.tsv
             bert-fast predict run labelled.tsv --evaluate

  tokenize   text of any size to token ids that are mapped into memory
             bert-fast tokenize books/*.txt -o corpus --tokenizer DIR

DIR is a folder with a model and its tokenizer, as save_pretrained leaves it, or a name on the hub.
`bert-fast --help` lists all commands, `bert-fast doctor` says what is installed and what can run here.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; what is wrong with files and arguments is one line, and so is each warning.

    Returns: the exit status (1 after such an error, 2 for wrong flags, 130 and 141 as after SIGINT and SIGPIPE).
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv:
        print(_OVERVIEW.format(version=__version__), end="")
        return 0
    parser = argparse.ArgumentParser("bert-fast", None, "Trains and runs BERT-shaped encoders faster.", add_help=False)
    _add_help(parser)
    parser.add_argument("--version", action="version", version=f"bert_fast {__version__}", help="Prints the version.")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True, title="commands")
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary, add_help=False)
        _add_help(subparser)
        # Only the module that is asked for is imported: `--help` and `--version` stay instant.
        if argv[:1] == [name] and name not in TRAINING:
            module = importlib.import_module(f"bert_fast.cli.{name}")
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: say(argv[0], str(message))
        if not is_main_process():
            warnings.simplefilter("ignore")  # the main process says the same
        try:
            if argv[0] in TRAINING:
                return int(importlib.import_module(f"bert_fast.cli.{argv[0]}").run(argv[1:]))
            if argv[0] not in COMMANDS and not argv[0].startswith("-"):
                parser.error(f"no command {printable(argv[0])}{nearest(argv[0], COMMANDS)}; see bert-fast --help")
            chosen = subparsers.choices.get(argv[0], parser)
            check_flags(chosen, argv[1:] if chosen is not parser else argv)
            arguments, unknown = parser.parse_known_args(argv)
            if unknown:
                chosen.error(printable(f"unrecognized arguments: {' '.join(unknown)}"))
            return int(arguments.run(arguments))
        except KeyboardInterrupt:
            return 130
        except BrokenPipeError:  # the program that read the output, such as `head`, has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still flushes at the end
            return 141
        except (*_OF_ONE_PROCESS, StoreError, ImportError, OSError, TypeError, ValueError) as error:
            # Wrong files are wrong for all processes: one says so. What fails in another one only, says it itself.
            if is_main_process() or isinstance(error, _OF_ONE_PROCESS):
                say(argv[0], str(error))
            return 1


def _add_help(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-h", "--help", action="help", help="Prints this.")


def command() -> NoReturn:
    """`bert-fast` and `python -m bert_fast`: `main` on the command line, and the end of the process.

    One of several processes ends without taking Python down: PyTorch's threads of the process group outlive it, and
    were seen to abort there ("terminate called without an active exception"), with all work done.
    """
    status = main()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        atexit._run_exitfuncs()  # loggers of experiments send their last lines there
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    command()
