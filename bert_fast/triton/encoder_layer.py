"""A layer of BERT from the ops of this back-end, as `reference.encoder_layer` puts them together.

What calls of layers that are alike have in common, all but tensors, seeds and sites, is done once (`_programs.py`).
"""

import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from bert_fast.addresses import lie_of
from bert_fast.reference.encoder_layer import (
    PROJECTED,
    TENSORS,
    EncoderLayer,
    LayerOps,
    OfCall,
    OfLayer,
    Options,
    Projections,
    Saved,
    in_places,
)
from bert_fast.remembered import Remembered
from bert_fast.storage import one_tensor, view_of_neighbours
from bert_fast.triton._column_sums import launched_together
from bert_fast.triton._norm_inputs import norm_inputs
from bert_fast.triton._products import settings
from bert_fast.triton._programs import Kind, Programs
from bert_fast.triton._tracing import Trace
from bert_fast.triton.attention import attention_bwd, attention_fwd
from bert_fast.triton.dropout_add_layer_norm import dropout_add_layer_norm_bwd, dropout_add_layer_norm_fwd
from bert_fast.triton.linear import linear_bwd, linear_fwd
from bert_fast.triton.mlp import mlp_bwd, mlp_fwd
from bert_fast.triton.qkv_projection import qkv_projection_bwd, qkv_projection_fwd

OPS = LayerOps(
    qkv_projection_fwd, qkv_projection_bwd, linear_fwd, linear_bwd, attention_fwd, attention_bwd,
    dropout_add_layer_norm_fwd, dropout_add_layer_norm_bwd, mlp_fwd, mlp_bwd, one_tensor,
    norm_inputs,
)  # fmt: skip
_FIELDS = EncoderLayer._fields
_PARAMETERS = slice(_FIELDS.index("query_weight"), _FIELDS.index("norm_bias") + 1)
_OF_FORWARD = {
    "x": "T_", "rows": "M", "cu_seqlens_q": "O", "cu_seqlens_k": "O", "coords_q": "M_", "coords_k": "T_",
    "sequence_order": "B",
}  # fmt: skip
_OF_BACKWARD = _OF_FORWARD | {
    "dy": "M_", "y": "M_", "qkv": "T_", "q": "M_", "kv": "T_", "out": "M_", "lse": "_M", "mask": "_KW", "z": "M_",
    "attention_h": "M_", "attention_mean": "M", "attention_rstd": "M", "pre": "M_", "h": "M_", "mean": "M",
    "rstd": "M", "query": "T_", "key": "T_", "value": "T_",
}  # fmt: skip
_is_none = functools.partial(operator.is_, None)
_NUMBERS = [_FIELDS.index(name) for name in (
    "max_seqlen_q", "max_seqlen_k", "probabilities_site", "attention_site", "site",
)]  # fmt: skip


def _run_forward(*values: Any) -> tuple[Tensor | None, ...]:
    return OPS.forward(EncoderLayer(*values))


def _run_backward(*values: Any) -> dict[str, Tensor]:
    a, (dy, *kept, wants) = EncoderLayer(*values[: len(_FIELDS)]), values[len(_FIELDS) :]
    with launched_together():  # gradients of biases and of LayerNorms, which nothing in a layer reads
        return OPS.backward(a, dy, *kept, wants=wants)


def _joined(group: tuple[Tensor | None, ...]) -> dict[tuple[int, ...], Tensor | None]:
    """Of a layer's parameters: weights and biases of query, key and value, each as one tensor, as its ops find them."""
    weights, biases = group[:6:2], group[1:6:2]
    return {
        (0, 2, 4): None if weights[0] is None else view_of_neighbours(*weights),  # type: ignore[arg-type]
        (1, 3, 5): None if biases[0] is None else view_of_neighbours(*biases),  # type: ignore[arg-type]
    }


def _programs(run: Callable[..., Any], fields: Sequence[str], letters: Mapping[str, str]) -> Programs:
    sizes = {place: letters[name] for place, name in enumerate(fields) if name in letters}
    return Programs(run, sizes=sizes, integers=_NUMBERS, settings=settings, lasting=_PARAMETERS, joined=_joined)


_forward = _programs(_run_forward, _FIELDS, _OF_FORWARD)
_backward = _programs(_run_backward, (*_FIELDS, "dy", "y", *Saved._fields, "wants"), _OF_BACKWARD)


def encoder_layer_fwd(a: EncoderLayer) -> tuple[Tensor | None, ...]:
    """(y, what backward reads), as `reference.encoder_layer`."""
    return _forward(tuple(a))


def encoder_layer_bwd(a: EncoderLayer, dy: Tensor, *saved: Any) -> dict[str, Tensor]:
    """Gradients by name, as `reference.encoder_layer`."""
    return _backward((*a, dy, *saved))


class Found(NamedTuple):
    """What calls of a layer that are alike are run by; it refers to no tensor.

    kind: of their programs. references: to weights, and biases, of query, key and value as one tensor.
    """

    kind: Kind
    references: tuple[Any, ...]

    def together(self) -> tuple[Tensor | None, ...] | None:
        """What is referred to; None where it is not there any more."""
        made = tuple([one if one is None else one() for one in self.references])
        return made if [*map(_is_none, made)] == [*map(_is_none, self.references)] else None


def find_layer(x: Tensor, projected: Projections, layer: OfLayer, call: OfCall, options: Options) -> Found:
    """What `layer_of_model` is given for such calls."""
    lasting, references = _of_lasting(layer.parameters, _look_forward)
    lie = lie_of([one for one in (x, *projected) if one is not None])
    key = "forward", lasting, call.kind, x.dtype, lie, options, *settings()
    return Found(_of_model.kind_of(key), references)


