"""One life of a case, in a process of its own: every text timed once by every entrant, in turn.

    python -m benchmarks.tokenizers.stream CASE --rounds 9 --seed 0

Each round has a slice of the corpus that nobody has met, so that no cache of texts is what is measured; the first
rounds are not counted: a cache of words knows the common ones by then. Before its turn an entrant has the slice before
once more, uncounted, so that its tables and branches are where an unbroken stream would have left them,
not where the others did. Every entrant gets strings of its own (a string may keep the UTF-8 that was once asked of it),
freshly decoded, as a reader of files would have them. The order is drawn anew in every round. What the timed calls
returned is compared with Hugging Face `tokenizers`: if bert_fast's differ, there is no result.
"""

import argparse
import gc
import itertools
import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.tokenizers.cases import CASES, Entrant, TokenizerCase
from benchmarks.tokenizers.contestants import HAS_NO_SPECIAL_TOKENS, Forms, load, missing, version
from benchmarks.tokenizers.corpora import CORPORA, slices

WARMUP = 3
OTHER_TEXTS = 500  # documents of a corpus that comes before, 1 MB
Life = dict[str, Any]
Clock = Callable[[], int]  # nanoseconds


def life(case: TokenizerCase, texts: list[str], rounds: int, seed: int, other_texts: Sequence[str] = ()) -> Life:
    """Times every entrant on `rounds` slices of the texts, after `WARMUP` uncounted ones and `other_texts`.

    Returns:
        bytes and seconds of every round (seconds and differing texts by label), texts of all counted rounds, versions,
        and why somebody did not take part.

    Raises:
        RuntimeError: bert_fast's results are wrong.
    """
    forms: dict[str, Forms] = {}
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(entrant.contestant for entrant in case.entrants):
        reason = missing(name)
        if reason is None:
            try:
                forms[name] = load(name, CORPORA[case.corpus].vocabulary)
            except Exception as error:  # whatever a foreign package raises
                reason = f"{type(error).__name__}: {error}"
        for entrant in case.entrants:
            if entrant.contestant == name and (reason is not None or entrant.form not in forms[name]):
                left_out[entrant.label] = reason or "does not offer it"
    entrants = [e for e in case.entrants if e.label not in left_out]
    judge = load("tokenizers", CORPORA[case.corpus].vocabulary)
    dealt = slices(texts, WARMUP + rounds, seed)
    gc.collect()
    gc.freeze()
    seconds: dict[str, list[float]] = {entrant.label: [] for entrant in entrants}
    differ = dict.fromkeys(seconds, 0)
    sizes, num_texts = [], 0
    before: list[str] = []
    order = random.Random(seed)
    for entrant in entrants:
        _timed(case, forms[entrant.contestant][entrant.form], _fresh(other_texts))
    for index, slice_ in enumerate(dealt):
        chosen = slice_[: case.texts_per_round]
        chosen = chosen[: len(chosen) // case.batch_size * case.batch_size or None]  # whole batches, if there are any
        outputs: dict[str, Any] = {}
        # Drawn, not rotated: nobody comes always after the same one, whose memory it finds in the caches.
        for entrant in order.sample(entrants, len(entrants)):
            run = forms[entrant.contestant][entrant.form]
            run_in, mine = _fresh(before), _fresh(chosen)  # first both: the stream is not broken in between
            _timed(case, run, run_in)
            taken, outputs[entrant.label] = _timed(case, run, mine)
            if index >= WARMUP:
                seconds[entrant.label].append(taken)
        truth = _truth(case, judge, chosen)
        for entrant in entrants:
            count = _count_different(case, entrant, outputs[entrant.label], truth)
            if entrant.contestant == "bert_fast" and count:
                raise RuntimeError(
                    f"{case.name}, {entrant.label}: {count} texts differ from tokenizers: nothing to time"
                )
            differ[entrant.label] += count
        before = chosen
        if index >= WARMUP:
            sizes.append(sum(len(text.encode()) for text in chosen))
            num_texts += len(chosen)
    return {
        "bytes": sizes,
        "texts": num_texts,
        "seconds": seconds,
        "differ": differ,
        "versions": {name: version(name) for name in forms},
        "left_out": left_out,
    }


def _timed(case: TokenizerCase, run: Callable[[Any], Any], mine: Sequence[str]) -> tuple[float, list[Any]]:
    """Seconds of one pass, and what it returned: for each batch, or text."""
    clock: Clock = time.process_time_ns if case.clock == "cpu" else time.perf_counter_ns
    if case.form == "one":
        if case.is_primed:
            deque(map(run, mine), 0)
        start = clock()
        deque(map(run, mine), 0)
        taken = clock() - start
        return taken / 1e9, [run(text) for text in mine]
    batches = [mine[i : i + case.batch_size] for i in range(0, len(mine), case.batch_size)]
    if case.is_primed:
        for batch in batches:
            run(batch)
    outputs: list[Any] = []
    taken = 0
    for batch in batches:
        start = clock()
        output = run(batch)
        taken += clock() - start
        if case.form != "packed":
            outputs.append(output)
    if case.form == "packed":  # a batch is let go of before the next one, whose memory it is then
        outputs = [run(batch) for batch in batches]
    return taken / 1e9, outputs


def _fresh(texts: Sequence[str]) -> list[str]:
    return [data.decode() for data in [text.encode() for text in texts]]


def _truth(case: TokenizerCase, judge: Forms, texts: list[str]) -> Any:
    """What is right: rows of ids, of a matrix, or of ids with origins."""
    if case.form == "padded":
        return judge["padded"](texts)
    if case.form == "origins":
        return judge["origins"](texts)
    return judge["lists"](texts)


def _count_different(case: TokenizerCase, entrant: Entrant, outputs: list[Any], truth: Any) -> int:
    """Texts whose result is not the right one."""
    if case.form == "padded":
        wrong = np.zeros(len(truth["input_ids"]), bool)
        for key, right in truth.items():
            wrong |= (np.concatenate([np.asarray(output[key]) for output in outputs]) != right).any(axis=1)
        return int(wrong.sum())
    if case.form in ("one", "lists"):
        rows = outputs if case.form == "one" else [row for output in outputs for row in output]
    else:
        rows = [row for output in outputs for row in _rows(*output[:2])]
    if case.form == "origins":
        ids, boundaries, offsets, word_ids = truth
        if not _same_origins(entrant, outputs, offsets, word_ids):
            return len(rows)
        truth = _rows(ids, boundaries)
    if entrant.contestant in HAS_NO_SPECIAL_TOKENS:
        truth = [right[1:-1] for right in truth]
    return sum(list(row) != right for row, right in zip(rows, truth, strict=True))


def _rows(ids: Any, boundaries: Any) -> list[list[int]]:
    values, bounds = ids.tolist(), boundaries.tolist()
    return [values[start:stop] for start, stop in itertools.pairwise(bounds)]


def _same_origins(entrant: Entrant, outputs: list[Any], offsets: np.ndarray, word_ids: np.ndarray) -> bool:
    same = True
    if entrant.form in ("offsets", "origins"):
        same &= np.array_equal(np.concatenate([output[2] for output in outputs]), offsets)
    if entrant.form in ("word_ids", "origins"):
        same &= np.array_equal(np.concatenate([output[3] for output in outputs]), word_ids)
    return same


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tokenizers.stream", description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=[case.name for case in CASES])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    case = next(case for case in CASES if case.name == options.case)
    if case.clock == "cpu" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    corpus = CORPORA[case.corpus]
    other_texts = CORPORA[corpus.after].read()[:OTHER_TEXTS] if corpus.after else []
    print(json.dumps(life(case, corpus.read(), options.rounds, options.seed, other_texts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
