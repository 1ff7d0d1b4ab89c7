"""y = dropout(LayerNorm(word + type + position)), forward and backward, on any back-end.

Registered as `bert_fast::embedding_fwd` and `_bwd`, so `torch.compile` sees two opaque ops and autograd saves exactly
ids, mean and rstd besides parameters, seed and coords: nothing of size T * H.
"""

from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.nn import Parameter

from bert_fast.backend import OpSpec, requested, resolve
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
from bert_fast.ops._define import declaration
from bert_fast.ops._register import Op
from bert_fast.ops._saved import keep_tensors, kept_tensors
from bert_fast.ops._signature import lines_of
from bert_fast.ops.dropout import check_dropout_state
from bert_fast.reference.dropout import dropout_threshold
from bert_fast.reference.embedding import Embedding
from bert_fast.reference.precision import wide_dtype

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INTEGERS = (torch.int64, torch.int32)
_PLAIN = (Parameter, Tensor)
_BITS = (("word_table", 1), ("position_table", 2), ("type_table", 4))  # of `needs`: gradients that are wanted


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

    Args:
        words (Tensor [T], int32/int64): ids; or (Tensor [T, H], floating): vectors in place of looked-up words, of a
            dtype that the tables' holds (half precision beside fp32 tables).
        word_table (Tensor [V, H], fp32/fp16/bf16/fp64): H up to 8,192 on the Triton back-end. Not
            used, and may be None, where words are vectors.
        type_table (Tensor [K, H], dtype of word_table): of token types.
        position_table (Tensor [M, H] or None, dtype of word_table): of positions.
        token_type_ids (Tensor [T], int32/int64): any strides; without them every token is of type 0.
        position_ids (Tensor [T], int32/int64): any strides; needed exactly where there is a position table.
        padding_idx: the word whose row receives no gradient, 0 <= padding_idx < V; None for none.
        weight (Tensor [H]): of LayerNorm; one dtype, that of the tables or fp32.
        bias (Tensor [H], dtype of weight): of LayerNorm.
        eps: of LayerNorm, as given.
        dropout_p: this and the next three as for `dropout_add_layer_norm`.
        seed (Tensor [1], int64): as there.
        coords (Tensor [T, 2], int32): as there.
        site: as there.
        backend: "triton", "torch" or "reference"; None takes the first that can run the call.

    Returns:
        y (Tensor [T, H], dtype of the tables), contiguous, never an alias of an input.

    Raises:
        TypeError, ValueError: the message names the argument.
        BackendError: the named back-end cannot run the call. Ids out of range: ValueError on the CPU, elsewhere with
            BERT_FAST_DEBUG=1. Without it a device gives such a token a row of NaN and leaves it out of all gradients;
            there is no device assertion and no read out of bounds.

    Differentiable once, in the tables (or vectors), weight and bias; only gradients that are asked for are computed.
        Those of tables are dense, with exact zeros in rows that no token looked up. Deterministic, no device sync.

    Autocast:
        y has the autocast dtype (fp64 stays), so the residual stream begins in it; tables and parameters keep theirs
        and all arithmetic inside is fp32.

    Saves mean and rstd, 2 * T fp32 numbers, besides its inputs; h is looked up again. Nothing under `torch.no_grad`.
    Source: Devlin et al. 2019 (arXiv:1810.04805), figure 2.

    Example:
        >>> words, positions = torch.tensor([3, 1, 2]), torch.tensor([0, 1, 2])
        >>> word_table, type_table, position_table = torch.randn(10, 8), torch.randn(2, 8), torch.randn(16, 8)
        >>> y = ops.embedding(
        ...     words, word_table, type_table, torch.ones(8), torch.zeros(8), position_ids=positions,
        ...     position_table=position_table,
        ... )
        >>> y.shape
        torch.Size([3, 8])
    """
    given = (words, token_type_ids, position_ids, word_table, position_table, type_table, padding_idx, weight, bias)
    a = Embedding(*given, eps, dropout_p, seed, coords, site, None)  # type: ignore[arg-type]
    _check_call(a)
    _check_all_ids(a)
    return _embed(a, backend)


def embedding_of_model(a: Embedding) -> Tensor:
    """`embedding` of ids that are known to be rows of their tables, checked under the names that a caller gave them."""
    _check_call(a)
    return _embed(a, None)


def _check_call(a: Embedding) -> None:
    if _fits(a):
        check_dropout_state(a.dropout_p, a.seed, a.coords, a.words, a.site, ("coords", "words"))
    else:
        _check(a)


def _fits(a: Embedding) -> bool:
    """Whether nothing is wrong with ids and parameters, as nearly always: seen at a third of the cost of `_check`."""
    words, word_table, type_table = a.words, a.word_table, a.type_table
    if type(words) is not Tensor or words.dim() != 1 or word_table is None or type(word_table) not in _PLAIN:
        return False
    if type(type_table) not in _PLAIN or type_table.dim() != 2 or not type_table.numel():
        return False
    dtype, device, hidden_size = type_table.dtype, words.device, type_table.shape[1]
    if dtype not in _DTYPES or (a.position_ids is None) != (a.position_table is None):
        return False
    for ids in (words, a.token_type_ids, a.position_ids):
        if ids is not None and (
            type(ids) is not Tensor
            or ids.dtype not in _INTEGERS
            or ids.layout is not torch.strided
            or ids.is_nested
            or ids.shape != words.shape
            or ids.device != device
        ):
            return False
    for p, rank in ((type_table, 2), (word_table, 2), (a.position_table, 2), (a.weight, 1), (a.bias, 1)):
        if p is not None and (
            type(p) not in _PLAIN
            or p.dtype is not dtype
            or p.layout is not torch.strided
            or p.is_nested
            or p.dim() != rank
            or p.shape[-1] != hidden_size
            or p.device != device
        ):
            return False
    if a.weight is None or a.bias is None:
        return False
    return a.padding_idx is None or (type(a.padding_idx) is int and 0 <= a.padding_idx < word_table.shape[0])


def _embed(a: Embedding, backend: str | None) -> Tensor:
    mask: tuple[Any, ...] = (float(a.dropout_p), a.seed, a.coords, int(a.site))
    if dropout_threshold(a.dropout_p) == 0:  # p below 2**-17 drops nothing
        mask = (0.0, None, None, int(a.site))
    lookups = a[:7]
    if a.words.is_floating_point():
        lookups = a._replace(word_table=None, padding_idx=None)[:7]
    elif a.padding_idx is not None:
        lookups = (*lookups[:6], int(a.padding_idx))
    out_dtype = autocast_dtype(a.type_table) or a.type_table.dtype
    norm = (a.weight, a.bias, check_number("eps", a.eps))
    return _fwd(*lookups, *norm, *mask, out_dtype, requested(backend))[0]


def _check(a: Embedding) -> None:
    words, type_table, position_table = a.words, a.type_table, a.position_table
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
        check_like("word_table", a.word_table, ("V", hidden_size), "type_table", type_table)
        num_words = a.word_table.shape[0]  # type: ignore[union-attr]
        if a.padding_idx is not None and not 0 <= check_integer("padding_idx", a.padding_idx) < num_words:
            raise ValueError(f"padding_idx: expected a row of word_table, in [0, {num_words}), got {a.padding_idx}")
    check_same_device("words", words, "type_table", type_table)
    num_tokens = words.shape[0]
    if position_table is not None:
        check_like("position_table", position_table, ("M", hidden_size), "type_table", type_table)
    if (a.position_ids is None) != (position_table is None):
        missing, given = ("position_ids", "position_table")[:: 1 if a.position_ids is None else -1]
        raise ValueError(f"{missing}: expected a Tensor beside {given}, got None")
    for name, ids in (("token_type_ids", a.token_type_ids), ("position_ids", a.position_ids)):
        if ids is not None:
            check_shape(name, ids, (num_tokens,))
            check_dtype(name, ids, _INTEGERS)
            check_same_device(name, ids, "words", words)
    check_shape("weight", a.weight, (hidden_size,))
    is_half = type_table.dtype in (torch.float16, torch.bfloat16)
    check_dtype("weight", a.weight, (type_table.dtype, torch.float32) if is_half else (type_table.dtype,))
    check_same_device("weight", a.weight, "type_table", type_table)
    check_like("bias", a.bias, (hidden_size,), "weight", a.weight)
    check_dropout_state(a.dropout_p, a.seed, a.coords, words, a.site, ("coords", "words"))


def _check_all_ids(a: Embedding) -> None:
    """Raises ValueError where an id is no row of its table; where that can be seen at no cost, see `check_ids`."""
    for name, ids, table in (
        ("words", a.words, a.word_table),
        ("token_type_ids", a.token_type_ids, a.type_table),
        ("position_ids", a.position_ids, a.position_table),
    ):
        if ids is not None and table is not None and not ids.is_floating_point():
            check_ids(name, ids, len(table))


# Not by `_define.define`: which field a word's gradient belongs to is known from the values that are given alone.
class _Saved(NamedTuple):
    """What backward is given beside dy: most of the record, statistics, and the gradients that are wanted."""

    a: Embedding
    mean: Tensor
    rstd: Tensor
    wants: frozenset[str]

    @classmethod
    def of(cls, given: tuple[Any, ...]) -> "_Saved":
        """Of the arguments of the registered op between dy and the request for a back-end."""
        lookups, (weight, mean, rstd, *mask, needs) = given[:7], given[7:]
        a = Embedding._make((*lookups, weight, None, None, *mask, None))
        wants = {a.word_source if name == "word_table" else name for name, bit in _BITS if needs & bit}
        return cls(a, mean, rstd, frozenset(wants))


def _module(a: Embedding, backend: str) -> Any:
    lead = a.type_table
    return resolve("embedding", OpSpec(lead.device, lead.dtype, hidden_size=lead.shape[1]), backend)


def _forward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    a = Embedding(*given[:-1])
    y, mean, rstd = _module(a, given[-1]).embedding_fwd(a)
    return y.contiguous(), mean, rstd


def _backward(dy: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Gradients that are not needed come back empty."""
    saved = _Saved.of(given[:-1])
    made = _module(saved.a, given[-1]).embedding_bwd(saved.a, dy, saved.mean, saved.rstd, saved.wants)
    names = (saved.a.word_source, "position_table", "type_table", "weight", "bias")
    return tuple([made[name].contiguous() if name in made else dy.new_empty(0) for name in names])


