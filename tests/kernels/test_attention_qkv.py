"""The Triton kernels of attention writing dq, dk and dv into one tensor, in the interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast import backend, ops
from bert_fast.reference.attention import Attention
from bert_fast.testing.attention import SEED, SITE, AttentionCase
from bert_fast.testing.traffic import traffic

from .attention_grid import OP, arguments_of, check, in_fused_buffer, run

pytestmark = [
    pytest.mark.interpreter,
    # Infinities and NaN that tests put there: NumPy says so, a GPU does not.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning"),
]

DTYPES = [torch.float32, torch.float16]
CASES = {
    "short": AttentionCase((9, 0, 33), num_heads=3, head_dim=24, dropout_p=0.1),
    "one token": AttentionCase((1,), num_heads=1, head_dim=16),
    "tiled": AttentionCase((150,), num_heads=2, head_dim=80, dropout_p=0.1),
    "causal": AttentionCase((20, 5), head_dim=16, causal=True, holes=True),
    "extras": AttentionCase((7, 12), head_dim=16, bias="BAQK", removes=True, relative="C"),
    "no tokens": AttentionCase((0, 0)),
}


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    return backend.resolve(OP, backend.OpSpec(torch.device("cpu"), torch.float32), "triton")


class IntoOne:
    """A back-end whose backward is asked to write into one tensor, which holds NaN before."""

    def __init__(self, family: Any) -> None:
        self.family, self.attention_fwd = family, family.attention_fwd
        self.dqkv: Tensor | None = None

    def attention_bwd(self, a: Attention, *upstream: Any) -> dict[str, Tensor]:
        self.dqkv = a.q.new_full((a.q.shape[0], 3, *a.q.shape[1:]), torch.nan)
        made = self.family.attention_bwd(a, *upstream, self.dqkv)
        for name, part in zip("qkv", self.dqkv.unbind(1), strict=True):
            assert made[name].data_ptr() == part.data_ptr() and made[name].stride() == part.stride()
        return made


@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_three_tensors(kernels, name: str) -> None:  # type: ignore[no-untyped-def]
    dtype = DTYPES[list(CASES).index(name) % len(DTYPES)]
    inputs = in_fused_buffer(CASES[name].inputs(dtype))
    a = arguments_of(CASES[name], inputs)
    expected = run(kernels, a, inputs["dout"])
    results = run(IntoOne(kernels), a, inputs["dout"])
    assert results.keys() == expected.keys()
    assert all(torch.equal(results[key], expected[key]) for key in expected)


def test_sequences_too_long_for_offsets_of_32_bits(kernels, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    case = CASES["short"]
    inputs = in_fused_buffer(case.inputs(torch.float32))
    a = arguments_of(case, inputs)
    expected = run(kernels, a, inputs["dout"])
    monkeypatch.setattr(kernels, "_MAX_INT32", 33 * 3 * 3 * 24 - 1)  # one less than the longest sequence reaches
    results = run(IntoOne(kernels), a, inputs["dout"])
    assert all(torch.equal(results[key], expected[key]) for key in expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_op_against_the_reference(kernels, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    case = CASES["short"]
    inputs = case.inputs(dtype)
    check(kernels, case, dtype, inputs)  # what follows is the same to the bit
    expected = run(kernels, arguments_of(case, inputs), inputs["dout"])
    qkv = torch.stack([inputs[name] for name in "qkv"], dim=1).requires_grad_()
    out = ops.attention_qkv(
        qkv, cu_seqlens=case.cu_seqlens()[0], max_seqlen=33, dropout_p=case.dropout_p, seed=SEED,
        coords=case.coords()[0], site=SITE, backend="triton",
    )  # fmt: skip
    (dqkv,) = torch.autograd.grad(out, qkv, inputs["dout"])
    assert torch.equal(out, expected["out"]) and dqkv.is_contiguous()
    assert all(torch.equal(part, expected[f"d{name}"]) for name, part in zip("qkv", dqkv.unbind(1), strict=True))


def test_every_gradient_is_written_once(kernels) -> None:  # type: ignore[no-untyped-def]
    case = AttentionCase((40, 24), num_heads=2, head_dim=32, dropout_p=0.1)
    inputs = in_fused_buffer(case.inputs(torch.float16))
    a = arguments_of(case, inputs)
    out, lse, mask = kernels.attention_fwd(a)
    family = IntoOne(kernels)
    with traffic() as backward:
        family.attention_bwd(a, inputs["dout"], out, lse, mask, set())
    assert family.dqkv is not None and backward.times_stored(family.dqkv) == {1}
