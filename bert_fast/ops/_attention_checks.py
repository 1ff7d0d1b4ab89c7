"""Checks of the arguments of attention: what is known without looking at values, and what only values tell."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bert_fast.checks import (
    check_dtype,
    check_floating,
    check_host_or_same,
    check_integer,
    check_like,
    check_same_device,
    check_shape,
    check_tensor,
)
from bert_fast.env import SETTINGS
from bert_fast.ops.dropout import check_coords
from bert_fast.reference.attention import Attention
from bert_fast.reference.dropout import HEAD_STRIDE

MAX_TOKENS = 2**31 - 1  # offsets are int32


def check_heads(q: Tensor, k: Tensor, v: Tensor, tokens_q: Sequence[str], tokens_k: Sequence[int | str]) -> None:
    """Raises unless q is [*tokens_q, A, D] and k and v are [*tokens_k, A, D] of q's dtype and device.

    A head has at least one element, and keys have as many heads as queries.
    """
    check_shape("q", q, (*tokens_q, "A", "D"))
    check_floating("q", q)
    num_heads, head_dim = q.shape[-2:]
    if num_heads == 0 or head_dim == 0:
        raise ValueError(f"q: expected at least one head of at least one element, got shape {list(q.shape)}")
    check_tensor("k", k)
    if k.dim() == q.dim() and k.shape[-1] == head_dim and 0 < k.shape[-2] < num_heads:
        raise ValueError(
            f"k: expected {num_heads} heads (those of q), got {k.shape[-2]}: grouped-query attention is not supported; "
            "repeat the heads of k and v with repeat_interleave"
        )
    check_like("k", k, (*tokens_k, num_heads, head_dim), "q", q)
    check_like("v", v, tuple(k.shape), "q", q)


def check_num_tokens(name: str, x: Tensor) -> None:
    """Raises ValueError where x [T, ...] has more tokens than offsets can count."""
    if x.shape[0] > MAX_TOKENS:
        raise ValueError(f"{name}: expected at most {MAX_TOKENS} tokens, got {x.shape[0]}")


def check_qkv(qkv: Any) -> None:
    """Raises unless qkv is [T, 3, A, D], floating, with at least one head of at least one element."""
    check_shape("qkv", qkv, ("T", 3, "A", "D"))
    check_floating("qkv", qkv)
    if qkv.shape[2] == 0 or qkv.shape[3] == 0:
        raise ValueError(f"qkv: expected at least one head of at least one element, got shape {list(qkv.shape)}")


def check_cu_seqlens(name: str, cu_seqlens: Any, entries: int | str, q: Tensor, q_name: str = "q") -> None:
    """Raises unless cu_seqlens is int32 [entries], at least one, on q's device."""
    check_shape(name, cu_seqlens, (entries,))
    if cu_seqlens.shape[0] == 0:
        raise ValueError(f"{name}: expected at least one entry (the leading 0), got none")
    check_dtype(name, cu_seqlens, (torch.int32,))
    check_same_device(name, cu_seqlens, q_name, q)


def check_extras(
    q: Tensor,
    bias: Tensor | None,
    relative_keys: Tensor | None,
    relative_queries: Tensor | None,
    sequence_order: Tensor | None,
    num_sequences: int,
    q_name: str = "q",
) -> None:
    """Raises unless what attention is given beside q, k and v fits q [..., A, D] in rank, shape, dtype and device."""
    if bias is None and relative_keys is None and relative_queries is None and sequence_order is None:
        return
    num_heads = q.shape[-2]
    if bias is not None:
        check_shape("bias", bias, ("B or 1", "A or 1", "Sq or 1", "Sk or 1"))
        if not bias.is_floating_point():
            raise TypeError(
                "bias: expected a floating-point dtype (0 where a query sees a key, -inf where not), "
                f"got {_short(bias.dtype)}"
            )
        check_same_device("bias", bias, q_name, q)
        if bias.shape[1] != 1 and bias.shape[1] != num_heads:
            raise ValueError(f"bias: expected 1 or {num_heads} heads in dimension 1, got {list(bias.shape)}")
    for name, table in (("relative_keys", relative_keys), ("relative_queries", relative_queries)):
        if table is not None:
            _check_table(name, table, q, q_name)
    if relative_keys is not None and relative_queries is not None:
        # Not `len`, which makes torch.compile take the size for a constant.
        num_rows = relative_keys.shape[0]
        if relative_queries.shape[0] != num_rows:
            raise ValueError(
                f"relative_queries: expected {num_rows} rows (those of relative_keys), "
                f"got {list(relative_queries.shape)}"
            )
    if sequence_order is not None:
        check_shape("sequence_order", sequence_order, (num_sequences,))
        check_dtype("sequence_order", sequence_order, (torch.int32,))
        check_same_device("sequence_order", sequence_order, q_name, q)


def _check_table(name: str, table: Tensor, q: Tensor, q_name: str) -> None:
    """Raises unless table is [2M - 1, A, D] of the heads, the dtype (or fp32) and the device of q [..., A, D]."""
    check_shape(name, table, ("2M - 1", *q.shape[-2:]))
    if table.shape[0] % 2 == 0:
        raise ValueError(f"{name}: expected an odd number of rows (2M - 1), got {list(table.shape)}")
    check_dtype(name, table, (q.dtype,) if q.dtype in (torch.float32, torch.float64) else (q.dtype, torch.float32))
    check_same_device(name, table, q_name, q)


def check_dropout_lengths(name: str, max_seqlen: int, dropout_p: float) -> None:
    """Raises where a sequence may have more keys than dropout has names for."""
    if dropout_p and max_seqlen > HEAD_STRIDE:
        raise ValueError(
            f"{name}: expected at most {HEAD_STRIDE} keys a sequence where dropout_p is {dropout_p}, got {max_seqlen}"
        )


