"""Attention of packed sequences: softmax(c q k^T + bias) v with dropout on the probabilities, forward and backward.

    S   = softmax_scale * (q k^T + R) + bias        R: relative positions
    P   = exp(S - lse)                              0 where no key is left
    out = (P * z * K) v                             K keep mask, z = 1 / (1 - p)

    delta = rowsum(dout * out)
    dS    = P * (z * K * dout v^T - delta)
    dq    = softmax_scale * dS k    dk = softmax_scale * dS^T q    dv = (P * z * K)^T dout

Three regimes. Up to `SHORT_SEQLEN` tokens one program holds a whole head of a sequence: every input is read once,
softmax takes one pass, backward is one kernel of 5 products with delta inside. Longer, or with a bias or relative
positions, a program takes a tile of queries (forward, dq) or of keys (dk, dv) and walks over the other side; backward
is two kernels and 7 products. Of these there are two sets: one draws dropout's mask in every kernel, one
(`stores_mask`) in forward alone. `docs/decisions/0007-attention-regimes.md` says why the border is where it is. Within
`batch_invariant` every sequence is a long one.

Bytes per head of a sequence with Sq queries and Sk keys, in elements of D and dtype size, caches left out; BM, BN the
tiles' sides (`_attention_tiles.py`):
    short    forward: q + k + v + out                          backward: q + k + v + out + dout + dq + dk + dv
    tiled    forward: q + out + ceil(Sq / BM) * (k + v)        dq: q + out + dout + dq + ceil(Sq / BM) * (k + v)
             dk, dv: k + v + dk + dv + ceil(Sk / BN) * (q + dout)
and lse (fp32), written once and read once a kernel, delta likewise; with dropout or where positions matter, 8 bytes of
coords a token. Dropout's mask, where it is stored (`stores_mask`), is written by forward and read by the other kernels:
a bit a score. Nothing else of size Sq * Sk is read or written. Saved for backward: q, k, v, out, lse, and such a mask.

Precision: products in the dtype of q with fp32 accumulators (fp32: as `torch.backends.cuda.matmul` allows, TF32 or
its split into three terms, whose error is that of fp32), everything between them in fp32; P and dS are rounded to the
dtype before they are multiplied. Deterministic: no atomics, sums in a fixed order.

Source: Dao et al. 2022 (arXiv:2205.14135), algorithms 1 and 4; Dao 2023 (arXiv:2307.08691), section 3.1, for the split
of the work; the one-program-per-head form is NVIDIA apex's fmha (2021).
"""

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from bert_fast.batch_invariance import ASKED
from bert_fast.env import SETTINGS
from bert_fast.reference.attention import Attention, stored_mask_shape
from bert_fast.reference.dropout import dropout_threshold
from bert_fast.triton._attention_bwd import (
    _attention_bwd_bias_kernel,
    _attention_bwd_dkdv_kernel,
    _attention_bwd_dq_kernel,
    _attention_bwd_short_kernel,
    _attention_bwd_table_kernel,
)
from bert_fast.triton._attention_fwd import _attention_fwd_kernel, _attention_fwd_short_kernel
from bert_fast.triton._attention_stored import (
    _attention_bwd_dkdv_stored_kernel,
    _attention_bwd_dq_stored_kernel,
    _attention_fwd_stored_kernel,
)
from bert_fast.triton._attention_tiles import (
    STORED_SEQLENS,
    STORED_THRESHOLDS,
    LaunchConfig,
    Tile,
    block_d,
    extras_config,
    kernel_by_names,
    launch_config,
    short_config,
)
from bert_fast.triton._launch import architecture, ceil_div, dropout_numbers, kind_of, num_multiprocessors
from bert_fast.triton._sizes import larger

MAX_HEAD_DIM = 128
_MAX_INT32 = 2**31 - 1
_PROGRAMS_PER_MULTIPROCESSOR = 4  # what sequences are dealt out for: two at once, two rounds
_SEQUENCES = 128  # a batch's, usually


def stores_mask(a: Attention) -> bool:
    """Whether forward stores dropout's mask where `a.keeps`; else the kernels of backward draw it again."""
    threshold = dropout_threshold(a.dropout_p)
    if threshold not in STORED_THRESHOLDS or a.has_extras or a.q.dtype not in (torch.float16, torch.bfloat16):
        return False
    max_seqlen = larger(a.max_seqlen_q, a.max_seqlen_k)
    if a.q.shape[2] > MAX_HEAD_DIM or max_seqlen < STORED_SEQLENS.start or max_seqlen >= STORED_SEQLENS.stop:
        return False
    return kind_of(architecture(a.q.device)) == "sm_90" and not ASKED.get()


