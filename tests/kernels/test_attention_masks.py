"""Dropout in the Triton kernels of attention, in the interpreter: its masks read out of results, bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast import backend
from bert_fast.reference.attention import Attention
from bert_fast.reference.dropout import attention_keep_mask
from bert_fast.testing.attention import AttentionCase

from .attention_grid import OP, arguments_of, run

pytestmark = pytest.mark.interpreter

DTYPES = [torch.float32, torch.float16]


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    return backend.resolve(OP, backend.OpSpec(torch.device("cpu"), torch.float32), "triton")


def coords_of(num_queries: int) -> Tensor:
    """Names up to the largest that 31 bits hold."""
    index = torch.arange(num_queries, dtype=torch.int32)
    return torch.stack([torch.full_like(index, 2**31 - 7), index * 7 + 2**31 - 7 * num_queries - 1], dim=1)


def uniform(
    num_queries: int, num_keys: int, num_heads: int, head_dim: int, p: float, seed: int, dtype: torch.dtype
) -> Attention:
    """Arguments of one sequence whose scores are all 0, so that probabilities show dropout's mask alone."""
    case = AttentionCase((num_queries,), (num_keys,), num_heads, head_dim, dropout_p=p)
    a = arguments_of(case, case.inputs(dtype))
    a = a._replace(softmax_scale=1.0, seed=torch.tensor([seed]), coords_q=coords_of(num_queries))
    return a._replace(q=torch.zeros_like(a.q), k=torch.zeros_like(a.k), v=torch.zeros_like(a.v))


def one_hot(num_tokens: int, num_heads: int, head_dim: int) -> Tensor:
    """[T, A, D]: token t is a unit vector t % D times 2^(t // D), so that a sum of tokens tells which they were."""
    token = torch.arange(num_tokens)
    values = torch.zeros(num_tokens, head_dim)
    values[token, token % head_dim] = 2.0 ** (token // head_dim)
    return values[:, None].expand(-1, num_heads, -1).contiguous()


def tokens_in(sums: Tensor, num_tokens: int) -> Tensor:
    """bool [..., T], which of the tokens of `one_hot` are in sums [..., D]."""
    token = torch.arange(num_tokens)
    return (sums.round().long()[..., token % sums.shape[-1]] >> token // sums.shape[-1]) & 1 == 1


def mask_of_forward(family: Any, a: Attention) -> Tensor:
    """bool [A, Sq, Sk]: which values reach which output."""
    num_keys, num_heads, head_dim = a.k.shape
    out, *_ = family.attention_fwd(a._replace(v=one_hot(num_keys, num_heads, head_dim).to(a.v.dtype)))
    scale = 65536 / (65536 - round(a.dropout_p * 65536))
    return tokens_in(out.float().transpose(0, 1) * num_keys / scale, num_keys)


def masks_of_backward(family: Any, a: Attention) -> dict[str, Tensor]:
    """The same from dv, and from dS in dq and dk: where dP is 1 everywhere, dS is above 0 for what is kept alone."""
    num_queries, num_heads, head_dim = a.q.shape
    num_keys = len(a.k)
    scale = 65536 / (65536 - round(a.dropout_p * 65536))
    dout = one_hot(num_queries, num_heads, head_dim).to(a.q.dtype)
    dv = run(family, a, dout)["dv"]
    masks = {"dv": tokens_in(dv.float().transpose(0, 1) * num_keys / scale, num_queries).transpose(1, 2)}
    ones = torch.zeros_like(a.v)
    ones[..., 0] = 1.0
    found: dict[str, list[Tensor]] = {"dq": [], "dk": []}
    for name, given, size in (("dq", "k", num_keys), ("dk", "q", num_queries)):
        for start in range(0, size, head_dim):
            window = torch.zeros_like(getattr(a, given))
            here = torch.arange(start, min(start + head_dim, size))
            window[here, :, here - start] = 1.0
            spied = a._replace(v=ones, **{given: window})
            result = run(family, spied, ones[:1].expand(num_queries, -1, -1))[name]
            found[name].append((result > 0).transpose(0, 1)[..., : len(here)])
    masks["dq"] = torch.cat(found["dq"], dim=2)
    return masks | {"dk": torch.cat(found["dk"], dim=2).transpose(1, 2)}


@pytest.mark.parametrize("num_keys", [1, 7, 33, 128, 129, 300])
@pytest.mark.parametrize("p", [2**-16, 32767 / 65536, 1 - 2**-16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_draws_the_bits_of_the_reference(kernels, num_keys: int, p: float, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    for seed in (-1, -(2**63)):
        a = uniform(9, num_keys, 2, 64, p, seed, dtype)
        expected = attention_keep_mask(a.seed, a.site, a.coords_q, num_keys, 2, p)
        assert torch.equal(mask_of_forward(kernels, a), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_is_that_of_the_reference(kernels, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """Sixteen thresholds, one bit apart: masks that agree at all of them hide no exchange of values."""
    for bit in range(16):
        p = 2**bit / 65536
        a = uniform(16, 64, 2, 64, p, 2**63 - 1 - bit, dtype)
        expected = attention_keep_mask(a.seed, a.site, a.coords_q, 64, 2, p)
        assert torch.equal(mask_of_forward(kernels, a), expected)


@pytest.mark.parametrize(
    ("dtype", "num_queries", "num_keys"),
    [
        (torch.float32, 1, 40), (torch.float32, 40, 70), (torch.float16, 40, 20), (torch.float16, 128, 128),
        (torch.float16, 70, 130),
    ],
)  # fmt: skip
def test_backward_draws_the_same_bits(kernels, dtype: torch.dtype, num_queries: int, num_keys: int) -> None:  # type: ignore[no-untyped-def]
    a = uniform(num_queries, num_keys, 2, 128 if dtype == torch.float32 else 64, 0.5, 2**40 + 5, dtype)
    expected = attention_keep_mask(a.seed, a.site, a.coords_q, num_keys, 2, 0.5)
    assert not expected.all(2).any(), "dS is 0 where everything is kept"
    for name, mask in masks_of_backward(kernels, a).items():
        assert torch.equal(mask, expected), name


def test_masks_of_a_token_do_not_depend_on_its_batch(kernels) -> None:  # type: ignore[no-untyped-def]
    """A sequence alone, and between others: coords name its queries."""
    alone = uniform(20, 20, 2, 32, 0.5, 3, torch.float32)
    coords = torch.stack([torch.full((20,), 1), torch.arange(20)], dim=1).int()
    case = AttentionCase((9, 20, 3), None, 2, 32, dropout_p=0.5)
    together = arguments_of(case, case.inputs(torch.float32))
    v = torch.cat([torch.zeros(9, 2, 32), one_hot(20, 2, 32), torch.zeros(3, 2, 32)])
    out, *_ = kernels.attention_fwd(together._replace(v=v, seed=alone.seed, softmax_scale=0.0))
    inside = tokens_in(out[9:29].transpose(0, 1) * 10, 20)
    assert torch.equal(inside, mask_of_forward(kernels, alone._replace(coords_q=coords)))
