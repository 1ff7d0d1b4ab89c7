"""The command line; see the package."""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks import pretraining
from benchmarks.kit.markdown import show_tables
from benchmarks.kit.record import RESULTS, Recorder, host_environment
from benchmarks.pretraining import (
    ablations,
    beside,
    cases,
    finetuned,
    memory,
    picture,
    probe,
    setting,
    starts,
    tables,
)
from bert_fast import BertForPreTraining, BertTokenizer
from bert_fast.data.pretraining import PretrainingSource
from bert_fast.training.reporting import read_metrics

STORED = RESULTS / "pretraining.jsonl"
_CURVE_POINTS = 200
_CONFIG = ("vocab_size", "num_hidden_layers", "hidden_size", "hidden_dropout_prob", "initializer_range")

Store = Callable[..., Any]


def _probe(options: argparse.Namespace, store: Store) -> None:
    """Of a finished run; with its curve."""
    torch.set_num_threads(1)
    words = BertTokenizer.from_pretrained(options.run / "model")
    model = BertForPreTraining.from_pretrained(options.run / "model").eval()
    with setting.stores(words) as (train, valid):
        source = PretrainingSource(valid, words, max_length=options.length)
        found = probe.probe(model, source, train, probe.names_in(setting.VALID))
    lines = read_metrics(options.run / "metrics.jsonl")
    steps = [line for line in lines if line["kind"] == "step"]
    stride = max(1, len(steps) // _CURVE_POINTS)
    store(
        "learned",
        name=options.name,
        steps=steps[-1]["step"],
        tokens=sum(line["tokens"] for line in steps),
        training_seconds=round(sum(line["seconds"] for line in steps)),
        config={key: getattr(model.config, key) for key in _CONFIG},
        found=found,
        curve=[[line["step"], round(line["losses"]["masked_lm"], 4)] for line in steps[::stride]],
        evaluations=[
            {"step": line["step"]} | {key: round(value, 4) for key, value in line["metrics"].items()}
            for line in lines
            if line["kind"] == "evaluation"
        ],
    )


def _beside(options: argparse.Namespace, store: Store) -> None:
    torch.set_num_threads(1)
    words = setting.tokenizer()
    with setting.stores(words) as (train, _):
        source = PretrainingSource(train, words, max_length=64)
        config = setting.config(initializer_range=options.initializer_range)
        pairs = list(beside.beside(config, source, options.steps, 2e-3, 2048, 0.1))
    curve = [[step, *(round(side["masked_lm"], 5) for side in pair)] for step, pair in enumerate(pairs, start=1)]
    store(
        "beside",
        initializer_range=options.initializer_range,
        **beside.summary(pairs),
        curve=[point for point in curve if point[0] <= 10 or point[0] % 10 == 0],
    )


def _ablations(options: argparse.Namespace, store: Store) -> None:
    _check("names", options.names, ablations.PARTS)
    for line in ablations.ablations(options.names or list(ablations.PARTS), options.steps):
        store("ablation", **line)


def _check(argument: str, given: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    if unknown := [name for name in given if name not in known]:
        raise SystemExit(f"{argument}: expected some of {', '.join(known)}; got {', '.join(unknown)}")


def _finetuned(options: argparse.Namespace, store: Store) -> None:
    _check("cases", options.cases, cases.CASES)
    with tempfile.TemporaryDirectory() as folder:
        found = starts.Starts(options.run / "model", Path(folder), options.adaptation_steps)
        for name in options.cases or cases.CASES:
            for line in finetuned.finetuned(cases.CASES[name], found, range(options.seeds)):
                store("finetuned", case=name, **line)


def _memory(options: argparse.Namespace, store: Store) -> None:
    found = list(memory.resident(options.batches, options.kernels))
    points = [[step, round(size, 1)] for step, size in found]
    store("memory", batches=options.batches, kernels=options.kernels, **memory.growth(found), resident_mb=points)


def _tables(options: argparse.Namespace, store: Store) -> None:
    show_tables(tables.tables(STORED), tables.PAGE, options.write)


def _picture(options: argparse.Namespace, store: Store) -> None:
    print(picture.draw(STORED, options.output))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pretraining",
        description=pretraining.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dry-run", action="store_true", help="do not store the results")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, work: Callable[[argparse.Namespace, Store], None]) -> argparse.ArgumentParser:
        made = commands.add_parser(name)
        made.set_defaults(work=work)
        return made

    made = command("probe", _probe)
    made.add_argument("run", type=Path, help="directory of a finished run")
    made.add_argument("--name", default="books", help="by which the line is known; default: %(default)s")
    made.add_argument("--length", type=int, default=64, help="tokens of an example; default: %(default)s")
    made = command("beside", _beside)
    made.add_argument("--steps", type=int, default=600, help="default: %(default)s")
    made.add_argument("--initializer-range", type=float, default=0.05, help="default: %(default)s")
    made = command("ablations", _ablations)
    made.add_argument("names", nargs="*", help=f"of {', '.join(ablations.PARTS)}; default: all")
    made.add_argument("--steps", type=int, default=ablations.STEPS, help="default: %(default)s")
    made = command("finetuned", _finetuned)
    made.add_argument("run", type=Path, help="directory of a finished run")
    made.add_argument("cases", nargs="*", help=f"of {', '.join(cases.CASES)}; default: all of them")
    made.add_argument("--seeds", type=int, default=finetuned.SEEDS, help="default: %(default)s")
    steps = {"type": int, "default": starts.ADAPTATION_STEPS}
    made.add_argument("--adaptation-steps", **steps, help="with masked words of a task's texts; default: %(default)s")
    made = command("memory", _memory)
    made.add_argument("--batches", type=int, default=5000, help="default: %(default)s")
    made.add_argument("--kernels", type=int, help="that oneDNN keeps; default: as a Trainer has it")
    made = command("tables", _tables)
    made.add_argument("--write", action="store_true", help="put them into docs/pretraining.md")
    command("picture", _picture).add_argument("--output", type=Path, default=picture.PATH)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    options = _parser().parse_args(arguments)
    recorder = Recorder(STORED, host_environment())

    def store(kind: str, **fields: Any) -> None:
        shown = {name: value for name, value in fields.items() if name not in ("curve", "resident_mb", "config")}
        print(kind, shown, flush=True)
        if not options.dry_run:
            recorder.write(kind, **fields)

    options.work(options, store)
    return 0


if __name__ == "__main__":
    sys.exit(main())