def attention_fwd(a: Attention) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, lse, mask), as `reference.attention`, of q, k, v in fp32, fp16 or bf16 and heads of at most 128.

    mask (Tensor, int32, as `stored_mask_shape` says): None where it is not stored.
    """
    out = a.q.new_empty(a.q.shape)
    lse = a.q.new_empty((a.q.shape[1], a.q.shape[0]), dtype=torch.float32)
    mask = a.q.new_empty(stored_mask_shape(a), dtype=torch.int32) if a.keeps and stores_mask(a) else None
    if not a.q.numel():
        return out, lse, mask
    call, made = _Call(a, mask), {"out_ptr": out, "lse_ptr": lse}
    if call.short is not None:
        call.launch(_attention_fwd_short_kernel, call.short.forward, 1, made)
    else:
        tile, kernel = call.config.forward, _attention_fwd_kernel if mask is None else _attention_fwd_stored_kernel
        call.launch(kernel, tile, ceil_div(a.max_seqlen_q, tile.block_m), made)
    return out, lse, mask


def attention_bwd(
    a: Attention, dout: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, wants: Set[str],
    dqkv: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Gradients by name, as `reference.attention`. mask: as forward stored it, or None."""
    max_seqlen = max(a.max_seqlen_q, a.max_seqlen_k)
    if dqkv is not None and max_seqlen * dqkv.stride(0) <= _MAX_INT32:
        dq, dk, dv = dqkv.unbind(1)
    else:
        dq, dk, dv = (t.new_empty(t.shape) for t in (a.q, a.k, a.v))
    extras = {name: getattr(a, name) for name in wants}
    if not a.q.numel() and not a.k.numel():
        zeros = {name: torch.zeros(x.shape, dtype=x.dtype, device=x.device) for name, x in extras.items()}
        return {"q": dq, "k": dk, "v": dv} | zeros
    call = _Call(a, mask)
    dout = _addressable(dout, a.max_seqlen_q)
    arguments = {
        "dout_ptr": dout, "dout_stride": dout.stride(0), "dout_head_stride": dout.stride(1), "lse_ptr": lse,
        "inverse_scale": 1.0 / call.dropout_scale if call.dropout_scale else 0.0, "out_ptr": out,
        "dq_ptr": dq, "dk_ptr": dk, "dv_ptr": dv,
        "PARTS": 1 if dqkv is None or dq.data_ptr() != dqkv.data_ptr() else 3,
    }  # fmt: skip
    if call.short is not None:
        call.launch(_attention_bwd_short_kernel, call.short.backward, 1, arguments)
        return _as_asked(dq, dk, dv, dqkv)
    config = call.config
    arguments["delta_ptr"] = torch.empty_like(lse)  # written by the first kernel, read by the second
    dq_kernel, dkdv_kernel = _attention_bwd_dq_kernel, _attention_bwd_dkdv_kernel
    if mask is not None:
        dq_kernel, dkdv_kernel = _attention_bwd_dq_stored_kernel, _attention_bwd_dkdv_stored_kernel
    call.launch(dq_kernel, config.dq, ceil_div(a.max_seqlen_q, config.dq.block_m), arguments)
    call.launch(dkdv_kernel, config.dkdv, ceil_div(a.max_seqlen_k, config.dkdv.block_n), arguments)
    made = _as_asked(dq, dk, dv, dqkv)
    if config.gradients is None:  # no extras
        return made
    return made | _extras_gradients(call.shared | arguments, config, call.num_sequences, extras)


def _as_asked(dq: Tensor, dk: Tensor, dv: Tensor, dqkv: Tensor | None) -> dict[str, Tensor]:
    """The gradients where they were asked for: they lie elsewhere where a sequence is too long for 32-bit offsets."""
    if dqkv is None or dq.data_ptr() == dqkv.data_ptr():
        return {"q": dq, "k": dk, "v": dv}
    for part, gradient in zip(dqkv.unbind(1), (dq, dk, dv), strict=True):
        part.copy_(gradient)
    return dict(zip("qkv", dqkv.unbind(1), strict=True))


