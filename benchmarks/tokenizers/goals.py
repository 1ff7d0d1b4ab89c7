"""What bert_fast's tokenizer is meant to reach, in one core, on texts that nobody has met, beside the best peer."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.kit.goal import Figure, Figures, Goal, Line
from benchmarks.tokenizers.stored import best_peer, newest

MB = 1e6
Entrants = dict[str, dict[str, Any]]


def _entrants(lines: Sequence[Line], case: str) -> Entrants:
    """Who took part in the newest run of a case; nobody where it is not stored."""
    line: Line = newest(lines).get(f"tokenizer/{case}", {"entrants": {}})
    return line["entrants"]


def _beside_best(case: str, field: str, digits: int, value: Callable[[float], float]) -> Figures:
    """A figure from the ratio to the best peer; field: what both are shown by."""

    def figures(lines: Sequence[Line]) -> Iterator[Figure]:
        entrants = _entrants(lines, case)
        best = best_peer({"entrants": entrants})
        if best is None:
            yield Figure(case, None)
            return
        ours, theirs = (f"{entrants[name][field]:.{digits}f}" for name in ("bert_fast", best))
        unit = "us" if field == "us" else "MB/s"
        yield Figure(f"{case}: {ours} {unit}, {best} {theirs}", value(entrants[best]["ratio"]))

    return figures


def _over_best(*cases: str) -> Figures:
    """How many times as fast as the best peer."""
    each = [_beside_best(case, "mb_per_s", 0, lambda ratio: ratio) for case in cases]
    return lambda lines: (figure for figures in each for figure in figures(lines))


def _speed(*cases: str) -> Figures:
    """MB/s."""

    def figures(lines: Sequence[Line]) -> Iterator[Figure]:
        for case in cases:
            ours = _entrants(lines, case).get("bert_fast")
            yield Figure(case, None if ours is None else ours["mb_per_s"])

    return figures


def _time_of_best(case: str) -> Figures:
    """Share of the best peer's time for a call."""
    return _beside_best(case, "us", 3, lambda ratio: 1 / ratio)


def _two_threads(lines: Sequence[Line]) -> Iterator[Figure]:
    """Speed of two threads over that of one."""
    case = "en_docs/threads"
    entrants = _entrants(lines, case)
    one = entrants.get("bert_fast, one thread")
    if one is None:
        yield Figure(case, None)
    else:
        two = entrants["bert_fast"]["mb_per_s"]
        yield Figure(f"{case}: {two:.0f} MB/s, one thread {one['mb_per_s']:.0f}", one["ratio"])


def _origins(lines: Sequence[Line]) -> Iterator[Figure]:
    """Speed with offsets or word ids over that of ids alone."""
    case = "en_docs/origins"
    for asked in ("offsets", "word ids", "both"):
        found = _entrants(lines, case).get(f"bert_fast, {asked}")
        if found is None:
            yield Figure(f"{case}, {asked}", None)
        else:
            yield Figure(f"{case}, {asked}: {found['mb_per_s']:.0f} MB/s", 1 / found["ratio"])


def _packed(lines: Sequence[Line]) -> Iterator[Figure]:
    """Speed of what models are fed with over that of arrays alone."""
    for case in ("en_docs/packed", "en_short/packed"):
        entrants = _entrants(lines, case)
        arrays = entrants.get("bert_fast, arrays")
        if arrays is None:
            yield Figure(case, None)
        else:
            ours = entrants["bert_fast"]["mb_per_s"]
            yield Figure(f"{case}: {ours:.0f} MB/s, arrays {arrays['mb_per_s']:.0f}", arrays["ratio"])


def _start(field: str, divisor: float = 1.0) -> Figures:
    """What a fresh process pays."""

    def figures(lines: Sequence[Line]) -> Iterator[Figure]:
        ours = _entrants(lines, "start").get("bert_fast")
        yield Figure(f"start, {field}", ours[field] / divisor if ours is not None else None)

    return figures


def _goal(title: str, bound: float, figures: Figures, is_upper: bool = False, unit: str = "x") -> Goal:
    return Goal(f"tokenizer: {title}", bound, figures, "cpu", is_upper, unit, digits=1)


_DOCUMENTS = _over_best("en_docs/arrays", "en_docs/padded")
_UNIGRAM = ("xlmr_en/arrays", "xlmr_multi/arrays", "xlmr_250k_en/arrays", "xlmr_250k_multi/arrays")
TOKENIZER_GOALS = (
    _goal("English documents to arrays and padded, over the best peer", 2.8, _DOCUMENTS),
    _goal("English documents to lists, over the best peer", 2.8, _over_best("en_docs/lists")),
    _goal("English short texts, a call each, over the best peer", 2.7, _over_best("en_short/one")),
    _goal("Chinese documents, over the best peer", 3.5, _over_best("zh_docs/arrays")),
    _goal("99 languages, over the best peer", 3.0, _over_best("multi_docs/arrays")),
    _goal("code, tweets with emoji, over the best peer", 2.5, _over_best("code_docs/arrays", "tweets/arrays")),
    _goal("Unigram, over the best peer", 2.5, _over_best(*_UNIGRAM)),
    _goal("Unigram, English, MB/s", 100, _speed(*_UNIGRAM[::2]), unit=" MB/s"),
    _goal("a call of 11 bytes, of the best peer's time", 1.0, _time_of_best("en_11/one"), is_upper=True),
    _goal("a call of 128 bytes, of the best peer's time", 0.5, _time_of_best("en_128/one"), is_upper=True),
    _goal("two threads over one", 1.7, _two_threads),
    _goal("with offsets, word ids, of the speed of ids alone", 0.5, _origins),
    _goal("packed for models, of the speed of arrays", 0.95, _packed),
    _goal("loading a vocabulary", 10, _start("load_ms"), is_upper=True, unit=" ms"),
    _goal("memory, a pass over 1.7 MB included", 10, _start("used_bytes", MB), is_upper=True, unit=" MB"),
    _goal("memory that 8 MB more of text add", 0.5, _start("growth_bytes", MB), is_upper=True, unit=" MB"),
)
