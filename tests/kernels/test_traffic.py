"""The counter of loads and stores sees every way into memory, and the 5 % rule can fail."""

import pytest
import torch

from bert_fast.testing.traffic import Traffic, assert_traffic, traffic

pytestmark = pytest.mark.interpreter
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

SIZE, BLOCK = 20, 16


@triton.jit
def _masked_kernel(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offset, tl.load(x_ptr + offset, mask=offset < size, other=0), mask=offset < size)


@triton.jit
def _unmasked_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offset = tl.arange(0, BLOCK)
    scale = tl.load(x_ptr)  # one element
    tl.store(y_ptr + offset, tl.load(x_ptr + offset) * scale)


@triton.jit
def _descriptor_kernel(x_ptr, y_ptr, n_rows, n_cols, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [n_rows, n_cols], [n_cols, 1], [2, BLOCK])
    y = tl.make_tensor_descriptor(y_ptr, [n_rows, n_cols], [n_cols, 1], [2, BLOCK])
    y.store([2, 0], x.load([2, 0]))


@triton.jit
def _atomic_kernel(x_ptr, BLOCK: tl.constexpr):
    offset = tl.arange(0, BLOCK)
    tl.atomic_add(x_ptr + offset, 1.0, mask=offset < 3)


@triton.jit
def _shared_row_kernel(x_ptr, row_ptr, y_ptr, BLOCK: tl.constexpr):
    offset = tl.arange(0, BLOCK)
    at = tl.program_id(0) * BLOCK + offset
    tl.store(y_ptr + at, tl.load(x_ptr + at) + tl.load(row_ptr + offset))


def count_shared_row(programs: int = 4) -> tuple[Traffic, torch.Tensor, torch.Tensor]:
    x, row = torch.randn(programs, BLOCK), torch.randn(BLOCK)
    with traffic() as counts:
        _shared_row_kernel[(programs,)](x, row, torch.empty_like(x), BLOCK)
    return counts, x, row


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool, torch.int64])
def test_masked_accesses_count_what_the_mask_admits(dtype: torch.dtype) -> None:
    x = torch.ones(SIZE).to(dtype)
    y = torch.zeros_like(x)
    with traffic() as counts:
        _masked_kernel[(2,)](x, y, SIZE, BLOCK)
    assert torch.equal(x, y)
    assert counts.times_loaded(x) == {1} == counts.times_stored(y)
    assert counts.loaded_bytes == counts.stored_bytes == x.nbytes
    assert counts.unique_bytes == counts.total_bytes == 2 * x.nbytes


def test_accesses_without_a_mask() -> None:
    x, y = torch.full((BLOCK,), 2.0), torch.zeros(BLOCK)
    with traffic() as counts:
        _unmasked_kernel[(1,)](x, y, BLOCK)
    assert (y == 4).all()
    assert counts.times_loaded(x) == {1, 2}
    assert (counts.loaded_bytes, counts.stored_bytes) == (x.nbytes + 4, y.nbytes)
    assert counts.unique_bytes == 2 * x.nbytes
    assert counts.repeated_loaded_bytes(x) == 4


def test_tensor_descriptors() -> None:
    """What lies outside the tensor is not read: one row of the block of two, 12 columns of 16."""
    x, y = torch.randn(3, 12), torch.zeros(3, 12)
    with traffic() as counts:
        _descriptor_kernel[(1,)](x, y, 3, 12, BLOCK)
    assert torch.equal(y[2], x[2])
    assert counts.times_loaded(x[2]) == {1} == counts.times_stored(y[2])
    assert counts.times_loaded(x[:2]) == {0} == counts.times_stored(y[:2])
    assert counts.loaded_bytes == counts.stored_bytes == 12 * 4


def test_atomics_load_and_store() -> None:
    x = torch.zeros(BLOCK)
    with traffic() as counts:
        _atomic_kernel[(1,)](x, BLOCK)
    assert counts.times_loaded(x[:3]) == {1} == counts.times_stored(x[:3])
    assert counts.total_bytes == 3 * 4 * 2


def test_nothing_is_counted_outside_the_context() -> None:
    counts, x, _ = count_shared_row()
    before = counts.total_bytes
    _unmasked_kernel[(1,)](x, torch.zeros(BLOCK), BLOCK)
    assert counts.total_bytes == before


def test_unique_and_total() -> None:
    counts, x, row = count_shared_row(programs=4)
    assert counts.total_bytes == 2 * x.nbytes + 4 * row.nbytes
    assert counts.unique_bytes == 2 * x.nbytes + row.nbytes
    assert counts.unique_loaded_bytes(x, row) == x.nbytes + row.nbytes
    assert counts.unique_stored_bytes(x) == 0
    assert counts.repeated_loaded_bytes(row) == 3 * row.nbytes


def test_the_rule() -> None:
    counts, x, row = count_shared_row(programs=4)
    floor = 2 * x.nbytes + row.nbytes
    assert_traffic(counts, floor, cached=(row,))
    assert_traffic(counts, floor / 1.05, cached=(row,))
    with pytest.raises(AssertionError, match=r"1\.\d+ of the floor"):
        assert_traffic(counts, floor)  # nothing says that repeated reads of the row come from a cache
    with pytest.raises(AssertionError, match="of the floor"):
        assert_traffic(counts, floor / 1.06, cached=(row,))
    with pytest.raises(AssertionError, match="it is none"):
        assert_traffic(counts, floor + 1, cached=(row,))


def test_no_two_tensors_have_the_same_address() -> None:
    """The allocator would reuse the first one's memory, and both would be counted as one."""
    with traffic():
        addresses = set()
        for _ in range(20):
            freed = torch.empty(64)
            addresses.add(freed.data_ptr())
            del freed
    assert len(addresses) == 20
