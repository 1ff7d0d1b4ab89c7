"""The reference's mask of attention: bits by its definition, drawn for all heads together."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bert_fast.reference import dropout as reference

SEED = torch.tensor([-(2**61) + 12345])
SITE = 9


def names(num_queries: int) -> torch.Tensor:
    return torch.stack((torch.full((num_queries,), 3), 2 * torch.arange(num_queries)), 1).int()


def by_definition(num_queries: int, num_keys: int, num_heads: int, p: float) -> torch.Tensor:
    """Head by head and key by key, as the module's docstring has it."""
    row, position = names(num_queries).long().unbind(1)
    found = torch.zeros(num_heads, num_queries, num_keys, dtype=torch.bool)
    for head in range(num_heads):
        for n in range(num_keys):
            block = torch.tensor((head * reference.HEAD_STRIDE + n // 32 * 32) // 8 + n % 8 // 2)
            words = reference.philox4x32((block, position, row, torch.tensor(SITE)), SEED)
            value = 2 * (n % 32 // 8) + n % 2
            bits = words[value // 2] >> (16 * (value % 2)) & 0xFFFF
            found[head, :, n] = bits >= reference.dropout_threshold(p)
    return found


@pytest.mark.parametrize(("num_queries", "num_keys", "num_heads"), [(3, 70, 4), (5, 32, 1), (1, 1, 3), (2, 33, 2)])
@pytest.mark.parametrize("counters", [1, 48, 2**22])
def test_the_bits_of_attentions_mask(
    num_queries: int, num_keys: int, num_heads: int, counters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_MOST_COUNTERS", counters)  # of heads in several parts, too
    keep = reference.attention_keep_mask(SEED, SITE, names(num_queries), num_keys, num_heads, 0.3)
    assert torch.equal(keep, by_definition(num_queries, num_keys, num_heads, 0.3))
    assert keep.is_contiguous()


@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 5), (5, 0), (0, 0)])
def test_an_empty_mask(num_queries: int, num_keys: int) -> None:
    keep = reference.attention_keep_mask(SEED, SITE, names(num_queries), num_keys, 2, 0.3)
    assert keep.shape == (2, num_queries, num_keys) and keep.dtype == torch.bool


class Calls(TorchDispatchMode):
    """Counts the operators that run."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_more_heads_take_no_more_operators() -> None:
    counts = []
    for num_heads in (1, 16):
        with Calls() as calls:
            reference.attention_keep_mask(SEED, SITE, names(128), 128, num_heads, 0.1)
        counts.append(calls.count)
    assert counts[0] == counts[1] < 300
