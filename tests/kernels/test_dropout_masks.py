"""The mask of Triton kernels, straight from `kernels/_math.py`: the bits of the reference, so its statistics too."""

import pytest
import torch
from torch import Tensor

from bert_fast.reference.dropout import dropout_threshold, keep_mask
from bert_fast.testing.randomness import agreement, mask_bias
from bert_fast.testing.tolerances import ABSOLUTE

pytestmark = pytest.mark.interpreter
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from bert_fast.triton._launch import dropout_numbers  # noqa: E402 - imports triton's neighbours
from bert_fast.triton._math import keep_values, split_seed  # noqa: E402

VECTORS = {8: "fp16 and bf16", 4: "fp32"}  # neighbouring columns of one thread
COLS = 256


@triton.jit
def _mask_kernel(keep_ptr, seed_ptr, coords_ptr, site, drop_max, ROWS: tl.constexpr, COLS: tl.constexpr,
                 VECTOR: tl.constexpr):  # fmt: skip
    """ROWS tokens of two chunks of COLS columns."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :, None]
    chunk = tl.arange(0, 2)[:, None, None] * COLS
    k0, k1 = split_seed(tl.load(seed_ptr))
    batch_row = tl.load(coords_ptr + row * 2).to(tl.uint32)
    position = tl.load(coords_ptr + row * 2 + 1).to(tl.uint32)
    column = (chunk + tl.arange(0, COLS // VECTOR)[None, None, :] * VECTOR).to(tl.uint32)
    keep = keep_values(k0, k1, site.to(tl.uint32), batch_row, position, column, drop_max.to(tl.uint32), VECTOR)
    col = chunk + tl.arange(0, COLS)[None, None, :]
    tl.store(keep_ptr + row * (2 * COLS) + col, keep.to(tl.int8))


def coords_of(tokens: int) -> Tensor:
    """Rows and positions up to the largest that 31 bits hold."""
    index = torch.arange(tokens, dtype=torch.int32)
    return torch.stack([index // 4 + 2**31 - 64, index % 4 * 1_000_003], dim=1)


def triton_mask(seed: int, site: int, p: float, vector: int, tokens: int = 32) -> Tensor:
    keep = torch.empty(tokens, 2 * COLS, dtype=torch.int8)
    drop_max, _ = dropout_numbers(p)
    _mask_kernel[(tokens // 8,)](keep, torch.tensor([seed]), coords_of(tokens), site, drop_max, 8, COLS, vector)
    return keep.bool()


@pytest.mark.parametrize("vector", VECTORS, ids=VECTORS.get)
@pytest.mark.parametrize("p", [2**-16, 1 / 3, 0.1, 0.5, 32767 / 65536, 0.9, 1 - 2**-16, 1.0])
def test_bits_are_those_of_the_reference(p: float, vector: int) -> None:
    assert dropout_threshold(p) > 0
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        keep = triton_mask(seed, 2**31 - 1, p, vector, tokens=8)
        assert torch.equal(keep, keep_mask(torch.tensor([seed]), 2**31 - 1, coords_of(8), 2 * COLS, p))


@pytest.mark.parametrize("vector", VECTORS, ids=VECTORS.get)
def test_every_value_is_that_of_the_reference(vector: int) -> None:
    """Sixteen thresholds, one bit apart: masks that agree at all of them hide no exchange of values."""
    for bit in range(16):
        p = 2**bit / 65536
        keep = triton_mask(-77, 5, p, vector, tokens=8)
        assert torch.equal(keep, keep_mask(torch.tensor([-77]), 5, coords_of(8), 2 * COLS, p))


@pytest.mark.parametrize("vector", VECTORS, ids=VECTORS.get)
def test_masks_drop_as_often_as_asked_and_seeds_are_unrelated(vector: int) -> None:
    for p in (0.1, 0.5):
        assert mask_bias(triton_mask(3, 1, p, vector), p) < ABSOLUTE["one_random_figure"]
    masks = [triton_mask(seed, site, 0.5, vector) for seed, site in ((3, 1), (4, 1), (3 + 2**32, 1), (3, 2))]
    for i, first in enumerate(masks):
        for second in masks[:i]:
            assert agreement(first, second) < ABSOLUTE["largest_of_many_random_figures"]
    for first, second in ((masks[0][1:], masks[0][:-1]), (masks[0][:, 1:], masks[0][:, :-1])):
        assert agreement(first, second) < ABSOLUTE["largest_of_many_random_figures"]


def test_both_vectors_draw_one_mask() -> None:
    assert torch.equal(triton_mask(3, 1, 0.3, 4), triton_mask(3, 1, 0.3, 8))
