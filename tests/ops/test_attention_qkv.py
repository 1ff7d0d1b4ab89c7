"""attention_qkv: the bits of `attention` on the three parts, forward and backward; one gradient, written in place."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bert_fast import ops
from bert_fast.ops.attention_qkv import attention_of_packed
from bert_fast.storage import join_memory
from bert_fast.testing.attention import SEED, SITE, AttentionCase

CASES = {
    "plain": AttentionCase((5, 1, 17)),
    "no sequences": AttentionCase(()),
    "only empty ones": AttentionCase((0, 0)),
    "one token": AttentionCase((1,), dropout_p=0.1),
    "dropout": AttentionCase((0, 9, 33), num_heads=3, dropout_p=0.3),
    "causal": AttentionCase((7, 12), causal=True, holes=True, dropout_p=0.1),
    "bias": AttentionCase((7, 0, 12), bias="BAQK", removes=True),
    "bias of rows": AttentionCase((7, 12), bias="BA", dropout_p=0.2, order=(1, 0)),
    "relative positions": AttentionCase((7, 12), relative="CP", bias="BK", holes=True),
    "a scale": AttentionCase((4, 3), softmax_scale=0.3, head_dim=1, num_heads=1),
    "wide heads": AttentionCase((4, 3), head_dim=264, num_heads=1),
}
LAYOUTS = {
    "contiguous": lambda t: t,
    "tokens last": lambda t: t.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "heads first": lambda t: t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "every other column": lambda t: t.repeat_interleave(2, dim=3)[..., ::2],
    "a part of more": lambda t: torch.cat((t, t), dim=1)[:, :3],
    "expanded": lambda t: t[:1].expand_as(t),
}
EXTRAS = ("bias", "relative_keys", "relative_queries")


def call(case: AttentionCase, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Any], dict[str, Tensor]]:
    """qkv, dout, the arguments that `attention` and `attention_qkv` have in common, and the extras as leaves."""
    inputs = case.inputs(dtype)
    extras = {name: inputs[name].requires_grad_() for name in EXTRAS if name in inputs}
    common = dict(
        causal=case.causal, dropout_p=case.dropout_p, seed=SEED, site=SITE, softmax_scale=case.softmax_scale, **extras,
    )  # fmt: skip
    return torch.stack([inputs[name] for name in "qkv"], dim=1), inputs["dout"], common, extras


def gradients(out: Tensor, leaves: list[Tensor], dout: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out, leaves, dout, allow_unused=True, materialize_grads=True))


def both(case: AttentionCase, dtype: torch.dtype, backend: str, relaid: Any = LAYOUTS["contiguous"]) -> Any:
    """out and all gradients, dqkv first, of `attention_qkv` and of `attention`."""
    qkv, dout, common, extras = call(case, dtype)
    qkv = relaid(qkv).requires_grad_()
    cu_seqlens, coords, longest = case.cu_seqlens()[0], case.coords()[0], max(case.lengths, default=0)
    one = ops.attention_qkv(
        qkv, cu_seqlens=cu_seqlens, max_seqlen=longest, coords=coords, backend=backend, **common
    )  # fmt: skip
    three = ops.attention(
        *qkv.unbind(1), cu_seqlens_q=cu_seqlens, max_seqlen_q=longest, coords_q=coords, backend=backend, **common
    )  # fmt: skip
    leaves = [qkv, *extras.values()]
    return tuple([out.detach(), *gradients(out, leaves, dout)] for out in (one, three))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_bits_of_attention(name: str, backend: str, dtype: torch.dtype) -> None:
    one, three = both(CASES[name], dtype, backend)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, three, strict=True))
    assert one[0].is_contiguous() and one[1].is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_any_strides(layout: str, backend: str) -> None:
    one, three = both(CASES["dropout"], torch.float32, backend, LAYOUTS[layout])
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


def test_gradcheck() -> None:
    case = AttentionCase((3, 0, 2), bias="BQK", relative="C", holes=True, dropout_p=0.3)
    qkv, _, common, extras = call(case, torch.float64)
    rest = {name: value for name, value in common.items() if name not in extras}

    def function(qkv: Tensor, *given: Tensor) -> Tensor:
        return ops.attention_qkv(
            qkv, cu_seqlens=case.cu_seqlens()[0], max_seqlen=3, coords=case.coords()[0], **rest,
            **dict(zip(extras, given, strict=True)),
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, (qkv.requires_grad_(), *extras.values()))


class Copies(TorchDispatchMode):
    """Counts operators that make a tensor of at least `size` elements out of others."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.names = size, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if isinstance(made, Tensor) and made.numel() >= self.size and name in {"cat", "stack", "clone", "copy_", "add"}:
            self.names.append(name)
        return made


def test_projection_and_attention_copy_nothing_between_them() -> None:
    tokens, heads, head_dim = 12, 2, 8
    width = heads * head_dim
    parameters = [nn.Parameter(torch.randn(shape)) for _ in range(3) for shape in ((width, width), (width,))]
    join_memory(*parameters[::2])
    join_memory(*parameters[1::2])
    x, cu_seqlens = torch.randn(tokens, width, requires_grad=True), torch.tensor([0, 5, tokens], dtype=torch.int32)
    with Copies(tokens * width) as copies:
        qkv = ops.qkv_projection(x, *parameters)
        out = ops.attention_qkv(qkv.view(tokens, 3, heads, head_dim), cu_seqlens=cu_seqlens, max_seqlen=7)
        out.backward(torch.randn(tokens, heads, head_dim))
    assert not copies.names


