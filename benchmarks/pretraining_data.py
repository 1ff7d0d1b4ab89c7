"""Measures how fast one core makes pre-training batches: from a store of token ids to tensors that a model takes.

    python -m benchmarks.pretraining_data             about half a minute; appends to results/pretraining_data.jsonl
    python -m benchmarks.pretraining_data --dry-run   the same, nothing is stored

A round is an epoch of real books, planning included, in one thread; figures are tokens of finished batches per second
of CPU time, special tokens counted. Beside masked words alone stands the collator of transformers, which is given texts
cut and joined beforehand, as lists of ids of the same lengths, and does the masking and padding alone.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kit.clock import Times
from benchmarks.kit.record import DATA, RESULTS, Recorder, host_environment
from bert_fast import BertTokenizer
from bert_fast.data import TokenStore, tokenize_files
from bert_fast.data.batches import Batches
from bert_fast.data.pretraining import PretrainingSource

ROUNDS = 9
MAX_TOKENS = 16384
GOAL = 2e6  # tokens per second
PEER_EXAMPLES = 512  # of an epoch: it is slow
CASES: dict[str, dict[str, Any]] = {
    f"pretraining_data/{kind}/{max_length}{'/whole_words' if whole_words else ''}": {
        "next_sentence": kind == "pairs", "max_length": max_length, "whole_words": whole_words,
    }
    for kind in ("pairs", "words") for max_length in (128, 512) for whole_words in (False, True)
}  # fmt: skip


def measure(store: TokenStore, tokenizer: BertTokenizer, options: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Rates of a case, in million tokens a second, and what they were measured on."""
    source = PretrainingSource(store, tokenizer, **options)
    batches = Batches(source, max_tokens=MAX_TOKENS)
    contestants: dict[str, Callable[[int], int]] = {"bert_fast": lambda epoch: _epoch(batches, epoch)}
    is_plain = not options["next_sentence"] and not options["whole_words"]
    collate = _peer(source, tokenizer) if is_plain else None
    if collate is not None:
        contestants["transformers"] = collate
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for epoch in range(rounds + 1):
        for name, work in contestants.items():
            begin = time.thread_time()
            tokens = work(epoch)
            if epoch:  # the first run is not counted
                seconds[name].append((time.thread_time() - begin) / tokens)
    entrants = {}
    for name, values in seconds.items():
        times = Times(tuple(values))
        low, high = times.quantiles()
        line = {"mtokens_per_s": 1e-6 / times.median, "p20": 1e-6 / high, "p80": 1e-6 / low}
        if name != "bert_fast":
            line["ratio"] = Times(tuple(seconds["bert_fast"])).speedup_over(times)
        entrants[name] = {key: round(value, 3) for key, value in line.items()}
    plan = batches.plan(0)
    return {"entrants": entrants, "examples": len(plan.order), "batches": len(plan), "fill": round(plan.fill, 4)}


def _epoch(batches: Batches, epoch: int) -> int:
    """Makes all batches of an epoch; how many tokens they have."""
    tokens = 0
    for batch in batches.epoch(epoch):
        tokens += len(batch["input_ids"])
    return tokens


def _peer(source: PretrainingSource, tokenizer: BertTokenizer) -> Callable[[int], int] | None:
    """The collator of transformers on finished texts; None where it is not installed."""
    try:
        from transformers import BertTokenizerFast, DataCollatorForLanguageModeling
    except ImportError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        collator = DataCollatorForLanguageModeling(BertTokenizerFast.from_pretrained(folder))
    lengths = source.lengths(0)[:PEER_EXAMPLES]
    batch = source.batch(0, np.arange(len(lengths)))
    ids = [piece.tolist() for piece in batch["input_ids"].split(lengths.tolist())]
    features = [{"input_ids": one, "attention_mask": [1] * len(one)} for one in ids]
    size = max(1, MAX_TOKENS // source.max_length)

    def work(epoch: int) -> int:
        for start in range(0, len(features), size):
            collator([dict(feature) for feature in features[start : start + size]])
        return int(lengths.sum())

    return work


def results(rounds: int) -> Iterator[dict[str, Any]]:
    """The lines to store, case by case. Raises OSError where the texts are not there."""
    torch.set_num_threads(1)
    tokenizer = BertTokenizer(DATA / "vocab" / "bert-base-uncased" / "vocab.txt")
    with tempfile.TemporaryDirectory() as folder:
        store = tokenize_files([DATA / "pretrain_en" / "books_train.txt"], Path(folder) / "store", tokenizer)
        for case, options in CASES.items():
            found = measure(store, tokenizer, options, rounds)
            yield {"case": case, **found, "rounds": rounds, "tokens": len(store.tokens), "clock": "cpu"}


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 if a figure is below the goal."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pretraining_data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="counted epochs; default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="do not store the results")
    options = parser.parse_args(arguments)
    environment = host_environment() | {"numpy": np.__version__, "threads": 1}
    recorder = Recorder(RESULTS / "pretraining_data.jsonl", environment)
    is_met = True
    for line in results(options.rounds):
        rates = [f"{name} {entry['mtokens_per_s']:.1f} M tokens/s" for name, entry in line["entrants"].items()]
        rates += [f"{entry['ratio']:.1f} times as fast" for entry in line["entrants"].values() if "ratio" in entry]
        print(f"{line['case']:<42} {'  '.join(rates)}  fill {line['fill']:.3f}", flush=True)
        is_met &= line["entrants"]["bert_fast"]["mtokens_per_s"] * 1e6 >= GOAL
        if not options.dry_run:
            recorder.write("pretraining_data", **line)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
