"""Attention of a padded batch: the packed call in other clothes, and nothing of what padding holds."""

import importlib
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast import ops
from bert_fast.reference.dropout import attention_keep_mask
from bert_fast.testing.attention import AttentionCase

SEED = torch.tensor([2**61 - 9])
HEADS, HEAD_DIM = 2, 16
OF_TOKENS = ("q", "k", "v", "dout")
# right padding, left padding, a hole, nothing, everything
KEEP = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 1, 1, 0], [0] * 5, [1] * 5]).bool()
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": dict(dropout_p=0.3, seed=SEED, site=7),
    "causal": dict(causal=True),
    "bias": dict(bias=torch.randn(5, HEADS, 5, 5)),
    "bias of keys": dict(bias=torch.randn(5, 1, 1, 5)),
    "relative": dict(relative_keys=torch.randn(9, HEADS, HEAD_DIM), relative_queries=torch.randn(9, HEADS, HEAD_DIM)),
}


def leaves(*shape: int) -> list[Tensor]:
    return [torch.randn(shape).requires_grad_() for _ in range(3)]


def poisoned(x: Tensor, keep: Tensor) -> Tensor:
    """x with NaN where nothing is kept, as a new leaf."""
    return torch.where(keep[..., None, None], x.detach(), torch.nan).requires_grad_()


def textbook(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, **features: Any) -> Tensor:
    """The same on the padded batch with PyTorch's own operators; padding must hold numbers."""
    length = keep.shape[1]
    position = torch.arange(length)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, A, S, D]
    scores = q @ k.transpose(2, 3)
    if "relative_keys" in features:
        rows = position[:, None] - position + length - 1
        c, p = features["relative_keys"][rows], features["relative_queries"][rows]
        scores = scores + torch.einsum("basd,stad->bast", q, c) + torch.einsum("batd,stad->bast", k, p)
    scores = scores * HEAD_DIM**-0.5 + features.get("bias", torch.zeros(()))
    if features.get("causal"):
        scores = scores.masked_fill(position > position[:, None], -torch.inf)
    scores = scores.masked_fill(~keep[:, None, None, :], -torch.inf)
    scores = scores.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)  # else NaN; is padding, see below
    return (scores.softmax(-1) @ v).transpose(1, 2) * keep[..., None, None]


@pytest.mark.parametrize("name", [name for name in FEATURES if name != "dropout"])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_equals_the_textbook_whatever_padding_holds(name: str, backend: str) -> None:
    tensors = leaves(*KEEP.shape, HEADS, HEAD_DIM)
    expected = textbook(*tensors, KEEP, **FEATURES[name])
    dirty = [poisoned(t, KEEP) for t in tensors]
    out = ops.attention_padded(*dirty, keep_mask=KEEP, backend=backend, **FEATURES[name])
    torch.testing.assert_close(out, expected)
    assert torch.equal(out[~KEEP], torch.zeros_like(out[~KEEP])), "padding is exactly 0"
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, tensors, dout)
    # What arrives for padding from above must not count either.
    got = torch.autograd.grad(out, dirty, torch.where(KEEP[..., None, None], dout, torch.nan))
    for gradient, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(gradient, want)
        assert not gradient[~KEEP].any()


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("keep", [KEEP, KEEP.int(), torch.ones_like(KEEP), None], ids=["bool", "int", "full", "none"])
def test_packed_and_padded_agree_bit_for_bit(name: str, keep: Tensor | None) -> None:
    q, k, v = leaves(*KEEP.shape, HEADS, HEAD_DIM)
    padded = ops.attention_padded(q, k, v, keep_mask=keep, **FEATURES[name])
    packing = ops.Packing.from_keep_mask(torch.ones_like(KEEP) if keep is None else keep)
    packed = ops.attention(
        *(packing.pack(t) for t in (q, k, v)), cu_seqlens_q=packing.cu_seqlens, max_seqlen_q=packing.max_seqlen,
        coords_q=packing.coords, **FEATURES[name],
    )  # fmt: skip
    assert torch.equal(packing.pack(padded), packed)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_dropout_masks_of_padded_batches(backend: str) -> None:
    """Queries by row and column, keys by their ordinal among the kept; forward and backward draw the same."""
    length = KEEP.shape[1]
    ordinal = KEEP.long().cumsum(1) - 1
    # Kept key n has value e_n, so the output is the row of dropped probabilities by ordinals.
    v = torch.eye(length)[ordinal.clamp(min=0)][:, :, None].repeat(1, 1, HEADS, 1).requires_grad_()
    q, k, _ = leaves(*KEEP.shape, HEADS, length)
    out = ops.attention_padded(
        q, k, v, keep_mask=KEEP, dropout_p=0.5, seed=SEED, site=7, backend=backend, softmax_scale=0.1
    )
    for row, kept in enumerate(KEEP):
        columns = kept.nonzero().squeeze(1)
        names = torch.stack((torch.full_like(columns, row), columns), 1).int()
        mask = attention_keep_mask(SEED, 7, names, len(columns), HEADS, 0.5)  # [A, Sq, Sk]
        assert torch.equal(out[row, columns].transpose(0, 1)[..., : len(columns)] != 0, mask)
        for index in range(len(columns)):
            (dv,) = torch.autograd.grad(out[row, columns[index]].sum(), v, retain_graph=True)
            assert torch.equal(dv[row, columns].transpose(0, 1)[..., 0] != 0, mask[:, index])


