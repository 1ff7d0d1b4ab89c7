"""Prints the newest stored result of every CPU case as the tables of the README: models, `fuse`, whole runs.

python -m benchmarks.table
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.tokenizers.stored import best_peer, newest_lines

_FUSED, _RUN = "fuse/", "run/"
_RUNS = {"sms": "SMS spam, an epoch", "mlm": "masked words,"}
RESULTS = Path(__file__).resolve().parent / "results" / "cpu.jsonl"
TOKENIZERS = RESULTS.with_name("tokenizers.jsonl")
_TOKENIZER = {  # what the README shows of many cases
    "en_docs/arrays": "English documents to arrays",
    "en_docs/padded": "English documents, padded to 512",
    "en_docs/lists": "English documents to lists",
    "en_short/one": "English sentences, a call each",
    "zh_docs/arrays": "Chinese documents to arrays",
    "multi_docs/arrays": "99 languages to arrays",
    "tweets/arrays": "tweets and emoji to arrays",
}


def newest() -> dict[str, dict[str, Any]]:
    """Case name -> its last stored result."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines()
    return {result["case"]: result for result in map(json.loads, filter(None, lines))}


def render() -> str:
    """Two Markdown tables: whole models of ours (real tokens per second), single pieces."""
    results = newest()
    models = {case: r for case, r in results.items() if not case.startswith((_FUSED, _RUN))}
    rows = _models("bert_fast", models, digits=1)
    rows += ["", "| piece | bert_fast | compared with | ratio |", "| --- | --- | --- | --- |"]
    rows += filter(None, map(_tokenizer, newest_lines(TOKENIZERS).values()))
    rows += filter(None, (_piece(case, r) for case, r in results.items()))
    return "\n".join(rows)


def render_fused() -> str:
    """A Markdown table: Hugging Face's models after `bert_fast.fuse`, beside the same models untouched."""
    results = {case.removeprefix(_FUSED): r for case, r in newest().items() if case.startswith(_FUSED)}
    return "\n".join(_models("fused", results, digits=2))


def render_runs() -> str:
    """A Markdown table: whole runs of our `Trainer`, beside transformers'."""
    rows = ["| training run | fill | bert_fast | transformers | ratio (goal) |", "| --- | --- | --- | --- | --- |"]
    for case, r in newest().items():
        if case.startswith(_RUN):
            shape, what, *lengths = case.removeprefix(_RUN).split("/")
            ours, theirs = (round(r[f"{side}_tokens_per_s"]) for side in ("bert_fast", "transformers"))
            rows.append(
                f"| {shape}, {' '.join([_RUNS[what], *lengths])} | {r['fill']:.2f} | {ours:,} | {theirs:,} "
                f"| **{r['ratio']:.1f}x** ({r['goal']:.1f}x) |"
            )
    return "\n".join(rows)


def _models(name: str, results: dict[str, dict[str, Any]], digits: int) -> list[str]:
    rows = [f"| BERT, lengths, mode | fill | {name} | transformers | ratio (goal) |", "| --- | --- | --- | --- | --- |"]
    for case, r in results.items():
        if "transformers_tokens_per_s" not in r:
            continue
        shape, lengths, order, mode = case.split("/")
        ours, theirs = (round(r[f"{side}_tokens_per_s"]) for side in ("bert_fast", "transformers"))
        sorted_note = ", sorted" if order == "sorted" else ""
        rows.append(
            f"| {shape}, {lengths}{sorted_note}, {mode} | {r['fill']:.2f} | {ours:,} | {theirs:,} "
            f"| **{r['ratio']:.{digits}f}x** ({r['goal']:.{digits}f}x) |"
        )
    return rows


def _tokenizer(line: dict[str, Any]) -> str | None:
    """The newest figures beside the best other tokenizer whose ids are right."""
    what = _TOKENIZER.get(line["case"].removeprefix("tokenizer/"))
    peer = best_peer(line) if what else None
    if peer is None:
        return None
    ours, theirs = line["entrants"]["bert_fast"], line["entrants"][peer]
    return (
        f"| tokenizer, {what} | {ours['mb_per_s']:.0f} MB/s | {peer} {theirs['mb_per_s']:.0f} MB/s "
        f"| {theirs['ratio']:.1f}x |"
    )


def _piece(case: str, r: dict[str, Any]) -> str | None:
    if "torch_ms" in r:
        return f"| {case} | {r['bert_fast_ms']:.1f} ms | PyTorch {r['torch_ms']:.1f} ms | {r['ratio']:.1f}x |"
    if case.startswith("saved_bytes"):
        ours, theirs = r["bert_fast"] / 2**20, r["transformers_eager"] / 2**20
        return f"| {case} | {ours:.0f} MiB | transformers, eager {theirs:.0f} MiB | {r['share_of_eager']:.0%} |"
    if case == "import_time":
        return f"| `import bert_fast` beyond torch | {r['median_s']:.2f} s | | |"
    return None


if __name__ == "__main__":
    print(f"{render()}\n\n{render_fused()}\n\n{render_runs()}")
