"""A bias on the scores by itself, which back-end "torch" takes in its C++ routine on the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bert_fast import native, ops
from bert_fast.testing.attention import AttentionCase
from bert_fast.testing.compare import assert_close_to_truth

LETTERS = ["", "B", "A", "K", "Q", "BK", "AQ", "QK", "AQK", "BQK", "BAQK"]
LAYOUTS = {
    "ragged": dict(lengths=(5, 0, 1, 37)),
    "holes": dict(lengths=(5, 1, 33), holes=True, order=(2, 0, 1)),
    "other keys": dict(lengths=(5, 2, 0, 7), lengths_k=(70, 0, 4, 9), holes=True),
    "cached": dict(lengths=(1, 2, 1), lengths_k=(9, 5, 30), cached=True),
    "one token": dict(lengths=(1,)),
    "no token": dict(lengths=(0, 0)),
}


def check(case: AttentionCase) -> None:
    actual, plain, truth = case.run("torch", torch.float32), case.plain(torch.float32), case.truth(torch.float32)
    assert actual.keys() == plain.keys() == truth.keys() and "dbias" in actual
    for name in actual:
        assert_close_to_truth("attention", name, actual[name], plain[name], truth[name])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("letters", LETTERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_shape(layout: str, letters: str, causal: bool) -> None:
    for removes, dropout_p in ((False, 0.0), (True, 0.0), (True, 0.3)):
        arguments: dict[str, Any] = LAYOUTS[layout]
        check(
            AttentionCase(**arguments, bias=letters, removes=removes, causal=causal, dropout_p=dropout_p, head_dim=40)
        )


def attend(q: Tensor, bias: Tensor, dropout_p: float = 0.0) -> tuple[Tensor, ...]:
    """out and the gradients of q, as queries, keys and values at once, and of the bias; sequences of 30 tokens."""
    q, bias = q.detach().requires_grad_(), bias.detach().requires_grad_()
    cu_seqlens = torch.arange(0, len(q) + 1, 30, dtype=torch.int32)
    out = ops.attention(
        q, q, q, cu_seqlens_q=cu_seqlens, max_seqlen_q=30, bias=bias, dropout_p=dropout_p, seed=torch.tensor([5]),
        coords_q=torch.stack((torch.arange(len(q)) // 30, torch.arange(len(q)) % 30), 1).int(), backend="torch",
    )  # fmt: skip
    weight = torch.linspace(-1.0, 1.0, out.numel()).view_as(out)
    return out.detach(), *torch.autograd.grad(out, (q, bias), weight.to(out.dtype))


def test_the_routine_is_taken_and_sees_the_bias_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    library, seen = native.load(), []
    if library is None:
        pytest.skip(str(native.unavailable_reason()))

    class Recorder:
        def attention_fwd(self, *arguments: Any, **extras: Any) -> None:
            seen.extend(extras.values())
            library.attention_fwd(*arguments, **extras)

        def attention_bwd(self, *arguments: Any, dbias: int, **extras: Any) -> None:
            seen.append(dbias != 0)
            library.attention_bwd(*arguments, dbias=dbias, **extras)

    monkeypatch.setattr("bert_fast.torch.attention.routines", lambda *_: Recorder())
    bias = torch.randn(1, 2, 30, 30).transpose(2, 3).expand(3, -1, -1, -1)
    attend(torch.randn(90, 2, 16), bias)
    assert seen == [bias.data_ptr(), (3, 2, 30, 30), (0, 900, 1, 30), True]


@pytest.mark.parametrize(
    "shape", [(3, 2, 30, 30), (1, 2, 30, 30), (1, 1, 30, 30), (3, 1, 1, 30), (1, 2, 1, 1)], ids=str
)
def test_threads_change_no_bit(shape: tuple[int, ...]) -> None:
    q, bias = torch.randn(90 * 4, 2, 16), torch.randn(shape).repeat(4 if shape[0] == 3 else 1, 1, 1, 1)
    num_threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5, 1):
            torch.set_num_threads(count)
            results.append(attend(q, bias, 0.2))
    finally:
        torch.set_num_threads(num_threads)
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], result, strict=True))


class Largest(TorchDispatchMode):
    """The largest number of elements in the memory of any result."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_what_is_broadcast_is_not_written_out(dtype: torch.dtype) -> None:
    bias = torch.randn(1, 1, 1, 30, dtype=dtype).expand(200, 4, 30, -1)
    q = torch.randn(60, 4, 8)
    arguments: dict[str, Any] = dict(cu_seqlens_q=torch.tensor([0, 30, 60], dtype=torch.int32), max_seqlen_q=30)
    expected = ops.attention(q, q, q, **arguments, bias=bias[:1, :1, :1].float())
    with Largest() as largest:
        out = ops.attention(q, q, q, **arguments, bias=bias)
    assert torch.equal(out, expected) and largest.elements <= q.numel()


def test_strides_change_no_bit_of_gradients() -> None:
    q = torch.randn(90, 2, 16)
    for bias in (
        torch.randn(1, 2, 30, 30).expand(3, -1, -1, -1),
        torch.randn(3, 2, 30, 1).expand(-1, -1, -1, 30),
        torch.randn(30, 30, 2).permute(2, 0, 1).unsqueeze(0),
        torch.randn(3, 2, 40, 64)[:, :, 5:35, 1:61:2],
    ):
        results = attend(q, bias, 0.1), attend(q, bias.contiguous(), 0.1)
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
        assert results[0][2].shape == bias.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_gradients_have_the_dtype_of_the_bias(dtype: torch.dtype) -> None:
    q, bias = torch.randn(90, 2, 16), torch.randn(1, 2, 30, 30).to(dtype)
    found, wanted = attend(q, bias), attend(q, bias.float())
    assert found[2].dtype == dtype and torch.equal(found[2], wanted[2].to(dtype))
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("size", [1e4, 1e9, 1e30, float(torch.finfo(torch.float32).max)], ids=str)
def test_huge_values_remove_keys(size: float) -> None:
    """What masks of 4 dimensions hold: 0 and a very small number; a row of nothing else is the mean of all values."""
    q, hidden = torch.randn(90, 2, 16), torch.rand(3, 1, 30, 30) < 0.4
    hidden[..., 0] = False
    shape = hidden.shape
    found = attend(q, torch.zeros(shape).masked_fill(hidden, -size))
    for one, other in zip(found, attend(q, torch.zeros(shape).masked_fill(hidden, -torch.inf)), strict=True):
        torch.testing.assert_close(one, other)
    hidden[1, :, 7] = True
    out, dq, dbias = attend(q, torch.zeros(shape).masked_fill(hidden, -size))
    if size > 1e6:  # beside which the scores of that row vanish
        torch.testing.assert_close(out[37], q[30:60].mean(0))
        torch.testing.assert_close(dbias[1, :, 7].sum(), torch.tensor(0.0))
    assert all(x.isfinite().all() for x in (out, dq, dbias))


def test_a_bias_that_is_not_a_number_is_no_silent_zero() -> None:
    bias = torch.zeros(1, 1, 30, 30)
    bias[..., 3, 4] = torch.nan
    out, _, _ = attend(torch.randn(30, 2, 16), bias)
    assert out[3].isnan().all() and out[:3].isfinite().all() and out[4:].isfinite().all()