def find_layer_bwd(
    dy: Tensor, kept: tuple[Tensor | None, ...], names: tuple[str, ...], layer: OfLayer, call: OfCall, options: Options,
    needs: tuple[bool, ...],
) -> Found:  # fmt: skip
    """What `layer_of_model_bwd` is given for such calls."""
    lasting, references = _of_lasting(layer.parameters, _look_backward)
    # These two were made by others; all else that is kept was made here.
    x, projected = kept[names.index("x")], kept[-len(PROJECTED) :]
    lie = lie_of([one for one in (dy, x, *projected) if one is not None])
    given = x is None, projected[0] is None, kept[names.index("mask")] is None
    key = "backward", lasting, call.kind, dy.dtype, lie, given, names, options, needs, *settings()
    return Found(_of_model.kind_of(key), references)


def layer_of_model(
    found: Found, x: Tensor, projected: Projections, layer: OfLayer, call: OfCall, options: Options
) -> tuple[Tensor | None, ...] | None:
    """(y, what backward reads) by a program; None where there is none for such a call.

    projected: queries, keys and values [T, N] where others made them, else None three times.
    """
    together = found.together()
    if together is None:
        return None
    inputs = (x, *projected, *layer.parameters, *together, *call.tensors)

    def run(trace: Trace) -> Any:
        return OPS.forward(*_record(trace, _OF_MODEL, inputs, call, options)[:2])

    return _of_model.run(found.kind, inputs, (*call.numbers, *layer.sites), run)  # type: ignore[no-any-return]


def layer_of_model_bwd(
    found: Found, dy: Tensor, kept: tuple[Tensor | None, ...], names: tuple[str, ...], layer: OfLayer, call: OfCall,
    options: Options, wants: frozenset[str], needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...] | None:  # fmt: skip
    """Gradients of x, what was projected and the parameters, None where `needs` has no need of one; None as above.

    kept: of these names, of which `PROJECTED` are the last; what backward does not read may be None.
    """
    together = found.together()
    if together is None:
        return None
    inputs = (dy, *kept, *together)

    def run(trace: Trace) -> Any:
        a, projected, others = _record(trace, ("dy", *names, *_TOGETHER), inputs, call, options)
        given = [others.get(name) for name in ("dy", "y", *Saved._fields)]
        with launched_together():
            made = OPS.backward(a, *given, wants=wants, projected=projected)
        return in_places(made, needs)

    return _of_model.run(found.kind, inputs, (*call.numbers, *layer.sites), run)  # type: ignore[no-any-return]


_of_model = Programs(_run_forward, sizes={})
_NAMES, _TOGETHER = _FIELDS[_PARAMETERS], ("qkv_weight", "qkv_bias")
_OF_MODEL = ("x", *PROJECTED, *_NAMES, *_TOGETHER, *TENSORS)


def _look(group: tuple[Tensor | None, ...]) -> tuple[int, list[Any]]:
    return _kind_of_lasting(group), [one if one is None else weakref.ref(one) for one in _joined(group).values()]


# What PyTorch would do with a tensor is not the same in forward and in backward.
_look_forward, _look_backward = (Remembered(_look, by_address=True) for _ in range(2))


def _of_lasting(parameters: tuple[Tensor | None, ...], look: Remembered) -> tuple[Any, tuple[Any, ...]]:
    """What tells a layer's parameters from others', and references to those that lie side by side as one tensor."""
    kind, references = look(parameters)
    references = tuple([one if one is None or one() is not None else None for one in references])
    return (kind, *map(_is_none, references)), references


def _kind_of_lasting(group: tuple[Tensor | None, ...]) -> int:
    kind = tuple([one if one is None else (one.dtype, one.shape, one.stride(), one.data_ptr() % 16) for one in group])
    device = next(one.get_device() for one in group if one is not None)
    return _kinds.setdefault((*kind, device), len(_kinds))


_kinds: dict[Any, int] = {}


def _record(
    trace: Trace, names: tuple[str, ...], tensors: tuple[Tensor | None, ...], call: OfCall, options: Options
) -> tuple[EncoderLayer, Any, dict[str, Any]]:
    """The arguments of a call that is traced, what was projected if anything, and all its tensors by name."""
    of_tokens, of_rows, of_offsets, of_order, max_q, max_k, *sites = trace.numbers.arguments
    are_all = call.tensors[TENSORS.index("coords_q")] is call.tensors[TENSORS.index("coords_k")]
    sizes = {"T": of_tokens, "M": of_tokens if are_all else of_rows, "O": of_offsets, "B": of_order}
    sizes |= {"K": sizes["M"] // 16 + (of_offsets - 1), "W": (max_k + 63) // 64 * 32}  # `stored_mask_shape`
    letters = _OF_BACKWARD
    if tensors[names.index(PROJECTED[0])] is not None:  # x, too, is of the rows
        letters = letters | {"x": "M_", PROJECTED[0]: "M_"}
    given: dict[str, Any] = {}
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is None:
            trace.skip()
        else:
            given[name] = trace.input_like(tensor, letters.get(name, ""), sizes)
    for whole, parts in zip(_TOGETHER, (_NAMES[:6:2], _NAMES[1:6:2]), strict=True):
        if whole in given and all(part in given for part in parts):
            trace.join([given[part] for part in parts], given.pop(whole))
    if not options.drops:
        given["seed"] = None
    of_sites = dict(zip(("probabilities_site", "attention_site", "site"), sites, strict=True))
    fields = given | options.fields() | of_sites | {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
    projected = tuple([given[name] for name in PROJECTED]) if PROJECTED[0] in given else None
    return EncoderLayer(*[fields.get(name) for name in _FIELDS]), projected, given
