"""The tables of docs/pretraining.md, of what is stored."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.kit.markdown import NOTHING, facts, table
from benchmarks.kit.record import ROOT, read_lines

PAGE = ROOT / "docs" / "pretraining.md"
_KINDS = {
    "sign": "signs and digits",
    "function": "function words",
    "piece": "pieces of words, from the second on",
    "repeated": "repeated: to be seen elsewhere in the example",
    "other": "other words",
    "name": "names",
}
# Of fine-tuning: words for the examples, and the models that it began from.
_STARTS = ("random", "pre-trained")
_WITH_TEXTS = (*_STARTS, "pre-trained, task's texts", "random, task's texts")
_CASES = {
    "few": ("film snippets, 960", _WITH_TEXTS),
    "all": ("film snippets, 9,596", _WITH_TEXTS),
    "tags-few": ("parts of speech, 201 sentences", _STARTS),
    "tags": ("parts of speech, 2,001 sentences", _STARTS),
    "pairs": ("does a sentence answer a question, 1,833 pairs", _STARTS),
}
_POINTS = (100, 500, 1000, 2000, 3000, 4000, 5000)


def tables(stored: Path) -> dict[str, str]:
    """Every table by its name; of lines of one name the newest counts."""
    lines = list(read_lines(stored)) if stored.exists() else []
    learned = _newest(lines, "learned", "name")
    longest = max(learned, key=lambda line: line["steps"], default=None)
    return {
        "first_weights": _first_weights([line for line in learned if line is not longest]),
        "learned": NOTHING if longest is None else _learned(longest),
        "kinds": NOTHING if longest is None else _kinds(longest["found"]),
        "finetuned": _finetuned([line for line in lines if line["kind"] == "finetuned"]),
        "memory": _memory(_newest(lines, "memory", "kernels")),
        "taken": "; ".join(f"{key} {value}" for key, value in facts(lines, ("processor", "torch", "commit")).items()),
    }


def _newest(lines: list[dict[str, Any]], kind: str, key: str) -> list[dict[str, Any]]:
    return list({str(line.get(key)): line for line in lines if line["kind"] == kind}.values())


def _first_weights(lines: list[dict[str, Any]]) -> str:
    rows = []
    for line in sorted(lines, key=lambda one: one["config"]["initializer_range"]):
        found = line["found"]
        rows.append([
            f"{line['config']['initializer_range']:g}",
            f"{found['masked_lm']:.3f}",
            f"{found['context_free_loss'] - found['masked_lm']:.2f}",
            f"{found['shuffled']:.3f}",
            f"{found['next_sentence_accuracy']:.3f}",
        ])  # fmt: skip
    head = ["initializer_range", "masked_lm", "below the plateau", "the same, words shuffled", "next_sentence_accuracy"]
    return table(head, rows) if rows else NOTHING


def _learned(line: Mapping[str, Any]) -> str:
    found = line["found"]
    below, worse = found["context_free_loss"] - found["masked_lm"], found["shuffled"] - found["masked_lm"]
    error = (found["next_sentence_accuracy"] * (1 - found["next_sentence_accuracy"]) / found["examples"]) ** 0.5
    rows = [
        ["masked_lm", f"{found['masked_lm']:.3f}, {below:.2f} below the plateau ({found['context_free_loss']:.3f})"],
        ["words shuffled within their text", f"{found['shuffled']:.3f}: {worse:.2f} worse"],
        ["masked_accuracy", f"{found['masked_accuracy']:.3f}"],
        [
            "next_sentence_accuracy",
            f"{found['next_sentence_accuracy']:.3f} ({found['examples']:,} pairs: standard error {error:.3f})",
        ],
    ]
    return table(["on two novels that it did not see", ""], rows)


def _kinds(found: Mapping[str, Any]) -> str:
    rows = [
        [words, f"{kind['number']:,}", f"{kind['loss']:.2f}", f"{kind['accuracy']:.3f}"]
        for name, words in _KINDS.items()
        if (kind := found["kinds"].get(name)) is not None
    ]
    return table(["words to predict", "number", "loss", "accuracy"], rows)


def _finetuned(lines: list[dict[str, Any]]) -> str:
    """Runs whose learning rate was searched; where there are none of a start, those with one that was given."""
    rows = []
    for name, (words, starts) in _CASES.items():
        for start in starts:
            of_start = [line for line in lines if (line.get("case"), line["start"]) == (name, start)]
            searched = [line for line in of_start if "learning_rate" in line]
            newest = {line["seed"]: line for line in searched or of_start}
            runs = [newest[seed] for seed in sorted(newest)]
            found = [run["metrics"]["accuracy"] for run in runs]
            if len(found) > 1:
                mean = f"{statistics.fmean(found):.3f} ± {statistics.stdev(found):.3f}"
                rate = f"{runs[-1]['learning_rate']:g}" if searched else "given"
                rows.append([words, start, rate, ", ".join(f"{value:.3f}" for value in found), mean])
    return table(["examples", "start", "rate", "accuracy of each seed", "mean"], rows) if rows else NOTHING


def _memory(lines: list[dict[str, Any]]) -> str:
    rows = []
    for line in lines:
        sizes = dict(line["resident_mb"])
        rows.append([
            f"{line['kernels'] or 64:,}",
            *(f"{sizes[point]:.0f}" if point in sizes else "" for point in _POINTS),
            f"{line['most_mb']:.0f}",
            f"{line['growth']:+.1%}",
        ])  # fmt: skip
    head = ["kernels kept, batches", *(f"{point:,}" for point in _POINTS), "most", "second quarter to last"]
    return table(head, rows) if rows else NOTHING
