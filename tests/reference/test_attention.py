"""Attention: gradcheck of the explicit backward with every extra, against torch's own attention, and its edges."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bert_fast.reference.attention import Attention, attention_bwd, attention_fwd, attention_with_probabilities
from bert_fast.reference.dropout import attention_keep_mask, dropout_scale
from bert_fast.testing.explicit import explicit_function
from bert_fast.testing.tolerances import tolerance
from tests.attention_records import plain_attention

SEED = torch.tensor([-0x1234_5678_9ABC_DEF], dtype=torch.int64)
SITE = 9
HEADS, HEAD_DIM = 2, 3
SCALE = 1 / math.sqrt(HEAD_DIM)
ROWS = 4  # rows of the batch that the ragged sequences below come from
LENGTH = 6  # and its padded length
EXTRAS = ("bias", "relative_keys", "relative_queries")
GRADIENTS = ("q", "k", "v", *EXTRAS)


def _rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _pack(kept_positions: list[list[int]]) -> tuple[Tensor, Tensor]:
    """cu_seqlens and coords of the sequences whose kept positions are given, one list per row."""
    lengths = [0, *(len(row) for row in kept_positions)]
    coords = [(row, position) for row, positions in enumerate(kept_positions) for position in positions]
    return (
        torch.tensor(lengths).cumsum(0).int(),
        torch.tensor(coords, dtype=torch.int32).reshape(-1, 2),
    )


# padding on the right, none, an empty sequence, padding on the left with a hole
RAGGED = _pack([[0, 1, 2], [0, 1, 2, 3, 4, 5], [], [2, 4, 5]])
# the same in few tokens: numeric derivatives take as long as there are numbers
FEW = _pack([[0, 1], [0, 1, 2], [], [2, 5]])
# keys of another length: more, fewer, some without queries, none at all for the last
RAGGED_KEYS = _pack([[0, 1, 2, 3], [1, 2], [0, 3], []])
BIAS = {
    "per pair": (ROWS, HEADS, LENGTH, LENGTH),
    "per key": (ROWS, 1, 1, LENGTH),
    "shared by rows": (1, HEADS, LENGTH, LENGTH),
    "one number": (1, 1, 1, 1),
}


def _attention(
    q: Tensor, k: Tensor, v: Tensor, packing: tuple = RAGGED, keys: tuple | None = None, **others: Any
) -> Attention:
    """Attention within packed sequences; keys: their packing, where it is not that of the queries."""
    (cu_q, coords_q), (cu_k, coords_k) = packing, keys or packing
    return plain_attention(
        q, k, v, cu_q, LENGTH, cu_seqlens_k=cu_k, seed=SEED, coords_q=coords_q, coords_k=coords_k, site=SITE, **others
    )


def _gradcheck(packing=FEW, keys=None, extras=(None, None, None), **others) -> None:
    def forward(*tensors):
        q, k, v, *extras = (None if t is None else t.detach() for t in tensors)
        a = _attention(q, k, v, packing, keys, **dict(zip(EXTRAS, extras, strict=True)), **others)
        out, lse, _ = attention_fwd(a)
        return (out,), (a, out, lse)

    def backward(saved, dout):
        a, out, lse = saved
        wants = {name for name in EXTRAS if getattr(a, name) is not None}
        made = attention_bwd(a, dout, out, lse, None, wants)
        return [made.get(name) for name in GRADIENTS]

    num_queries, num_keys = int(packing[0][-1]), int((keys or packing)[0][-1])
    q, k, v = _rand(num_queries, HEADS, HEAD_DIM), _rand(num_keys, HEADS, HEAD_DIM), _rand(num_keys, HEADS, HEAD_DIM)
    assert torch.autograd.gradcheck(explicit_function(forward, backward), (q, k, v, *extras))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_gradcheck_plain(dropout_p: float, causal: bool) -> None:
    _gradcheck(dropout_p=dropout_p, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_gradcheck_other_keys(dropout_p: float, causal: bool) -> None:
    _gradcheck(keys=RAGGED_KEYS, dropout_p=dropout_p, causal=causal)


@pytest.mark.parametrize("shape", BIAS.values(), ids=BIAS)
def test_gradcheck_bias(shape: tuple[int, ...]) -> None:
    _gradcheck(extras=(_rand(*shape), None, None))


def _tables(letters: str, length: int = LENGTH) -> list[Tensor | None]:
    """relative_keys where "C" is asked for and relative_queries where "P" is, of tokens up to length - 1 apart."""
    return [_rand(2 * length - 1, HEADS, HEAD_DIM) if letter in letters else None for letter in "CP"]


@pytest.mark.parametrize("letters", ["C", "P", "CP"])
def test_gradcheck_relative_positions(letters: str) -> None:
    _gradcheck(extras=(None, *_tables(letters)))


def test_gradcheck_everything_at_once() -> None:
    extras = _rand(ROWS, HEADS, LENGTH, LENGTH), *_tables("CP")
    _gradcheck(keys=RAGGED_KEYS, dropout_p=0.3, causal=True, extras=extras)


@pytest.mark.parametrize("letters", ["C", "P", "CP"])
def test_equals_deberta_written_out(letters: str) -> None:
    """Every pair of tokens by itself: q_i . C[d] and k_j . P[d] of the head, at d = p_i - r_j."""
    cu, coords = RAGGED
    q, k, v = (_rand(int(cu[-1]), HEADS, HEAD_DIM).detach() for _ in range(3))
    c, p = _tables(letters)
    out, *_ = attention_fwd(_attention(q, k, v, relative_keys=c, relative_queries=p))
    for start, end in itertools.pairwise(cu.tolist()):
        for i, head in itertools.product(range(start, end), range(HEADS)):
            scores = []
            for j in range(start, end):
                row = int(coords[i, 1] - coords[j, 1]) + LENGTH - 1
                score = q[i, head] @ k[j, head]
                score = score if c is None else score + q[i, head] @ c[row, head]
                scores.append(score if p is None else score + k[j, head] @ p[row, head])
            expected = (torch.stack(scores) * SCALE).softmax(0) @ v[start:end, head]
            torch.testing.assert_close(out[i, head], expected)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("letters", ["", "C", "P", "CP"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_gradcheck_of_all_combinations(has_bias: bool, letters: str, causal: bool, dropout_p: float) -> None:
    """Small ones, dropout among them; those above are larger."""
    _gradcheck(
        _pack([[0], [1, 2]]),
        _pack([[0, 1], [1]]),
        dropout_p=dropout_p,
        causal=causal,
        extras=(_rand(2, 1, 3, 3) if has_bias else None, *_tables(letters, 3)),
    )


def test_no_gradient_is_made_that_is_not_wanted() -> None:
    q, k, v = torch.randn(3, 12, HEADS, HEAD_DIM).unbind()
    a = _attention(q, k, v, **dict(zip(EXTRAS, (torch.randn(1, 1, 1, 1), *_tables("CP")), strict=True)))
    out, lse, mask = attention_fwd(a)
    for size in range(len(EXTRAS) + 1):
        for wants in itertools.combinations(EXTRAS, size):
            made = attention_bwd(a, torch.ones_like(out), out, lse, mask, {*wants})
            assert made.keys() == {"q", "k", "v", *wants}


def test_explicit_backward_equals_autograd_with_masked_entries() -> None:
    """gradcheck cannot step over -inf; autograd through the forward can, and a query with no key left gives no NaN."""
    bias = torch.randn(ROWS, 1, LENGTH, LENGTH, dtype=torch.float64)
    bias[0, :, 1] = -torch.inf  # query 1 of row 0: nothing left
    bias[1, :, :, 2] = -torch.inf
    bias.requires_grad_()
    q, k, v = (_rand(int(RAGGED[0][-1]), HEADS, HEAD_DIM) for _ in range(3))
    a = _attention(q, k, v, dropout_p=0.3, bias=bias)
    out, lse, mask = attention_fwd(a)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v, bias), dout)
    with torch.no_grad():
        made = attention_bwd(a, dout, out, lse, mask, {"bias"})
    for name, wanted in zip(("q", "k", "v", "bias"), expected, strict=True):
        assert torch.isfinite(wanted).all()
        torch.testing.assert_close(made[name], wanted)
    assert not out[1].any() and (lse[:, 1] == -torch.inf).all()
    assert not made["q"][1].any() and not made["bias"][0, :, 1].any() and not made["bias"][1, :, :, 2].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_equals_padded_softmax_attention(dropout_p: float, causal: bool) -> None:
    """Written once more on the padded batch, with torch's softmax and logsumexp."""
    cu, coords = RAGGED
    q, k, v = (_rand(int(cu[-1]), HEADS, HEAD_DIM).detach() for _ in range(3))
    out, lse, _ = attention_fwd(_attention(q, k, v, dropout_p=dropout_p, causal=causal))
    rows, positions = coords.long().unbind(1)

    def padded(x: Tensor) -> Tensor:
        return torch.zeros(ROWS, LENGTH, HEADS, HEAD_DIM, dtype=x.dtype).index_put((rows, positions), x).transpose(1, 2)

    removed = torch.ones(ROWS, LENGTH, dtype=torch.bool).index_put((rows, positions), torch.tensor(False))
    scores = (padded(q) @ padded(k).transpose(2, 3) * SCALE).masked_fill(removed[:, None, None], -torch.inf)
    if causal:
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)
    names = torch.cartesian_prod(torch.arange(ROWS), torch.arange(LENGTH)).int()
    by_ordinal = torch.stack([attention_keep_mask(SEED, SITE, n, LENGTH, HEADS, dropout_p) for n in names.chunk(ROWS)])
    ordinals = ((~removed).long().cumsum(1) - 1).clamp(min=0)  # of the keys that stand in these columns
    keep = by_ordinal.gather(3, ordinals[:, None, None].expand_as(by_ordinal))
    weights = scores.softmax(-1) * keep * dropout_scale(dropout_p)
    expected = (weights @ padded(v)).transpose(1, 2)[rows, positions]
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, scores.logsumexp(-1).transpose(1, 2)[rows, positions].T)


