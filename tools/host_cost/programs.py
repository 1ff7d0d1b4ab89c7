"""Counts the share of calls of layers that a program runs which was there, on batches of real texts' lengths."""

import json
import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

LENGTHS = Path(__file__).resolve().parents[3] / "shared" / "data" / "length_distributions"
# Name of the file and the longest text; longer ones are cut.
DISTRIBUTIONS = dict(
    single_reviews=128, single_sms=128, single_tweets=128, single_books=128, pair_question_sentence=128,
    pair_consecutive_book_sentences=128, ner_wnut17_words=128, squad_windows_128_stride64=128,
    squad_windows_384_stride128=384, packed_nsp_128=128, documents_wiki_en_512=512, packed_nsp_512=512,
    multiple_choice_xcopa_en=128,
)  # fmt: skip
BATCH = 32
NUM_BEFORE, NUM_COUNTED = 100, 100  # batches
NUM_LAYERS = 2
LEAST = 0.99  # of the calls


def _batches(name: str, count: int) -> list[tuple[int, ...]]:
    """Lengths of batches of texts in random order."""
    histogram = json.loads((LENGTHS / f"{name}.json").read_text(encoding="utf-8"))["histogram"]
    texts = [min(int(length), DISTRIBUTIONS[name]) for length, times in histogram.items() for _ in range(times)]
    rng = random.Random(0)
    found: list[tuple[int, ...]] = []
    while len(found) < count:
        rng.shuffle(texts)
        found += [tuple(texts[first : first + BATCH]) for first in range(0, len(texts) - BATCH + 1, BATCH)]
    return found[:count]


def shares(names: list[str]) -> dict[str, tuple[int, int, int]]:
    """Returns by distribution: calls, those that a program ran which was there, and programs made until the end.

    Starts the null driver: once a process. Calls are of a layer's forward and backward pass.
    """
    from tools.host_cost.count import start

    driver = start()
    from bert_fast.triton import _programs
    from bert_fast.triton.encoder_layer import _of_model
    from tools.host_cost.cases import CASES, make
    from tools.null_driver.steps import inputs_of

    case = next(case for case in CASES if case.name == "sequence classification")
    run, traced = _programs.Programs.run, _programs._traced
    found = made = 0

    def counted_traced(*arguments: Any) -> Any:
        nonlocal made
        made += 1
        return traced(*arguments)

    def counted_run(programs: Any, *arguments: Any) -> Any:
        nonlocal found
        if programs is not _of_model:
            return run(programs, *arguments)
        before = made
        result = run(programs, *arguments)
        found += result is not None and made == before
        return result

    results = {}
    with (
        mock.patch.object(_programs.Programs, "run", counted_run),
        mock.patch.object(_programs, "_traced", counted_traced),
    ):
        for name in names:
            _of_model.forget()
            step = make(case, "autocast", "fused", NUM_LAYERS)
            made = 0
            for index, lengths in enumerate(_batches(name, NUM_BEFORE + NUM_COUNTED)):
                if index == NUM_BEFORE:
                    found = 0
                step.inputs = inputs_of(case.of, lengths)
                step.run("forward")
                step.run("backward")
            results[name] = 2 * NUM_LAYERS * NUM_COUNTED, found, made
    if driver.refusals[0]:
        raise RuntimeError(f"the null driver refused {driver.refusals[0]} calls, the last one: {driver.refusals[1]}")
    return results


def print_shares(only: str = "") -> int:
    """Prints a line for each distribution whose name holds a text; returns 1 where a share is too small."""
    if not LENGTHS.is_dir():
        print(f"there are no length distributions at {LENGTHS}", file=sys.stderr)
        return 1
    print(f"{f'calls after {NUM_BEFORE} batches of {BATCH}':<40}{'calls':>8}{'share':>9}{'programs':>10}")
    found = shares([name for name in DISTRIBUTIONS if only in name])
    for name, (calls, by_program, made) in found.items():
        print(f"{name:<40}{calls:>8}{by_program / calls:>9.2%}{made:>10}")
    return int(any(by_program < LEAST * calls for calls, by_program, _ in found.values()))
