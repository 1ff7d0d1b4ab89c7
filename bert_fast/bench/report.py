"""What `bert-fast bench` leaves: a page with the picture, the figures behind it and what they were measured on."""

import datetime
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from bert_fast.bench.measuring import Result
from bert_fast.bench.page import Html, figure, page, section, table
from bert_fast.bench.picture import Bar, Group, Picture, as_svg


def device_name(device: torch.device) -> str:
    """Of a device that a model runs on, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"CPU {_processor_name()}, {cores} cores, PyTorch threads: {torch.get_num_threads()}"


def measured_on(device: torch.device) -> list[tuple[str, str]]:
    """What figures depend on, (what, value): for the end of a page."""
    packages = ("bert_fast", "torch", "triton", "transformers", "tokenizers", "numpy")
    there = {found.name.replace("-", "_") for found in metadata.distributions()}
    versions = [f"{name} {metadata.version(name)}" for name in packages if name in there]
    return [
        ("Time", datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")),
        ("Device", device_name(device)),
        ("Versions", ", ".join([f"Python {platform.python_version()}", *versions])),
    ]


def _processor_name() -> str:
    """Of the first processor, as the system calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def picture_of(results: Sequence[Result], device: str, is_quick: bool) -> Picture:
    """The picture of what was measured."""
    sizes = dict.fromkeys(result.case.size for result in results)
    groups = [
        Group(size.title, tuple(Bar(one.case.label, one.ratio) for one in results if one.case.size is size))
        for size in sizes
    ]
    share = min(result.share for result in results)
    notes = (
        f"1x is the same model untouched. {device}.",
        f"Padded batch: texts of several lengths, down to {share:.0%} of the positions hold a token.",
        *(("A quick run: too short for times that mean anything.",) if is_quick else ()),
    )
    return Picture("Tokens per second after bert_fast.fuse(model)", tuple(groups), notes)


def render_page(results: Sequence[Result], picture: Picture, device: torch.device, wrong: Sequence[Result]) -> str:
    """The whole page. wrong: results whose two models disagree."""
    rows = [
        (
            result.case.size.name, result.case.label, f"{result.share:.0%}", f"{result.fused.tokens_per_s:,.0f}",
            f"{result.untouched.tokens_per_s:,.0f}", f"{result.ratio:.2f}x", str(len(result.fused.seconds)),
            f"{result.difference:.1g}",
        )
        for result in results
    ]  # fmt: skip
    head = ("model", "what", "tokens", "fused, tokens/s", "untouched, tokens/s", "ratio", "rounds", "difference")
    caption = (
        "Blue: the fused model. Grey: the same model untouched, which is 1. Both take turns on the same batch; a ratio "
        "is the median over rounds. Tokens: the share of the batch's positions that hold one. Difference: the largest "
        "between both models' hidden states, which are about 1 in size."
    )
    return page(
        title="bert_fast bench",
        text="transformers' BertModel before and after bert_fast.fuse, measured on this machine.",
        verdict=f"{len(wrong)} of {len(results)} comparisons disagree" if wrong else "both models agree",
        is_good=not wrong,
        sections=(
            figure(picture.title, Html(as_svg(picture)), caption),
            section("Figures", table(head, rows, range(2, 8))),
            section("Measured on", table((), measured_on(device))),
        ),
    )