def _addressable(x: Tensor, max_seqlen: int) -> Tensor:
    """x [T, A, D] with neighbouring columns whose offsets within a sequence are 32-bit numbers; a copy where needed."""
    return x if x.stride(2) == 1 and max_seqlen * x.stride(0) <= _MAX_INT32 else x.contiguous()


class _Call:
    """One call's arguments as kernels take them, by name."""

    def __init__(self, a: Attention, mask: Tensor | None) -> None:
        num_tokens, self.num_heads, head_dim = a.q.shape
        dtype, max_seqlen, chip = a.q.dtype, max(a.max_seqlen_q, a.max_seqlen_k), architecture(a.q.device)
        self.num_sequences = a.cu_seqlens_q.shape[0] - 1
        self.short = None
        has_dropout = dropout_threshold(a.dropout_p) > 0
        if a.has_extras:
            self.config = extras_config(head_dim, dtype, chip, a.has_tables)
        else:
            self.config = launch_config(head_dim, dtype, chip, a.causal, has_dropout, mask is not None)
            if mask is None and not ASKED.get():  # the longest sequence may have no say in how the others are summed up
                self.short = short_config(max_seqlen, head_dim, dtype, chip, has_dropout)
        drop_max, self.dropout_scale = dropout_numbers(a.dropout_p) if has_dropout else (0, 1.0)
        q = _addressable(a.q, a.max_seqlen_q)
        k, v = _addressable(a.k, a.max_seqlen_k), _addressable(a.v, a.max_seqlen_k)
        self.shared: dict[str, Any] = {
            "q_ptr": q, "q_stride": q.stride(0), "q_head_stride": q.stride(1),
            "k_ptr": k, "k_stride": k.stride(0), "k_head_stride": k.stride(1),
            "v_ptr": v, "v_stride": v.stride(0), "v_head_stride": v.stride(1),
            "cu_seqlens_q_ptr": a.cu_seqlens_q.contiguous(), "cu_seqlens_k_ptr": a.cu_seqlens_k.contiguous(),
            "coords_q_ptr": None if a.coords_q is None else a.coords_q.contiguous(),
            "coords_k_ptr": None if a.coords_k is None else a.coords_k.contiguous(),
            "seed_ptr": a.seed if has_dropout else None, "num_tokens": num_tokens, "num_heads": self.num_heads,
            "softmax_scale": a.softmax_scale, "dropout_scale": self.dropout_scale, "drop_max": drop_max, "site": a.site,
            "D": head_dim, "BLOCK_D": block_d(head_dim), "CAUSAL": a.causal, "HAS_DROPOUT": has_dropout,
            "PRECISION": _dot_precision(dtype, self.config.precision),
        }  # fmt: skip
        if self.short is None:
            self.shared |= self._of_tiled(a)
        if mask is not None:
            self.shared |= {"words_ptr": mask, "num_strips": mask.shape[1], "num_words": mask.shape[2]}

    def _of_tiled(self, a: Attention) -> dict[str, Any]:
        """What the kernels for sequences of any length take beside the rest."""
        tables = a.relative_keys, a.relative_queries
        keys, queries = (None if table is None else table.to(a.q.dtype).contiguous() for table in tables)
        return {
            "order_ptr": a.sequence_order, "relative_keys_ptr": keys, "relative_queries_ptr": queries,
            "num_distances": max(0 if table is None else len(table) for table in tables),
            # Plain tiles scale inside the exponential, after the maximum: only a positive scale keeps it the maximum.
            "HAS_PLAIN": self.config.has_plain and not a.has_extras and a.softmax_scale > 0.0,
            **_bias_arguments(a.bias),
        }  # fmt: skip

    def launch(self, kernel: object, tile: Tile, num_blocks: int, arguments: dict[str, Any]) -> None:
        """Runs a kernel with `num_blocks` programs for every head of every sequence."""
        num_programs = num_blocks * self.num_heads * self.num_sequences
        if num_programs == 0:
            return
        arguments = self.shared | arguments | {"num_blocks": num_blocks}
        kernel_by_names(kernel, tile)((num_programs,), arguments)