_TYPES = get_type_hints(Embedding)
_LINES = lines_of(Embedding)
_fwd = Op(
    "embedding_fwd", _forward, _LINES, lambda *given: _check(Embedding(*given[:-1])),
    lambda *given: _check_all_ids(Embedding(*given[:-1])),
    declaration=declaration(_TYPES | {"backend": str}, 3),
)  # fmt: skip
_bwd = Op(
    "embedding_bwd",
    _backward,
    _LINES | {"dy": "f T H", "mean": "s T", "rstd": "s T"},
    lambda dy, *given: _check(_Saved.of(given[:-1]).a._replace(bias=given[7])),  # as good as weight
    lambda dy, *given: _check_all_ids(_Saved.of(given[:-1]).a),
    declaration=declaration(
        {"dy": Tensor}
        | {name: _TYPES[name] for name in (*Embedding._fields[:7], "weight")}
        | {"mean": Tensor, "rstd": Tensor}
        | {name: _TYPES[name] for name in ("dropout_p", "seed", "coords", "site")}
        | {"needs": int, "backend": str},
        5,
    ),
)


def _fake_forward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    a = Embedding(*given[:-1])
    num_tokens, hidden_size = a.words.shape[0], a.type_table.shape[1]
    mean, rstd = (a.type_table.new_empty(num_tokens, dtype=wide_dtype(a.type_table.dtype)) for _ in range(2))
    return a.type_table.new_empty((num_tokens, hidden_size), dtype=a.out_dtype), mean, rstd


