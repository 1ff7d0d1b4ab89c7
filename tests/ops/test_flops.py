"""`FlopCounterMode` counts of every op what it counts of PyTorch's composition, forward and backward."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

from bert_fast import ops
from bert_fast.ops._flops import FORMULAS, WITHOUT_PRODUCTS
from bert_fast.ops.encoder_layer import _op as encoder_layer_op

LENGTHS, HEADS, DIM, H, WIDE, CLASSES = (3, 1, 5), 3, 8, 24, 40, 30
T = sum(LENGTHS)
CU_SEQLENS = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
COORDS = torch.tensor([(row, i) for row, length in enumerate(LENGTHS) for i in range(length)], dtype=torch.int32)
LABELS = torch.arange(T)
# PyTorch has formulas for the fused attention of GPUs only, and this one's arguments are alike.
_aten = torch.ops.aten
FUSED_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop.__wrapped__,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop.__wrapped__,
}


def counted(function: Callable[..., Tensor], tensors: list[Tensor], frozen: int | None = None) -> tuple[int, int]:
    """FLOPs of forward, and of both passes."""
    leaves = [t.clone().requires_grad_(i != frozen) for i, t in enumerate(tensors)]
    with FlopCounterMode(display=False, custom_mapping=FUSED_ATTENTION) as counter:
        y = function(*leaves)
        forward = counter.get_total_flops()
        torch.autograd.backward(y, torch.ones_like(y))
    return forward, counter.get_total_flops()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in one))[0] for one in parts], 1)


def layer(x: Tensor, *parameters: Tensor) -> Tensor:
    return encoder_layer_op(
        x, *parameters, None, CU_SEQLENS, CU_SEQLENS, 5, 5, COORDS, COORDS, None, HEADS, False, "gelu", 0.0, 0.0, 0.0,
        None, 1, 2, 3, 1e-12, 1e-12, "input", "input", True, "torch",
    )[0]  # fmt: skip


def plain_layer(x: Tensor, *parameters: Tensor) -> Tensor:
    wq, bq, wk, bk, wv, bv, wo, bo, n1, b1, up, up_bias, down, down_bias, n2, b2 = parameters
    heads = (F.linear(x, w, b).view(T, HEADS, DIM) for w, b in ((wq, bq), (wk, bk), (wv, bv)))
    z = F.layer_norm(F.linear(attend(*heads).transpose(0, 1).flatten(1), wo, bo) + x, (H,), n1, b1)
    return F.layer_norm(F.linear(F.gelu(F.linear(z, up, up_bias)), down, down_bias) + z, (H,), n2, b2)


ROWS, SQUARE, COLUMN, HEAD_ROWS = (T, H), (H, H), (H,), (T, HEADS, DIM)
MLP = ((WIDE, H), (WIDE,), (H, WIDE), COLUMN)
CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "linear": (ops.linear, F.linear, (ROWS, (WIDE, H), (WIDE,))),
    "linear_gelu": (ops.linear_gelu, lambda *t: F.gelu(F.linear(*t)), (ROWS, (WIDE, H), (WIDE,))),
    "mlp": (ops.mlp, lambda x, up, b, *down: F.linear(F.gelu(F.linear(x, up, b)), *down), (ROWS, *MLP)),
    "gated_mlp": (
        ops.gated_mlp,
        lambda x, gate, b, up, c, *down: F.linear(F.silu(F.linear(x, gate, b)) * F.linear(x, up, c), *down),
        (ROWS, *MLP[:2], *MLP),
    ),
    "qkv_projection": (
        ops.qkv_projection, lambda x, *w: torch.cat([F.linear(x, w[i], w[i + 1]) for i in (0, 2, 4)], 1),
        (ROWS, *(SQUARE, COLUMN) * 3),
    ),
    "attention": (
        lambda q, k, v: ops.attention(q, k, v, cu_seqlens_q=CU_SEQLENS, max_seqlen_q=5), attend, (HEAD_ROWS,) * 3
    ),
    "attention_qkv": (
        lambda qkv: ops.attention_qkv(qkv, cu_seqlens=CU_SEQLENS, max_seqlen=5), lambda qkv: attend(*qkv.unbind(1)),
        ((T, 3, HEADS, DIM),),
    ),
    "linear_cross_entropy": (
        lambda *t: ops.linear_cross_entropy(*t, LABELS), lambda *t: F.cross_entropy(F.linear(*t), LABELS),
        (ROWS, (CLASSES, H), (CLASSES,)),
    ),
    "splade": (lambda *t: ops.splade(*t, CU_SEQLENS), F.linear, (ROWS, (CLASSES, H), (CLASSES,))),
    "encoder_layer": (
        layer, plain_layer,
        (ROWS, *(SQUARE, COLUMN) * 4, COLUMN, COLUMN, *MLP, COLUMN, COLUMN),
    ),
}  # fmt: skip

# Places of arguments that may want no gradient; default: the weight. Those of q, k and v are made together.
FROZEN = {
    "gated_mlp": (0, 5),
    "mlp": (0, 1, 3),
    "qkv_projection": (0,),
    "attention": (),
    "attention_qkv": (),
    "encoder_layer": (0, 7, 11, 13),
}


@pytest.mark.parametrize("name", CASES)
def test_counts_are_pytorchs(name: str) -> None:
    ours, plain, shapes = CASES[name]
    tensors = [torch.randn(shape) for shape in shapes]
    (forward, both), expected = counted(ours, tensors), counted(plain, tensors)
    if name == "linear_cross_entropy":  # which makes its gradients in forward
        forward = expected[0]
    assert (forward, both) == expected and both > forward > 0
    for place in FROZEN.get(name, (1,)):
        assert counted(ours, tensors, place)[1] == counted(plain, tensors, place)[1]


def test_every_op_has_a_formula_or_no_product() -> None:
    names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("bert_fast::")}
    assert FORMULAS.keys() | WITHOUT_PRODUCTS == {name.split(".")[0] for name in names}
    assert not FORMULAS.keys() & WITHOUT_PRODUCTS


def test_what_backward_computes_again_counts() -> None:
    tensors = [torch.randn(shape) for shape in (ROWS, *MLP)]
    product = 2 * T * WIDE * H
    kept, again = (counted(lambda *t, keeps=keeps: ops.mlp(*t, save_pre=keeps), tensors) for keeps in (True, False))
    assert again == (kept[0], kept[1] + product)
    tensors = [torch.randn(shape) for shape in (ROWS, *MLP[:2], *MLP)]
    kept, again = (
        counted(lambda *t, keeps=keeps: ops.gated_mlp(*t, save_pre=keeps), tensors) for keeps in (True, False)
    )
    assert again == (kept[0], kept[1] + 2 * product)


@pytest.mark.parametrize("names", [{"relative_keys"}, {"relative_queries"}, {"relative_keys", "relative_queries"}])
def test_every_table_of_relative_positions_is_one_more_product(names: set[str]) -> None:
    def function(qkv: Tensor, *tables: Tensor) -> Tensor:
        given = dict(zip(sorted(names), tables, strict=True))
        return ops.attention_qkv(qkv, cu_seqlens=CU_SEQLENS, max_seqlen=5, **given)

    qkv, *tables = torch.randn(T, 3, HEADS, DIM), *torch.randn(len(names), 9, HEADS, DIM)
    made, without = counted(function, [qkv, *tables]), counted(CASES["attention_qkv"][0], [qkv])
    assert made == tuple(count * (2 + len(names)) // 2 for count in without)


def test_lengths_without_values_count_as_the_longest() -> None:
    with FakeTensorMode() as mode, FlopCounterMode(display=False) as counter:
        qkv, cu_seqlens = mode.from_tensor(torch.empty(T, 3, HEADS, DIM)), mode.from_tensor(CU_SEQLENS)
        ops.attention_qkv(qkv, cu_seqlens=cu_seqlens, max_seqlen=5)
    assert counter.get_total_flops() == 4 * 3 * 5 * 5 * HEADS * DIM


@pytest.mark.parametrize("first", ["bert_fast", "torch.utils.flop_counter"])
def test_formulas_are_there_in_either_order_of_imports(first: str) -> None:
    """And PyTorch's module, which imports triton, is left to the program."""
    program = f"""
import sys, {first}
assert {first == "bert_fast"} != ("torch.utils.flop_counter" in sys.modules)
import bert_fast, torch.utils.flop_counter as counter
names = {{str(packet) for packet in counter.flop_registry}}
assert "bert_fast.encoder_layer_bwd" in names and not any(type(f).__name__ == "_AfterImport" for f in sys.meta_path)
"""
    arguments: list[Any] = [sys.executable, "-c", program]
    subprocess.run(arguments, check=True)