def test_equals_scaled_dot_product_attention() -> None:
    q, k, v = (_rand(2 * 5, HEADS, HEAD_DIM) for _ in range(3))
    cu = torch.tensor([0, 5, 10], dtype=torch.int32)
    a = plain_attention(q, k, v, cu, 5, causal=True)
    out, lse, mask = attention_fwd(a)
    batched = [x.unflatten(0, (2, 5)).transpose(1, 2) for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*batched, is_causal=True).transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    with torch.no_grad():
        made = attention_bwd(a, dout, out, lse, mask, set())
    for name, want in zip("qkv", wanted, strict=True):
        torch.testing.assert_close(made[name], want)


def test_without_coords_tokens_are_counted_from_zero() -> None:
    cu, coords = _pack([[0, 1, 2], [], [0, 1]])
    q, k, v = torch.randn(3, 5, HEADS, HEAD_DIM).unbind()
    extras = dict(zip(EXTRAS, (torch.randn(3, HEADS, 3, 3), *_tables("CP", 3)), strict=True))
    a = _attention(q, k, v, (cu, coords), causal=True, **extras)
    named, counted = attention_fwd(a), attention_fwd(a._replace(coords_q=None, coords_k=None))
    assert torch.equal(named[0], counted[0]) and torch.equal(named[1], counted[1])