def _fake_backward(dy: Tensor, *given: Any) -> tuple[Tensor, ...]:
    a, _, _, wants = _Saved.of(given[:-1])
    gradients = [
        getattr(a, name).new_empty(getattr(a, name).shape)
        if name in wants and getattr(a, name) is not None
        else dy.new_empty(0)
        for name in (a.word_source, "position_table", "type_table")
    ]
    return *gradients, a.weight.new_empty(a.weight.shape), a.weight.new_empty(a.weight.shape)


_KEPT = (*Embedding._fields[:6], "weight", "mean", "rstd", "seed", "coords")


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    a, (_, mean, rstd) = Embedding(*inputs[:-1]), output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    keep_tensors(ctx, (*a[:6], a.weight, mean, rstd, a.seed, a.coords))
    ctx.others = (a.padding_idx, a.dropout_p, a.site, inputs[-1])


def _differentiate(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    gradients: dict[str, Tensor | None] = dict.fromkeys((*Embedding._fields, "backend"))
    if dy is None:
        return tuple(gradients.values())
    *lookups, weight, mean, rstd, seed, coords = kept_tensors(ctx, _KEPT)
    padding_idx, dropout_p, site, backend = ctx.others
    wanted = dict(zip(Embedding._fields, ctx.needs_input_grad, strict=False))
    words = "words" if lookups[0].is_floating_point() else "word_table"
    names = (words, "position_table", "type_table")
    needs = sum([bit for name, (_, bit) in zip(names, _BITS, strict=True) if wanted[name]])
    made = _bwd(dy, *lookups, padding_idx, weight, mean, rstd, dropout_p, seed, coords, site, needs, backend)
    gradients |= {
        name: gradient for name, gradient in zip((*names, "weight", "bias"), made, strict=True) if wanted[name]
    }
    return tuple(gradients.values())


_fwd.register_fake(_fake_forward)
_bwd.register_fake(_fake_backward)
_fwd.register_autograd(_differentiate, setup_context=_save)
