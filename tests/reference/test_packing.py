"""Padding removed and put back; what attention masks of every rank say."""

import pytest
import torch

from bert_fast.reference.packing import Packing, read_attention_mask

KEEP = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]]).bool()
CPU = torch.device("cpu")


def test_the_example() -> None:
    packing = Packing(KEEP)
    assert packing.cu_seqlens.tolist() == [0, 2, 4, 4] and packing.cu_seqlens.dtype == torch.int32
    assert packing.coords.tolist() == [[0, 0], [0, 1], [1, 1], [1, 2]] and packing.coords.dtype == torch.int32
    assert Packing(KEEP, first_position=5).coords.tolist() == [[0, 5], [0, 6], [1, 6], [1, 7]]
    x = torch.arange(9.0).view(3, 3, 1)
    assert packing.pack(x).flatten().tolist() == [0, 1, 4, 5]
    assert torch.equal(packing.pad(packing.pack(x)), x * KEEP[..., None])
    assert packing.first_tokens(packing.pad(packing.pack(x))).flatten().tolist() == [0, 4, 0]


def test_2d_masks_remove_tokens() -> None:
    for mask in (KEEP, KEEP.long(), KEEP.float() * 0.5):
        keep, bias = read_attention_mask(mask, 3, 3, 3, CPU)
        assert torch.equal(keep, KEEP) and bias is None
    keep, bias = read_attention_mask(None, 3, 2, 4, CPU)
    assert keep.shape == (3, 4) and keep.all() and bias is None


@pytest.mark.parametrize("kind", ["3d", "4d bool", "4d int", "4d added, lowest", "4d added, -inf"])
def test_masks_per_pair_become_biases(kind: str) -> None:
    sees = torch.rand(2, 3, 4) < 0.5
    mask = {
        "3d": sees.long(),
        "4d bool": sees[:, None],
        "4d int": sees[:, None].int(),
        "4d added, lowest": torch.zeros(2, 1, 3, 4).masked_fill(~sees[:, None], torch.finfo(torch.float32).min),
        "4d added, -inf": torch.zeros(2, 1, 3, 4).masked_fill(~sees[:, None], -torch.inf),
    }[kind]
    keep, bias = read_attention_mask(mask, 2, 3, 4, CPU)
    assert keep.shape == (2, 4) and keep.all()
    assert torch.equal(bias, torch.zeros(2, 1, 3, 4).masked_fill(~sees[:, None], -torch.inf))


def test_added_masks_keep_their_values() -> None:
    mask = torch.randn(1, 5, 1, 4)
    assert torch.equal(read_attention_mask(mask, 2, 3, 4, CPU)[1], mask)


@pytest.mark.parametrize("shape", [(4,), (2, 3), (3, 4), (2, 4, 4), (2, 1, 2, 4), (2, 1, 3, 3), (1, 2, 1, 3, 4)])
def test_other_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"attention mask: expected .* B = 2, Sq = 3, Sk = 4, got \[" + f"{shape[0]}"):
        read_attention_mask(torch.ones(shape), 2, 3, 4, CPU)
