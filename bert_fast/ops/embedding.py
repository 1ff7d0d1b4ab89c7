"""y = dropout(LayerNorm(word + type + position)), forward and backward, on any back-end.

Registered as `bert_fast::embedding_fwd` and `_bwd`, so `torch.compile` sees two opaque ops and autograd saves exactly
ids, mean and rstd besides parameters, seed and coords: nothing of size T * H. The request for a back-end travels as the
last argument: backward runs where forward was asked to run.
"""

from typing import Any

import torch
from torch import Tensor

from bert_fast import backend as backends
from bert_fast.checks import (
    check_dtype,
    check_ids,
    check_integer,
    check_like,
    check_number,
    check_same_device,
    check_shape,
)
from bert_fast.ops._autocast import autocast_dtype
from bert_fast.ops._register import custom_op
from bert_fast.ops.dropout import check_dropout_state
from bert_fast.reference.dropout import dropout_threshold

__all__ = ["embedding"]

_OP = "embedding"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INTEGERS = (torch.int64, torch.int32)
_WORDS, _POSITIONS, _TYPES = 1, 2, 4  # bits of `needs`: gradients that are wanted


def _check_forward(
    words: Tensor, token_type_ids: Tensor | None, position_ids: Tensor | None, word_table: Tensor | None,
    position_table: Tensor | None, type_table: Tensor, padding_idx: int | None, weight: Tensor, bias: Tensor,
    eps: float, dropout_p: float, seed: Tensor | None, coords: Tensor | None, site: int, *_: Any,
) -> None:  # fmt: skip
    _check(
        words, word_table, type_table, weight, bias, token_type_ids, position_ids, position_table, padding_idx,
        dropout_p, seed, coords, site,
    )  # fmt: skip


def _check_backward(
    dy: Tensor, words: Tensor, token_type_ids: Tensor | None, position_ids: Tensor | None, word_table: Tensor | None,
    position_table: Tensor | None, type_table: Tensor, padding_idx: int | None, weight: Tensor, mean: Tensor,
    rstd: Tensor, dropout_p: float, seed: Tensor | None, coords: Tensor | None, site: int, *_: Any,
) -> None:  # fmt: skip
    _check(
        words, word_table, type_table, weight, weight, token_type_ids, position_ids, position_table, padding_idx,
        dropout_p, seed, coords, site,
    )  # fmt: skip


def _check_all_ids(
    words: Tensor, token_type_ids: Tensor | None, position_ids: Tensor | None, word_table: Tensor | None,
    position_table: Tensor | None, type_table: Tensor, *_: Any,
) -> None:  # fmt: skip
    """Raises ValueError where an id is no row of its table; where that can be seen at no cost, see `check_ids`."""
    for name, ids, table in (
        ("words", words, word_table),
        ("token_type_ids", token_type_ids, type_table),
        ("position_ids", position_ids, position_table),
    ):
        if ids is not None and table is not None and not ids.is_floating_point():
            check_ids(name, ids, len(table))


_TABLES = {"type_table": "x K+ H+", "word_table": "x V H", "position_table": "x M H", "weight": "p H"}


