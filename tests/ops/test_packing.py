"""Removing padding and putting it back."""

import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from bert_fast.ops import Packing, repad, unpad
from bert_fast.ops import packing as packing_module
from bert_fast.ops.packing import counted_coords, longest_first


def test_right_padding():
    packing = Packing.from_keep_mask(torch.tensor([[1, 1, 0], [1, 0, 0]]))
    assert packing.cu_seqlens.tolist() == [0, 2, 3]
    assert packing.cu_seqlens.dtype == torch.int32
    assert packing.max_seqlen == 2
    assert packing.coords.tolist() == [[0, 0], [0, 1], [1, 0]]


def test_padding_anywhere_keeps_original_positions():
    packing = Packing.from_keep_mask(torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]).bool())
    assert packing.cu_seqlens.tolist() == [0, 2, 2, 6]
    assert packing.coords.tolist() == [[0, 1], [0, 3], [2, 0], [2, 1], [2, 2], [2, 3]]


@pytest.mark.parametrize("mask", [[[1, 1, 0], [0, 1, 0]], [[1, 1], [1, 1]], [[0, 0], [0, 0]], [[0], [1]]])
def test_pack_then_unpack_zeroes_padding_only(mask):
    keep_mask = torch.tensor(mask)
    x = torch.randn(*keep_mask.shape, 5)
    packing = Packing.from_keep_mask(keep_mask)
    packed = packing.pack(x)
    assert packed.shape == (int(keep_mask.sum()), 5)
    assert torch.equal(packing.unpack(packed), x * keep_mask[..., None])


def test_gradients_pass_through_and_stop_at_padding():
    keep_mask = torch.tensor([[1, 0], [1, 1]])
    packing = Packing.from_keep_mask(keep_mask)
    x = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: packing.unpack(packing.pack(t) ** 2), (x,))


def test_empty_batch_and_zero_length():
    for shape in ((0, 4), (3, 0)):
        packing = Packing.from_keep_mask(torch.ones(shape))
        assert packing.pack(torch.zeros(*shape, 2)).shape == (0, 2)
        assert packing.unpack(torch.zeros(0, 2)).shape == (*shape, 2)


def test_packed_input_gets_rows_and_positions():
    packing = Packing.from_cu_seqlens(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 3, 5)
    assert packing.coords.tolist() == [[0, 0], [0, 1], [2, 0], [2, 1], [2, 2]]
    assert packing.coords.dtype == torch.int32


def test_first_tokens_of_empty_sequences_are_zero():
    packing = Packing.from_cu_seqlens(torch.tensor([0, 0, 2, 2], dtype=torch.int32), 2, 2)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert packing.first_tokens(x).tolist() == [[0, 0], [1, 2], [0, 0]]


@pytest.mark.parametrize(
    ("cu_seqlens", "max_seqlen", "tokens", "error", "message"),
    [
        (torch.tensor([0, 3]), 3, 3, TypeError, "cu_seqlens: expected dtype int32, got int64"),
        (torch.tensor([[0, 3]], dtype=torch.int32), 3, 3, ValueError, "cu_seqlens: expected shape"),
        (torch.tensor([0, 4, 3], dtype=torch.int32), 4, 3, ValueError, "rise from 0 to the number of tokens"),
        (torch.tensor([1, 3], dtype=torch.int32), 3, 3, ValueError, "rise from 0 to the number of tokens"),
        (torch.tensor([0, 2], dtype=torch.int32), 3, 3, ValueError, "rise from 0 to the number of tokens"),
        (torch.tensor([0, 3], dtype=torch.int32), 2, 3, ValueError, "max_seqlen: expected at least the longest"),
        (torch.tensor([], dtype=torch.int32), 2, 0, ValueError, "at least one entry"),
    ],
)
def test_bad_layouts_are_named(cu_seqlens, max_seqlen, tokens, error, message):
    with pytest.raises(error, match=message):
        Packing.from_cu_seqlens(cu_seqlens, max_seqlen, tokens)


def test_all_lengths_take_one_transfer():
    waits = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._local_scalar_dense.default:
                waits.append(func)
            return func(*args, **(kwargs or {}))

    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]])
    with Recorder():
        packing = Packing.from_keep_mask(mask)
    assert (packing.num_tokens, packing.max_seqlen, packing.min_seqlen) == (8, 4, 0)
    assert not waits, "each item() would be another sync"


@pytest.mark.parametrize("lengths", [[3], [0, 0], [3, 0, 7, 1, 7], [5, 5, 5], [1, 2, 3, 4, 5, 6, 7, 8]])
def test_offsets_and_order_take_one_copy_to_a_gpu(lengths, monkeypatch):
    sent = []
    monkeypatch.setattr(packing_module, "sent", lambda given, device: sent.append(given) or given)
    with torch.device("meta"):  # the default device must not matter
        cu_seqlens, order = packing_module._offsets_on_host(lengths, SimpleNamespace(type="cuda"))
    expected = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    assert len(sent) == 1 and cu_seqlens.dtype == order.dtype == torch.int32
    assert torch.equal(cu_seqlens, expected)
    assert torch.equal(order, packing_module.longest_first(expected))
    assert (order.data_ptr() - cu_seqlens.data_ptr()) % 16 == 0, "kernels are compiled for addresses by 16"
    on_cpu, none = packing_module._offsets_on_host(lengths, torch.device("cpu"))
    assert torch.equal(on_cpu, expected) and none is None


