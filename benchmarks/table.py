"""The newest stored result of every case, as README, docs/results.md and the pictures in docs show it.

`python -m benchmarks.table` prints the tables; `--write` puts them into the pages and draws the pictures; `--check`
fails where a page or the picture is not of the stored results.
"""

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.embedding.report import CROSS
from benchmarks.gpu import report as gpu
from benchmarks.gpu import step_report
from benchmarks.kit.markdown import page_with, table
from benchmarks.kit.results import RESULTS, ROOT, read_lines
from benchmarks.models.families import FAMILIES
from benchmarks.plot.stored import in_order
from benchmarks.serving import report as serving
from benchmarks.tokenizers.stored import best_peer, newest_lines
from bert_fast.bench.cases import CASES
from bert_fast.bench.picture import Bar, Group, Picture, as_svg

Line = dict[str, Any]
_FUSED, _FAMILIES, _RUN = "fuse/", "families/", "run/"
_RUNS = {"sms": "SMS spam, an epoch", "mlm": "masked words,"}
_RUN_LABELS = {
    "sms": "classes of messages", "single_books": "masked words, novels",
    "squad_windows_384_stride128": "masked words, SQuAD", "packed_nsp_512": "masked words, full texts",
}  # fmt: skip
_PIECES = ("import_time", "saved_bytes", "attention/", "linear/", "dropout/", "dropout_add_layer_norm/")
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
    return in_order({line["case"]: line for line in read_lines(RESULTS / "cpu.jsonl")})


def fused() -> dict[str, dict[str, Line]]:
    """Processor -> case name -> its last stored result, of processors on which all that is drawn was measured."""
    found: dict[str, dict[str, Line]] = {}
    for line in read_lines(RESULTS / "cpu.jsonl"):
        if line["case"].startswith(_FUSED):
            found.setdefault(_short(line["processor"]), {})[line["case"]] = line
    return {name: in_order(of) for name, of in sorted(found.items()) if of.keys() >= {case.stored for case in CASES}}


def _short(processor: str) -> str:
    """`Intel Xeon` of `Intel(R) Xeon(R) Processor`."""
    return re.sub(r"\(R\)|\(TM\)| Processor$", "", processor)


def render_models() -> str:
    """A Markdown table: whole models of ours, real tokens per second."""
    models = {case: r for case, r in newest().items() if not case.startswith((_FUSED, _FAMILIES, _RUN))}
    return _models("bert_fast", models, digits=1)


def render_pieces() -> str:
    """A Markdown table: single pieces."""
    pieces = [_tokenizer(line) for line in newest_lines(RESULTS / "tokenizers.jsonl").values()]
    pieces += [_piece(case, r) for piece in _PIECES for case, r in newest().items() if case.startswith(piece)]
    return table(("piece", "bert_fast", "compared with", "ratio"), filter(None, pieces))


def render_fused() -> str:
    """A Markdown table: Hugging Face's models after `bert_fast.fuse`, beside the same models untouched."""
    tables = []
    for processor, results in fused().items():
        rows = {case.removeprefix(_FUSED): r for case, r in results.items()}
        tables.append(f"**{processor}**\n\n{_models('fused', rows, digits=2)}")
    return "\n\n".join(tables)


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


def _piece(case: str, r: Line) -> tuple[str, ...]:
    if case == "import_time":
        return "`import bert_fast` beyond torch", f"{r['median_s']:.2f} s", "", ""
    if "torch_ms" in r:
        return case, f"{r['bert_fast_ms']:.1f} ms", f"PyTorch {r['torch_ms']:.1f} ms", f"{r['ratio']:.1f}x"
    ours, theirs = r["bert_fast"] / 2**20, r["transformers_eager"] / 2**20
    return case, f"{ours:.0f} MiB", f"transformers, eager {theirs:.0f} MiB", f"{r['share_of_eager']:.0%}"


def render_front() -> str:
    """A Markdown table: what README says of each hardware."""

    def span(results: dict[str, Line], is_padded: bool) -> str:
        ratios = sorted(results[case.stored]["ratio"] for case in CASES if case.is_padded is is_padded)
        return f"**{ratios[0]:.1f} to {ratios[-1]:.1f}x**"

    rows = gpu.front_rows(RESULTS)
    for name, results in fused().items():
        hardware = f"{name}, {_threads(list(results.values()))}, fp32"
        rows.append((hardware, "training and inference, padded batches", span(results, True), "", ""))
        rows.append((hardware, "training and inference, nothing padded", span(results, False), "", ""))
    rows += _front_row_of_cross_encoders()
    memory = "memory of a step: untouched / `fuse` / own classes"
    return table(("hardware", "work", "speed-up by `fuse`", "by own classes", memory), rows)