def test_sequences_do_not_see_each_other() -> None:
    q, k, v = torch.randn(3, 12, HEADS, HEAD_DIM).unbind()
    a = _attention(q, k, v, dropout_p=0.1)
    before, *_ = attention_fwd(a)
    for x in (q, k, v):
        x[3:9] += 1.0  # the second sequence
    after, *_ = attention_fwd(a)
    others = torch.tensor([0, 1, 2, 9, 10, 11])
    assert torch.equal(before[others], after[others]) and not torch.equal(before[3:9], after[3:9])


def test_rows_are_those_of_the_coords() -> None:
    """Some sequences of a batch, in another order, find their own biases by the rows in their coords."""
    coords = RAGGED[1]
    q, k, v = torch.randn(3, 12, HEADS, HEAD_DIM, dtype=torch.float64).unbind()
    bias = torch.randn(ROWS, HEADS, LENGTH, LENGTH)
    whole, whole_lse, _ = attention_fwd(_attention(q, k, v, dropout_p=0.3, bias=bias))
    chosen = torch.tensor([9, 10, 11, 0, 1, 2])  # the last sequence, then the first
    some = torch.tensor([0, 3, 6], dtype=torch.int32), coords[chosen]
    part, lse, _ = attention_fwd(_attention(q[chosen], k[chosen], v[chosen], some, dropout_p=0.3, bias=bias))
    torch.testing.assert_close(part, whole[chosen])
    torch.testing.assert_close(lse, whole_lse[:, chosen])


