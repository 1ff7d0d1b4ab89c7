"""The inputs of a layer's two LayerNorms in Triton, computed again where their outputs do not give them back.

    attention_h = x + dropout(out Wo^T + bo);   h = z + dropout(act(pre) Wd^T + bd)

Backward reads what LayerNorm normalised from its output, (y - bias) / weight. Where the weights do not allow that
(`reference.dropout_add_layer_norm.output_suffices`) it needs the input, which forward did not keep: memory may not
depend on weights that are on a device. One launch looks at the weights of both LayerNorms, and computes what is needed
from what a layer keeps for its products. Where nothing is, as of most trained weights, its programs end there.

Shapes: x, out, z, attention_h, h [T, H]; pre [T, I]; Wo [H, H], Wd [H, I]; parameters of LayerNorms and biases [H].
Bytes moved: none but parameters, 4 H numbers a program. Where an input is computed, elements of e bytes: a program
reads out (or pre) once for each BLOCK_N columns, its weights once for each BLOCK_M rows, and e T H of x (or z), and
writes e T H. Flops: 2 T H^2 and 2 T H I, a twelfth and a third of the layer's products forward.
Precision: accumulators, sums and activations in fp32; the product is rounded to the dtype of x, as forward's is, and h
too. Another order of the sum over K, and act of pre as it is saved, may give a product its other neighbour: h then errs
by less than half a unit of the product's last place more than a stored one. Half precision only. Deterministic.
"""

import functools

import triton
import triton.language as tl
from torch import Tensor, empty_like

from bert_fast.reference.dropout_add_layer_norm import AGAIN
from bert_fast.reference.encoder_layer import EncoderLayer, Saved
from bert_fast.triton._activations import activation
from bert_fast.triton._launch import (
    architecture,
    ceil_div,
    dropout_arguments,
    persistent_programs,
    register_limit,
    unit_stride,
)
from bert_fast.triton._launch_plan import LaunchPlan
from bert_fast.triton._math import keep_values, split_seed
from bert_fast.triton.bias_gelu import _ACTIVATIONS
from bert_fast.triton.dropout_add_layer_norm import _output_suffices

# Tensor cores at about half their rate, with what every chip has; it is not what a layer usually waits for.
_BLOCK_M, _BLOCK_N, _BLOCK_K, _WARPS, _STAGES = 64, 64, 32, 4, 3
PROGRAMS = 3  # that a multiprocessor holds at once
_REGISTERS = {"sm_120": 168}  # its compiler spills to make room for a fourth; 168 leave three
_NOTHING = (None,) * 7
_VECTOR = tl.constexpr(8)  # neighbouring columns of half precision whose random bits are one draw


