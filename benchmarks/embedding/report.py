"""The tables of the page on embeddings, from stored results of a CPU."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.kit.markdown import NOTHING, table
from benchmarks.kit.results import ROOT

Line = dict[str, Any]  # a stored result
PAGE = ROOT / "docs" / "embeddings.md"
STEPS = ("contrastive/minilm/32x8/1",)
SCORES = ("late_interaction/32", "late_interaction/128")
MEMORY = ("batch_memory/tiny", "batch_memory/minilm")
SPLADE = ("splade/minilm/16/1", "splade/base, 4 layers/8/1")
SPLADE_MEMORY = ("splade_memory/base",)
_MODELS = {"minilm": "MiniLM", "base, 4 layers": "BERT-base, 4 layers"}
_WORK = ("score/as they come", "score/sorted", "train/as they come", "train/sorted")
PACKED = tuple(
    f"gliner/roberta base, 4 layers/{mix}" for mix in ("short_zipf", "short_uniform", "mixed_tail", "flat_long")
)
EFFICIENCY = tuple(
    f"efficiency/{model}/{data}" for model in _MODELS for data in ("stsb", "natural-questions", "imdb, four times")
)
CROSS = tuple(f"cross_encoder/{model}/{what}" for model in _MODELS for what in _WORK)


def newest(lines: Sequence[Line]) -> dict[str, Line]:
    """Case -> its last line, of those that are about embedding models on a CPU."""
    known = {*STEPS, *SCORES, *MEMORY, *SPLADE, *SPLADE_MEMORY, *CROSS, *PACKED, *EFFICIENCY}
    return {line["case"]: line for line in lines if line.get("case") in known}


def tables(lines: Sequence[Line]) -> dict[str, str]:
    """Name -> Markdown of every table of the page; one whose results are not stored says so."""
    found = newest(lines)
    rows = {
        "steps": [row for case in STEPS if case in found for row in _steps(found[case])],
        "scores": [row for case in SCORES if case in found for row in _scores(found[case])],
        "memory": [row for case in MEMORY if case in found for row in _memory(found[case])],
        "splade": [_splade(found[case]) for case in SPLADE if case in found],
        "splade_memory": [_splade_memory(found[case]) for case in SPLADE_MEMORY if case in found],
        "cross_encoders": [_cross(found[case]) for case in CROSS if case in found],
        "efficiency": [_efficiency(found[case]) for case in EFFICIENCY if case in found],
        "packed": [_packed(found[case]) for case in PACKED if case in found],
    }
    return {name: table(_HEADERS[name], some) if some else NOTHING for name, some in rows.items()}


_HEADERS = {
    "steps": ("pairs, 32 in parts of 8", "bert_fast, CPU s", "sentence-transformers, CPU s", "ratio (0.9 / fill)"),
    "scores": ("queries and documents", "", "bert_fast", "sentence-transformers", "ratio"),
    "memory": ("model", "pairs", "bytes beyond a part", "a matrix of scores"),
    "splade": ("model", "pairs", "fill", "fused, CPU s", "untouched, CPU s", "ratio"),
    "splade_memory": ("texts", "fused", "untouched", "share"),
    "cross_encoders": (
        "model, work, pairs", "fill", "untouched, pairs/s", "compiled, pairs/s", "fused, pairs/s", "fused over the best"
    ),
    "efficiency": (
        "model, lengths of", "texts", "tokens", "untouched, CPU s", "compiled", "bf16", "fused", "fused, bf16",
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


def _scores(r: Line) -> Iterator[tuple[str, ...]]:
    times, sizes = ([r[f"{side}_{what}"] for side in ("ours", "theirs")] for what in ("cpu_s", "bytes"))
    yield str(r["queries"]), "CPU time", *(f"{1e3 * s:,.0f} ms" for s in times), f"**{r['ratio']:.1f}x**"
    yield str(r["queries"]), "peak memory", *map(_megabytes, sizes), f"{sizes[1] / sizes[0]:.1f}x"


def _cross(r: Line) -> tuple[str, ...]:
    _, model, work, order = r["case"].split("/")
    rates = (f"{r['pairs'] / r[f'{name}_cpu_s']:.1f}" for name in ("untouched", "compiled", "fused"))
    return f"{_MODELS[model]}, {work}, {order}", f"{r['fill']:.2f}", *rates, f"**{r['ratio']:.2f}x**"


def _efficiency(r: Line) -> tuple[str, ...]:
    _, model, data = r["case"].split("/")
    names = ("compiled", "bf16", "fused", "fused_bf16")
    compiled, bf16, fused, fused_bf16 = (f"{r[f'{one}_over_untouched']:.2f}x" for one in names)
    counts = str(r["texts"]), f"{r['real_tokens']:,}", f"{r['untouched_cpu_s']:.2f}"
    return f"{_MODELS[model]}, {data}", *counts, compiled, bf16, f"**{fused}**", fused_bf16


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


def _splade(r: Line) -> tuple[str, ...]:
    seconds = (f"{r[f'{side}_cpu_s']:.2f}" for side in ("bert_fast", "theirs"))
    return _MODELS[r["case"].split("/")[1]], str(r["pairs"]), f"{r['fill']:.2f}", *seconds, f"**{r['ratio']:.2f}x**"


def _splade_memory(r: Line) -> tuple[str, ...]:
    sizes = (_megabytes(r[f"{side}_bytes"]) for side in ("bert_fast", "theirs"))
    return f"{r['texts']} of {r['length']} tokens", *sizes, f"{r['share']:.1%}"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"