def _front_row_of_cross_encoders() -> list[tuple[str, ...]]:
    """One row, or none where scores or training steps were not timed."""
    lines = {case: line for case, line in newest().items() if case in CROSS}
    spans = []
    for work in ("score", "train"):
        ratios = [line["ratio"] for case, line in lines.items() if f"/{work}/" in case]
        if not ratios:
            return []
        least, most = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
        spans.append(f"**{least if least == most else f'{least} to {most}'}x**")
    hardware = f"{_processors(lines.values())}, {_threads(list(lines.values()))}, fp32"
    work = "a CrossEncoder, beside the best of [untouched and compiled](docs/embeddings.md#cross-encoders)"
    return [(hardware, work, f"scores {spans[0]}, training {spans[1]}", "", "")]


def picture() -> str:
    """docs/speed.svg: what `fuse` gives BERT-base on each processor, from the newest stored results."""
    cases = [case for case in CASES if case.size is CASES[0].size]
    results = fused()
    lines = [of[case.stored] for of in results.values() for case in cases]
    share = min(line["fill"] for line in lines)
    notes = (
        f"1x (grey) is the same model untouched, with PyTorch's SDPA attention; {_threads(lines)}, fp32.",
        f"Padded batch: sentences of novels as they come; {share:.0%} or more of the positions hold a token.",
    )
    groups = [
        _group(f"BERT-base on an {name}", {case.label: of[case.stored] for case in cases})
        for name, of in results.items()
    ]
    return as_svg(Picture("Tokens per second after bert_fast.fuse(model)", tuple(groups), notes))


def picture_of_the_rest() -> str:
    """docs/speed_more.svg: fused MiniLM, the library's own classes, whole runs and tokenizers, likewise."""
    results = newest()
    base, small = dict.fromkeys(case.size for case in CASES)
    parts = [
        ("MiniLM after bert_fast.fuse(model)", {case.label: of[case.stored] for case in CASES if case.size is small})
        for of in fused().values()
    ]
    for size in (base, small):
        own = {case.label: results[case.stored.removeprefix(_FUSED)] for case in CASES if case.size is size}
        parts.append((f"The library's own classes, {size.name}", own))
    runs = {_RUN_LABELS[case.split("/")[-1]]: line for case, line in results.items() if case.startswith(_RUN)}
    parts.append(("Training runs of MiniLM beside transformers' Trainer", runs))
    parts.append(("Tokenizer beside the fastest other with the right ids", _tokenizers()))
    threads = _threads([line for _, lines in parts for line in lines.values()])
    notes = (f"1x (grey) is the other side of each comparison; {threads}, fp32.",)
    groups = tuple(_group(f"{title} ({_processors(lines.values())})", lines) for title, lines in parts)
    return as_svg(Picture("Tokens per second, the rest of what is measured", groups, notes))


def _group(title: str, lines: dict[str, Line]) -> Group:
    return Group(title, tuple(Bar(label, float(line["ratio"])) for label, line in lines.items()))


def _tokenizers() -> dict[str, Line]:
    """Label -> its newest line, with the ratio to the best other tokenizer."""
    stored = newest_lines(RESULTS / "tokenizers.jsonl")
    shown = {"en_docs/arrays": "English", "zh_docs/arrays": "Chinese", "multi_docs/arrays": "99 languages"}
    lines = {}
    for case, label in shown.items():
        line = stored[f"tokenizer/{case}"]
        if (peer := best_peer(line)) is not None:
            lines[label] = line | {"ratio": line["entrants"][peer]["ratio"]}
    return lines


def _processors(lines: Iterable[Line]) -> str:
    return ", ".join(sorted({_short(line["processor"]) for line in lines}))


def _threads(lines: list[Line]) -> str:
    numbers = sorted({line["threads"] for line in lines})
    return f"{' or '.join(map(str, numbers))} thread{'' if numbers == [1] else 's'}"


TABLES = {
    "front": render_front,
    "models": render_models,
    "pieces": render_pieces,
    "fused": render_fused,
    "families": render_families,
    "serving": serving.render_speed,
    "serving_start": serving.render_start,
    "runs": render_runs,
    "gpu_steps": lambda: gpu.render_steps(RESULTS),
    "gpu_finetuning": lambda: step_report.render_finetuning(RESULTS),
    "gpu_profiles": lambda: step_report.render_profiles(RESULTS),
    "gpu_kernels": lambda: gpu.render_kernels(RESULTS),
    "gpu_checked": lambda: gpu.render_checked(RESULTS),
}  # fmt: skip
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")
PICTURES = {
    ROOT / "docs" / "speed.svg": picture,
    ROOT / "docs" / "speed_more.svg": picture_of_the_rest,
    ROOT / "docs" / "speed_gpu.svg": lambda: as_svg(gpu.picture(RESULTS)),
}


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
