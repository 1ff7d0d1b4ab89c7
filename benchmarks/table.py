"""The newest stored result of every CPU case, as README, docs/results.md and docs/speed.svg show it.

`python -m benchmarks.table` prints the tables; `--write` puts them into the pages and draws the pictures; `--check`
fails where a page or the picture is not of the stored results.
"""

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.kit.markdown import page_with, table
from benchmarks.kit.record import RESULTS, ROOT, read_lines
from benchmarks.models.families import FAMILIES
from benchmarks.serving import report as serving
from benchmarks.tokenizers.stored import best_peer, newest_lines
from bert_fast.bench.cases import CASES, draw
from bert_fast.bench.picture import Bar, Group, Picture, as_svg

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


def render_models() -> str:
    """A Markdown table: whole models of ours, real tokens per second."""
    models = {case: r for case, r in newest().items() if not case.startswith((_FUSED, _FAMILIES, _RUN))}
    return _models("bert_fast", models, digits=1)


def render_pieces() -> str:
    """A Markdown table: single pieces."""
    pieces = [_tokenizer(line) for line in newest_lines(RESULTS / "tokenizers.jsonl").values()]
    pieces += [_piece(case, r) for case, r in newest().items()]
    return table(("piece", "bert_fast", "compared with", "ratio"), filter(None, pieces))


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


def render_front() -> str:
    """A Markdown list: what README says of each hardware."""
    results = newest()

    def span(is_padded: bool) -> str:
        ratios = sorted(results[case.stored]["ratio"] for case in CASES if case.is_padded is is_padded)
        return f"{ratios[0]:.1f} to {ratios[-1]:.1f} times"

    gpus = [file.stem for file in sorted(RESULTS.glob("*.jsonl")) if is_of_gpu(file)]
    lines = (
        f"- **CPU** (x86-64): {span(True)} as fast on padded batches, {span(False)} where nothing is padded, in "
        "training and in inference; measured beside the same model untouched.",
        f"- **GPU**: {f'measured on {chr(44).join(gpus)}' if gpus else 'no speed has been measured yet'}. The Triton "
        "kernels are checked in Triton's interpreter and compiled for NVIDIA's Ampere, Hopper and Blackwell and AMD's "
        "MI300; `make gpu` measures them on yours.",
    )
    return "\n".join(textwrap.fill(line, 100, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


def is_of_gpu(file: Path) -> bool:
    """Whether a file of results has times that were taken on a GPU."""
    return any(line.get("gpu") and line.get("kind") in ("timing", "step", "model") for line in read_lines(file))


def picture() -> str:
    """docs/speed.svg: what `fuse` gives, from the newest stored results."""
    results = newest()
    lines = [results[case.stored] for case in CASES]
    processors, threads = sorted({line["processor"] for line in lines}), sorted({line["threads"] for line in lines})
    share = min(line["fill"] for line in lines)
    notes = (
        f"1x (grey) is the same model untouched, with PyTorch's SDPA attention. {' and '.join(processors)}, "
        f"{' or '.join(map(str, threads))} cores, fp32.",
        f"Padded batch: sentences of novels as they come; {share:.0%} or more of the positions hold a token.",
    )
    return as_svg(draw(lambda case: float(results[case.stored]["ratio"]), CASES, notes))


def picture_of_the_rest() -> str:
    """docs/speed_more.svg: the library's own classes, whole runs and tokenizers, from the newest stored results."""
    results = newest()
    groups = []
    for size in dict.fromkeys(case.size for case in CASES):
        stored = {case.label: results[case.stored.removeprefix(_FUSED)]["ratio"] for case in CASES if case.size is size}
        groups.append(Group(f"The library's own classes, {size.name}", tuple(Bar(*item) for item in stored.items())))
    runs = {case: line["ratio"] for case, line in results.items() if case.startswith(_RUN)}
    labels = {"sms": "classes of messages", "single_books": "masked words, novels"}
    bars = (Bar(labels.get(case.split("/")[-1], "masked words, SQuAD"), ratio) for case, ratio in runs.items())
    groups.append(Group("Whole training runs beside transformers' Trainer, minilm", tuple(bars)))
    lines = newest_lines(RESULTS / "tokenizers.jsonl")
    shown = {"en_docs/arrays": "English", "zh_docs/arrays": "Chinese", "multi_docs/arrays": "99 languages"}
    best = {what: (lines[f"tokenizer/{case}"], best_peer(lines[f"tokenizer/{case}"])) for case, what in shown.items()}
    bars = (Bar(what, line["entrants"][peer]["ratio"]) for what, (line, peer) in best.items() if peer is not None)
    groups.append(Group("Tokenizer beside the fastest other with the right ids", tuple(bars)))
    notes = ("1x (grey) is the other side of each comparison; two cores of an AMD EPYC, fp32.",)
    return as_svg(Picture("Tokens per second, the rest of what is measured", tuple(groups), notes))


TABLES = {
    "front": render_front,
    "models": render_models,
    "pieces": render_pieces,
    "fused": render_fused,
    "families": render_families,
    "serving": serving.render_speed,
    "serving_start": serving.render_start,
    "runs": render_runs,
}  # fmt: skip
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")
PICTURES = {ROOT / "docs" / "speed.svg": picture, ROOT / "docs" / "speed_more.svg": picture_of_the_rest}


def present() -> dict[Path, str]:
    """What each page and the picture should be, by the stored results."""
    tables = {name: render() for name, render in TABLES.items()}
    pages = {page: page_with(page.read_text(encoding="utf-8"), tables) for page in PAGES}
    return pages | {path: drawn() for path, drawn in PICTURES.items()}


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 if `--check` finds something stale."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the tables into the pages, and draw the picture")
    parser.add_argument("--check", action="store_true", help="fail where a page or the picture is stale")
    options = parser.parse_args(arguments)
    if not options.write and not options.check:
        print("\n\n".join(f"{name}\n\n{render()}" for name, render in TABLES.items()))
        return 0
    stale = [path for path, text in present().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if options.write:
            path.write_text(present()[path], encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'written' if options.write else 'stale; run `make results`'}")
    return 1 if stale and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
