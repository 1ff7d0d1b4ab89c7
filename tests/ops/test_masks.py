"""Masks of ops on a device, read off what they give: bit for bit those that the reference draws on a CPU."""

import pytest
import torch
from torch import Tensor

from bert_fast import ops
from bert_fast.reference.dropout import attention_keep_mask, keep_mask

pytestmark = [
    pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]),
    pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32]),
]
SEED, SITE, DROPOUT_P = torch.tensor([2**62 + 11]), 14, 0.1


def coords_of(num_tokens: int) -> Tensor:
    index = torch.arange(num_tokens, dtype=torch.int32)
    return torch.stack((index // 50 + 2**31 - 64, index % 50), dim=1)


@pytest.mark.parametrize("hidden_size", [768, 1001])
def test_of_what_is_added_and_normalised(hidden_size: int, dtype: torch.dtype, device: str) -> None:
    coords = coords_of(131)
    x, residual, dy = (torch.randn(131, hidden_size).to(device, dtype) for _ in range(3))
    weight, bias = (torch.rand(hidden_size).add(0.5).to(device, dtype) for _ in range(2))
    y = ops.dropout_add_layer_norm(
        x.requires_grad_(), residual, weight, bias, dropout_p=DROPOUT_P, seed=SEED.to(device),
        coords=coords.to(device), site=SITE,
    )  # fmt: skip
    [dx] = torch.autograd.grad(y, x, dy)
    assert torch.equal((dx != 0).cpu(), keep_mask(SEED, SITE, coords, hidden_size, DROPOUT_P))


@pytest.mark.parametrize("hidden_size", [768, 1001])
def test_of_embeddings(hidden_size: int, dtype: torch.dtype, device: str) -> None:
    coords = coords_of(131)
    words, types = torch.randint(50, (131,), device=device), torch.zeros(131, dtype=torch.int64, device=device)
    word_table, type_table = (torch.randn(rows, hidden_size).to(device, dtype) for rows in (50, 2))
    weight, bias = (torch.rand(hidden_size).add(0.5).to(device, dtype) for _ in range(2))
    y = ops.embedding(
        words, word_table, type_table, weight, bias, token_type_ids=types, dropout_p=DROPOUT_P, seed=SEED.to(device),
        coords=coords.to(device), site=SITE,
    )  # fmt: skip
    assert torch.equal((y != 0).cpu(), keep_mask(SEED, SITE, coords, hidden_size, DROPOUT_P))


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_of_attentions_probabilities(num_sequences: int, dtype: torch.dtype, device: str) -> None:
    """v is the identity: what comes out is what it was multiplied with."""
    length, heads = 64, 12
    coords = torch.stack(
        (torch.arange(num_sequences).repeat_interleave(length) + 3, torch.arange(length).repeat(num_sequences)), 1
    ).int()
    q, k = (torch.randn(num_sequences * length, heads, length).to(device, dtype) for _ in range(2))
    v = torch.eye(length, device=device, dtype=dtype)[:, None].expand(length, heads, length).repeat(num_sequences, 1, 1)
    offsets = torch.arange(num_sequences + 1, dtype=torch.int32, device=device) * length
    out = ops.attention(
        q, k, v, cu_seqlens_q=offsets, max_seqlen_q=length, dropout_p=DROPOUT_P, seed=SEED.to(device),
        coords_q=coords.to(device), site=SITE,
    )  # fmt: skip
    for found, own in zip((out != 0).cpu().split(length), coords.split(length), strict=True):
        keep = attention_keep_mask(SEED, SITE, own, length, heads, DROPOUT_P)
        assert torch.equal(found.transpose(0, 1), keep)
