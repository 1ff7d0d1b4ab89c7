"""y = (dropout(act(gate) * up)) Wd^T + bd with [gate | up] = x [Wg; Wu]^T + [bg; bu] on a GPU, and its gradients.

Forward:   pre = [gate | up]                                       one product, or two into the halves of one tensor
           h = m * act(gate) * up                                  one kernel; m = scale where kept, else 0
           y = h Wd^T + bd                                         one product
Backward:  dh = dy Wd                                              one product
           dgate = m dh * up * act'(gate), dup = m dh * act(gate), h again: one kernel; h takes the memory of dh
           dWd = dy^T h;   d[Wg; Wu] = dpre^T x                    one product each
           dx = dgate Wg + dup Wu                                  one product, or two, the second of which adds
           d[bg; bu], dbd = sums over rows of dpre, dy             one kernel each, where they are wanted

Shapes: x, dx [T, H]; gate, up, h, dh [T, I]; pre, dpre [T, 2I]; y, dy [T, N]; Wg, Wu [I, H], Wd [N, I].
The weights of gate and up are one matrix where they lie side by side in memory (`bert_fast/storage.py`), else two.
Bytes moved per token by the two kernels, elements of e bytes (the floor, and what they do), and 8 of coords:
    forward   reads pre: 2 e I; writes h: e I. PyTorch: act(gate), the product, dropout: 2, 3, 2 e I and a mask
    backward  reads dh, pre: 3 e I; writes dpre, h: 3 e I. PyTorch: 2 for dropout, 6 for both products, 3 for act'
In epilogues of products the kernels would save one write and one read of pre, of dh: a tile then needs gate and up of
the same columns, two accumulators, where ours are slower than the library's as it is (docs/kernels/gated_mlp.md).
Saved: x, the weights, and pre (2 e I bytes a token) unless it is recomputed, which costs the first product again and
takes no memory: the kernel writes dpre over it. Neither h nor a mask is ever saved.
Precision: act, act' and their products in fp32, of pre as rounded to the dtype of x; h and dpre are rounded once. Sums
in fp32; gradients of fp32 parameters are never rounded to half precision. Exactly 0 where dropped, also of what is not
finite. Deterministic.
Source: Shazeer 2020 (arXiv:2002.05202), section 2.

A program has a tile [ROWS, COLS]; a warp takes one row of it, each thread 128 bits of neighbouring columns of gate and
those of up, which are what one Philox call names (`_math.keep_values`). Rows may be of any length.
"""

from collections.abc import Set
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bert_fast.reference.gated_mlp import OF_PRE, GatedMlp, needs_pre
from bert_fast.storage import one_tensor, view_of_neighbours
from bert_fast.triton._activations import activation, activation_derivative
from bert_fast.triton._column_sums import row_sums
from bert_fast.triton._gemm import narrowed, product
from bert_fast.triton._launch import ceil_div, dropout_arguments
from bert_fast.triton._launch_plan import launch_plan
from bert_fast.triton._math import keep_values, row_major, split_seed
from bert_fast.triton.bias_gelu import _ACTIVATIONS
from bert_fast.triton.linear import weight_gradient

_WARPS = 4
ROWS = 8  # of a tile: four loads of 128 bits in flight for every thread in forward, six in backward
_VECTOR_BYTES = 16


