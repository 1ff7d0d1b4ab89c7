"""Prints the newest stored result of every CPU case as the tables of docs/speed.md: models, `fuse`, families, runs.

python -m benchmarks.table
"""

from typing import Any

from benchmarks.kit.markdown import table
from benchmarks.kit.record import RESULTS, read_lines
from benchmarks.models.families import FAMILIES
from benchmarks.tokenizers.stored import best_peer, newest_lines

Line = dict[str, Any]
_FUSED, _FAMILIES, _RUN = "fuse/", "families/", "run/"
_RUNS = {"sms": "SMS spam, an epoch", "mlm": "masked words,"}
_TOKENIZER = {  # what the page shows of many cases
    "en_docs/arrays": "English documents to arrays",
    "en_docs/padded": "English documents, padded to 512",
    "en_docs/lists": "English documents to lists",
    "en_short/one": "English sentences, a call each",
    "zh_docs/arrays": "Chinese documents to arrays",
    "multi_docs/arrays": "99 languages to arrays",
    "tweets/arrays": "tweets and emoji to arrays",
}


def newest() -> dict[str, Line]:
    """Case name -> its last stored result."""
    return {line["case"]: line for line in read_lines(RESULTS / "cpu.jsonl")}


def render() -> str:
    """Two Markdown tables: whole models of ours (real tokens per second), single pieces."""
    results = newest()
    models = {case: r for case, r in results.items() if not case.startswith((_FUSED, _FAMILIES, _RUN))}
    pieces = [_tokenizer(line) for line in newest_lines(RESULTS / "tokenizers.jsonl").values()]
    pieces += [_piece(case, r) for case, r in results.items()]
    return f"{_models('bert_fast', models, digits=1)}\n\n" + table(
        ("piece", "bert_fast", "compared with", "ratio"), filter(None, pieces)
    )


def render_fused() -> str:
    """A Markdown table: Hugging Face's models after `bert_fast.fuse`, beside the same models untouched."""
    results = {case.removeprefix(_FUSED): r for case, r in newest().items() if case.startswith(_FUSED)}
    return _models("fused", results, digits=2)


def render_families() -> str:
    """The same of other families."""
    results = {}
    for case, r in newest().items():
        if case.startswith(_FAMILIES):
            family, shape, rest = case.removeprefix(_FAMILIES).split("/", 2)
            results[f"{FAMILIES[family].shown} {shape}/{rest}"] = r
    return _models("fused", results, digits=2, first="model")


def render_runs() -> str:
    """A Markdown table: whole runs of our `Trainer`, beside transformers'."""
    rows = []
    for case, r in newest().items():
        if case.startswith(_RUN):
            shape, what, *lengths = case.removeprefix(_RUN).split("/")
            rows.append((f"{shape}, {' '.join([_RUNS[what], *lengths])}", *_rates(r, digits=1)))
    return table(("training run", "fill", "bert_fast", "transformers", "ratio (goal)"), rows)


def _models(name: str, results: dict[str, Line], digits: int, first: str = "BERT") -> str:
    rows = []
    for case, r in results.items():
        if "transformers_tokens_per_s" in r:
            shape, lengths, order, mode = case.split("/")
            row = f"{shape}, {lengths}{', sorted' if order == 'sorted' else ''}, {mode}"
            rows.append((row, *_rates(r, digits)))
    return table((f"{first}, lengths, mode", "fill", name, "transformers", "ratio (goal)"), rows)


def _rates(r: Line, digits: int) -> tuple[str, ...]:
    ours, theirs = (f"{round(r[f'{side}_tokens_per_s']):,}" for side in ("bert_fast", "transformers"))
    return f"{r['fill']:.2f}", ours, theirs, f"**{r['ratio']:.{digits}f}x** ({r['goal']:.{digits}f}x)"


def _tokenizer(line: Line) -> tuple[str, ...] | None:
    """The newest figures beside the best other tokenizer whose ids are right."""
    what = _TOKENIZER.get(line["case"].removeprefix("tokenizer/"))
    peer = best_peer(line) if what else None
    if peer is None:
        return None
    ours, theirs = line["entrants"]["bert_fast"], line["entrants"][peer]
    rates = f"{ours['mb_per_s']:.0f} MB/s", f"{peer} {theirs['mb_per_s']:.0f} MB/s"
    return f"tokenizer, {what}", *rates, f"{theirs['ratio']:.1f}x"


def _piece(case: str, r: Line) -> tuple[str, ...] | None:
    if "torch_ms" in r:
        return case, f"{r['bert_fast_ms']:.1f} ms", f"PyTorch {r['torch_ms']:.1f} ms", f"{r['ratio']:.1f}x"
    if case.startswith("saved_bytes"):
        ours, theirs = r["bert_fast"] / 2**20, r["transformers_eager"] / 2**20
        return case, f"{ours:.0f} MiB", f"transformers, eager {theirs:.0f} MiB", f"{r['share_of_eager']:.0%}"
    if case == "import_time":
        return "`import bert_fast` beyond torch", f"{r['median_s']:.2f} s", "", ""
    return None


if __name__ == "__main__":
    print(f"{render()}\n\n{render_fused()}\n\n{render_families()}\n\n{render_runs()}")
