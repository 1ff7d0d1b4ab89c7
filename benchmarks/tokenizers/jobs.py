"""Everything that is measured of tokenizers, as jobs: each starts processes of its own and yields a line to store."""

import os
from collections.abc import Iterator
from importlib import metadata

from benchmarks.kit.clock import Times
from benchmarks.kit.results import host_environment
from benchmarks.kit.study import Job, Line, in_a_process
from benchmarks.tokenizers.cases import CASES, TokenizerCase

ROUNDS, LIVES = 9, 2


def tokenizer_jobs(rounds: int = ROUNDS, lives: int = LIVES) -> dict[str, Job]:
    """Name -> what yields its line, of kind "tokenizer" with the job's name as `case`."""
    return {case.name: (lambda case=case: _case(case, rounds, lives)) for case in CASES}


def tokenizer_environment() -> Line:
    """Fields of every stored line."""
    return host_environment() | {
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "numpy": metadata.version("numpy"),
        "bert_fast": metadata.version("bert_fast"),
    }


def _case(case: TokenizerCase, rounds: int, lives: int) -> Iterator[Line]:
    threads, options = 1 if case.clock == "cpu" else 2, ("--rounds", str(rounds), "--seed")
    found = [
        in_a_process("tokenizers.stream", case.name, *options, str(seed), threads=threads) for seed in range(lives)
    ]
    yield {"kind": "tokenizer", "case": case.name, **joined(case, found)}


def joined(case: TokenizerCase, lives: list[Line]) -> Line:
    """Figures of a case from all its lives.

    entrants: label -> mb_per_s (median over rounds) with 20 % and 80 % quantiles, us (of a text, where each is a
    call of its own), `ratio` (median over rounds of its time over the first entrant's, in the same round), `differ`
    (texts whose ids are not those of Hugging Face `tokenizers`), `version`.
    """
    sizes = [size for life in lives for size in life["bytes"]]
    num_texts = sum(life["texts"] for life in lives)
    times = {
        entrant: Times(tuple(s for life in lives for s in life["seconds"][entrant.label]))
        for entrant in case.entrants
        if all(entrant.label in life["seconds"] for life in lives)
    }
    first = case.entrants[0]
    entrants: dict[str, Line] = {}
    for entrant, time in times.items():
        rates = Times(tuple(size / seconds / 1e6 for size, seconds in zip(sizes, time.seconds, strict=True)))
        low, high = rates.quantiles()
        line: Line = {"mb_per_s": round(rates.median, 2), "p20": round(low, 2), "p80": round(high, 2)}
        if case.form == "one":
            line["us"] = round(time.median / (num_texts / len(sizes)) * 1e6, 4)
        if first in times and entrant != first:
            line["ratio"] = round(times[first].speedup_over(time), 3)
        line["differ"] = sum(life["differ"][entrant.label] for life in lives)
        line["version"] = lives[0]["versions"][entrant.contestant]
        entrants[entrant.label] = line
    return {
        "entrants": entrants,
        "left_out": lives[0]["left_out"],
        "rounds": len(sizes),
        "bytes": sum(sizes),
        "texts": num_texts,
        "clock": case.clock,
    }