@triton.jit
def _tile(N_COLS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """(rows [1, ROWS, 1], columns [1, 1, COLS], the first of them) of a program's tile, block of columns by block."""
    NUM_BLOCKS: tl.constexpr = (N_COLS + COLS - 1) // COLS
    first_col = tl.program_id(0) % NUM_BLOCKS * COLS
    row = (tl.program_id(0) // NUM_BLOCKS * ROWS + tl.arange(0, ROWS))[None, :, None].to(tl.int64)
    return row, first_col + tl.arange(0, COLS)[None, None, :], first_col


@triton.jit
def _load(ptr, offset, mask, N_COLS: tl.constexpr):
    return tl.load(row_major(ptr, offset, N_COLS), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, offset, value, mask, N_COLS: tl.constexpr):
    tl.store(row_major(ptr, offset, N_COLS), value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _kept(seed_ptr, coords_ptr, row, mask_row, first_col, drop_max, site, COLS: tl.constexpr, VECTOR: tl.constexpr):
    """The mask [1, ROWS, COLS] of a tile."""
    vector_col = (first_col + tl.arange(0, COLS // VECTOR)[None, None, :] * VECTOR).to(tl.uint32)
    batch_row = tl.load(coords_ptr + row * 2, mask=mask_row, other=0).to(tl.uint32)
    position = tl.load(coords_ptr + row * 2 + 1, mask=mask_row, other=0).to(tl.uint32)
    k0, k1 = split_seed(tl.load(seed_ptr))
    return keep_values(k0, k1, site.to(tl.uint32), batch_row, position, vector_col, drop_max.to(tl.uint32), VECTOR)


@triton.jit(do_not_specialize=["n_rows", "drop_max", "site"])
def _gated_mlp_fwd_kernel(
    pre_ptr, seed_ptr, coords_ptr, h_ptr, n_rows, scale, drop_max, site, ACTIVATION: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, N_COLS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """h [n_rows, N_COLS] of pre [n_rows, 2 N_COLS]: one tile."""
    row, col, first_col = _tile(N_COLS, ROWS, COLS)
    mask_row = row < n_rows
    mask = mask_row & (col < N_COLS)
    gate = _load(pre_ptr, row * (2 * N_COLS) + col, mask, N_COLS)
    up = _load(pre_ptr, row * (2 * N_COLS) + (N_COLS + col), mask, N_COLS)
    h = activation(gate, ACTIVATION, h_ptr.dtype.element_ty) * up
    if HAS_DROPOUT:
        keep = _kept(seed_ptr, coords_ptr, row, mask_row, first_col, drop_max, site, COLS, VECTOR)
        h = tl.where(keep, h * scale, 0.0)
    _store(h_ptr, row * N_COLS + col, h, mask, N_COLS)


@triton.jit(do_not_specialize=["n_rows", "drop_max", "site"])
def _gated_mlp_bwd_kernel(
    dh_ptr, pre_ptr, seed_ptr, coords_ptr, dpre_ptr, h_ptr, n_rows, scale, drop_max, site, ACTIVATION: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, N_COLS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """dpre [n_rows, 2 N_COLS] and, where h_ptr is not None, h: one tile.

    dpre may be pre and h may be dh: every element is read before it is written over, by the same thread.
    """
    OUT: tl.constexpr = dpre_ptr.dtype.element_ty
    row, col, first_col = _tile(N_COLS, ROWS, COLS)
    mask_row = row < n_rows
    mask = mask_row & (col < N_COLS)
    gate_offset, up_offset = row * (2 * N_COLS) + col, row * (2 * N_COLS) + (N_COLS + col)
    dh = _load(dh_ptr, row * N_COLS + col, mask, N_COLS)
    gate, up = _load(pre_ptr, gate_offset, mask, N_COLS), _load(pre_ptr, up_offset, mask, N_COLS)
    if HAS_DROPOUT:
        keep = _kept(seed_ptr, coords_ptr, row, mask_row, first_col, drop_max, site, COLS, VECTOR)
        dh = tl.where(keep, dh * scale, 0.0)
    act = activation(gate, ACTIVATION, OUT)
    _store(dpre_ptr, up_offset, dh * act, mask, N_COLS)
    _store(dpre_ptr, gate_offset, dh * up * activation_derivative(gate, ACTIVATION, OUT), mask, N_COLS)
    if h_ptr is not None:
        h = act * up
        if HAS_DROPOUT:
            h = tl.where(keep, h * scale, 0.0)
        _store(h_ptr, row * N_COLS + col, h, mask, N_COLS)


def gated(a: GatedMlp, pre: Tensor) -> Tensor:
    """Returns h [T, I] of pre [T, 2I], both contiguous."""
    h = pre.new_empty((pre.shape[0], pre.shape[1] // 2))
    _launch(a, _gated_mlp_fwd_kernel, h, (pre,), (h,))
    return h


def gated_bwd(a: GatedMlp, pre: Tensor, dh: Tensor, dpre: Tensor, wants_h: bool) -> Tensor | None:
    """Fills dpre [T, 2I], which may be pre; returns h, in the memory of dh [T, I], if it is wanted. All contiguous.

    dh: before dropout's mask.
    """
    h = dh if wants_h else None
    _launch(a, _gated_mlp_bwd_kernel, dh, (dh, pre), (dpre, h))
    return h


def gated_mlp_fwd(a: GatedMlp) -> tuple[Tensor, Tensor | None]:
    """(y, pre), as `reference.gated_mlp`, contiguous."""
    pre = _gate_and_up(a)
    return product(gated(a, pre), narrowed(a.down_weight, a.x).t(), a.down_bias), pre if a.save_pre else None


def gated_mlp_bwd(a: GatedMlp, dy: Tensor, pre: Tensor | None, wants: Set[str]) -> dict[str, Tensor]:
    """Gradients by name, as `reference.gated_mlp`."""
    made: dict[str, Tensor] = {}
    if "down_bias" in wants:
        made["down_bias"] = row_sums(dy, a.down_weight.dtype)
    if not needs_pre(wants):
        return made
    is_ours = pre is None  # autograd may want what it saved again
    pre = _gate_and_up(a) if pre is None else pre.contiguous()
    if wants.isdisjoint(OF_PRE):
        h: Tensor | None = gated(a, pre)
    else:
        dh = product(dy, narrowed(a.down_weight, dy))
        dpre = pre if is_ours else torch.empty_like(pre)
        h = gated_bwd(a, pre, dh, dpre, "down_weight" in wants)
        del dh
    if h is not None:
        made["down_weight"] = weight_gradient(dy, h, a.down_weight)
        del h
    if "weight" in wants:
        made["weight"] = weight_gradient(dpre, a.x, a.gate_weight)
    if "bias" in wants:
        made["bias"] = row_sums(dpre, a.gate_weight.dtype)
    if "x" in wants:
        made["x"] = _dx(a, dpre)
    return made


def _gate_and_up(a: GatedMlp) -> Tensor:
    """[gate | up] [T, 2I], new and contiguous."""
    x, both = a.x, view_of_neighbours(a.gate_weight, a.up_weight)
    if both is not None:
        bias = None if a.gate_bias is None or a.up_bias is None else one_tensor(a.gate_bias, a.up_bias)
        return product(x, narrowed(both, x).t(), bias)
    pre = x.new_empty((x.shape[0], 2 * a.up_weight.shape[0]))
    gate, up = pre.tensor_split(2, dim=1)
    product(x, narrowed(a.gate_weight, x).t(), a.gate_bias, out=gate)
    product(x, narrowed(a.up_weight, x).t(), a.up_bias, out=up)
    return pre


def _dx(a: GatedMlp, dpre: Tensor) -> Tensor:
    """dgate Wg + dup Wu [T, H] of dpre = [dgate | dup]."""
    both = view_of_neighbours(a.gate_weight, a.up_weight)
    if both is not None:
        return product(dpre, narrowed(both, dpre))
    dgate, dup = dpre.tensor_split(2, dim=1)
    dx = product(dgate, narrowed(a.gate_weight, dpre))
    return product(dup, narrowed(a.up_weight, dpre), out=dx, accumulate=True)


def _launch(
    a: GatedMlp, kernel: Any, like: Tensor, inputs: tuple[Tensor, ...], outputs: tuple[Tensor | None, ...]
) -> None:
    """One program for each tile of a tensor like `like` [T, I]."""
    if not like.numel():
        return
    num_tokens, num_cols = like.shape
    vector = _VECTOR_BYTES // like.dtype.itemsize
    cols = 32 * vector
    seed, coords, drop_max, scale = dropout_arguments(a.dropout_p, a.seed, a.coords)
    launch_plan(
        kernel,
        ACTIVATION=_ACTIVATIONS[a.hidden_act],
        HAS_DROPOUT=coords is not None,
        N_COLS=num_cols,
        ROWS=ROWS,
        COLS=cols,
        VECTOR=vector,
        num_warps=_WARPS,
        enable_fp_fusion=True,  # Horner's rule in activations
    )(
        (ceil_div(num_tokens, ROWS) * ceil_div(num_cols, cols),),
        (*inputs, seed, coords, *outputs),
        (num_tokens, scale, drop_max, a.site),
    )
