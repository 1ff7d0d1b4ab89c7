"""What bert_fast's tokenizer is meant to reach, in one core, on texts that it has not met, beside the best peer."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.kit.goal import Figure, Figures, Goal, Line
from benchmarks.tokenizers.stored import best_peer, newest

Entrants = dict[str, dict[str, Any]]
Value = Callable[[Entrants], tuple[str, float] | None]  # what it is of, beyond its case; None where nothing is stored


def _of(value: Value, *cases: str, what: str = "") -> Figures:
    """A value of the newest line of each case."""

    def figures(lines: Sequence[Line]) -> Iterator[Figure]:
        stored = newest(lines)
        for case in cases:
            line = stored.get(f"tokenizer/{case}")
            more, found = (value(line["entrants"]) if line is not None else None) or ("", None)
            yield Figure(case + what + more, found)

    return figures


def _beside_best(field: str, digits: int, unit: str, share: Callable[[float], float]) -> Value:
    """From the ratio of times to that of the best peer; field: what both are shown by."""

    def value(entrants: Entrants) -> tuple[str, float] | None:
        best = best_peer({"entrants": entrants})
        if best is None:
            return None
        ours, theirs = (f"{entrants[name][field]:.{digits}f}" for name in ("bert_fast", best))
        return f": {ours} {unit}, {best} {theirs}", share(entrants[best]["ratio"])

    return value


def _beside_own(label: str) -> Value:
    """The speed over that in another form."""

    def value(entrants: Entrants) -> tuple[str, float] | None:
        other = entrants.get(f"bert_fast, {label}")
        rate = entrants["bert_fast"]["mb_per_s"]
        return other and (f": {rate:.0f} MB/s, {label} {other['mb_per_s']:.0f}", other["ratio"])

    return value


def _of_own(label: str) -> Value:
    """The speed in another form over the usual."""

    def value(entrants: Entrants) -> tuple[str, float] | None:
        other = entrants.get(f"bert_fast, {label}")
        return other and (f": {other['mb_per_s']:.0f} MB/s", 1 / other["ratio"])

    return value


def _origins(lines: Sequence[Line]) -> Iterator[Figure]:
    for label in ("offsets", "word ids", "both"):
        yield from _of(_of_own(label), "en_docs/origins", what=f", {label}")(lines)


def _start(field: str, divisor: float = 1.0) -> Figures:
    """What a fresh process pays."""
    return _of(lambda entrants: ("", entrants["bert_fast"][field] / divisor), "start", what=f", {field}")


def _goal(title: str, bound: float, figures: Figures, is_upper: bool = False, unit: str = "x") -> Goal:
    return Goal(f"tokenizer: {title}", bound, figures, "cpu", is_upper, unit, digits=1)


_OVER_BEST = _beside_best("mb_per_s", 0, "MB/s", lambda ratio: ratio)
_TIME_OF_BEST = _beside_best("us", 3, "us", lambda ratio: 1 / ratio)
_UNIGRAM = ("xlmr_en/arrays", "xlmr_multi/arrays", "xlmr_250k_en/arrays", "xlmr_250k_multi/arrays")
_UNIGRAM_SPEED = _of(lambda entrants: ("", entrants["bert_fast"]["mb_per_s"]), *_UNIGRAM[::2])
_DOCUMENTS, _HARD = ("en_docs/arrays", "en_docs/padded"), ("code_docs/arrays", "tweets/arrays")
_THREADS, _PACKED = _of(_beside_own("one thread"), "en_docs/threads"), ("en_docs/packed", "en_short/packed")
TOKENIZER_GOALS = (
    _goal("English documents to arrays and padded, over the best peer", 2.8, _of(_OVER_BEST, *_DOCUMENTS)),
    _goal("English documents to lists, over the best peer", 2.8, _of(_OVER_BEST, "en_docs/lists")),
    _goal("English short texts, a call each, over the best peer", 2.7, _of(_OVER_BEST, "en_short/one")),
    _goal("Chinese documents, over the best peer", 3.5, _of(_OVER_BEST, "zh_docs/arrays")),
    _goal("99 languages, over the best peer", 3.0, _of(_OVER_BEST, "multi_docs/arrays")),
    _goal("code, tweets with emoji, over the best peer", 2.5, _of(_OVER_BEST, *_HARD)),
    _goal("Unigram, over the best peer", 2.5, _of(_OVER_BEST, *_UNIGRAM)),
    _goal("Unigram, English, MB/s", 100, _UNIGRAM_SPEED, unit=" MB/s"),
    _goal("a call of 11 bytes, of the best peer's time", 1.0, _of(_TIME_OF_BEST, "en_11/one"), is_upper=True),
    _goal("a call of 128 bytes, of the best peer's time", 0.5, _of(_TIME_OF_BEST, "en_128/one"), is_upper=True),
    _goal("two threads over one", 1.7, _THREADS),
    _goal("with offsets, word ids, of the speed of ids alone", 0.5, _origins),
    _goal("packed for models, of the speed of arrays", 0.95, _of(_beside_own("arrays"), *_PACKED)),
    _goal("loading a vocabulary", 10, _start("load_ms"), is_upper=True, unit=" ms"),
    _goal("memory, a pass over 1.7 MB included", 10, _start("used_bytes", 1e6), is_upper=True, unit=" MB"),
    _goal("memory that 8 MB more of text add", 0.5, _start("growth_bytes", 1e6), is_upper=True, unit=" MB"),
)
