"""Stored results of embedding models: their goals, and the tables of the page on embeddings.

python -m benchmarks.embedding.report [--write]    prints the tables; --write puts them into docs/embeddings.md
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

from benchmarks.kit.goal import Figure, Figures, Goal, Line
from benchmarks.kit.markdown import NOTHING, page_with, table
from benchmarks.kit.record import RESULTS, ROOT, read_lines

PAGE = ROOT / "docs" / "embeddings.md"
STEPS = ("contrastive/minilm/32x8/1",)
MEMORY = ("batch_memory/tiny", "batch_memory/minilm")


def newest(lines: Sequence[Line]) -> dict[str, Line]:
    """Case -> its last line, of those that are about embedding models on a CPU."""
    known = {*STEPS, *MEMORY}
    return {line["case"]: line for line in lines if line.get("case") in known}


def _of(cases: Sequence[str], value: Callable[[Line], float]) -> Figures:
    def figures(lines: Sequence[Line]) -> Iterator[Figure]:
        found = newest(lines)
        for case in cases:
            yield Figure(case, value(found[case]) if case in found else None)

    return figures


def _goal(title: str, bound: float, figures: Figures, is_upper: bool = False) -> Goal:
    return Goal(f"embedding, CPU: {title}", bound, figures, "cpu", is_upper)


EMBEDDING_GOALS = (
    _goal("a cached step over one at once", 1.35, _of(STEPS, lambda r: r["cached_over_whole"]), is_upper=True),
    _goal(
        "a cached step over sentence-transformers', times fill", 0.9,
        _of(STEPS, lambda r: r["cached_ratio"] * r["fill"]),
    ),
)  # fmt: skip


def tables(lines: Sequence[Line]) -> dict[str, str]:
    """Name -> Markdown of every table of the page; one whose results are not stored says so."""
    found = newest(lines)
    rows: dict[str, list[tuple[str, ...]]] = {"steps": [], "memory": []}
    for case in STEPS:
        if case in found:
            rows["steps"] += _steps(found[case])
    for case in MEMORY:
        if case in found:
            rows["memory"] += _memory(found[case])
    return {name: table(_HEADERS[name], some) if some else NOTHING for name, some in rows.items()}


_HEADERS = {
    "steps": ("pairs, 32 in parts of 8", "bert_fast, CPU s", "sentence-transformers, CPU s", "ratio (0.9 / fill)"),
    "memory": ("model", "pairs", "bytes beyond a part", "a matrix of scores"),
}  # fmt: skip


def _steps(r: Line) -> Iterator[tuple[str, ...]]:
    goal = f"({r['goal']:.2f}x)"
    yield "at once", f"{r['whole_cpu_s']:.2f}", f"{r['theirs_cpu_s']:.2f}", f"**{r['ratio']:.2f}x** {goal}"
    yield (
        "cached",
        f"{r['cached_cpu_s']:.2f}",
        f"{r['theirs_cached_cpu_s']:.2f}",
        f"**{r['cached_ratio']:.2f}x** {goal}",
    )
    yield "cached over at once", f"{r['cached_over_whole']:.2f}x", "", ""


def _memory(r: Line) -> Iterator[tuple[str, ...]]:
    shape = r["case"].split("/")[1]
    pairs, size = r["pairs"][-1], r["bytes"][-1]
    yield shape, f"{pairs:,}", _megabytes(size), _megabytes(4 * pairs**2)
    large = r["large_pairs"], r["large_bytes"], r["large_matrix_bytes"]
    yield shape, f"{large[0]:,}, by a line", _megabytes(large[1]), _megabytes(large[2])


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embedding.report", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/embeddings.md")
    made = tables(list(read_lines(RESULTS / "cpu.jsonl")))
    if parser.parse_args(arguments).write:
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
    print("\n\n".join(made.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
