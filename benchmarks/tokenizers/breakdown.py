"""Where bert_fast's time goes, by stage, and how fast this machine reads and copies bytes: one CPU, CPU time.

    python -m benchmarks.tokenizers.breakdown --rounds 9

Stages are told apart by texts that need fewer of them, of as many bytes, in batches of 128 documents to arrays:
    calls     empty texts: crossing into C++, and what every text costs whatever it holds
    scan      spaces: classifying bytes and finding that no word begins
    words     the real text with every word that takes several tokens replaced by one of the vocabulary, of the same
              length where there is one: each word is found by one look-up
    real      the text as it is: longest match of the words that are no entries
    lists     the real text to lists of Python ints instead of arrays
Each is new text in every round, and the stages take turns.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.kit.clock import Times
from benchmarks.tokenizers.contestants import load
from benchmarks.tokenizers.corpora import CORPORA, Vocabulary, slices
from benchmarks.tokenizers.environment import pin_to_one_cpu

BATCH = 128
LARGE, SMALL = 64 << 20, 256 << 10  # beyond the last cache of most machines; within the second


def ceilings(rounds: int, large: int = LARGE, small: int = SMALL) -> dict[str, float]:
    """GB/s of reading (memchr for a byte that is not there) and copying, beyond the caches and within."""
    found = {}
    for where, size in (("memory", large), ("cache", small)):
        source = np.full(size, 97, np.uint8)
        target = np.empty_like(source)
        data = source.tobytes()
        repeats = max(1, large // size // 4)
        runs: dict[str, Callable[[], object]] = {
            "read": lambda data=data: data.find(b"\xff"),
            "copy": lambda source=source, target=target: np.copyto(target, source),
        }
        for name, run in runs.items():
            taken = [
                _cpu_seconds(lambda run=run, repeats=repeats: [run() for _ in range(repeats)])
                for _ in range(rounds + 1)
            ]
            found[f"{name}_{where}_gb_per_s"] = round(size * repeats / statistics.median(taken[1:]) / 1e9, 1)
    return found


def stages(
    texts: list[str], vocabulary: Vocabulary, rounds: int, encode: dict[str, Callable[[Any], Any]]
) -> dict[str, Any]:
    """Nanoseconds a byte of each stage, medians over rounds, and the shares of the real text's time that they add.

    encode: forms "arrays" and "lists".
    """
    dealt = slices(texts, rounds + 1, seed=0)
    words = vocabulary.path.read_text(encoding="utf-8").splitlines()
    seconds: dict[str, list[float]] = defaultdict(list)
    before: dict[str, list[str]] = {}
    order = random.Random(0)
    for index, slice_ in enumerate(dealt):
        size = sum(len(text.encode()) for text in slice_)
        derived = {
            "calls": ["" for _ in slice_],
            "scan": [" " * len(text.encode()) for text in slice_],
            "words": single_words(slice_, words, vocabulary.lowercase, encode["lists"]),
            "real": slice_,
            "lists": slice_,
        }
        for name in order.sample(list(derived), len(derived)):
            run = encode["lists" if name == "lists" else "arrays"]
            for batch in _batches(before.get(name, [])):  # tables and branches as an unbroken stream leaves them
                run(batch)
            taken = sum(_cpu_seconds(lambda run=run, batch=batch: run(batch)) for batch in _batches(derived[name]))
            if index:
                seconds[name].append(taken / size)
        before = derived
    ns = {name: round(statistics.median(values) * 1e9, 3) for name, values in seconds.items()}
    real = Times(tuple(seconds["real"]))
    relative = {name: 1 / Times(tuple(values)).speedup_over(real) for name, values in seconds.items()}
    added = {
        "calls": relative["calls"],
        "scan": relative["scan"] - relative["calls"],
        "words": relative["words"] - relative["scan"],
        "misses": 1 - relative["words"],
        "lists": relative["lists"] - 1,
    }
    return {"ns_per_byte": ns, "shares": {name: round(value, 3) for name, value in added.items()}}


def single_words(
    texts: list[str], vocabulary: list[str], lowercase: bool, lists: Callable[[list[str]], Any]
) -> list[str]:
    """The texts with every word of several tokens replaced by a word of one token, of the same length if there is one.

    Words are what stands between spaces; those with punctuation, which is a token of its own, stay.
    """
    by_length: dict[int, list[str]] = defaultdict(list)
    for entry in vocabulary:
        if entry.isascii() and entry.isalpha() and (not lowercase or entry == entry.lower()):
            by_length[len(entry)].append(entry)
    longest = max(by_length)
    draw = random.Random(0)
    words = sorted({word for text in texts for word in text.split(" ") if word.isascii() and word.isalpha()})
    many = {word for word, ids in zip(words, lists(words), strict=True) if len(ids) > 3}  # [CLS], the word, [SEP]

    def replaced(word: str) -> str:
        if word not in many:
            return word
        return draw.choice(by_length[min(len(word), longest)] or by_length[1])

    return [" ".join(replaced(word) for word in text.split(" ")) for text in texts]


def _batches(texts: list[str]) -> list[list[str]]:
    """Of strings of their own, freshly decoded."""
    mine = [data.decode() for data in [text.encode() for text in texts]]
    return [mine[i : i + BATCH] for i in range(0, len(mine), BATCH)]


def _cpu_seconds(run: Callable[[], object]) -> float:
    start = time.process_time_ns()
    result = run()
    taken = time.process_time_ns() - start
    del result
    return taken / 1e9


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tokenizers.breakdown", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    pin_to_one_cpu()
    corpus = CORPORA["en_docs"]
    forms = load("bert_fast", corpus.vocabulary)
    found = ceilings(options.rounds) | stages(corpus.read(), corpus.vocabulary, options.rounds, forms)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
