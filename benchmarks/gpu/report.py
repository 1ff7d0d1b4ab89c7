"""What is stored of GPUs, as README and docs/results.md show it: whole training steps, kernels, and what was checked.

Of each case and contestant the newest line counts. A ratio is of rounds in turn, never of two runs' times. A kernel
whose source has changed since it was timed is marked.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kit.markdown import NOTHING, facts, table
from benchmarks.kit.programs import kernel_digests
from benchmarks.kit.results import ROOT, read_lines
from benchmarks.models.families import FAMILIES
from benchmarks.plot.stored import Row, load
from bert_fast.bench.picture import Bar, Group, Picture

Line = dict[str, Any]
_PROVIDERS = ("bert_fast", "graph", "fused", "fused_graphs", "sdpa", "eager", "flash", "compiled")
_OF_FAMILIES = ("labelled", "fused", "sdpa")
_CASE = re.compile(
    r"(?P<purpose>step|finetune)/(?:(?P<family>\w+)/)?(?P<shape>\w+)/(?P<lengths>\w+)@(?P<longest>\d+)/B(?P<texts>\d+)"
)
_SMALL_BATCH = 8192  # tokens, padding included; the host needs longer to queue a step than the device to take it
# Kernels are shown at one number of tokens; the optimizer knows no tokens.
_SHOWN = re.compile(r"kernel/(?:\w+/16384x|encoder_layer/128x128x|optimizer/bert-base/)")


@dataclass
class Step:
    """A case of whole training steps on one GPU. lines: contestant -> its newest line."""

    name: str
    lines: dict[str, Line] = field(default_factory=dict)

    @property
    def parts(self) -> re.Match[str]:
        """What the name is made of. ValueError if it is none of a step."""
        if (found := _CASE.fullmatch(self.name)) is None:
            raise ValueError(f"case: expected the name of a training step, got {self.name!r}")
        return found

    @property
    def is_bert(self) -> bool:
        """Whether the library's own classes take part."""
        return self.parts["family"] is None

    @property
    def label(self) -> str:
        """Model, lengths and batch in words."""
        _, family, shape, lengths, longest, texts = self.parts.groups()
        model = f"BERT-{shape}" if family is None else f"{FAMILIES[family].shown} {shape}"
        return f"{model}, {lengths}@{longest}, {texts} texts"

    @property
    def purpose(self) -> str:
        """What the step trains for."""
        return {"step": "pre-training", "finetune": "fine-tuning"}[self.parts["purpose"]]

    @property
    def short(self) -> str:
        """Model and lengths alone, of a small batch also how many texts."""
        shape, longest, texts = self.parts["shape"], self.parts["longest"], self.parts["texts"]
        tokens = f"{longest if self.is_full else f'up to {longest}'} tokens"
        return f"BERT-{shape}, {f'{texts} texts of ' if self.is_small else ''}{tokens}"

    @property
    def is_small(self) -> bool:
        """Whether it is a batch as one fine-tunes with, where the host may be the limit."""
        return int(self.parts["texts"]) * int(self.parts["longest"]) <= _SMALL_BATCH

    @property
    def is_full(self) -> bool:
        """Whether nothing is padded."""
        return self.parts["lengths"] == "full"

    @property
    def fill(self) -> float:
        """Share of the padded batch that is tokens."""
        return float(next(iter(self.lines.values()))["fill"])

    def faster(self, provider: str, than: str) -> float | None:
        """How many times as fast one contestant is as another; None unless one run timed both, in turn with ours.

        Beside ours the median over rounds, between two others the ratio of their medians.
        """
        speedup = self._ratio("bert_fast_speedup", provider, than)
        return speedup if speedup is None or "bert_fast" in (provider, than) else self._ratio("ms", provider, than)

    def steadily_faster(self, provider: str, than: str) -> float | None:
        """The ratio of medians without a wait for the device after every step, which steps of fine-tuning have."""
        return self._ratio("ms_steady", provider, than)

    def _ratio(self, figure: str, provider: str, than: str) -> float | None:
        first, second = self.lines.get(provider), self.lines.get(than)
        if first is None or second is None or first["run"] != second["run"]:
            return None
        return float(second[figure] / first[figure]) if first[figure] and second[figure] else None


