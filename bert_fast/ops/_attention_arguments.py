"""What the public functions of attention do to their arguments: autocast, checks, defaults.

`arguments_of` and `arguments_of_qkv` complete the arguments of the registered ops, which hold one signature with every
back-end (`reference/attention.py` explains it); what only values tell is checked within the ops, by `check_values`.
`save_arguments` and `saved_arguments` carry them from forward to backward.
"""

import math
from typing import Any

import torch
from torch import Tensor

from bert_fast.checks import check_flag, check_number
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
from bert_fast.reference.dropout import dropout_threshold

__all__ = [
    "arguments_of",
    "arguments_of_qkv",
    "check_registered",
    "check_values",
    "looks_up",
    "save_arguments",
    "saved_arguments",
    "with_dense_heads",
]


def arguments_of(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, max_seqlen_q: int,
    max_seqlen_k: int | None, softmax_scale: float | None, dropout_p: float, seed: Tensor | None,
    coords_q: Tensor | None, coords_k: Tensor | None, site: int, causal: bool, bias: Tensor | None,
    head_mask: Tensor | None, distance_table: Tensor | None, key_term: bool, sequence_order: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of `attention_fwd`, checked and complete: all but the back-end."""
    q, k, v = autocast_operands(q, k, v)
    distance_table = _autocast_table(distance_table)
    check_heads(q, k, v, ("Tq",), ("Tk",))
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, "B + 1", q)
    max_seqlen_q = as_length("max_seqlen_q", max_seqlen_q)
    num_sequences = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k is None:
        if coords_k is None:
            coords_k = coords_q
        cu_seqlens_k, max_seqlen_k, is_self = cu_seqlens_q, max_seqlen_q, True
    else:
        if max_seqlen_k is None:
            raise ValueError("max_seqlen_k: expected an int beside cu_seqlens_k, got None")
        check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, num_sequences + 1, q)
        max_seqlen_k = as_length("max_seqlen_k", max_seqlen_k)
        is_self = False
    check_extras(q, bias, head_mask, distance_table, key_term, sequence_order, num_sequences)
    check_dropout_state(dropout_p, seed, coords_q, q, site, ("coords_q", "q"))
    if dropout_threshold(dropout_p) == 0:  # p below 2**-17 drops nothing
        dropout_p, seed = 0.0, None
    check_dropout_lengths("max_seqlen_k", max_seqlen_k, dropout_p)
    if type(causal) is not bool:  # here, since a call costs more than this
        check_flag("causal", causal)
    if looks_up(causal, bias, head_mask, distance_table):
        if is_self and coords_q is None and coords_k is None:
            coords_q = coords_k = counted_coords(cu_seqlens_q, q.shape[0])
        check_coords_of_both(coords_q, coords_k, q, k)
    else:
        coords_q, coords_k = None if seed is None else coords_q, None
    return (
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, _scale(softmax_scale, q.shape[2]),
        float(dropout_p), seed, coords_q, coords_k, int(site), causal, bias, head_mask, distance_table,
        key_term, sequence_order,
    )  # fmt: skip


def arguments_of_qkv(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float | None, dropout_p: float,
    seed: Tensor | None, coords: Tensor | None, site: int, causal: bool, bias: Tensor | None, head_mask: Tensor | None,
    distance_table: Tensor | None, key_term: bool, sequence_order: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of `attention_qkv_fwd`, checked and complete: all but the back-end."""
    (qkv,) = autocast_operands(qkv)
    distance_table = _autocast_table(distance_table)
    check_qkv(qkv)
    check_cu_seqlens("cu_seqlens", cu_seqlens, "B + 1", qkv, "qkv")
    max_seqlen = as_length("max_seqlen", max_seqlen)
    num_sequences = cu_seqlens.shape[0] - 1
    check_extras(qkv, bias, head_mask, distance_table, key_term, sequence_order, num_sequences, "qkv")
    check_dropout_state(dropout_p, seed, coords, qkv, site, ("coords", "qkv"))
    if dropout_threshold(dropout_p) == 0:  # p below 2**-17 drops nothing
        dropout_p, seed = 0.0, None
    check_dropout_lengths("max_seqlen", max_seqlen, dropout_p)
    if type(causal) is not bool:  # here, since a call costs more than this
        check_flag("causal", causal)
    if looks_up(causal, bias, head_mask, distance_table):
        if coords is None:
            coords = counted_coords(cu_seqlens, qkv.shape[0])
        check_coords("coords", coords, qkv, "qkv")
    elif seed is None:
        coords = None
    return (
        qkv, cu_seqlens, max_seqlen, _scale(softmax_scale, qkv.shape[3]), float(dropout_p), seed, coords, int(site),
        causal, bias, head_mask, distance_table, key_term, sequence_order,
    )  # fmt: skip


def looks_up(causal: bool, bias: Tensor | None, head_mask: Tensor | None, distance_table: Tensor | None) -> bool:
    """Whether keys are looked up under their names too, and back-ends therefore want `coords_k`."""
    return causal or bias is not None or head_mask is not None or distance_table is not None


def _autocast_table(distance_table: Any) -> Any:
    if isinstance(distance_table, Tensor) and distance_table.dtype != torch.float32:
        return autocast_operands(distance_table)[0]
    return distance_table


def _scale(softmax_scale: float | None, head_dim: int) -> float:
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    return check_number("softmax_scale", softmax_scale)


def check_registered(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float, dropout_p: float, seed: Tensor | None, coords_q: Tensor | None, coords_k: Tensor | None,
    site: int, causal: bool, bias: Tensor | None, head_mask: Tensor | None, distance_table: Tensor | None,
    key_term: bool, sequence_order: Tensor | None, *_: Any, suffixes: tuple[str, str] = ("_q", "_k"),
) -> None:  # fmt: skip
    """Raises where arguments of the registered op, each of which is right, do not go together.

    suffixes: how the caller's arguments are called.
    """
    check_extras(q, bias, head_mask, distance_table, key_term, sequence_order, cu_seqlens_q.shape[0] - 1)
    check_dropout_lengths(f"max_seqlen{suffixes[1]}", max_seqlen_k, dropout_p)
    if looks_up(causal, bias, head_mask, distance_table):
        check_given(f"coords{suffixes[0]}", coords_q, is_needed=True)
        check_given(f"coords{suffixes[1]}", coords_k, is_needed=True)


def check_values(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float, dropout_p: float, seed: Tensor | None, coords_q: Tensor | None, coords_k: Tensor | None,
    site: int, causal: bool, bias: Tensor | None, head_mask: Tensor | None, distance_table: Tensor | None,
    *_: Any, names: tuple[str, str] = ("q", "k"), suffixes: tuple[str, str] = ("_q", "_k"),
) -> None:  # fmt: skip
    """Raises where values do not fit: what would else be read from memory that is not theirs.

    names, suffixes: how the caller's arguments are called.
    """
    of_q, of_k = suffixes
    check_num_tokens(names[0], q)
    check_offsets(f"cu_seqlens{of_q}", cu_seqlens_q, f"max_seqlen{of_q}", max_seqlen_q, q.shape[0])
    if cu_seqlens_k is not cu_seqlens_q or max_seqlen_k != max_seqlen_q or k.shape[0] != q.shape[0]:
        check_num_tokens(names[1], k)
        check_offsets(f"cu_seqlens{of_k}", cu_seqlens_k, f"max_seqlen{of_k}", max_seqlen_k, k.shape[0])
    check_lookups(cu_seqlens_q, cu_seqlens_k, coords_q, coords_k, bias, head_mask, distance_table, suffixes)


def with_dense_heads(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Any, ...]:
    """The arguments with q, k, v such that the elements of a head stand together, as back-ends want them."""
    return *[t if t.stride(2) == 1 or t.shape[2] == 1 else t.contiguous() for t in (q, k, v)], *rest


def save_arguments(ctx: Any, inputs: Any, output: Any) -> None:
    """What autograd keeps of a forward op (out, lse): its results and all of its arguments.

    On the CPU, where offsets may lie in memory that a loader fills again before backward, a copy of them: the sequences
    that forward has checked. B + 1 numbers.
    """
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.is_tensor = [isinstance(argument, Tensor) for argument in inputs]
    tensors = [argument for argument in inputs if isinstance(argument, Tensor)]
    if inputs[0].is_cpu:
        tensors = [t.clone() if t.dtype is torch.int32 and t.dim() == 1 else t for t in tensors]
    ctx.save_for_backward(*output, *tensors)
    ctx.others = [argument for argument in inputs if not isinstance(argument, Tensor)]


def saved_arguments(ctx: Any) -> tuple[Tensor, Tensor, list[Any]]:
    """(out, lse, the arguments in their order) that `save_arguments` kept."""
    out, lse, *tensors = ctx.saved_tensors
    saved, others = iter(tensors), iter(ctx.others)
    return out, lse, [next(saved) if is_tensor else next(others) for is_tensor in ctx.is_tensor]