def test_probabilities_are_those_multiplied_with_v() -> None:
    q, k, v = torch.randn(3, 12, HEADS, HEAD_DIM).unbind()
    a = _attention(q, k, v, dropout_p=0.3)
    out, lse, probabilities = attention_with_probabilities(a)
    same_out, same_lse, _ = attention_fwd(a)
    assert torch.equal(out, same_out) and torch.equal(lse, same_lse)
    assert [tuple(p.shape) for p in probabilities] == [(2, 3, 3), (2, 6, 6), (2, 0, 0), (2, 3, 3)]
    torch.testing.assert_close(out[3:9], (probabilities[1] @ v[3:9].transpose(0, 1)).transpose(0, 1))


def test_gradcheck_through_probabilities() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        out, _, probabilities = attention_with_probabilities(_attention(q, k, v, bias=bias))
        return out, *probabilities

    q, k, v = (_rand(12, HEADS, HEAD_DIM) for _ in range(3))
    assert torch.autograd.gradcheck(function, (q, k, v, _rand(ROWS, 1, 1, LENGTH)))


@pytest.mark.parametrize("num_keys", [0, 4])
@pytest.mark.parametrize("num_queries", [0, 3])
def test_nothing_to_attend(num_queries: int, num_keys: int) -> None:
    q, k, v = (torch.randn(n, HEADS, HEAD_DIM) for n in (num_queries, num_keys, num_keys))
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (num_queries, num_keys))
    coords_q, coords_k = (torch.stack([torch.zeros(n), torch.arange(n)], 1).int() for n in (num_queries, num_keys))
    a = _attention(q, k, v, (cu_q, coords_q), (cu_k, coords_k), dropout_p=0.1)
    a = a._replace(**dict(zip(EXTRAS, (torch.randn(1, 1, 4, 4), *_tables("CP", 4)), strict=True)))
    out, lse, mask = attention_fwd(a)
    made = attention_bwd(a, torch.ones_like(out), out, lse, mask, {*EXTRAS})
    if num_keys == 0 or num_queries == 0:
        assert not any(made[name].any() for name in EXTRAS)
    assert out.shape == q.shape and lse.shape == (HEADS, num_queries)
    if num_keys == 0:
        assert not out.any() and (lse == -torch.inf).all() and not made["q"].any()
    if num_queries == 0:
        assert not made["k"].any() and not made["v"].any()


def test_no_sequences() -> None:
    empty = torch.randn(0, HEADS, HEAD_DIM)
    out, lse, _ = attention_fwd(_attention(empty, empty, empty, (torch.zeros(1, dtype=torch.int32), None)))
    assert out.shape == empty.shape and lse.shape == (HEADS, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    q, k, v, dout = torch.randn(4, 12, HEADS, HEAD_DIM).to(dtype).unbind()
    a = _attention(q, k, v, dropout_p=0.1, bias=torch.randn(ROWS, 1, LENGTH, LENGTH))
    a = a._replace(relative_keys=torch.randn(2 * LENGTH - 1, HEADS, HEAD_DIM))
    a = a._replace(relative_queries=torch.randn_like(a.relative_keys))
    out, lse, mask = attention_fwd(a)
    truth, *_ = attention_fwd(a._replace(q=q.double(), k=k.double(), v=v.double()))
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(out.double(), truth, rtol=torch.finfo(dtype).eps, atol=tolerance("", "", dtype).floor)
    made = attention_bwd(a, dout, out, lse, mask, {*EXTRAS})
    expected = dict.fromkeys("qkv", dtype) | dict.fromkeys(EXTRAS, torch.float32)
    assert {name: gradient.dtype for name, gradient in made.items()} == expected


def test_scores_of_any_size() -> None:
    """exp neither overflows nor loses its row where scores are in the thousands."""
    cu = torch.tensor([0, 4], dtype=torch.int32)
    q, k, v = torch.randn(3, 4, HEADS, HEAD_DIM).unbind()
    out, lse, _ = attention_fwd(_attention(q * 1e3, k * 1e3, v, (cu, None)))
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
