"""The command line; see the package."""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks import pretraining
from benchmarks.kit.markdown import show_tables
from benchmarks.kit.record import DATA, RESULTS, ROOT, Recorder, host_environment
from benchmarks.pretraining import beside, picture, probe, tables
from benchmarks.recipes.data import PREPARED, books_vocabulary
from bert_fast import BertConfig, BertForPreTraining, BertTokenizer
from bert_fast.data import TokenStore, tokenize_files
from bert_fast.data.pretraining import PretrainingSource

STORED = RESULTS / "pretraining.jsonl"
TRAIN, VALID = (DATA / "pretrain_en" / f"books_{part}.txt" for part in ("train", "valid"))


@contextmanager
def _stores(words: BertTokenizer) -> Iterator[tuple[TokenStore, TokenStore]]:
    """The text that is learned from, and the one that is judged by."""
    with tempfile.TemporaryDirectory() as folder:
        yield (
            tokenize_files([TRAIN], Path(folder) / "train", words),
            tokenize_files([VALID], Path(folder) / "valid", words),
        )


def _probe(options: argparse.Namespace) -> None:
    words = BertTokenizer.from_pretrained(options.run)
    model = BertForPreTraining.from_pretrained(options.run).eval()
    with _stores(words) as (train, valid):
        source = PretrainingSource(valid, words, max_length=options.length)
        found = probe.probe(model, source, train, probe.names_in(VALID))
    print(json.dumps(found, indent=1))


def _beside(options: argparse.Namespace) -> None:
    recorder = Recorder(STORED, host_environment())
    words = BertTokenizer(books_vocabulary(PREPARED))
    values = json.loads((ROOT / "examples" / "books_model.json").read_text(encoding="utf-8"))
    config = BertConfig.from_dict(values | {"initializer_range": options.initializer_range})
    with _stores(words) as (train, _):
        pairs = list(beside.beside(config, PretrainingSource(train, words, max_length=64), options.steps))
    curve = [[step, *(round(side["masked_lm"], 5) for side in pair)] for step, pair in enumerate(pairs, start=1)]
    line = {"initializer_range": options.initializer_range, **beside.summary(pairs)}
    print(line)
    if not options.dry_run:
        kept = [point for point in curve if point[0] <= 10 or point[0] % 10 == 0]
        recorder.write("beside", **line, curve=kept)


def _tables(options: argparse.Namespace) -> None:
    show_tables(tables.tables(STORED), tables.PAGE, options.write)


def _picture(options: argparse.Namespace) -> None:
    print(picture.draw(STORED, options.output))


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pretraining",
        description=pretraining.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, work: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        made = commands.add_parser(name)
        made.set_defaults(work=work)
        return made

    made = command("probe", _probe)
    made.add_argument("run", type=Path, help="folder of a finished run")
    made.add_argument("--length", type=int, default=64, help="tokens of an example; default: %(default)s")
    made = command("beside", _beside)
    made.add_argument("--steps", type=int, default=600, help="default: %(default)s")
    made.add_argument("--initializer-range", type=float, default=0.05, help="default: %(default)s")
    made.add_argument("--dry-run", action="store_true", help="do not store the result")
    command("tables", _tables).add_argument("--write", action="store_true", help="put them into docs/pretraining.md")
    command("picture", _picture).add_argument("--output", type=Path, default=picture.PATH)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options.work(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
