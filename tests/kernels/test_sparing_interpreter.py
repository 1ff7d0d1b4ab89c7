"""The interpreter that tests run kernels in gives what Triton's own gives, bit for bit."""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.interpreter


@triton.jit
def _pair(a, b, other_a, other_b):
    return a * 0.75 + other_a, b - other_b * a


@triton.jit
def _reduce_kernel(x_ptr, y_ptr, AXIS: tl.constexpr, KEEP: tl.constexpr):
    at = (tl.arange(0, 2)[:, None, None] * 4 + tl.arange(0, 4)[None, :, None]) * 8 + tl.arange(0, 8)[None, None, :]
    first, second = tl.reduce((tl.load(x_ptr + at), tl.load(x_ptr + 64 + at)), AXIS, _pair, keep_dims=KEEP)
    shape: tl.constexpr = first.numel
    to = tl.arange(0, shape)
    tl.store(y_ptr + to, tl.reshape(first, (shape,)))
    tl.store(y_ptr + shape + to, tl.reshape(second, (shape,)))


@pytest.mark.parametrize("keep_dims", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_slices_are_combined_in_order(dtype: torch.dtype, axis: int, keep_dims: bool) -> None:
    """A function that is neither commutative nor associative, rounded after each step."""
    x = torch.randn(2, 2, 4, 8).to(dtype)
    size = 64 // x.shape[1 + axis]
    y = torch.empty(2 * size, dtype=dtype)
    _reduce_kernel[(1,)](x, y, axis, keep_dims)
    a, b = (np.moveaxis(part.numpy(), axis, 0) for part in x)
    first, second, dtype_of = a[0], b[0], a.dtype.type
    for other_a, other_b in zip(a[1:], b[1:], strict=True):
        first, second = first * dtype_of(0.75) + other_a, second - other_b * first
    assert np.array_equal(y.numpy(), np.concatenate([first.ravel(), second.ravel()]))


def test_blocks_are_checked_as_before() -> None:
    with pytest.raises(TypeError, match="0d"):
        tl.block_type(tl.int32, [])
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.int32, [3])
    made = tl.block_type(tl.int32, [tl.constexpr(4), 2])
    assert made == tl.block_type(tl.int32, [4, 2]) != tl.block_type(tl.int32, [2, 4])
    assert made != tl.block_type(tl.uint32, [4, 2]) and str(made) == "<['4', '2'], int32>" and made.numel == 8
    assert tl.int32 != tl.uint32 and tl.pointer_type(tl.int32) != tl.pointer_type(tl.float32)
