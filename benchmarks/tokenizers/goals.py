"""What bert_fast's tokenizer is meant to reach, in one core, on texts that nobody has met, beside the best peer."""

from collections.abc import Iterator, Sequence

from benchmarks.kit.goal import Figure, Figures, Goal, Line
from benchmarks.tokenizers.stored import best_peer, newest

__all__ = ["TOKENIZER_GOALS"]

MB = 1e6


def _over_best(*cases: str) -> Figures:
    """How many times as fast as the best peer."""

    def figures(lines: Sequence[Line]) -> Iterator[Figure]:
        for case in cases:
            line = newest(lines).get(f"tokenizer/{case}")
            best = best_peer(line) if line is not None else None
            if line is None or best is None:
                yield Figure(case, None)
                continue
            ours, theirs = (line["entrants"][name]["mb_per_s"] for name in ("bert_fast", best))
            yield Figure(f"{case}: {ours:.0f} MB/s, {best} {theirs:.0f}", line["entrants"][best]["ratio"])

    return figures


def _time_of_best(case: str) -> Figures:
    """Share of the best peer's time for a call."""

    def figures(lines: Sequence[Line]) -> Iterator[Figure]:
        line = newest(lines).get(f"tokenizer/{case}")
        best = best_peer(line) if line is not None else None
        if line is None or best is None:
            yield Figure(case, None)
            return
        ours, theirs = (line["entrants"][name]["us"] for name in ("bert_fast", best))
        yield Figure(f"{case}: {ours:.3f} us, {best} {theirs:.3f}", 1 / line["entrants"][best]["ratio"])

    return figures


def _two_threads(lines: Sequence[Line]) -> Iterator[Figure]:
    """Speed of two threads over that of one."""
    case = "en_docs/threads"
    line = newest(lines).get(f"tokenizer/{case}")
    one = line["entrants"].get("bert_fast, one thread") if line is not None else None
    if line is None or one is None:
        yield Figure(case, None)
        return
    two = line["entrants"]["bert_fast"]["mb_per_s"]
    yield Figure(f"{case}: {two:.0f} MB/s, one thread {one['mb_per_s']:.0f}", one["ratio"])


def _origins(lines: Sequence[Line]) -> Iterator[Figure]:
    """Speed with offsets or word ids over that of ids alone."""
    case = "en_docs/origins"
    line = newest(lines).get(f"tokenizer/{case}")
    for asked in ("offsets", "word ids", "both"):
        found = line["entrants"].get(f"bert_fast, {asked}") if line is not None else None
        yield Figure(
            f"{case}, {asked}" + (f": {found['mb_per_s']:.0f} MB/s" if found is not None else ""),
            1 / found["ratio"] if found is not None else None,
        )


def _start(field: str, divisor: float = 1.0) -> Figures:
    def figures(lines: Sequence[Line]) -> Iterator[Figure]:
        line = newest(lines).get("tokenizer/start")
        yield Figure(f"start, {field}", line["entrants"]["bert_fast"][field] / divisor if line is not None else None)

    return figures


def _goal(title: str, bound: float, figures: Figures, is_upper: bool = False, unit: str = "x") -> Goal:
    return Goal(f"tokenizer: {title}", bound, figures, "cpu", is_upper, unit, digits=1)


TOKENIZER_GOALS = (
    _goal(
        "English documents to arrays and padded, over the best peer",
        2.8,
        _over_best("en_docs/arrays", "en_docs/padded"),
    ),
    _goal("English documents to lists, over the best peer", 2.8, _over_best("en_docs/lists")),
    _goal("English short texts, a call each, over the best peer", 2.7, _over_best("en_short/one")),
    _goal("Chinese documents, over the best peer", 3.5, _over_best("zh_docs/arrays")),
    _goal("99 languages, over the best peer", 3.0, _over_best("multi_docs/arrays")),
    _goal("code, tweets with emoji, over the best peer", 2.5, _over_best("code_docs/arrays", "tweets/arrays")),
    _goal("a call of 11 bytes, of the best peer's time", 1.0, _time_of_best("en_11/one"), is_upper=True),
    _goal("a call of 128 bytes, of the best peer's time", 0.5, _time_of_best("en_128/one"), is_upper=True),
    _goal("two threads over one", 1.7, _two_threads),
    _goal("with offsets, word ids, of the speed of ids alone", 0.5, _origins),
    _goal("loading a vocabulary", 10, _start("load_ms"), is_upper=True, unit=" ms"),
    _goal("memory, a pass over 1.7 MB included", 10, _start("used_bytes", MB), is_upper=True, unit=" MB"),
    _goal("memory that 8 MB more of text add", 0.5, _start("growth_bytes", MB), is_upper=True, unit=" MB"),
)
