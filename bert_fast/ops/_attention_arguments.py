"""What the public functions of attention do to their arguments: autocast, checks, defaults.

`complete` and `complete_qkv` make records as back-ends take them (`reference/attention.py`) out of what was given; what
only values tell is checked within the ops, by `check_values`.
"""

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bert_fast.checks import check_flag, check_number, check_shape
from bert_fast.ops._attention_checks import (
    check_coords_of_both,
    check_cu_seqlens,
    check_dropout_lengths,
    check_extras,
    check_heads,
    check_lookups,
    check_num_tokens,
    check_qkv,
)
from bert_fast.ops._autocast import autocast_operands
from bert_fast.ops._signature import check_given
from bert_fast.ops.dropout import check_coords, check_dropout_state
from bert_fast.ops.packing import as_length, check_offsets, counted_coords
from bert_fast.reference.attention import Attention, AttentionQkv, stored_mask_shape
from bert_fast.reference.dropout import dropout_threshold


def complete(a: Attention) -> Attention:
    """The same checked; where no cu_seqlens_k are given, keys belong to the sequences of queries."""
    q, k, v = autocast_operands(a.q, a.k, a.v)
    relative_keys, relative_queries = _autocast_table(a.relative_keys), _autocast_table(a.relative_queries)
    check_heads(q, k, v, ("Tq",), ("Tk",))
    check_cu_seqlens("cu_seqlens_q", a.cu_seqlens_q, "B + 1", q)
    max_seqlen_q = as_length("max_seqlen_q", a.max_seqlen_q)
    num_sequences = a.cu_seqlens_q.shape[0] - 1
    coords_q, coords_k, is_self = a.coords_q, a.coords_k, a.cu_seqlens_k is None
    if is_self:
        if coords_k is None:
            coords_k = coords_q
        cu_seqlens_k, max_seqlen_k = a.cu_seqlens_q, max_seqlen_q
    else:
        if a.max_seqlen_k is None:
            raise ValueError("max_seqlen_k: expected an int beside cu_seqlens_k, got None")
        check_cu_seqlens("cu_seqlens_k", a.cu_seqlens_k, num_sequences + 1, q)
        cu_seqlens_k, max_seqlen_k = a.cu_seqlens_k, as_length("max_seqlen_k", a.max_seqlen_k)
    check_extras(q, a.bias, relative_keys, relative_queries, a.sequence_order, num_sequences)
    check_dropout_state(a.dropout_p, a.seed, coords_q, q, a.site, ("coords_q", "q"))
    dropout_p, seed = _effective_dropout(a)
    check_dropout_lengths("max_seqlen_k", max_seqlen_k, dropout_p)
    if type(a.causal) is not bool:  # here, since a call costs more than this
        check_flag("causal", a.causal)
    if a.causal or a.has_extras:
        if is_self and coords_q is None and coords_k is None:
            coords_q = coords_k = counted_coords(a.cu_seqlens_q, q.shape[0])
        check_coords_of_both(coords_q, coords_k, q, k)
    else:
        coords_q, coords_k = None if seed is None else coords_q, None
    return Attention(
        q, k, v, a.cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, _scale(a.softmax_scale, q.shape[2]),
        dropout_p, seed, coords_q, coords_k, int(a.site), a.causal, a.bias, relative_keys, relative_queries,
        a.sequence_order,
        seed is not None and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
    )  # fmt: skip