@triton.jit
def _sums_again(
    a_ptr, w_ptr, x_bias_ptr, residual_ptr, weight_ptr, bias_ptr, h_ptr, seed_ptr, coords_ptr,
    residual_row_stride, n_rows, scale, drop_max, site,
    N_COLS: tl.constexpr, N_K: tl.constexpr, ACTIVATION: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    PARAM_COLS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Every num_programs-th tile of h = residual + dropout(act(a) w^T + x_bias), unless LayerNorm's output suffices."""
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    if not _output_suffices(weight_ptr, bias_ptr, dtype, N_COLS, PARAM_COLS):
        num_n: tl.constexpr = (N_COLS + BLOCK_N - 1) // BLOCK_N
        for tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M) * num_n, tl.num_programs(0)):
            row = tile // num_n * BLOCK_M + tl.arange(0, BLOCK_M)[:, None].to(tl.int64)  # offsets pass 2^31
            first_col = tile % num_n * BLOCK_N
            col = first_col + tl.arange(0, BLOCK_N)[None, :]
            mask_row, mask_col = row < n_rows, col < N_COLS
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for k in tl.range(0, N_K, BLOCK_K):
                a_col = k + tl.arange(0, BLOCK_K)[None, :]
                a = tl.load(a_ptr + row * N_K + a_col, mask=mask_row & (a_col < N_K), other=0.0)
                if ACTIVATION is not None:
                    a = activation(a.to(tl.float32), ACTIVATION, dtype).to(dtype)
                w_row = k + tl.arange(0, BLOCK_K)[:, None]
                w = tl.load(w_ptr + col.to(tl.int64) * N_K + w_row, mask=mask_col & (w_row < N_K), other=0.0)
                acc = tl.dot(a, w.to(dtype), acc)
            branch = acc.to(dtype).to(tl.float32)  # [BLOCK_M, BLOCK_N]
            if x_bias_ptr is not None:
                branch += tl.load(x_bias_ptr + col, mask=mask_col, other=0.0).to(tl.float32)
            h = tl.load(residual_ptr + row * residual_row_stride + col, mask=mask_row & mask_col, other=0.0)
            if HAS_DROPOUT:
                k0, k1 = split_seed(tl.load(seed_ptr))
                batch_row = tl.load(coords_ptr + row * 2, mask=mask_row, other=0).to(tl.uint32)
                position = tl.load(coords_ptr + row * 2 + 1, mask=mask_row, other=0).to(tl.uint32)
                vector_col = first_col + tl.arange(0, BLOCK_N // _VECTOR)[None, None, :] * _VECTOR
                keep = keep_values(
                    k0, k1, site.to(tl.uint32), batch_row[None, :, :], position[None, :, :], vector_col.to(tl.uint32),
                    drop_max.to(tl.uint32), _VECTOR,
                )  # fmt: skip
                h = h.to(tl.float32) + tl.where(tl.reshape(keep, [BLOCK_M, BLOCK_N]), branch, 0.0) * scale
            else:
                h = h.to(tl.float32) + branch
            tl.store(h_ptr + row * N_COLS + col, h.to(dtype), mask=mask_row & mask_col)


@triton.jit(do_not_specialize=["x_row_stride", "n_rows", "attention_drop_max", "attention_site", "drop_max", "site"])
def _norm_inputs_kernel(
    out_ptr, wo_ptr, bo_ptr, x_ptr, attention_weight_ptr, attention_bias_ptr, attention_h_ptr,
    pre_ptr, wd_ptr, bd_ptr, z_ptr, weight_ptr, bias_ptr, h_ptr, seed_ptr, coords_ptr,
    x_row_stride, n_rows, attention_scale, attention_drop_max, attention_site, scale, drop_max, site,
    N_COLS: tl.constexpr, N_HEADS: tl.constexpr, N_WIDE: tl.constexpr, ACTIVATION: tl.constexpr,
    DROPS_ATTENTION: tl.constexpr, DROPS: tl.constexpr, PARAM_COLS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Tiles of h, which is read first, then of attention_h; neither where its pointer is None."""
    if h_ptr is not None:
        _sums_again(
            pre_ptr, wd_ptr, bd_ptr, z_ptr, weight_ptr, bias_ptr, h_ptr, seed_ptr, coords_ptr,
            N_COLS, n_rows, scale, drop_max, site,
            N_COLS, N_WIDE, ACTIVATION, DROPS, PARAM_COLS, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if attention_h_ptr is not None:
        _sums_again(
            out_ptr, wo_ptr, bo_ptr, x_ptr, attention_weight_ptr, attention_bias_ptr, attention_h_ptr, seed_ptr,
            coords_ptr, x_row_stride, n_rows, attention_scale, attention_drop_max, attention_site,
            N_COLS, N_HEADS, None, DROPS_ATTENTION, PARAM_COLS, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _plan(
    hidden: int, width: int, wide: int, hidden_act: str, drops_attention: bool, drops: bool, chip: str, converts: bool
) -> LaunchPlan:
    # Activations that meet weights as they are loaded stay in registers: products in flight would read them while
    # Triton 3.6 and 3.7 overwrite them (triton#9433). In one stage each product is waited for.
    num_stages = 1 if chip == "sm_90" and not converts else _STAGES
    return LaunchPlan(
        _norm_inputs_kernel,
        N_COLS=hidden,
        N_HEADS=width,
        N_WIDE=wide,
        ACTIVATION=_ACTIVATIONS[hidden_act],
        DROPS_ATTENTION=drops_attention,
        DROPS=drops,
        PARAM_COLS=triton.next_power_of_2(hidden),
        BLOCK_M=_BLOCK_M,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        num_warps=_WARPS,
        num_stages=num_stages,
        **register_limit(_REGISTERS.get(chip, 0), chip),
        enable_fp_fusion=True,  # residual + branch * scale, as in the kernel of LayerNorm
    )


def _contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple([None if t is None else t.contiguous() for t in tensors])


def norm_inputs(a: EncoderLayer, s: Saved, wants_attention: bool) -> tuple[Tensor | None, Tensor | None]:
    """(attention_h, h) [T, H]: as saved or computed again, then unwritten where the output suffices.

    Where attention's is not wanted it is None. Half precision, all rows of x (`a.rows` is None).
    """
    attention_h, h = s.attention_h, s.h
    of_attention, of_mlp = wants_attention and a.attention_saves == AGAIN, a.saves == AGAIN
    if not (of_attention or of_mlp):
        return attention_h, h
    assert s.out is not None and s.z is not None and s.pre is not None and a.rows is None
    z = s.z.contiguous()
    attention_h = empty_like(z) if of_attention else attention_h
    h = empty_like(z) if of_mlp else h
    (num_rows, hidden), wide = z.shape, s.pre.shape[1]
    if not num_rows:
        return attention_h, h
    seed, coords, drop_max, scale = dropout_arguments(a.dropout_p, a.seed, a.coords_q)
    attention = dropout_arguments(a.attention_dropout_p, a.seed, a.coords_q)
    drops, drops_attention = of_mlp and coords is not None, of_attention and attention[1] is not None
    x = unit_stride(a.x) if of_attention else None
    operands = (
        *((
            s.out.contiguous(), *_contiguous(a.attention_output_weight, a.attention_output_bias), x,
            *_contiguous(a.attention_norm_weight, a.attention_norm_bias), attention_h,
        ) if of_attention else _NOTHING),
        *((
            s.pre.contiguous(), *_contiguous(a.down_weight, a.down_bias), z,
            *_contiguous(a.norm_weight, a.norm_bias), h,
        ) if of_mlp else _NOTHING),
        seed if drops else attention[0], coords if drops else attention[1],
    )  # fmt: skip
    width = a.attention_output_weight.shape[1]
    num_tiles = ceil_div(num_rows, _BLOCK_M) * ceil_div(hidden, _BLOCK_N)
    chip, converts = architecture(z.device), a.down_weight.dtype != z.dtype
    _plan(hidden, width, wide, a.hidden_act, drops_attention, drops, chip, converts)(
        (persistent_programs(num_tiles, PROGRAMS, z.device),),
        operands,
        (
            0 if x is None else x.stride(0), num_rows, attention[3], attention[2], a.attention_site, scale, drop_max,
            a.site,
        ),
    )  # fmt: skip
    return attention_h, h