def test_operators_and_host_make_the_same_offsets(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    masks = [torch.rand(shape, generator=generator) < 0.7 for shape in ((1, 9), (40, 5), (300, 7), (3, 0), (0, 4))]
    masks += [torch.zeros(4, 3), torch.ones(2, 3), torch.eye(6)]
    few = [Packing.from_keep_mask(mask) for mask in masks]
    monkeypatch.setattr(packing_module, "_MOST_ON_HOST", 0)
    for mask, one, other in zip(masks, few, map(Packing.from_keep_mask, masks), strict=True):
        assert torch.equal(one.cu_seqlens, other.cu_seqlens) and one.cu_seqlens.dtype == other.cu_seqlens.dtype
        assert torch.equal(one.coords, other.coords), mask.shape
        assert (one.max_seqlen, one.min_seqlen) == (other.max_seqlen, other.min_seqlen)


def test_a_trace_computes_offsets_of_other_masks():
    first, second = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])

    def offsets(mask):
        return Packing.from_keep_mask(mask).cu_seqlens

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(offsets, (first,), check_trace=False)
    assert traced(second).tolist() == offsets(second).tolist() == [0, 2, 5]
    for is_before in (False, True):
        assert make_fx(offsets, pre_dispatch=is_before)(first)(second).tolist() == [0, 2, 5]


def test_coords_and_indices_lie_row_by_row():
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]])
    packing = Packing.from_keep_mask(mask)
    assert packing.coords.is_contiguous() and packing.coords.tolist() == [[0, 0], [0, 2], [1, 1], [1, 2]]
    assert packing.indices.is_contiguous() and packing.indices.tolist() == [0, 2, 4, 5]
    assert (packing.max_seqlen, packing.min_seqlen) == (2, 2)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([3, 1, 2], [0, 2, 1]), ([2, 5, 5, 0, 7], [4, 1, 2, 0, 3]), ([4, 4, 4], [0, 1, 2]), ([], []), ([0], [0])],
)
def test_longest_first(lengths, expected):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    order = longest_first(cu_seqlens)
    assert order.tolist() == expected and order.dtype == torch.int32


def test_the_order_is_made_where_it_is_used():
    cu_seqlens = torch.tensor([0, 1, 3], dtype=torch.int32)
    packings = [
        Packing.from_keep_mask(torch.tensor([[1, 0], [1, 1]])),
        Packing.from_cu_seqlens(cu_seqlens, 2, 3),
        Packing.full(2, 2, torch.device("cpu")),
    ]
    assert [packing.order for packing in packings] == [None] * 3


@pytest.mark.gpu
def test_the_order_on_a_gpu():
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 1, 1]], device="cuda")
    from_mask = Packing.from_keep_mask(mask)
    assert from_mask.order.tolist() == [1, 2, 0] and from_mask.order.dtype == torch.int32
    assert from_mask.max_seqlen == 3 and from_mask.indices.tolist() == [0, 3, 4, 5, 7, 8]
    from_offsets = Packing.from_cu_seqlens(from_mask.cu_seqlens, 3, 6)
    assert from_offsets.order.tolist() == [1, 2, 0]
    assert Packing.from_keep_mask(torch.ones_like(mask)).order is None


@pytest.mark.gpu
def test_a_mask_on_a_gpu_costs_one_sync():
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 1, 1]], device="cuda")
    Packing.from_keep_mask(mask)  # warm
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Packing.from_keep_mask(mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in caught if "synchroniz" in str(w.message)]) == 1


def test_coords_of_packed_tokens():
    coords = counted_coords(torch.tensor([0, 2, 2, 3], dtype=torch.int32), 3)
    assert coords.tolist() == [[0, 0], [0, 1], [2, 0]] and coords.dtype == torch.int32
    assert counted_coords(torch.zeros(1, dtype=torch.int32), 0).shape == (0, 2)


KEEP = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]])


@pytest.mark.parametrize("keep_mask", [KEEP, KEEP.bool(), None], ids=["number", "bool", "none"])
@pytest.mark.parametrize("padding_value", [0.0, -100.0])
def test_unpad_then_repad(keep_mask, padding_value):
    x = torch.randn(3, 3, 2)
    packed, packing = unpad(x, keep_mask)
    kept = torch.ones(3, 3, dtype=torch.bool) if keep_mask is None else keep_mask.bool()
    assert torch.equal(packed, x[kept])
    assert packing.cu_seqlens.tolist() == [0, *kept.sum(1).cumsum(0).tolist()]
    padded = repad(packed, packing, padding_value=padding_value)
    assert torch.equal(padded, x.where(kept[..., None], torch.tensor(padding_value)))


