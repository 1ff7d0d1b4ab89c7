"""`bert-fast demo`: the main job end to end on real text and real weights, checked against its peers as it runs."""

import argparse
import sys
from pathlib import Path

from bert_fast.cli.common import find_device, positive, seed
from bert_fast.demo.requirements import DemoError
from bert_fast.demo.settings import QUESTIONS, Settings
from bert_fast.errors import BackendError, CheckpointError
from bert_fast.terminal import printable

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `bert-fast demo`."""
    defaults = Settings()
    parser.description = (
        "Tokenizes Python's language reference, embeds and trains on it with real BERT weights, searches it, writes "
        "a report and a checkpoint. Each step is compared with Hugging Face or with the reference implementation; the "
        "exit status is 1 if a comparison fails. Takes about two minutes on two cores; downloads nothing."
    )
    parser.add_argument("--output", type=Path, default=Path("demo_output"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--steps", type=positive, default=defaults.steps, help="of training; default: %(default)s")
    parser.add_argument(
        "--question", action="append", default=[], metavar="TEXT", help="searched besides the built-in ones; repeatable"
    )
    parser.add_argument("--seed", type=seed, default=defaults.seed, help="of everything drawn; default: %(default)s")
    parser.add_argument("--threads", type=positive, help="of PyTorch; default: PyTorch's own choice")
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1 ...; default: cuda if there is one, else cpu"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a fraction of the work, to see that it runs; times mean nothing"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo; returns 0, 1 where a check failed or something is missing, 130 when interrupted."""
    try:
        return _run(arguments)
    except (DemoError, CheckpointError, BackendError, OSError) as error:
        print(printable(f"bert-fast demo: {error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bert-fast demo: interrupted", file=sys.stderr)
        return 130


def _run(arguments: argparse.Namespace) -> int:
    import torch

    from bert_fast.demo.requirements import check_packages

    check_packages()
    from rich.console import Console

    from bert_fast.demo.output import OutputFolder
    from bert_fast.demo.run import run_demo
    from bert_fast.demo.terminal import Terminal

    settings = Settings(seed=arguments.seed, steps=arguments.steps, questions=(*arguments.question, *QUESTIONS))
    if arguments.quick:
        settings = settings.smaller()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    try:
        device = find_device(arguments.device)
    except ValueError as error:
        raise DemoError(str(error)) from error
    results = run_demo(settings, OutputFolder(arguments.output), device, Terminal(Console()))
    for check in results.failed:
        print(f"bert-fast demo: FAILED: {check.name}: {check.found} (expected {check.expected})", file=sys.stderr)
    return 1 if results.failed else 0
