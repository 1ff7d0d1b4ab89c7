"""Stored results of embedding models on a CPU: their goals, and the tables of the page on embeddings."""

from collections.abc import Callable, Iterator, Sequence

from benchmarks.kit.goal import Figure, Goal, Line
from benchmarks.kit.markdown import NOTHING, table
from benchmarks.kit.results import ROOT

PAGE = ROOT / "docs" / "embeddings.md"
STEPS = ("contrastive/minilm/32x8/1",)
MEMORY = ("batch_memory/tiny", "batch_memory/minilm")
# Of cross-encoders: the model in words, and the least that `fuse` is meant to make of the best of the others.
_MODELS = {"minilm": "MiniLM", "base, 4 layers": "BERT-base, 4 layers"}
_CROSS_BOUNDS = {"score/as they come": 1.5, "score/sorted": 1.1, "train/as they come": 2.0, "train/sorted": 2.0}
PACKED = tuple(
    f"gliner/roberta base, 4 layers/{mix}" for mix in ("short_zipf", "short_uniform", "mixed_tail", "flat_long")
)
CROSS = tuple(f"cross_encoder/{model}/{what}" for model in _MODELS for what in _CROSS_BOUNDS)


def newest(lines: Sequence[Line]) -> dict[str, Line]:
    """Case -> its last line, of those that are about embedding models on a CPU."""
    known = {*STEPS, *MEMORY, *CROSS, *PACKED}
    return {line["case"]: line for line in lines if line.get("case") in known}


def _goal(
    title: str, bound: float, value: Callable[[Line], float], is_upper: bool = False, cases: Sequence[str] = STEPS
) -> Goal:
    def figures(lines: Sequence[Line]) -> Iterator[Figure]:
        found = newest(lines)
        for case in cases:
            yield Figure(case, value(found[case]) if case in found else None)

    return Goal(f"embedding, CPU: {title}", bound, figures, "cpu", is_upper)


_CACHED = "a cached step over one at once"
_THEIRS = "a cached step over sentence-transformers', times fill"
EMBEDDING_GOALS = (
    _goal(_CACHED, 1.35, lambda r: r["cached_over_whole"], is_upper=True),
    _goal(_THEIRS, 0.9, lambda r: r["cached_ratio"] * r["fill"]),
    *(
        _goal(
            f"cross-encoders, {what}, fused over the best of sentence-transformers', compiled or not",
            bound,
            lambda r: r["ratio"],
            cases=[case for case in CROSS if case.endswith(what)],
        )
        for what, bound in _CROSS_BOUNDS.items()
    ),
)


def tables(lines: Sequence[Line]) -> dict[str, str]:
    """Name -> Markdown of every table of the page; one whose results are not stored says so."""
    found = newest(lines)
    rows = {
        "steps": [row for case in STEPS if case in found for row in _steps(found[case])],
        "memory": [row for case in MEMORY if case in found for row in _memory(found[case])],
        "cross_encoders": [_cross(found[case]) for case in CROSS if case in found],
        "packed": [_packed(found[case]) for case in PACKED if case in found],
    }
    return {name: table(_HEADERS[name], some) if some else NOTHING for name, some in rows.items()}


_HEADERS = {
    "steps": ("pairs, 32 in parts of 8", "bert_fast, CPU s", "sentence-transformers, CPU s", "ratio (0.9 / fill)"),
    "memory": ("model", "pairs", "bytes beyond a part", "a matrix of scores"),
    "cross_encoders": (
        "model, work, pairs", "fill", "untouched, pairs/s", "compiled, pairs/s", "fused, pairs/s", "fused over the best"
    ),
    "packed": (
        "lengths of 64 texts", "fill", "fill of rows", "block-diagonal over padded", "fused over padded",
        "fused over the best",
    ),
}  # fmt: skip


def _steps(r: Line) -> Iterator[tuple[str, ...]]:
    rows = (("at once", "whole", "theirs", "ratio"), ("cached", "cached", "theirs_cached", "cached_ratio"))
    for name, ours, theirs, ratio in rows:
        seconds = (f"{r[f'{side}_cpu_s']:.2f}" for side in (ours, theirs))
        yield name, *seconds, f"**{r[ratio]:.2f}x** ({r['goal']:.2f}x)"
    yield "cached over at once", f"{r['cached_over_whole']:.2f}x", "", ""


def _cross(r: Line) -> tuple[str, ...]:
    _, model, work, order = r["case"].split("/")
    rates = (f"{r['pairs'] / r[f'{name}_cpu_s']:.1f}" for name in ("untouched", "compiled", "fused"))
    return f"{_MODELS[model]}, {work}, {order}", f"{r['fill']:.2f}", *rates, f"**{r['ratio']:.2f}x**"


def _packed(r: Line) -> tuple[str, ...]:
    ratios = (f"{r[name]:.2f}x" for name in ("block_diagonal_over_padded", "fused_over_padded"))
    fills = (f"{r[name]:.2f}" for name in ("fill", "fill_of_rows"))
    return r["case"].split("/")[-1], *fills, *ratios, f"**{r['ratio']:.2f}x**"


def _memory(r: Line) -> Iterator[tuple[str, ...]]:
    shape = r["case"].split("/")[1]
    pairs, size = r["pairs"][-1], r["bytes"][-1]
    yield shape, f"{pairs:,}", _megabytes(size), _megabytes(4 * pairs**2)
    large = r["large_pairs"], r["large_bytes"], r["large_matrix_bytes"]
    yield shape, f"{large[0]:,}, by a line", _megabytes(large[1]), _megabytes(large[2])


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"
