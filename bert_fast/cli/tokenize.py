"""`bert-fast tokenize`: files or stdin, of any size, to a memory-mapped token store."""

import argparse
import contextlib
import datetime
import textwrap
import time
from typing import TYPE_CHECKING

from bert_fast.cli.common import natural, say, seconds
from bert_fast.terminal import Part, StatusLine, printable

if TYPE_CHECKING:
    from bert_fast.data.tokenize_files import Report
    from bert_fast.tokenization import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `bert-fast tokenize`."""
    from bert_fast.data.text_sources import FORMATS

    parser.description = textwrap.fill(
        "Tokenizes texts of any size into a token store: a directory that training maps into memory. Memory use does "
        "not grow with the input. When it is interrupted, killed, or the disk is full, the same command goes on where "
        "it was; the store is then the same, byte for byte, as one made at a stroke.",
        width=80,
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "Formats:\n" + "\n".join(f"  {name:8} {meaning}" for name, meaning in FORMATS.items())
    parser.add_argument("files", nargs="+", metavar="FILE", help="Text, read in this order; - is standard input.")
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="Folder of the store.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--tokenizer", metavar="DIR", help="Folder, name on the hub, or tokenizer.json.")
    source.add_argument("--vocab", metavar="PATH", help="A vocab.txt, of an uncased model unless --cased.")
    parser.add_argument("--cased", action="store_true", help="With --vocab: keep case and accents.")
    parser.add_argument(
        "--format",
        choices=["auto", *FORMATS],
        default="auto",
        help="Format of the texts. [by the ending of each name, else text]",
    )
    parser.add_argument("--field", default="text", metavar="NAME", help="Key or column of the text. [%(default)s]")
    parser.add_argument(
        "--errors", choices=["strict", "replace"], default="strict",
        help="Bytes that are not UTF-8 end the run with their place, or count as U+FFFD. [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=natural, default=0, metavar="N", help="Threads that tokenize. [one per processor]"
    )
    parser.add_argument(
        "--checkpoint", type=seconds, default=5.0, metavar="SECONDS", help="Work that a crash may cost. [%(default)s]"
    )
    parser.add_argument("--quiet", action="store_true", help="Show the result only, no progress.")


def run(arguments: argparse.Namespace) -> int:
    """Tokenizes; returns 0, or 130 when interrupted."""
    from bert_fast.data import tokenize_files

    tokenizer = _tokenizer(arguments)
    done: list[Report] = []
    line, began = StatusLine(is_transient=True), time.monotonic()

    def report(now: "Report") -> None:
        done[:] = [now]
        if arguments.quiet:
            return
        text, share = _line(now), now.bytes_read / now.bytes_total if now.bytes_total else None
        parts, plain = [Part(text, 0)], text
        if share:
            left = datetime.timedelta(seconds=round((time.monotonic() - began) * (1 / share - 1)))
            parts, plain = [Part(f"{share:.0%}", 1), *parts, Part(f"{left} left", 2)], f"{share:.0%}, {text}"
        line.show(parts, share, f"bert-fast tokenize: {plain}")

    try:
        with contextlib.closing(line):
            if not arguments.quiet:
                line.open(is_patient=True)
            store = tokenize_files(
                arguments.files,
                arguments.output,
                tokenizer,
                format=arguments.format,
                field=arguments.field,
                errors=arguments.errors,
                num_threads=arguments.workers,
                checkpoint_seconds=arguments.checkpoint,
                report=report,
            )
    except KeyboardInterrupt:
        say("tokenize", "interrupted; the same command goes on from here")
        return 130
    how = f"{_line(done[0])} in {done[0].seconds:.1f} s" if done else "was complete already"
    print(printable(f"{store.path}: {len(store):,} documents, {len(store.tokens):,} tokens; {how}"))
    return 0


def _tokenizer(arguments: argparse.Namespace) -> "Tokenizer":
    from bert_fast.tokenization import BertTokenizer, load_tokenizer

    if arguments.vocab is not None:
        return BertTokenizer(arguments.vocab, do_lower_case=not arguments.cased)
    if arguments.cased:
        raise ValueError("--cased: goes with --vocab; what --tokenizer names knows it")
    return load_tokenizer(arguments.tokenizer)


def _line(report: "Report") -> str:
    speed = report.text_bytes / 1e6 / max(report.seconds, 1e-9)
    return f"{report.text_bytes / 1e6:,.0f} MB at {speed:.0f} MB/s"
