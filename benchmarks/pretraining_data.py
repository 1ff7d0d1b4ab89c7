"""Measures how fast one core makes pre-training batches: from a store of token ids to tensors that a model takes.

    python -m benchmarks.pretraining_data             about half a minute; appends to results/pretraining_data.jsonl
    python -m benchmarks.pretraining_data --dry-run   the same, nothing is stored

A round is an epoch of real books, planning included, in one thread; figures are tokens of finished batches per second
of CPU time, special tokens counted. Beside masked words alone stands the collator of transformers, which is given texts
cut and joined beforehand, as lists of ids of the same lengths, and does the masking and padding alone.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kit.clock import Times
from benchmarks.kit.results import DATA, RESULTS, host_environment
from benchmarks.kit.study import Line, Study
from bert_fast import BertTokenizer
from bert_fast.data import TokenStore, tokenize_files
from bert_fast.data.batches import Batches
from bert_fast.data.pretraining import PretrainingSource

MAX_TOKENS = 16384
PEER_EXAMPLES = 512  # of an epoch: it is slow
CASES: dict[str, dict[str, Any]] = {
    f"pretraining_data/{kind}/{max_length}{'/whole_words' if whole_words else ''}": {
        "next_sentence": kind == "pairs", "max_length": max_length, "whole_words": whole_words,
    }
    for kind in ("pairs", "words") for max_length in (128, 512) for whole_words in (False, True)
}  # fmt: skip


def measure(store: TokenStore, tokenizer: BertTokenizer, options: dict[str, Any], rounds: int) -> Line:
    """Rates of a case, in million tokens a second, and what they were measured on."""
    source = PretrainingSource(store, tokenizer, **options)
    batches = Batches(source, max_tokens=MAX_TOKENS)
    contestants: dict[str, Callable[[int], int]] = {
        "bert_fast": lambda epoch: sum(len(batch["input_ids"]) for batch in batches.epoch(epoch))
    }
    if not options["next_sentence"] and not options["whole_words"]:
        contestants["transformers"] = _peer(source, tokenizer)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}  # of a token
    for epoch in range(rounds + 1):
        for name, work in contestants.items():
            begin = time.thread_time()
            tokens = work(epoch)
            if epoch:  # the first run is not counted
                seconds[name].append((time.thread_time() - begin) / tokens)
    times = {name: Times(tuple(values)) for name, values in seconds.items()}
    entrants = {}
    for name, taken in times.items():
        low, high = taken.quantiles()
        line = {"mtokens_per_s": 1e-6 / taken.median, "p20": 1e-6 / high, "p80": 1e-6 / low}
        if name != "bert_fast":
            line["ratio"] = times["bert_fast"].speedup_over(taken)
        entrants[name] = {key: round(value, 3) for key, value in line.items()}
    plan = batches.plan(0)
    return {"entrants": entrants, "examples": len(plan.order), "batches": len(plan), "fill": round(plan.fill, 4)}


def _peer(source: PretrainingSource, tokenizer: BertTokenizer) -> Callable[[int], int]:
    """The collator of transformers on finished texts."""
    from transformers import BertTokenizerFast, DataCollatorForLanguageModeling

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


def _run(case: str, rounds: int) -> Iterator[Line]:
    """Raises OSError where the texts are not there."""
    torch.set_num_threads(1)
    tokenizer = BertTokenizer(DATA / "vocab" / "bert-base-uncased" / "vocab.txt")
    with tempfile.TemporaryDirectory() as folder:
        store = tokenize_files([DATA / "pretrain_en" / "books_train.txt"], Path(folder) / "store", tokenizer)
        found = measure(store, tokenizer, CASES[case], rounds)
        tokens = len(store.tokens)
    yield {"kind": "pretraining_data", "case": case, **found, "rounds": rounds, "tokens": tokens, "clock": "cpu"}


STUDY = Study(
    "pretraining_data",
    __doc__,
    RESULTS / "pretraining_data.jsonl",
    jobs=lambda options: {case: partial(_run, case, options.rounds) for case in CASES},
    rounds=9,
    what_rounds="counted epochs",
    environment=lambda: host_environment() | {"numpy": np.__version__, "threads": 1},
)

if __name__ == "__main__":
    sys.exit(STUDY.main())
