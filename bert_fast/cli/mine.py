"""`bert-fast mine`: hard negatives for rows of queries and positives."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bert_fast.cli.common import find_device, loaded, natural, number, positive
from bert_fast.terminal import printable

if TYPE_CHECKING:
    from bert_fast.training.recipes.mining import Mined

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `bert-fast mine`."""
    from bert_fast.data.text_sources import FORMATS

    parser.description = (
        "Adds hard negatives to rows of queries and positives: the texts of a corpus, and of other rows, that the "
        "model finds nearest to a query and that do not belong to it. Rows with the same query, or the same positive, "
        "belong together. What it writes is read by finetune embed and finetune rerank, with --negatives."
    )
    parser.add_argument("model", metavar="MODEL", help="checkpoint directory with its tokenizer")
    parser.add_argument("rows", metavar="ROWS", help="TSV, CSV, JSON lines or Parquet")
    parser.add_argument("-o", "--output", required=True, metavar="PATH", help="JSON lines; a name that ends in .jsonl")
    parser.add_argument("--query", default="query", metavar="NAME", help="column; default: %(default)s")
    parser.add_argument(
        "--positive", default="positive", metavar="NAME", help="column of what belongs to queries; default: %(default)s"
    )
    parser.add_argument(
        "--corpus", nargs="+", default=[], metavar="FILE", help="further texts, as embed takes them; held in memory"
    )
    parser.add_argument(
        "--index",
        metavar="PATH",
        help="what embed wrote of the files of --corpus, in their order: they are not embedded again",
    )
    parser.add_argument(
        "--format", choices=["auto", *FORMATS], default="auto", help="of --corpus; default: by the ending of each name"
    )
    parser.add_argument("--field", default="text", metavar="NAME", help="of --corpus; default: %(default)s")
    parser.add_argument(
        "--count",
        type=positive,
        default=3,
        metavar="N",
        help="negatives of a row; rows with fewer are left out; default: %(default)s",
    )
    parser.add_argument(
        "--first", type=natural, default=0, metavar="N", help="skip the N nearest that may be negatives; default: 0"
    )
    parser.add_argument(
        "--depth",
        type=positive,
        metavar="N",
        help="look at the N nearest only; default: what is needed, beside a limit ten times that",
    )
    parser.add_argument(
        "--margin", type=number, metavar="X", help="a negative's cosine is by X below the positive's; default: none"
    )
    parser.add_argument(
        "--relative-margin", type=number, metavar="X", help="it is below that by the share X of it; default: none"
    )
    parser.add_argument("--max-score", type=number, metavar="X", help="it is at most X; default: none")
    parser.add_argument(
        "--teacher", metavar="MODEL", help="a cross-encoder, whose scores go into the column teacher, for margin_mse"
    )
    parser.add_argument("--batch-tokens", type=positive, default=16384, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1 ...; default: cuda if there is one, else cpu"
    )
    parser.add_argument(
        "--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the models; default: %(default)s"
    )


def run(arguments: argparse.Namespace) -> int:
    """Mines; returns 0, or 1 where something cannot be read or written, or nothing is found."""
    try:
        mined = _mined(arguments)
        _write(mined, Path(arguments.output))
    except (OSError, ValueError, ImportError) as error:
        print(printable(f"bert-fast mine: {error}"), file=sys.stderr)
        return 1
    line = f"{arguments.output}: {len(mined.rows):,} rows with {arguments.count} negatives of {mined.corpus:,} texts"
    if mined.short:
        line += f"; {len(mined.short):,} left out, which have fewer: {mined.short[0]}" + ", ..." * (
            len(mined.short) > 1
        )
    print(printable(line))
    return 0


def _mined(arguments: argparse.Namespace) -> "Mined":
    import torch

    from bert_fast.training.recipes.embedding import Embedder
    from bert_fast.training.recipes.mining import Limits, mine, read_corpus
    from bert_fast.training.recipes.reranking import CrossEncoder
    from bert_fast.training.recipes.search import Index

    if Path(arguments.output).suffix not in (".jsonl", ".ndjson"):
        raise ValueError(f"--output: expected a name that ends in .jsonl, got {arguments.output}")
    limits = Limits(arguments.first, arguments.depth, arguments.margin, arguments.relative_margin, arguments.max_score)
    limits.looked_at(arguments.count)
    index = None
    if arguments.index is not None:
        if not arguments.corpus:
            raise ValueError("--index: expected --corpus beside it, the texts that were embedded, got none")
        index = Index(arguments.index)
    how = {
        "device": find_device(arguments.device),
        "dtype": {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[arguments.precision],
        "batch_tokens": arguments.batch_tokens,
    }
    embedder = loaded(lambda: Embedder.from_pretrained(arguments.model, **how))
    teacher = None
    if arguments.teacher is not None:
        teacher = loaded(lambda: CrossEncoder.from_pretrained(arguments.teacher, **how))
    if index is not None:
        index.check_model(embedder)  # before files are read
        if index.info is None:
            note = f"{arguments.index}.json is not there: whether the vectors are of this model is not known"
            print(printable(f"bert-fast mine: {note}; queries are embedded as its files say"), file=sys.stderr)
    corpus = []
    if arguments.corpus:
        errors = "strict" if index is None else "replace"  # embed has judged them
        corpus = read_corpus(arguments.corpus, arguments.format, arguments.field, errors)
    return mine(
        embedder, arguments.rows, corpus, index=index, count=arguments.count, limits=limits, query=arguments.query,
        positive=arguments.positive, teacher=teacher,
    )  # fmt: skip


def _write(mined: "Mined", path: Path) -> None:
    """A JSON object per row; the file appears whole."""
    from bert_fast.files import write_atomically

    def write(temporary: Path) -> None:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            for row in mined.rows:
                file.write(_json(row) + "\n")

    write_atomically(path, write)


def _json(row: dict) -> str:
    try:
        return json.dumps(row, ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"ROWS: expected columns of numbers and texts, as JSON has them: {error}") from None
