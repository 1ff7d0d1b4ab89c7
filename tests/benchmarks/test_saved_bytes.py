"""What a layer keeps for backward: what is counted, that the goal holds, and that the page says so."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.kit.results import ROOT
from benchmarks.kit.saved_bytes import saved_bytes
from benchmarks.models.pieces import saved_bytes_per_layer

pytest.importorskip("transformers", reason="the package transformers is not installed")


def test_saved_bytes_counts_storages_once_and_no_parameters() -> None:
    model = nn.Linear(8, 16, bias=False)
    x = torch.randn(4, 8, requires_grad=True)

    def forward() -> torch.Tensor:
        y = model(x)  # saves x and the weight
        return (y * y.view(16, 4).view(4, 16)).sum()  # saves y twice, one storage

    assert saved_bytes(model, forward) == 4 * (4 * 8 + 4 * 16)


def test_saved_bytes_tells_freed_storages_apart() -> None:
    x = torch.randn(1000, requires_grad=True)

    def forward() -> torch.Tensor:
        y = x
        for _ in range(5):
            y = y.sin()  # saves its input; without a reference each could land where the last one was
        return y

    assert saved_bytes(nn.Identity(), forward) == 5 * 4 * 1000


def test_inputs_are_left_out() -> None:
    x = torch.randn(1000, requires_grad=True)
    assert saved_bytes(nn.Identity(), lambda: x.sin().cos(), [x]) == 4 * 1000


def test_a_layer_keeps_at_most_35_percent_of_the_eager_layer() -> None:
    """And as much as the page says, which is of 8 sequences."""
    found: dict[str, Any] = saved_bytes_per_layer("base", 1, 512)
    assert 0.1 < found["share_of_eager"] <= 0.35
    text = (ROOT / "docs" / "saved_bytes.md").read_text(encoding="utf-8")
    ours, theirs = (f"{8 * found[name] / 2**20:.1f} MiB" for name in ("bert_fast", "transformers_eager"))
    assert f"**bert_fast keeps {ours} a layer, transformers (eager) {theirs}" in text
    list_of_ours = text.split("## bert_fast")[1].split("##")[0]
    assert f"| **{8 * found['bert_fast'] / 2**20:.3f}** |" in list_of_ours
    sizes = [float(size) for size in re.findall(r"\| ([\d.]+) \|\n", list_of_ours)]
    assert sum(sizes) == pytest.approx(8 * found["bert_fast"] / 2**20, abs=0.0005 * len(sizes))
