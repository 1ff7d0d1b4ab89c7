"""Measures encoders as they are served on a CPU: bert_fast beside transformers, ONNX Runtime and OpenVINO.

    python -m benchmarks.serving --compile             half an hour; appends to results/serving.jsonl
    python -m benchmarks.serving --only MiniLM/one --threads 1 --dry-run
    python -m benchmarks.serving --only start          load time and memory alone, two minutes
    python -m benchmarks.serving --tables              the tables of docs/results.md, from the stored results

fp32, models of MiniLM's and BERT-base's form with random weights, real texts, all of them tokenized beforehand. Every
contestant is given the same padded batch and returns hidden states, which must agree; ours is given the same texts
without padding, too. Contestants take turns, wall time, medians; ratios are those within a round. Packages that are not
installed (`pip install bert_fast[serving]`) are named and left out.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.kit.record import Recorder, cpu_environment
from benchmarks.serving import report
from benchmarks.serving.cases import MODELS, cases
from benchmarks.serving.contestants import contestants, model_of
from benchmarks.serving.start import measure_start
from benchmarks.serving.timing import measure

START_ROUNDS = 5
ROUNDS, ROUNDS_OF_BATCHES = 15, 5  # batches take long, and so vary little


def speeds(only: str, threads: Sequence[int], rounds: int | None, compiles: bool) -> Iterator[dict[str, Any]]:
    """Lines of the kind "serving"."""
    for name, (size, num_batches) in MODELS.items():
        wanted = [case for case in cases(num_batches) if only in f"{name}/{case.name}"]
        if not wanted:
            continue
        model = model_of(size)
        for count in threads:
            torch.set_num_threads(count)
            prepared = contestants(model, count, compiles)
            for case in wanted:
                runs = {contestant: prepare(case) for contestant, prepare in prepared.items()}
                usual = ROUNDS if case.name.startswith("one") else ROUNDS_OF_BATCHES
                found = measure(runs, case, size, usual if rounds is None else rounds)
                yield {"case": f"serving/{name}/{case.name}", "threads": count, **found, "clock": "wall"}


def starts(only: str, threads: Sequence[int], rounds: int | None) -> Iterator[dict[str, Any]]:
    """Lines of the kind "serving_start", with the most threads alone."""
    for name, (size, _) in MODELS.items():
        if only in f"{name}/start":
            found = measure_start(size, max(threads), START_ROUNDS if rounds is None else rounds)
            yield {"case": f"serving/{name}/start", "threads": max(threads), **found, "clock": "wall"}


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name (MiniLM/one_31) holds this text")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    usual = f"{ROUNDS}, of batches {ROUNDS_OF_BATCHES}, of starts {START_ROUNDS}"
    parser.add_argument("--rounds", type=int, help=f"counted rounds; default: {usual}")
    parser.add_argument("--compile", action="store_true", help="torch.compile, too: some minutes more")
    parser.add_argument("--dry-run", action="store_true", help="do not store the results")
    parser.add_argument("--tables", action="store_true", help="print what is stored")
    options = parser.parse_args(arguments)
    if options.tables:
        print(f"{report.render_speed()}\n\n{report.render_start()}")
        return 0
    recorder = Recorder(report.PATH, cpu_environment())
    for line in starts(options.only, options.threads, options.rounds):
        for name, entry in line["entrants"].items():
            print(f"{line['case']:<28} {name:<24} {entry}", flush=True)
        if not options.dry_run:
            recorder.write("serving_start", **line)
    for line in speeds(options.only, options.threads, options.rounds, options.compile):
        ratios = "  ".join(f"{name} {entry['bert_fast_ratio']:.2f}" for name, entry in line["entrants"].items())
        share = f"{line['share_of_peak']:.0%} of {line['peak_gflop_s']:.0f} GFLOP/s"
        print(f"{line['case']:<36} {line['threads']} threads  {ratios}  {share}", flush=True)
        if not options.dry_run:
            recorder.write("serving", **line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
