"""Attention that returns its probabilities: the reference's, with gradients through both results."""

import pytest
import torch
from torch import Tensor

from bert_fast import ops
from bert_fast.reference.attention import attention_with_probabilities as reference
from bert_fast.testing.attention import AttentionCase
from tests.attention_records import plain_attention

SEED = torch.tensor([12])
CASES = {
    "plain": AttentionCase((3, 0, 5)),
    "everything": AttentionCase((3, 0, 5), bias="BAQK", relative="CP", holes=True, causal=True, dropout_p=0.3),
    "other keys": AttentionCase((3, 2, 0), (5, 0, 4), bias="K", dropout_p=0.3),
    "no sequences": AttentionCase(()),
}


def arguments_of(case: AttentionCase) -> dict:
    (cu_q, cu_k), (coords_q, coords_k) = case.cu_seqlens(), case.coords()
    keys = dict(cu_seqlens_k=cu_k, max_seqlen_k=max(case.lengths_k)) if case.lengths_k is not None else {}
    return keys | dict(
        cu_seqlens_q=cu_q, max_seqlen_q=max(case.lengths, default=0), coords_q=coords_q, coords_k=coords_k,
        causal=case.causal, dropout_p=case.dropout_p, seed=SEED, site=4,
    )  # fmt: skip


def leaves_of(case: AttentionCase, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.requires_grad_() for name, t in case.inputs(dtype).items() if name != "dout"}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_to_the_reference(name: str, dtype: torch.dtype) -> None:
    case, leaves = CASES[name], leaves_of(CASES[name], dtype)
    given = arguments_of(case)
    out, probabilities = ops.attention_with_probabilities(**leaves, **given)
    (cu_q, cu_k), (coords_q, coords_k) = case.cu_seqlens(), case.coords()
    a = plain_attention(
        **leaves, cu_seqlens=cu_q, cu_seqlens_k=cu_k, max_seqlen=5, dropout_p=case.dropout_p, seed=SEED,
        coords_q=coords_q, coords_k=coords_k, site=4, causal=case.causal,
    )  # fmt: skip
    wanted_out, _, wanted = reference(a)
    assert torch.equal(out, wanted_out) and len(probabilities) == len(wanted) == len(case.lengths)
    assert all(torch.equal(one, other) for one, other in zip(probabilities, wanted, strict=True))
    assert {p.dtype for p in probabilities} <= {dtype}
    lengths_k = case.lengths if case.lengths_k is None else case.lengths_k
    shapes = [(case.num_heads, *sizes) for sizes in zip(case.lengths, lengths_k, strict=True)]
    assert [tuple(p.shape) for p in probabilities] == shapes
    if dtype == torch.float64 and len(out):
        torch.testing.assert_close(ops.attention(**leaves, **given, backend="torch"), out)


def test_gradients_through_both_results() -> None:
    case = CASES["everything"]
    leaves = leaves_of(case, torch.float64)

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(leaves, tensors, strict=True))
        out, probabilities = ops.attention_with_probabilities(**named, **arguments_of(case))
        return out, *probabilities

    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


def test_rows_without_keys_have_no_probabilities() -> None:
    q = torch.randn(4, 2, 8, requires_grad=True)
    bias = torch.zeros(1, 1, 4, 4)
    bias[:, :, 1] = -torch.inf
    cu_seqlens = torch.tensor([0, 4], dtype=torch.int32)
    out, (p,) = ops.attention_with_probabilities(q, q, q, cu_seqlens_q=cu_seqlens, max_seqlen_q=4, bias=bias)
    assert not p[:, 1].any() and not out[1].any()
    torch.testing.assert_close(p[:, [0, 2, 3]].sum(-1), torch.ones(2, 3))
    (gradient,) = torch.autograd.grad(p.square().sum() + out.sum(), q)
    assert gradient.isfinite().all()


def test_bad_arguments_are_named_here_too() -> None:
    q, cu_seqlens = torch.randn(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"max_seqlen_q: expected at least the longest sequence \(4\), got 3"):
        ops.attention_with_probabilities(q, q, q, cu_seqlens_q=cu_seqlens, max_seqlen_q=3)
    with pytest.raises(ValueError, match="bias: expected at least"):
        ops.attention_with_probabilities(q, q, q, cu_seqlens_q=cu_seqlens, max_seqlen_q=4, bias=torch.zeros(1, 1, 3, 3))


def test_autocast_casts_operands_alone() -> None:
    """The products within are the reference's own, in fp32."""
    case = CASES["everything"]
    leaves, given = case.inputs(torch.float32), arguments_of(case)
    del leaves["dout"]
    with torch.autocast("cpu", torch.bfloat16):
        out, probabilities = ops.attention_with_probabilities(**leaves, **given)
    cast = {name: t.bfloat16() if name in "qkv" else t for name, t in leaves.items()}
    wanted_out, wanted = ops.attention_with_probabilities(**cast, **given)
    assert out.dtype == torch.bfloat16 and torch.equal(out, wanted_out)
    assert all(torch.equal(one, other) for one, other in zip(probabilities, wanted, strict=True))