def complete_qkv(a: AttentionQkv) -> AttentionQkv:
    """The same checked."""
    (qkv,) = autocast_operands(a.qkv)
    relative_keys, relative_queries = _autocast_table(a.relative_keys), _autocast_table(a.relative_queries)
    check_qkv(qkv)
    check_cu_seqlens("cu_seqlens", a.cu_seqlens, "B + 1", qkv, "qkv")
    max_seqlen, coords = as_length("max_seqlen", a.max_seqlen), a.coords
    num_sequences = a.cu_seqlens.shape[0] - 1
    check_extras(qkv, a.bias, relative_keys, relative_queries, a.sequence_order, num_sequences, "qkv")
    check_dropout_state(a.dropout_p, a.seed, coords, qkv, a.site, ("coords", "qkv"))
    dropout_p, seed = _effective_dropout(a)
    check_dropout_lengths("max_seqlen", max_seqlen, dropout_p)
    if type(a.causal) is not bool:  # here, since a call costs more than this
        check_flag("causal", a.causal)
    if a.causal or a.has_extras:
        if coords is None:
            coords = counted_coords(a.cu_seqlens, qkv.shape[0])
        check_coords("coords", coords, qkv, "qkv")
    elif seed is None:
        coords = None
    return AttentionQkv(
        qkv, a.cu_seqlens, max_seqlen, _scale(a.softmax_scale, qkv.shape[3]), dropout_p, seed, coords, int(a.site),
        a.causal, a.bias, relative_keys, relative_queries, a.sequence_order,
        seed is not None and torch.is_grad_enabled() and qkv.requires_grad,
    )  # fmt: skip


def _effective_dropout(a: Attention | AttentionQkv) -> tuple[float, Tensor | None]:
    """(probability, seed), 0 and None where p is below 2**-17, which drops nothing."""
    return (0.0, None) if dropout_threshold(a.dropout_p) == 0 else (float(a.dropout_p), a.seed)


def _autocast_table(table: Any) -> Any:
    if isinstance(table, Tensor) and table.dtype != torch.float32:
        return autocast_operands(table)[0]
    return table


def _scale(softmax_scale: float | None, head_dim: int) -> float:
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    return check_number("softmax_scale", softmax_scale)


def shape_of_mask(module: ModuleType, a: Attention) -> tuple[int, ...] | None:
    """The shape of the mask that a back-end stores in forward; None where it does not."""
    stores = getattr(module, "stores_mask", None)
    return stored_mask_shape(a) if stores is not None and a.keeps and stores(a) else None


def check_mask(a: Attention, mask: Tensor | None) -> None:
    """Raises unless a stored mask has the shape that forward gave it."""
    if mask is not None:
        check_shape("mask", mask, stored_mask_shape(a))


def check_registered(a: Attention, suffixes: tuple[str, str] = ("_q", "_k")) -> None:
    """Raises where arguments of the registered op, each of which is right, do not go together.

    suffixes: how the caller's arguments are called.
    """
    num_sequences = a.cu_seqlens_q.shape[0] - 1
    check_extras(a.q, a.bias, a.relative_keys, a.relative_queries, a.sequence_order, num_sequences)
    check_dropout_lengths(f"max_seqlen{suffixes[1]}", a.max_seqlen_k, a.dropout_p)
    if a.causal or a.has_extras:
        check_given(f"coords{suffixes[0]}", a.coords_q, is_needed=True)
        check_given(f"coords{suffixes[1]}", a.coords_k, is_needed=True)


def check_values(a: Attention, names: tuple[str, str] = ("q", "k"), suffixes: tuple[str, str] = ("_q", "_k")) -> None:
    """Raises where values do not fit: what would else be read from memory that is not theirs.

    names, suffixes: how the caller's arguments are called.
    """
    (of_q, of_k), num_queries, num_keys = suffixes, a.q.shape[0], a.k.shape[0]
    check_num_tokens(names[0], a.q)
    check_offsets(f"cu_seqlens{of_q}", a.cu_seqlens_q, f"max_seqlen{of_q}", a.max_seqlen_q, num_queries)
    if a.cu_seqlens_k is not a.cu_seqlens_q or a.max_seqlen_k != a.max_seqlen_q or num_keys != num_queries:
        check_num_tokens(names[1], a.k)
        check_offsets(f"cu_seqlens{of_k}", a.cu_seqlens_k, f"max_seqlen{of_k}", a.max_seqlen_k, num_keys)
    check_lookups(a, suffixes)


def with_dense_heads(a: Attention) -> Attention:
    """The same with q, k, v such that the elements of a head stand together, as back-ends want them."""
    q, k, v = a.q, a.k, a.v
    if q.shape[2] == 1 or (q.stride(2) == k.stride(2) == v.stride(2) == 1):
        return a
    return a._replace(q=_dense(q), k=_dense(k), v=_dense(v))


def _dense(t: Tensor) -> Tensor:
    return t if t.stride(2) == 1 else t.contiguous()
