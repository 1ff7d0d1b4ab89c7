"""Dropout by counters: the same mask everywhere, the right probability, gradients, errors."""

import math

import pytest
import torch

from bert_fast import ops
from bert_fast.reference.dropout import dropout_scale, keep_mask, philox4x32


def _coords(tokens):
    index = torch.arange(tokens, dtype=torch.int32)
    return torch.stack((index // 7, index % 7), dim=1)


def test_philox_known_answers():
    """Test vectors published with Random123 (philox4x32, 7 rounds)."""
    zero, ones = torch.zeros(1, dtype=torch.int64), torch.full((1,), 0xFFFFFFFF)
    words = philox4x32((zero, zero, zero, zero), torch.tensor([0]))
    assert [int(w) for w in words] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    words = philox4x32((ones, ones, ones, ones), torch.tensor([-1]))
    assert [int(w) for w in words] == [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("columns", [1, 7, 8, 9, 768])
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_keeps_exactly_the_specified_elements(backend, columns, p, dtype):
    x, coords = torch.randn(29, columns).to(dtype) + 10, _coords(29)
    seed = torch.tensor([-123456789012345])
    x.requires_grad_()
    y = ops.dropout(x, p, seed=seed, coords=coords, site=12, backend=backend)
    keep = keep_mask(seed, 12, coords, columns, p)
    assert torch.equal(y != 0, keep)
    torch.testing.assert_close(y, x * keep * dropout_scale(p))
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad != 0, keep)


def test_strided_input():
    x = torch.randn(16, 24)[:, ::2]
    seed, coords = torch.tensor([1]), _coords(16)
    y = ops.dropout(x, 0.3, seed=seed, coords=coords, site=0)
    torch.testing.assert_close(y, ops.dropout(x.contiguous(), 0.3, seed=seed, coords=coords, site=0))


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5])
def test_share_of_dropped_elements_within_four_sigma(p):
    kept = keep_mask(torch.tensor([2024]), 3, _coords(1024), 768, p)
    count = kept.numel()
    assert abs(int((~kept).sum()) - p * count) <= 4 * math.sqrt(count * p * (1 - p)) + count / 2**17


def test_every_bit_is_fair():
    """Chi-square over the 16 bits of the values behind the masks, 4 sigma."""
    index = torch.arange(100_000)
    words = philox4x32((index, index * 0 + 5, index * 0 + 7, index * 0 + 9), torch.tensor([99]))
    for word in words:
        for bit in range(32):
            ones = int(((word >> bit) & 1).sum())
            assert abs(ones - 50_000) <= 4 * math.sqrt(25_000), f"bit {bit}: {ones}"


def test_masks_differ_between_seeds_sites_rows_and_positions():
    coords = _coords(64)
    base = keep_mask(torch.tensor([1]), 3, coords, 256, 0.5)
    moved = torch.stack((coords[:, 0] + 1000, coords[:, 1]), 1)
    swapped = coords.flip(1)
    for other in (
        keep_mask(torch.tensor([2]), 3, coords, 256, 0.5),
        keep_mask(torch.tensor([1 + 2**32]), 3, coords, 256, 0.5),
        keep_mask(torch.tensor([1]), 4, coords, 256, 0.5),
        keep_mask(torch.tensor([1]), 3, moved, 256, 0.5),
        keep_mask(torch.tensor([1]), 3, swapped, 256, 0.5)[1:7],
    ):
        same = (base[1:7] if len(other) == 6 else base).eq(other).float().mean()
        assert 0.4 < same < 0.6


def test_p_zero_returns_the_input_and_needs_no_seed():
    x = torch.randn(3, 4)
    assert ops.dropout(x, 0.0, seed=None, coords=None, site=0) is x


def test_manual_seed_rules_the_drawn_seed():
    draws = []
    for _ in range(2):
        torch.manual_seed(5)
        draws.append([int(ops.draw_seed(torch.device("cpu"))) for _ in range(3)])
    assert draws[0] == draws[1]
    assert len(set(draws[0])) == 3


def test_gradcheck_and_opcheck():
    x, coords, seed = torch.randn(5, 9, dtype=torch.float64, requires_grad=True), _coords(5), torch.tensor([3])
    torch.library.opcheck(torch.ops.bert_fast.dropout, (x, 0.5, seed, coords, 2, "auto"))
    assert torch.autograd.gradcheck(lambda t: ops.dropout(t, 0.5, seed=seed, coords=coords, site=2), (x,))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.zeros(3)}, ValueError, r"x: expected shape \[T, H\]"),
        ({"dropout_p": -0.1}, ValueError, r"dropout_p: expected a probability in \[0, 1\], got -0.1"),
        ({"seed": None}, ValueError, "seed: expected a Tensor"),
        ({"seed": torch.tensor([1], dtype=torch.int32)}, TypeError, "seed: expected dtype int64, got int32"),
        (
            {"coords": torch.zeros(2, 2, dtype=torch.int32)},
            ValueError,
            r"coords: expected shape \[3, 2\], got \[2, 2\]",
        ),
        ({"coords": torch.zeros(3, 2)}, TypeError, "coords: expected dtype int32, got float32"),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    arguments = {"x": torch.zeros(3, 4), "dropout_p": 0.5, "seed": torch.tensor([1]), "coords": _coords(3), "site": 0}
    with pytest.raises(error, match=message):
        ops.dropout(**(arguments | changes))