def test_unpad_and_repad_are_differentiable():
    x = torch.randn(3, 3, 2, dtype=torch.float64, requires_grad=True)

    def there_and_back(x):
        packed, packing = unpad(x, KEEP)
        return repad(packed.square(), packing, padding_value=7.0)

    assert torch.autograd.gradcheck(there_and_back, (x,))


def test_repad_of_a_batch_that_came_packed():
    cu_seqlens = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    ids = torch.tensor([5, 6, 7])
    padded = repad(ids, Packing.from_cu_seqlens(cu_seqlens, 2, 3), padding_value=-1)
    assert padded.tolist() == [[5, 6], [-1, -1], [7, -1]]


def repad_with(padding_value, dtype=torch.float32):
    return repad(torch.zeros(3, dtype=dtype), Packing.from_keep_mask(KEEP), padding_value=padding_value)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(-math.inf, torch.float16), (True, torch.bool), (-100.0, torch.int64), (np.float32(2), torch.float32)],
    ids=["infinity", "bool", "whole", "numpy"],
)
def test_numbers_that_fill_padding(value, dtype):
    assert repad_with(value, dtype)[0, 2] == value and repad_with(value, dtype).dtype is dtype


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: unpad([1]), TypeError, "x: expected a Tensor, got list"),
        (lambda: unpad(torch.zeros(3)), ValueError, r"x: expected a padded batch \[B, S, \.\.\.\], got shape \[3\]"),
        (lambda: unpad(torch.zeros(3, 2), KEEP), ValueError, r"keep_mask: expected shape \[3, 2\], got \[3, 3\]"),
        (lambda: unpad(torch.zeros(3, 3), KEEP.to("meta")), ValueError, "keep_mask: expected device cpu"),
        (lambda: repad(torch.zeros(2), Packing.from_keep_mask(KEEP)), ValueError, r"x: expected 3 tokens .* \[2\]"),
        (lambda: repad(torch.zeros(3).to("meta"), Packing.from_keep_mask(KEEP)), ValueError, "x: expected device cpu"),
        (
            lambda: repad(torch.zeros(3), KEEP),
            TypeError,
            "packing: expected a Packing, as unpad returns it, got Tensor",
        ),
        (lambda: repad_with(""), TypeError, "padding_value: expected a number, got str"),
        (lambda: repad_with(torch.zeros(1)), TypeError, "padding_value: expected a number, got Tensor"),
        (lambda: repad_with(1e300), ValueError, r"padding_value: expected a number of float32 .*, got 1e\+300"),
        (lambda: repad_with(10**400), ValueError, "padding_value: expected a number of float32"),
        (lambda: repad_with(0.5, torch.int64), ValueError, "padding_value: expected a number of int64 .*, got 0.5"),
        (lambda: repad_with(2**63, torch.int64), ValueError, "padding_value: expected a number of int64"),
        (lambda: repad_with(math.nan, torch.uint8), ValueError, "padding_value: expected a number of uint8"),
        (lambda: repad_with(2, torch.bool), ValueError, "padding_value: expected a number of bool"),
    ],
)
def test_messages_of_unpad_and_repad(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("keep_mask", [KEEP, torch.ones(3, 3)], ids=["padded", "full"])
@pytest.mark.parametrize(
    ("method", "x", "error", "message"),
    [
        ("pack", [1], TypeError, "x: expected a Tensor, got list"),
        ("pack", torch.zeros(3, 4, 2), ValueError, r"x: expected shape \[3, 3, \.\.\.\], got \[3, 4, 2\]"),
        ("pack", torch.zeros(3, 3).to_sparse(), TypeError, "x: expected a dense Tensor, got layout sparse_coo"),
        ("pack", torch.zeros(3, 3, device="meta"), ValueError, "x: expected device cpu"),
        ("unpack", torch.zeros(5, 2), ValueError, r"x: expected shape \[\d, \.\.\.\], got \[5, 2\]"),
        ("unpack", "abc", TypeError, "x: expected a Tensor, got str"),
        ("first_tokens", torch.zeros(2, 2), ValueError, r"x: expected shape \[\d, \.\.\.\], got \[2, 2\]"),
    ],
)
def test_what_a_packing_is_given_fits_it(keep_mask, method, x, error, message):
    with pytest.raises(error, match=message):
        getattr(Packing.from_keep_mask(keep_mask), method)(x)


def test_layouts_beyond_32_bits_are_refused():
    with pytest.raises(ValueError, match=r"batch_size, length: expected fewer than 2\*\*31 tokens, got 65536 .* 65536"):
        Packing.full(2**16, 2**16, torch.device("cpu"))
    offsets = torch.zeros(2, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match=r"num_tokens: expected fewer than 2\*\*31"):
        Packing.from_cu_seqlens(offsets, 3, 2**31)
    for device in ("nowhere", [1], 2**64):
        with pytest.raises(ValueError, match=r"device: expected a torch.device or its name"):
            Packing.full(1, 1, device)


def test_offsets_without_memory_are_refused():
    with pytest.raises(ValueError, match="cu_seqlens: expected a Tensor with memory"):
        Packing.from_cu_seqlens(torch._efficientzerotensor(2, dtype=torch.int32), 3, 0)
