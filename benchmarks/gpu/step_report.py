"""Steps of fine-tuning, and where the device's time goes in a step, as docs/results.md shows them.

Of each case and contestant the newest line counts, as in `report`.
"""

import re
from pathlib import Path

from benchmarks.gpu.report import Line, Step, lines_by_gpu, shown_ratio, steps_by_gpu
from benchmarks.kit.markdown import NOTHING, table

# What a kernel's time counts as, by its name; the first that matches. A line names its longest kernels alone.
_GROUPS = {
    "products": re.compile(r"gemm|nvjet|cublas"),
    "attention": re.compile(r"attention|sdpa|flash"),
    "LayerNorm": re.compile(r"layer_norm|GammaBeta|norm_inputs"),
    "optimizer": re.compile(r"Adam"),
    "copies": re.compile(r"copy|memcpy|memset|fill", re.IGNORECASE),
}
_OTHER, _UNNAMED = "other", "not named"


def render_finetuning(folder: Path) -> str:
    """A table of Markdown for each GPU: a row for each contestant of each step of fine-tuning."""
    parts = []
    header = ("step", "contestant", "ms", "20 to 80 %", "over sdpa", "ms in a row", "over sdpa in a row")
    for gpu, steps in steps_by_gpu(folder, "finetune").items():
        rows = [
            (
                step.label, provider, f"{line['ms']:.1f}", f"{line['ms_p20']:.1f} to {line['ms_p80']:.1f}",
                shown_ratio(step.faster(provider, "sdpa"), is_bold=True), f"{line['ms_steady']:.1f}",
                shown_ratio(step.steadily_faster(provider, "sdpa")),
            )
            for step in steps
            for provider, line in step.lines.items()
        ]  # fmt: skip
        parts.append(f"**{gpu}**\n\n{table(header, rows)}")
    return "\n\n".join(parts) or NOTHING


def render_profiles(folder: Path) -> str:
    """A table of Markdown for each GPU: the device's time in a step by what its kernels do, and launches."""
    parts = []
    header = ("step", "contestant", "ms in a row", "on the device", *_GROUPS, _OTHER, _UNNAMED, "launches")
    for gpu, lines in lines_by_gpu(folder).items():
        newest = {(line["case"], line["provider"]): line for line in lines if line.get("kind") == "profile"}
        if newest:
            parts.append(f"**{gpu}**\n\n{table(header, [_profile(newest[key]) for key in sorted(newest)])}")
    return "\n\n".join(parts) or NOTHING


def _profile(line: Line) -> tuple[str, ...]:
    step = Step(line["case"])
    return (
        f"{step.purpose}, {step.label}", line["provider"], f"{line['ms_steady']:.1f}", f"{line['gpu_ms']:.1f}",
        *(f"{ms:.1f}" if ms else "" for ms in times_by_group(line).values()), f"{line['launches']:,.0f}",
    )  # fmt: skip


def times_by_group(line: Line) -> dict[str, float]:
    """Milliseconds of a step by what kernels do, of a line of kind "profile"."""
    found = dict.fromkeys((*_GROUPS, _OTHER, _UNNAMED), 0.0)
    for name, us, _ in line["kernels"]:
        group = next((group for group, pattern in _GROUPS.items() if pattern.search(name)), _OTHER)
        found[group] += us / 1e3
    found[_UNNAMED] = line["other_kernels"][1] / 1e3
    return found
