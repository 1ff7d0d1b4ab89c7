"""`bert-fast bench`: what `fuse` gives on this machine, beside transformers, as a picture and a page."""

import argparse
import contextlib
import sys
from pathlib import Path

from bert_fast.cli.common import need, positive, seconds
from bert_fast.files import write_atomically
from bert_fast.terminal import Part, StatusLine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `bert-fast bench`."""
    parser.description = (
        "Times transformers' BERT before and after bert_fast.fuse on this machine, checks that both give the same "
        "hidden states (exit status 1 if not), prints the picture that README shows, and writes it with its figures "
        "to a page. Random weights, nothing is downloaded. Close other programs first."
    )
    parser.add_argument(
        "--output", type=Path, default=Path("bench.html"), metavar="FILE", help="The page. [%(default)s]"
    )
    parser.add_argument(
        "--seconds", type=seconds, default=75.0, metavar="S", help="Seconds to measure, about. [%(default).0f]"
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="Threads of PyTorch. [PyTorch's own choice]")
    parser.add_argument(
        "--device", default="auto", help="Device: cpu, cuda, cuda:1 and so on. [cuda if there is one, else cpu]"
    )
    parser.add_argument("--quick", action="store_true", help="Take toy models, whose times mean nothing.")


def run(arguments: argparse.Namespace) -> int:
    """Runs the comparison; returns 0, 1 where models disagree.

    Raises: ImportError, ValueError: a package, a folder or a device is missing.
    """
    need("transformers", "transformers")
    if not arguments.output.parent.is_dir() or arguments.output.is_dir():  # before two minutes are spent
        raise ValueError(f"--output: expected a file in a folder that is there, got {arguments.output}")
    import torch

    from bert_fast.bench.cases import CASES, TINY, cases_of
    from bert_fast.bench.measuring import MOST_DIFFERENCE, Result, compare
    from bert_fast.bench.picture import as_text
    from bert_fast.bench.report import device_name, picture_of, render_page

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    name = arguments.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device: {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    cases = cases_of((TINY,)) if arguments.quick else CASES
    results: list[Result] = []
    with contextlib.closing(StatusLine(is_transient=True)) as line:
        line.open()
        for result in compare(cases, arguments.seconds, device):
            results.append(result)
            words = f"{len(results)} of {len(cases)}: {result.case.size.name}, {result.case.label}: {result.ratio:.1f}x"
            line.show([Part(words, 0)], len(results) / len(cases), f"bert-fast bench: {words}")
    wrong = [result for result in results if not result.difference <= MOST_DIFFERENCE[device.type]]
    precision = "fp32" if device.type == "cpu" else "bf16"
    picture = picture_of(results, f"{device_name(device)}, {precision}", arguments.quick)
    page = render_page(results, picture, device, wrong)
    write_atomically(arguments.output, lambda temporary: temporary.write_text(page, encoding="utf-8"))
    print(as_text(picture, is_ascii=not _writes_blocks()))
    print(f"The page: {arguments.output}")
    for result in wrong:
        print(f"bert-fast bench: FAILED: {result.case.label}: hidden states differ by {result.difference:.2g}")
    return 1 if wrong else 0


def _writes_blocks() -> bool:
    try:
        "\u2588\u2592".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