def test_different_queries_and_keys() -> None:
    keep_q, keep_k = KEEP[:3, :4], KEEP[2:]
    q, (k, v, _) = leaves(3, 4, HEADS, HEAD_DIM)[0], leaves(3, 5, HEADS, HEAD_DIM)
    bias = torch.randn(3, 1, 4, 5)
    out = ops.attention_padded(q, k, v, keep_mask=keep_q, keep_mask_k=keep_k, bias=bias)
    scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * HEAD_DIM**-0.5 + bias
    scores = scores.masked_fill(~keep_k[:, None, None], -torch.inf)
    probabilities = scores.softmax(-1).nan_to_num()  # the second row has no keys
    expected = (probabilities @ v.transpose(1, 2)).transpose(1, 2) * keep_q[..., None, None]
    torch.testing.assert_close(out, expected)
    # One of the two masks alone.
    torch.testing.assert_close(ops.attention_padded(q, k, v, keep_mask_k=keep_k, bias=bias)[keep_q], expected[keep_q])


@pytest.mark.parametrize("cached", [0, 1, 3])
def test_decoding_with_a_cache(cached: int) -> None:
    """The last queries alone, keys and values of all: the same as the last rows of the whole."""
    q, k, v = leaves(*KEEP.shape, HEADS, HEAD_DIM)
    for name in ("causal", "bias", "bias of keys", "relative", "dropout"):
        features = FEATURES[name] | {"causal": True}
        whole = ops.attention_padded(q, k, v, keep_mask=KEEP, **features)
        part = dict(features)
        if name == "bias":
            part["bias"] = features["bias"][:, :, cached:]
        steps = ops.attention_padded(
            q[:, cached:], k, v, keep_mask=KEEP[:, cached:], keep_mask_k=KEEP, first_position=cached, **part
        )
        torch.testing.assert_close(steps, whole[:, cached:])


def test_nothing_is_copied_where_nothing_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
        seen.extend((q, k, v))
        return attention(q, k, v, **arguments)

    attention = ops.attention
    monkeypatch.setattr(importlib.import_module("bert_fast.ops.attention"), "attention", spy)
    fused = torch.randn(4, 6, 3, HEADS, HEAD_DIM)
    given = fused.unbind(2)
    for mask in (None, torch.ones(4, 6)):
        ops.attention_padded(*given, keep_mask=None if mask is None else mask.long())
        assert [t.data_ptr() for t in seen] == [t.data_ptr() for t in given]
        assert [t.shape for t in seen] == [(24, HEADS, HEAD_DIM)] * 3
        seen.clear()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_no_tokens(shape: tuple[int, int]) -> None:
    q, k, v = leaves(*shape, HEADS, HEAD_DIM)
    for mask in (None, torch.ones(shape, dtype=torch.bool)):
        out = ops.attention_padded(q, k, v, keep_mask=mask, causal=True)
        out.sum().backward()
        assert out.shape == (*shape, HEADS, HEAD_DIM)


def test_everything_masked_gives_zero() -> None:
    tensors = [poisoned(t, KEEP & False) for t in leaves(*KEEP.shape, HEADS, HEAD_DIM)]
    out = ops.attention_padded(*tensors, keep_mask=KEEP & False)
    out.sum().backward()
    assert not out.any() and not any(t.grad.any() for t in tensors)


@pytest.mark.parametrize("lengths", [(1,), (5, 1, 3), (4, 0, 7), (17, 31)], ids=str)
def test_right_padding_of_packed_cases(lengths: tuple[int, ...]) -> None:
    """The cases of the packed tests, padded: same output and gradients."""
    case = AttentionCase(lengths, bias="BAQK", relative="CP", dropout_p=0.2)
    packed, inputs = case.run("torch", torch.float32), case.inputs(torch.float32)
    keep = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    extras = {name: t.requires_grad_() for name, t in inputs.items() if name not in OF_TOKENS}
    tensors = {
        name: torch.full((*keep.shape, *t.shape[1:]), torch.nan).index_put((keep.nonzero(as_tuple=True)), t)
        for name, t in inputs.items()
        if name in OF_TOKENS
    }
    dout = tensors.pop("dout")
    given = {name: t.requires_grad_() for name, t in itertools.chain(tensors.items(), extras.items())}
    out = ops.attention_padded(**given, keep_mask=keep, dropout_p=0.2, seed=torch.tensor([-(2**61) + 12345]), site=9)
    assert torch.equal(out[keep], packed["out"])
    gradients = torch.autograd.grad(out, list(given.values()), dout)
    for name, gradient in zip(given, gradients, strict=True):
        assert torch.equal(gradient[keep] if name in tensors else gradient, packed[f"d{name}"])


@pytest.mark.parametrize("is_masked", [False, True])
def test_one_full_graph_for_all_sizes(is_masked: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, keep_mask: Tensor | None, bias: Tensor) -> Tensor:
        return ops.attention_padded(q, k, v, keep_mask=keep_mask, bias=bias, causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    # How many tokens a mask keeps is known only when the graph runs.
    with torch._dynamo.config.patch(error_on_recompile=True, capture_dynamic_output_shape_ops=True):
        for batch_size, length in ((4, 5), (6, 9), (3, 11)):
            arguments = (
                *leaves(batch_size, length, HEADS, HEAD_DIM),
                torch.rand(batch_size, length) < 0.7 if is_masked else None,
                torch.randn(batch_size, 1, 1, length),
            )
            assert torch.equal(compiled(*arguments), function(*arguments))
    torch._dynamo.reset()
