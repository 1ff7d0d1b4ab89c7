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
from bert_fast.cli.common import is_main_process, say
from bert_fast.errors import BackendError, CheckpointError, StoreError, TrainingError

# name (also the module's) -> what `bert-fast --help` says
COMMANDS = {
    "bench": "what bert_fast.fuse gives on this machine, beside transformers: a picture and a page",
    "tokenize": "text files, JSON lines, Parquet columns or stdin, of any size, to a memory-mapped token store",
    "pretrain": "a model that learns to fill in words from plain text",
    "finetune": "a pre-trained model that learns a task from examples: classify, ner, qa, choice",
    "predict": "what a trained model says about examples, of a file or as they come",
    "doctor": "what is installed, which back-ends can run here, why the others cannot, and what to do about it",
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

DIR is a folder with a model and its tokenizer, such as transformers' save_pretrained leaves.
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
    parser = argparse.ArgumentParser(prog="bert-fast", description="BERT training kernels and tokenizer: command line")
    parser.add_argument("--version", action="version", version=f"bert_fast {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
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
            arguments = parser.parse_args(argv)
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
