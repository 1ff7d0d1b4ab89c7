"""Removing padding and putting it back."""

import pytest
import torch

from bert_fast.ops import Packing


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