@custom_op("embedding_fwd", tensors=_TABLES | {"bias": "p H"}, check=_check_forward)
def _fwd(
    words: Tensor,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    word_table: Tensor | None,
    position_table: Tensor | None,
    type_table: Tensor,
    padding_idx: int | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
    coords: Tensor | None,
    site: int,
    out_dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    # Here, not in the public function, so that compiled graphs check their ids too.
    _check_all_ids(words, token_type_ids, position_ids, word_table, position_table, type_table)
    module = backends.resolve(_OP, backends.OpSpec.of(type_table, hidden_size=type_table.shape[1]), backend)
    y, mean, rstd = module.embedding_fwd(
        words, token_type_ids, position_ids, word_table, position_table, type_table, padding_idx, weight, bias, eps,
        dropout_p, seed, coords, site, out_dtype,
    )  # fmt: skip
    return y.contiguous(), mean, rstd


@_fwd.register_fake
def _(  # type: ignore[no-untyped-def]
    words, token_type_ids, position_ids, word_table, position_table, type_table, padding_idx, weight, bias, eps,
    dropout_p, seed, coords, site, out_dtype, backend,
):  # fmt: skip
    statistics_dtype = torch.float64 if type_table.dtype == torch.float64 else torch.float32
    y = type_table.new_empty((words.shape[0], type_table.shape[1]), dtype=out_dtype)
    mean, rstd = (type_table.new_empty((words.shape[0],), dtype=statistics_dtype) for _ in range(2))
    return y, mean, rstd


@custom_op(
    "embedding_bwd",
    tensors=_TABLES | {"dy": "f T H", "mean": "s T", "rstd": "s T"},
    check=_check_backward,
    check_values=lambda dy, *saved: _check_all_ids(*saved),
)
def _bwd(
    dy: Tensor,
    words: Tensor,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    word_table: Tensor | None,
    position_table: Tensor | None,
    type_table: Tensor,
    padding_idx: int | None,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    coords: Tensor | None,
    site: int,
    needs: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients that nobody needs come back empty."""
    module = backends.resolve(_OP, backends.OpSpec.of(type_table, hidden_size=type_table.shape[1]), backend)
    gradients = module.embedding_bwd(
        dy, words, token_type_ids, position_ids, word_table, position_table, type_table, padding_idx, weight, mean,
        rstd, dropout_p, seed, coords, site, bool(needs & _WORDS), bool(needs & _POSITIONS), bool(needs & _TYPES),
    )  # fmt: skip
    dwords, dpositions, dtypes, dweight, dbias = (dy.new_empty(0) if g is None else g.contiguous() for g in gradients)
    return dwords, dpositions, dtypes, dweight, dbias


@_bwd.register_fake
def _(  # type: ignore[no-untyped-def]
    dy, words, token_type_ids, position_ids, word_table, position_table, type_table, padding_idx, weight, mean, rstd,
    dropout_p, seed, coords, site, needs, backend,
):  # fmt: skip
    def like(t: Tensor | None, bit: int) -> Tensor:
        if t is None or not needs & bit:
            return dy.new_empty(0)
        return torch.empty_like(t, memory_format=torch.contiguous_format)

    dwords = like(words if words.is_floating_point() else word_table, _WORDS)
    dweight, dbias = (torch.empty_like(weight, memory_format=torch.contiguous_format) for _ in range(2))
    return dwords, like(position_table, _POSITIONS), like(type_table, _TYPES), dweight, dbias


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    words, token_type_ids, position_ids, word_table, position_table, type_table, padding_idx = inputs[:7]
    weight, _, _, dropout_p, seed, coords, site, _, backend = inputs[7:]
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        words, token_type_ids, position_ids, word_table, position_table, type_table, weight, mean, rstd, seed, coords
    )
    ctx.arguments = (padding_idx, dropout_p, site, backend)


def _backward(ctx, dy, *_):  # type: ignore[no-untyped-def]
    words, types, positions, word_table, position_table, type_table, weight, mean, rstd, seed, coords = (
        ctx.saved_tensors
    )
    padding_idx, dropout_p, site, backend = ctx.arguments
    are_vectors = words.is_floating_point()
    wanted = ctx.needs_input_grad
    has = {
        _WORDS: wanted[0] if are_vectors else wanted[3],
        _POSITIONS: position_table is not None and wanted[4],
        _TYPES: wanted[5],
    }
    needs = sum(bit for bit, is_wanted in has.items() if is_wanted)
    *gradients, dweight, dbias = _bwd(
        dy, words, types, positions, word_table, position_table, type_table, padding_idx, weight, mean, rstd,
        dropout_p, seed, coords, site, needs, backend,
    )  # fmt: skip
    dwords, dpositions, dtypes = (g if has[bit] else None for bit, g in zip(has, gradients, strict=True))
    dvectors, dword_table = (dwords, None) if are_vectors else (None, dwords)
    return dvectors, None, None, dword_table, dpositions, dtypes, None, dweight, dbias, *[None] * 7


_fwd.register_autograd(_backward, setup_context=_setup_context)


def embedding(
    words: Tensor,
    word_table: Tensor | None,
    type_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    position_table: Tensor | None = None,
    padding_idx: int | None = None,
    eps: float = 1e-12,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    coords: Tensor | None = None,
    site: int = 0,
    backend: str | None = None,
) -> Tensor:
    """y = dropout(LayerNorm(word_table[words] + type_table[token_type_ids] + position_table[position_ids])).

    words (Tensor [T], int32/int64): ids; or (Tensor [T, H], floating): vectors in place of looked-up words, of a dtype
        that the tables' holds (half precision beside fp32 tables).
    word_table (Tensor [V, H]; not used, may be None where words are vectors), type_table (Tensor [K, H]),
    position_table (Tensor [M, H] or None): fp32/fp16/bf16/fp64, one dtype; H up to 8,192 on the Triton back-end.
    token_type_ids, position_ids (Tensor [T], int32/int64): any strides; without types every token is of type 0;
        positions are needed exactly where there is a position table.
    padding_idx: the word whose row receives no gradient, 0 <= padding_idx < V; None for none.
    weight, bias (Tensor [H]), eps: of LayerNorm; one dtype, that of the tables or fp32.
    dropout_p, seed (Tensor [1], int64), coords (Tensor [T, 2], int32), site: as for `dropout_add_layer_norm`.
    backend: "triton", "torch" or "reference"; None takes the first that can run the call.
    Returns: y (Tensor [T, H], dtype of the tables), contiguous, never an alias of an input.
    Raises: TypeError, ValueError naming the argument; BackendError if the named back-end cannot run the call. Ids out
        of range: ValueError on the CPU, elsewhere with BERT_FAST_DEBUG=1. Without it a device gives such a token a row
        of NaN and leaves it out of all gradients; there is no device assertion and no read out of bounds.
    Differentiable once, in the tables (or vectors), weight and bias; only gradients that are asked for are computed.
        Those of tables are dense, with exact zeros in rows that no token looked up. Deterministic, no device sync.
    Autocast: y has the autocast dtype (fp64 stays), so the residual stream begins in it; tables and parameters keep
        theirs and all arithmetic inside is fp32.
    Saves mean and rstd, 2 * T fp32 numbers, besides its inputs; h is looked up again. Nothing under `torch.no_grad`.
    Source: Devlin et al. 2019 (arXiv:1810.04805), figure 2.
    """
    _check(
        words, word_table, type_table, weight, bias, token_type_ids, position_ids, position_table, padding_idx,
        dropout_p, seed, coords, site,
    )  # fmt: skip
    if dropout_threshold(dropout_p) == 0:  # p below 2**-17 drops nothing
        dropout_p, seed, coords = 0.0, None, None
    if words.is_floating_point():
        word_table = padding_idx = None
    padding_idx = None if padding_idx is None else int(padding_idx)
    out_dtype = autocast_dtype(type_table) or type_table.dtype
    return _fwd(
        words, token_type_ids, position_ids, word_table, position_table, type_table, padding_idx, weight, bias,
        check_number("eps", eps), float(dropout_p), seed, coords, int(site), out_dtype, backends.requested(backend),
    )[0]  # fmt: skip


def _check(
    words: Tensor,
    word_table: Tensor | None,
    type_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    position_table: Tensor | None,
    padding_idx: int | None,
    dropout_p: float,
    seed: Tensor | None,
    coords: Tensor | None,
    site: int,
) -> None:
    check_shape("type_table", type_table, ("K", "H"))
    check_dtype("type_table", type_table, _DTYPES)
    num_types, hidden_size = type_table.shape
    if not hidden_size or not num_types:
        raise ValueError(f"type_table: expected at least one row and one column, got shape {list(type_table.shape)}")
    if isinstance(words, Tensor) and words.is_floating_point():
        check_shape("words", words, ("T", hidden_size))
        if torch.promote_types(words.dtype, type_table.dtype) != type_table.dtype:
            want, got = (str(dtype).removeprefix("torch.") for dtype in (type_table.dtype, words.dtype))
            raise TypeError(f"words: expected ids or vectors of dtype {want} (that of type_table), got {got}")
    else:
        check_shape("words", words, ("T",))
        check_dtype("words", words, _INTEGERS)
        check_like("word_table", word_table, ("V", hidden_size), "type_table", type_table)
        num_words = word_table.shape[0]  # type: ignore[union-attr]
        if padding_idx is not None and not 0 <= check_integer("padding_idx", padding_idx) < num_words:
            raise ValueError(f"padding_idx: expected a row of word_table, in [0, {num_words}), got {padding_idx}")
    check_same_device("words", words, "type_table", type_table)
    num_tokens = words.shape[0]
    if position_table is not None:
        check_like("position_table", position_table, ("M", hidden_size), "type_table", type_table)
    if (position_ids is None) != (position_table is None):
        missing, given = ("position_ids", "position_table")[:: 1 if position_ids is None else -1]
        raise ValueError(f"{missing}: expected a Tensor beside {given}, got None")
    for name, ids in (("token_type_ids", token_type_ids), ("position_ids", position_ids)):
        if ids is not None:
            check_shape(name, ids, (num_tokens,))
            check_dtype(name, ids, _INTEGERS)
            check_same_device(name, ids, "words", words)
    check_shape("weight", weight, (hidden_size,))
    is_half = type_table.dtype in (torch.float16, torch.bfloat16)
    check_dtype("weight", weight, (type_table.dtype, torch.float32) if is_half else (type_table.dtype,))
    check_same_device("weight", weight, "type_table", type_table)
    check_like("bias", bias, (hidden_size,), "weight", weight)
    check_dropout_state(dropout_p, seed, coords, words, site, ("coords", "words"))