def _bias_arguments(bias: Tensor | None) -> dict[str, Any]:
    """A bias broadcast to [B, A, Sq, Sk] as kernels take it: pointer, strides (0 along size 1), and extent.

    extent: elements from the first to past the last, farther than which nothing is read.
    """
    sizes, strides = ((), (0,) * 4) if bias is None else (bias.shape, bias.stride())
    strides = tuple(0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=False)) or strides
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=False))
    named = {f"bias_{dim}_stride": stride for dim, stride in zip(("row", "head", "q", "k"), strides, strict=True)}
    return {"bias_ptr": bias, "bias_extent": extent, **named}


def _dot_precision(dtype: torch.dtype, of_fp32: str) -> str:
    """How products are made: those of fp32 in TF32 where the user allows it to PyTorch, else as the tiles say."""
    if dtype != torch.float32 or SETTINGS.triton_interpret:  # the interpreter multiplies in fp32
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else of_fp32


def _num_shares(num_programs: int, most: int, device: torch.device) -> int:
    """How many programs share what one could do, where `num_programs` would be there without sharing."""
    wanted = num_multiprocessors(device) * _PROGRAMS_PER_MULTIPROCESSOR
    return max(1, min(most, wanted // num_programs))


def _bias_gradient(arguments: dict[str, Any], bias: Tensor, tile: Tile, num_sequences: int) -> Tensor:
    """The gradient of the bias."""
    has_rows, has_heads, has_queries, has_keys = (size > 1 for size in bias.shape)
    num_tiles_q, num_tiles_k = ceil_div(bias.shape[2], tile.block_m), ceil_div(bias.shape[3], tile.block_n)
    num_programs = num_tiles_q * num_tiles_k * bias.shape[1]
    num_shares = 1 if has_rows else _num_shares(num_programs, num_sequences, bias.device)
    dtype = bias.dtype if num_shares == 1 else torch.float32
    dbias = torch.empty((bias.shape[0] * num_shares, *bias.shape[1:]), dtype=dtype, device=bias.device)
    arguments = arguments | {
        "dbias_ptr": dbias, "num_sequences": num_sequences, "num_shares": num_shares, "size_q": bias.shape[2],
        "size_k": bias.shape[3], "num_tiles_q": num_tiles_q, "num_tiles_k": num_tiles_k,
        "HAS_ROWS": has_rows, "HAS_HEADS": has_heads, "HAS_QUERIES": has_queries, "HAS_KEYS": has_keys,
        "SEQUENCES": _SEQUENCES,
    }  # fmt: skip
    kernel_by_names(_attention_bwd_bias_kernel, tile)((num_programs * dbias.shape[0],), arguments)
    return dbias if num_shares == 1 else dbias.sum(0, keepdim=True).to(bias.dtype)


def _table_gradients(
    arguments: dict[str, Any], tables: dict[str, Tensor], config: LaunchConfig, num_sequences: int
) -> dict[str, Tensor]:
    """The gradients of tables of relative positions, given by name."""
    (num_distances, num_heads, _), device = next(iter(tables.values())).shape, arguments["q_ptr"].device
    num_windows = ceil_div(num_distances, config.window)
    num_shares = _num_shares(num_windows * num_heads, num_sequences, device)
    partial = {
        name: torch.empty((num_shares, *table.shape), dtype=torch.float32, device=device)
        for name, table in tables.items()
    }
    arguments = arguments | {
        "dkeys_ptr": partial.get("relative_keys"), "dqueries_ptr": partial.get("relative_queries"),
        "num_sequences": num_sequences, "num_shares": num_shares, "num_windows": num_windows,
        "WIDTH": config.window,
    }  # fmt: skip
    kernel_by_names(_attention_bwd_table_kernel, config.gradients)((num_windows * num_heads * num_shares,), arguments)
    return {name: sums.sum(0).to(tables[name].dtype) for name, sums in partial.items()}


def _extras_gradients(
    arguments: dict[str, Any], config: LaunchConfig, num_sequences: int, extras: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Gradients of bias, relative_keys and relative_queries, each in its tensor's shape and dtype, contiguous.

    arguments: of the tiled backward kernels, by name. config: of the call. extras: those of the three whose gradients
    are wanted, by name.
    """
    tables = {name: table for name, table in extras.items() if name != "bias"}
    made = _table_gradients(arguments, tables, config, num_sequences) if tables else {}
    if "bias" in extras:
        made["bias"] = _bias_gradient(arguments, extras["bias"], config.gradients, num_sequences)
    return made