def lines_by_gpu(folder: Path) -> dict[str, list[Line]]:
    """Name of a GPU -> all lines that were stored on one."""
    found: dict[str, list[Line]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in read_lines(path):
            if line.get("gpu"):
                found.setdefault(line["gpu"], []).append(line)
    return found


def steps_by_gpu(folder: Path, kind: str = "step") -> dict[str, list[Step]]:
    """Name of a GPU -> its whole training steps, small models and short texts first; GPUs without any are left out.

    kind: of the lines, "step" (pre-training) or "finetune".
    """
    found: dict[str, list[Step]] = {}
    for gpu, lines in lines_by_gpu(folder).items():
        steps: dict[str, Step] = {}
        for line in lines:
            if line.get("kind") == kind:
                steps.setdefault(line["case"], Step(line["case"])).lines[line["provider"]] = line
        if steps:
            found[gpu] = sorted(steps.values(), key=_order)
    return found


def _order(step: Step) -> tuple[Any, ...]:
    parts = step.parts
    return not step.is_bert, step.is_small, not step.is_full, parts["shape"], int(parts["longest"]), step.name


def front_rows(folder: Path) -> list[tuple[str, ...]]:
    """For README: GPU, what a step does, speed-up of `fuse`, of own classes, and memory, beside transformers with SDPA.

    A step that only one of the two contestants made is left out; small batches have one row for each purpose.
    """
    rows = []
    for gpu, steps in steps_by_gpu(folder).items():
        rows += [(f"{gpu}, bf16", *row) for step in steps if (row := _front_row(step)) is not None]
        for small in (
            [step for step in steps if step.is_small and step.is_bert], steps_by_gpu(folder, "finetune").get(gpu, [])
        ):  # fmt: skip
            rows += [(f"{gpu}, bf16", *row) for row in _front_row_of_small(small)]
    return rows


def _front_row(step: Step) -> tuple[str, ...] | None:
    own, fused = (step.faster(provider, "sdpa") for provider in ("bert_fast", "fused"))
    if not step.is_bert or step.is_small or own is None or fused is None:
        return None
    of = [step.lines[provider].get("peak_bytes") for provider in ("sdpa", "fused", "bert_fast")]
    memory = "" if None in of else f"{' / '.join(f'{nbytes / 2**30:.1f}' for nbytes in of)} GiB"
    return f"{step.purpose}, {step.short}", f"**{fused:.1f}x**", f"**{own:.1f}x**", memory


def _front_row_of_small(steps: Sequence[Step]) -> list[tuple[str, ...]]:
    """One row or none. Fine-tuning is timed with a wait for the device after every step and without: both count."""
    found = {}
    for provider in ("fused", "fused_graphs"):
        of = [step.faster(provider, "sdpa") for step in steps]
        of += [step.steadily_faster(provider, "sdpa") for step in steps if step.purpose == "fine-tuning"]
        found[provider] = [ratio for ratio in of if ratio is not None]
    if not all(found.values()):
        return []
    fused, graphs = map(_range, found.values())
    work = f"{steps[0].purpose}, at most {_SMALL_BATCH:,} tokens a batch"
    return [(work, f"**{fused}x**, with [CUDA graphs](docs/migration.md) **{graphs}x**", "", "")]


def _range(ratios: Sequence[float]) -> str:
    least, most = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
    return least if least == most else f"{least} to {most}"


def render_steps(folder: Path) -> str:
    """Tables of Markdown for each GPU: times and ratios of whole steps, then rates and memory."""
    parts = []
    for gpu, steps in steps_by_gpu(folder).items():
        tables = [_times(steps), _rates(steps), _times_of_families(steps)]
        parts.append("\n\n".join([f"**{gpu}**", *filter(None, tables)]))
    return "\n\n".join(parts) or NOTHING


def _times(steps: Sequence[Step]) -> str:
    steps = [step for step in steps if step.is_bert]
    there = [name for name in _PROVIDERS if any(name in step.lines for step in steps)]
    ratios = [
        ("bert_fast", "sdpa"), ("bert_fast", "eager"), ("bert_fast", "flash"), ("bert_fast", "compiled"),
        ("fused", "sdpa"), ("fused", "flash"), ("fused_graphs", "sdpa"), ("graph", "bert_fast"),
    ]  # fmt: skip
    return _table_of_times(steps, there, [pair for pair in ratios if {*pair} <= {*there}])


def _times_of_families(steps: Sequence[Step]) -> str:
    others = [step for step in steps if not step.is_bert]
    return _table_of_times(others, _OF_FAMILIES, [("labelled", "sdpa"), ("fused", "sdpa")])


def _table_of_times(steps: Sequence[Step], providers: Sequence[str], ratios: Sequence[tuple[str, str]]) -> str:
    if not steps:
        return ""
    header = ("ms (host), step", "fill", *providers, *(f"{one} over {other}" for one, other in ratios))
    rows = [
        (
            step.label, f"{step.fill:.2f}",
            *(_cell(step.lines.get(name), _time) for name in providers),
            *(shown_ratio(step.faster(*pair), is_bold=pair[1] == "sdpa") for pair in ratios),
        )
        for step in steps
    ]  # fmt: skip
    return table(header, rows)


def _rates(steps: Sequence[Step]) -> str:
    steps = [step for step in steps if step.is_bert]
    there = [name for name in _PROVIDERS if any(name in step.lines for step in steps)]
    rates = [name for name in there if name in ("bert_fast", "graph", "sdpa")]
    if not steps:
        return ""
    header = ["step", *(f"{name}, sequences/s (MFU)" for name in rates), *(f"{name}, GiB" for name in there)]
    rows = [
        (
            step.label, *(_cell(step.lines.get(name), _rate) for name in rates),
            *(_cell(step.lines.get(name), lambda line: f"{line['peak_bytes'] / 2**30:.1f}") for name in there),
        )
        for step in steps
    ]  # fmt: skip
    return table(header, rows)


def _time(line: Line) -> str:
    return f"{line['ms']:.1f} ({line['host_ms']:.1f})"


def _rate(line: Line) -> str:
    mfu = "" if line["mfu"] is None else f" ({line['mfu']:.0%})"
    return f"{line['sequences_per_s']:,.0f}{mfu}"


def _cell(line: Line | None, shown: Callable[[Line], str]) -> str:
    return "" if line is None else shown(line)


def shown_ratio(value: float | None, is_bold: bool = False) -> str:
    """A ratio in a table; nothing of None."""
    shown = "" if value is None else f"{value:.2f}x"
    return f"**{shown}**" if shown and is_bold else shown


def render_kernels(folder: Path) -> str:
    """Tables of Markdown for each GPU: kernels at 16,384 tokens beside eager and compiled PyTorch."""
    parts, sources = [], kernel_digests()
    for machine in load(folder):
        rows = [row for row in machine.rows if row.result.get("gpu") and _SHOWN.match(row.result["case"])]
        tables = [_passes(rows, sources), _single(rows, sources)]
        if any(tables):
            parts.append("\n\n".join([f"**{machine.name}**", *filter(None, tables)]))
    return "\n\n".join(parts) or NOTHING


def _passes(rows: Sequence[Row], sources: Mapping[str, str]) -> str:
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row.mode in ("fwd", "bwd"):
            cases.setdefault((row.family, row.result["case"]), {})[row.mode] = row
    if not cases:
        return ""
    there = _peers(rows)
    header = ["operation, case"]
    for word in ("forward", "backward"):
        header += [f"{word}, us", "of the ceiling", *(f"over {peer}" for peer in there)]
    shown = [
        (
            _name(case) + _mark(next(iter(passes.values())), sources),
            *_figures(passes.get("fwd"), there),
            *_figures(passes.get("bwd"), there),
        )
        for (_, case), passes in sorted(cases.items())
    ]
    return table(header, shown)


def _single(rows: Sequence[Row], sources: Mapping[str, str]) -> str:
    """Cases that are one launch for all contestants: forward and backward together, or an optimizer's step."""
    rows = sorted((row for row in rows if row.mode not in ("fwd", "bwd")), key=lambda row: row.result["case"])
    there = _peers(rows)
    if not rows:
        return ""
    header = ("operation, case, all of it", "us", "of the ceiling", *(f"over {peer}" for peer in there))
    return table(header, [(_name(row.result["case"]) + _mark(row, sources), *_figures(row, there)) for row in rows])


def _peers(rows: Sequence[Row]) -> list[str]:
    return [peer for peer in ("eager", "compiled") if any(peer in row.speedups for row in rows)]


def _name(case: str) -> str:
    family, rest = case.removeprefix("kernel/").split("/", 1)
    return f"{family} {rest.replace('/', ', ')}"


def _mark(row: Row, sources: Mapping[str, str]) -> str:
    """What stands behind a case that launched a kernel whose source was another than it is by now."""
    launched = row.result["kernels"].items()
    return "" if all(sources.get(name) == source for name, source in launched) else " (before)"


def _figures(row: Row | None, peers: Sequence[str]) -> list[str]:
    if row is None:
        return ["", "", *("" for _ in peers)]
    shares = {
        "copy": row.result.get("share_of_copy_ceiling") or 0.0,
        "matmul": row.result.get("share_of_matmul_ceiling") or 0.0,
    }
    binding = max(shares, key=lambda name: shares[name])
    share = f"{shares[binding]:.0%} {binding}" if shares[binding] else ""
    return [f"{row.result['us']:,.1f}", share, *(shown_ratio(row.speedups.get(peer)) for peer in peers)]


def render_checked(folder: Path) -> str:
    """Sentences of Markdown for each GPU: how many cases and tests were green when they were last run, and by what."""
    return "\n".join(filter(None, (_checked(gpu, lines) for gpu, lines in lines_by_gpu(folder).items()))) or NOTHING


def _checked(gpu: str, lines: Sequence[Line]) -> str:
    cases = {line["case"]: line for line in lines if line.get("kind") == "verify"}
    smoke = {line["case"]: line for line in lines if line.get("kind") == "smoke"}
    tests = {line["test"]: line for line in lines if line.get("kind") == "test" and line["outcome"] != "skipped"}
    tests = {name: line for name, line in tests.items() if _is_there(name)}
    tools = {line["tool"]: line for line in lines if line.get("kind") == "sanitizer" and line["outcome"] != "skipped"}
    used = [*cases.values(), *smoke.values(), *tests.values(), *tools.values()]
    if not used:
        return ""
    said = []
    if cases:
        kernels = {kernel for line in cases.values() for kernel in line["kernels"]}
        counted, red = _counted([name for name, line in cases.items() if not line["ok"]], cases, "red")
        said.append(
            f"{counted} cases of `verify`, which launch {len(kernels)} kernels, gave the same bits twice and agree "
            f"with fp64{red}"
        )
    if smoke:
        counted, red = _counted([name for name, line in smoke.items() if line["outcome"] != "green"], smoke, "not")
        said.append(f"{counted} cases of `make gpu-smoke` are green{red}")
    if tests:
        parts = [line["outcome"] for line in lines if line.get("kind") == "part" and line["part"] == "tests"]
        counted, red = _counted([name for name, line in tests.items() if line["outcome"] != "passed"], tests, "failed")
        cut = " before their time was up" if parts and parts[-1] == "killed" else ""
        said.append(f"{counted} GPU tests that ran{cut} passed{red}")
    said += [f"{tool} {line['outcome']} over {len(line['kernels'])} kernels" for tool, line in tools.items()]
    by = ", ".join(f"{name} {version}" for name, version in facts(used, ("torch", "triton", "driver")).items())
    return f"- **{gpu}** ({by}): {'; '.join(said)}."


def _is_there(test: str) -> bool:
    """Whether the project still has a test, by pytest's name for it: what became another test counts no more."""
    file, name = test.split("::", 1)
    return f"def {name.split('[')[0].split('::')[-1]}(" in _text(ROOT / file)


@functools.cache  # hundreds of tests are of twenty files
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _counted(red: Sequence[str], of: Sized, word: str) -> tuple[str, str]:
    """How many are green, and which are not."""
    names = ", ".join(f"`{name}`" for name in red)
    return f"{len(of) - len(red)} of {len(of)}", f" ({word}: {names})" if names else ""


def picture(folder: Path) -> Picture:
    """Whole steps of BERT beside transformers with SDPA, by own classes and in place."""
    groups = []
    for gpu, steps in steps_by_gpu(folder).items():
        for provider, words, is_small in (
            ("bert_fast", "The library's own classes", False),
            ("fused", "After bert_fast.fuse(model)", False),
            ("fused_graphs", "After bert_fast.fuse(model, graphs=...), small batches", True),
        ):
            of_these = [step for step in steps if step.is_bert and step.is_small is is_small]
            ratios = [(step.short, step.faster(provider, "sdpa")) for step in of_these]
            bars = tuple(Bar(label, ratio) for label, ratio in ratios if ratio is not None)
            groups.append(Group(f"{words}, on an {gpu}", bars))
    notes = (
        "1x (grey) is transformers' model with SDPA; fp32 parameters under autocast to bf16, dropout 0.1.",
        "Up to N tokens: lengths vary, and transformers pads them to N.",
    )
    return Picture("Pre-training steps per second on a GPU", tuple(g for g in groups if g.bars), notes)