def check_coords_of_both(coords_q: Tensor | None, coords_k: Tensor | None, q: Tensor, k: Tensor) -> None:
    """Raises unless there are coords of all tokens of q and k, which causal order and all extras need."""
    if coords_q is None or coords_k is None:
        missing = "coords_q" if coords_q is None else "coords_k"
        raise ValueError(
            f"{missing}: expected a Tensor [T, 2] where causal, bias or relative positions are given, got None"
        )
    check_coords("coords_q", coords_q, q, "q")
    check_coords("coords_k", coords_k, k, "k")


def check_padded_mask(name: str, mask: Tensor | None, batch_size: int, length: int, q: Tensor) -> None:
    """Raises unless mask is None, or bool or integer [batch_size, length] on q's device or the CPU."""
    if mask is None:
        return
    check_shape(name, mask, (batch_size, length))
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"{name}: expected dtype bool or an integer (nonzero marks a token), got {_short(mask.dtype)}; "
            "what is added to scores goes into bias"
        )
    check_host_or_same(name, mask, "q", q)


def check_padded_bias(bias: Tensor | None, full: tuple[int, int, int, int], first_position: int) -> int:
    """first_position; raises unless it is an int of at least 0 and bias broadcasts to full = [B, A, Sq, Sk]."""
    first_position = check_integer("first_position", first_position)
    if first_position < 0:
        raise ValueError(f"first_position: expected at least 0, got {first_position}")
    if first_position + full[2] > MAX_TOKENS:
        raise ValueError(f"first_position: expected positions of at most {MAX_TOKENS}, got {first_position}")
    if bias is not None:
        check_tensor("bias", bias)
        sizes = zip(bias.shape, full, strict=False)
        if bias.dim() != 4 or any(size != 1 and size != whole for size, whole in sizes):
            raise ValueError(f"bias: expected a shape broadcastable to {list(full)}, got {list(bias.shape)}")
    return first_position


def check_lookups(a: Attention, suffixes: tuple[str, str] = ("_q", "_k")) -> None:
    """Raises ValueError unless coords name tokens as attention wants it, and all are found where they are looked up.

    suffixes: of the names of coords, empty where one tensor names queries and keys.

    Only where that costs no device sync: on the CPU, elsewhere with BERT_FAST_DEBUG=1.
    """
    coords_q, coords_k = a.coords_q, a.coords_k
    if coords_q is None or coords_k is None or (coords_q.device.type != "cpu" and not SETTINGS.debug):
        return
    largest_row, largest_q = _check_names(f"coords{suffixes[0]}", coords_q, a.cu_seqlens_q)
    largest_k = largest_q
    if coords_k is not coords_q or a.cu_seqlens_k is not a.cu_seqlens_q:
        _, largest_k = _check_names(f"coords{suffixes[1]}", coords_k, a.cu_seqlens_k)
    if a.bias is not None:
        least = (largest_row + 1, 1, largest_q + 1, largest_k + 1)
        if any(size != 1 and size < needed for size, needed in zip(a.bias.shape, least, strict=True)):
            wanted = f"[{least[0]} or 1, A or 1, {least[2]} or 1, {least[3]} or 1]"
            raise ValueError(
                f"bias: expected at least {wanted} for the rows and positions in coords, got {list(a.bias.shape)}"
            )
    name, table = ("relative_keys", a.relative_keys)
    if table is None:
        name, table = ("relative_queries", a.relative_queries)
    if table is not None:
        farthest, reach = (table.shape[0] - 1) // 2, _reach(a, coords_q, coords_k)
        if reach > farthest:
            raise ValueError(
                f"{name}: expected at least {2 * reach + 1} rows for positions {reach} apart, got {list(table.shape)}"
            )


def _check_names(name: str, coords: Tensor, cu_seqlens: Tensor) -> tuple[int, int]:
    """The largest row and position; raises unless within a sequence the row is one and positions rise."""
    if not len(coords):
        return -1, -1
    if coords._is_zerotensor():
        raise ValueError(f"{name}: expected a Tensor with memory, got one of zeros without any")
    low = int(coords.min())
    if low < 0:
        raise ValueError(f"{name}: expected rows and positions of at least 0, got {low}")
    steps = coords.diff(dim=0)
    is_wrong = (steps[:, 0] != 0) | (steps[:, 1] <= 0)
    starts = cu_seqlens[(cu_seqlens > 0) & (cu_seqlens < len(coords))].long()
    is_wrong[starts - 1] = False  # from one sequence to the next
    if is_wrong.any():
        token = int(is_wrong.int().argmax())
        pair = coords[token : token + 2].tolist()
        raise ValueError(f"{name}: expected one row and rising positions within a sequence, got {pair[0]}, {pair[1]}")
    row, position = coords.amax(0).tolist()
    return row, position


def _reach(a: Attention, coords_q: Tensor, coords_k: Tensor) -> int:
    """The farthest that a query and a key of one sequence are apart."""
    has_both = (a.cu_seqlens_q.diff() > 0) & (a.cu_seqlens_k.diff() > 0)
    if not has_both.any():
        return 0
    (first_q, last_q), (first_k, last_k) = (
        (coords[cu[:-1][has_both].long(), 1], coords[cu[1:][has_both].long() - 1, 1])
        for cu, coords in ((a.cu_seqlens_q, coords_q), (a.cu_seqlens_k, coords_k))
    )
    return int(torch.maximum(last_q - first_k, last_k - first_q).max())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
