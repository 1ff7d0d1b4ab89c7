"""Gradients of tables so large that zeros are not written: those of small ones, bit for bit."""

import copy
import pickle
from pathlib import Path

import pytest
import torch

from bert_fast import ops
from bert_fast.torch import embedding as family
from bert_fast.torch._zeros import zeros_on_touch

NUM_ROWS, WIDTH = 40000, 256  # 39 MiB


def gradients(words: torch.Tensor, padding_idx: int | None) -> tuple[torch.Tensor, ...]:
    """Of the table of words, of types and of LayerNorm's weight."""
    generator = torch.Generator().manual_seed(3)
    table, types = (torch.randn(rows, WIDTH, generator=generator).requires_grad_() for rows in (NUM_ROWS, 1))
    weight = torch.ones(WIDTH, requires_grad=True)
    y = ops.embedding(words, table, types, weight, torch.zeros(WIDTH), padding_idx=padding_idx, backend="torch")
    return torch.autograd.grad(y, (table, types, weight), torch.randn(y.shape, generator=generator))


@pytest.mark.parametrize("padding_idx", [None, 7])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("count", [0, 1, 300])
def test_as_of_small_tables(
    count: int, dtype: torch.dtype, padding_idx: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = torch.randint(0, NUM_ROWS, (count,))
    words[count // 2 :][:40] = words[:1]  # a row that many look up
    words[: count // 5] = 7
    calls = []
    monkeypatch.setattr(family, "zeros_on_touch", lambda *given: calls.append(given) or zeros_on_touch(*given))
    found = gradients(words.to(dtype), padding_idx)
    assert len(calls) == 1
    monkeypatch.setattr(family, "_LARGE_TABLE", 2**40)
    expected = gradients(words.to(dtype), padding_idx)
    assert len(calls) == 1 and all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert found[0].is_contiguous() and bool(found[0].any()) == (count > 0)


def resident_bytes() -> int:
    """Memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_pages_are_made_when_they_are_written() -> None:
    before = resident_bytes()
    zeros = zeros_on_touch((2**16, 2**10), torch.float32)  # 256 MiB
    zeros[::4096] = 1.0
    assert resident_bytes() - before < 2**26
    assert zeros.sum() == 16 * 2**10
    del zeros
    for _ in range(2**12):  # 1 TiB in all: it is given back
        zeros_on_touch((2**16, 2**10), torch.float32)


def test_without_room_the_allocator_says_so() -> None:
    with pytest.raises(RuntimeError, match="allocate"):
        zeros_on_touch((2**40, 2**10), torch.float32)


def test_it_is_a_tensor_as_any_other() -> None:
    zeros = zeros_on_touch((300, 5), torch.float64)
    zeros[3] += 2.0
    for other in (copy.deepcopy(zeros), pickle.loads(pickle.dumps(zeros)), zeros.clone().share_memory_()):
        assert torch.equal(other, zeros)
    parameter = torch.nn.Parameter(torch.ones(300, 5, dtype=torch.float64))
    parameter.grad = zeros
    torch.nn.utils.clip_grad_norm_(parameter, 1.0)
    torch.optim.SGD([parameter], 1.0).step()
    assert parameter[3, 0] < 1.0 and (parameter[4] == 1.0).all()
    assert zeros_on_touch((0, 5), torch.float32).shape == (0, 5)
