"""Everything that is measured of tokenizers, as jobs: each starts processes of its own and yields lines to store."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.kit.clock import Times
from benchmarks.kit.record import ROOT
from benchmarks.tokenizers import instructions
from benchmarks.tokenizers.cases import CASES, TokenizerCase
from benchmarks.tokenizers.contestants import CONTESTANTS, missing, tokenizer_json
from benchmarks.tokenizers.corpora import CORPORA
from benchmarks.tokenizers.environment import thread_environment

ROUNDS, LIVES = 9, 2
STARTS = 5
COUNTED = ("bert_fast", "nanotoken", "splintr")  # by callgrind, which is slow
Line = dict[str, Any]


def tokenizer_jobs(rounds: int = ROUNDS, lives: int = LIVES) -> dict[str, Callable[[], Iterator[Line]]]:
    """Name -> what yields its lines (one, as a rule), each of kind "tokenizer" with the job's name as `case`."""
    jobs: dict[str, Callable[[], Iterator[Line]]] = {
        case.name: (lambda case=case: _case(case, rounds, lives)) for case in CASES
    }
    return jobs | {
        "tokenizer/start": lambda: _start(min(rounds, STARTS)),
        "tokenizer/breakdown": lambda: _breakdown(rounds),
        "tokenizer/instructions": _instructions,
    }


def _case(case: TokenizerCase, rounds: int, lives: int) -> Iterator[Line]:
    threads = 1 if case.clock == "cpu" else 2
    found = [
        _child("stream", case.name, "--rounds", str(rounds), "--seed", str(seed), threads=threads)
        for seed in range(lives)
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
        entrant.label: Times(tuple(s for life in lives for s in life["seconds"][entrant.label]))
        for entrant in case.entrants
        if all(entrant.label in life["seconds"] for life in lives)
    }
    first = case.entrants[0].label
    entrants: dict[str, Line] = {}
    for entrant in case.entrants:
        if entrant.label not in times:
            continue
        time = times[entrant.label]
        rates = Times(tuple(size / seconds / 1e6 for size, seconds in zip(sizes, time.seconds, strict=True)))
        low, high = rates.quantiles()
        line: Line = {"mb_per_s": round(rates.median, 2), "p20": round(low, 2), "p80": round(high, 2)}
        if case.form == "one":
            line["us"] = round(statistics.median(time.seconds) / (num_texts / len(sizes)) * 1e6, 4)
        if first in times and entrant.label != first:
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


def _start(starts: int) -> Iterator[Line]:
    """Of every contestant the medians over fresh processes; one of them goes on to use it."""
    entrants: dict[str, Line] = {}
    left_out = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(tokenizer_json(CORPORA["en_docs"].vocabulary), encoding="utf-8")
        for name in CONTESTANTS:
            reason = missing(name)
            if reason is not None:
                left_out[name] = reason
                continue
            try:
                found = [
                    _child("startup", name, "--tokenizer-json", str(path), *use, threads=1)
                    for use in ([], *[["--only-load"]] * (starts - 1))
                ]
            except RuntimeError as error:
                if name == "bert_fast":
                    raise
                left_out[name] = str(error)[-200:]
                continue
            medians = {
                key: round(statistics.median(one[key] for one in found if key in one), 2)
                for key in found[0]
                if key != "version"
            }
            entrants[name] = medians | {"version": found[0]["version"]}
    yield {"kind": "tokenizer", "case": "tokenizer/start", "entrants": entrants, "left_out": left_out, "rounds": starts}


def _breakdown(rounds: int) -> Iterator[Line]:
    found = _child("breakdown", "--rounds", str(rounds), threads=1)
    yield {"kind": "tokenizer", "case": "tokenizer/breakdown", **found}


def _instructions() -> Iterator[Line]:
    reason = instructions.why_not()
    if reason is not None:
        yield {"kind": "skipped", "case": "tokenizer/instructions", "reason": reason}
        return
    entrants = {name: instructions.count(name) for name in COUNTED if missing(name) is None}
    yield {"kind": "tokenizer", "case": "tokenizer/instructions", "entrants": entrants}


def _child(module: str, *arguments: str, threads: int) -> Line:
    """What a module of this package prints, run in a process of its own. RuntimeError with what it said if it fails."""
    command = [sys.executable, "-m", f"benchmarks.tokenizers.{module}", *arguments]
    environment = os.environ | thread_environment(threads)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[2:])}: {done.stderr[-1500:]}")
    line: Line = json.loads(done.stdout.splitlines()[-1])
    return line