def test_what_is_saved() -> None:
    qkv = torch.randn(7, 3, 2, 8, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ops.attention_qkv(qkv, cu_seqlens=torch.tensor([0, 7], dtype=torch.int32), max_seqlen=7)
    assert sorted(tuple(t.shape) for t in saved) == [(2,), (2, 7), (7, 2, 8), (7, 3, 2, 8)]


def test_autocast() -> None:
    case = CASES["plain"]
    qkv, _, common, _ = call(case, torch.float32)
    layout = dict(cu_seqlens=case.cu_seqlens()[0], max_seqlen=17, coords=case.coords()[0])
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.attention_qkv(qkv, **layout, **common)
    assert torch.equal(out, ops.attention_qkv(qkv.bfloat16(), **layout, **common))


QKV, CU = torch.randn(5, 3, 2, 4), torch.tensor([0, 2, 5], dtype=torch.int32)
GIVEN: dict[str, Any] = dict(qkv=QKV, cu_seqlens=CU, max_seqlen=3)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"qkv": QKV[:, :2]}, ValueError, r"qkv: expected shape \[T, 3, A, D\], got \[5, 2, 2, 4\]"),
        ({"qkv": QKV.flatten(1)}, ValueError, r"qkv: expected shape \[T, 3, A, D\], got \[5, 24\]"),
        ({"qkv": QKV[:, :, :0]}, ValueError, "qkv: expected at least one head of at least one element"),
        ({"qkv": QKV.int()}, TypeError, "qkv: expected a floating-point dtype, got int32"),
        ({"cu_seqlens": CU.long()}, TypeError, "cu_seqlens: expected dtype int32, got int64"),
        ({"cu_seqlens": CU.to("meta")}, ValueError, r"cu_seqlens: expected device cpu \(that of qkv\), got meta"),
        ({"cu_seqlens": CU[1:]}, ValueError, "cu_seqlens: expected offsets that rise from 0 to the number of tokens"),
        ({"max_seqlen": 2}, ValueError, r"max_seqlen: expected at least the longest sequence \(3\), got 2"),
        ({"max_seqlen": 2.5}, TypeError, "max_seqlen: expected an int, got float"),
        ({"max_seqlen": 70000, "dropout_p": 0.1, "seed": SEED, "coords": torch.zeros(5, 2, dtype=torch.int32)},
         ValueError, "max_seqlen: expected at most 65536 keys a sequence where dropout_p is 0.1, got 70000"),
        ({"softmax_scale": "1"}, TypeError, "softmax_scale: expected a number, got str"),
        ({"dropout_p": 0.1}, (TypeError, ValueError), "seed: expected"),
        ({"causal": True, "coords": torch.zeros(5, 2)}, TypeError, "coords: expected dtype int32"),
        ({"causal": True, "coords": torch.zeros(5, 2, dtype=torch.int32)}, ValueError,
         "coords: expected one row and rising positions"),
        ({"bias": torch.zeros(1, 3, 1, 1)}, ValueError, "bias: expected 1 or 2 heads in dimension 1"),
        ({"bias": torch.zeros(1, 1, 1, 1).to("meta")}, ValueError, r"bias: expected device cpu \(that of qkv\)"),
        ({"relative_keys": torch.zeros(3, 1, 4)}, ValueError,
         r"relative_keys: expected shape \[2M - 1, 2, 4\], got \[3, 1, 4\]"),
        ({"relative_queries": torch.zeros(3, 2, 4)}, ValueError,
         "relative_queries: expected at least 5 rows for positions 2 apart"),
        ({"backend": "cuda"}, Exception, "backend: expected one of"),
    ],
)  # fmt: skip
def test_bad_input_is_named(changes: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        ops.attention_qkv(**GIVEN | changes)


def packed(tokens: int = 6) -> ops.Packing:
    return ops.Packing.from_keep_mask(torch.ones(2, tokens // 2, dtype=torch.bool))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_the_door_of_modules_gives_the_same_bits(causal: bool, dropout_p: float) -> None:
    qkv, packing = torch.randn(6, 3, 2, 8), packed()
    rules: dict[str, Any] = dict(causal=causal, dropout_p=dropout_p, seed=SEED, site=SITE)
    expected = ops.attention_qkv(
        qkv, cu_seqlens=packing.cu_seqlens, max_seqlen=packing.max_seqlen, coords=packing.coords, **rules
    )
    assert torch.equal(attention_of_packed(qkv, packing, **rules), expected)


def test_the_door_of_modules_refuses_other_tokens_by_name() -> None:
    rules: dict[str, Any] = dict(causal=False, dropout_p=0.3, seed=SEED, site=SITE)
    with pytest.raises(ValueError, match=r"coords: expected shape \[4, 2\], got \[6, 2\]"):
        attention_of_packed(torch.randn(4, 3, 2, 8), packed(), **rules)
    with pytest.raises(ValueError, match="cu_seqlens: expected device meta"):
        attention_of_packed(torch.randn(6, 3, 2, 8, device="meta"), packed(), **rules)
    with pytest.raises(ValueError, match=r"dropout_p: expected a probability in \[0, 1\], got 2"):
        attention_of_packed(torch.randn(6, 3, 2, 8), packed(), **rules | {"dropout_p": 2})
