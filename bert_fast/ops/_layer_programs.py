"""A layer of a model by the programs that a back-end keeps: one autograd function, with nothing around it.

What `_define.py` makes of a record is for anybody's call of an op, through PyTorch's dispatcher: every argument one by
one, 41 of them. A model's layers share nearly all; what they share comes as one object each here (`Form`, `OfCall`).
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bert_fast.addresses import lie_of, reader
from bert_fast.ops._memory import name_call
from bert_fast.ops._register import Op, are_plain, is_watched
from bert_fast.ops._saved import keep_tensors, kept_tensors
from bert_fast.reference.encoder_layer import (
    PROJECTED,
    TENSORS,
    EncoderLayer,
    OfCall,
    OfLayer,
    Options,
    Projections,
    Saved,
    in_places,
)
from bert_fast.remembered import guard_of

_Tensors = tuple[Tensor | None, ...]
_NUM_GRADIENTS = 1 + len(PROJECTED) + 16  # of x, of what was projected, of the parameters
_NUM_MADE = 1 + len(Saved._fields)  # what forward made, of what backward is given
_PLACE_OF_MASK = 1 + Saved._fields.index("mask")  # there or not by the lengths
_SITES = "probabilities_site", "attention_site", "site"
_kinds: dict[Any, int] = {}


def of_call(tensors: tuple[Tensor | None, ...], max_seqlen_q: int, max_seqlen_k: int, causal: bool) -> OfCall:
    """What the layers of a forward pass share. tensors: of `TENSORS`."""
    _, offsets, _, coords_q, coords_k, order, _ = tensors
    assert offsets is not None and coords_q is not None and coords_k is not None
    numbers = (
        coords_k.shape[0], coords_q.shape[0], offsets.shape[0], 0 if order is None else order.shape[0], max_seqlen_q,
        max_seqlen_k,
    )  # fmt: skip
    forms = [None if one is None else (one.dtype, one.dim()) for one in tensors]
    kind = (*forms, *lie_of([one for one in tensors if one is not None]), coords_q is coords_k)
    return OfCall(tensors, numbers, causal, _kinds.setdefault(kind, len(_kinds)))


def arguments(x: Any, layer: OfLayer, call: OfCall, options: Options) -> EncoderLayer:
    """The record of a call."""
    fields: dict[str, Any] = dict(zip(EncoderLayer._fields[1:17], layer.parameters, strict=True))
    fields |= dict(zip(TENSORS, call.tensors, strict=True)) | options.fields()
    fields |= dict(zip(_SITES, layer.sites, strict=True))
    if not options.drops:
        fields["seed"] = None
    return EncoderLayer(x=x, max_seqlen_q=call.numbers[4], max_seqlen_k=call.numbers[5], **fields)


class Form:
    """The decisions for calls of a layer that are alike, and the programs that ran these calls.

    A form holds no tensor. Before it is used again, its owner asks `fits` whether the layer's parameters still have the
    dtypes, shapes and addresses that they had. The other arguments must have the dtypes, devices and alignment of the
    first call. keeps: whether a gradient is recorded. saves: what LayerNorms save, see `ops.dropout_add_layer_norm`.
    """

    def __init__(
        self, layer: OfLayer, options: Options, module: Any, backend: str, keeps: bool, saves: tuple[str, str]
    ) -> None:
        self.saves = saves
        self.options, self.module, self.backend, self.keeps = options, module, backend, keeps
        self._of_layer, self._dtype = layer[1:], layer.parameters[6].dtype  # type: ignore[union-attr]  # of all parameters
        self._known: tuple[Any, ...] | None = None  # of parameters: whether all are there, guard, addresses
        self.found: Any = None
        self.keeping: tuple[Any, ...] | None = None  # which inputs need gradients, what is kept, the gradients' names
        self._backward: tuple[Any, ...] | None = None

    def remember(self, parameters: _Tensors) -> None:
        """Says what `fits` compares with."""
        there = [one for one in parameters if one is not None]
        self._known = len(there) == len(parameters), guard_of(there), reader().addresses(there)

    def fits(self, parameters: _Tensors) -> bool:
        """Whether parameters have the form of those that were remembered, and lie where they did."""
        are_all, guard, addresses = self._known  # type: ignore[misc]
        there: Any = parameters if are_all else [one for one in parameters if one is not None]
        return bool(guard(*there) and addresses == reader().addresses(there))

    def of(self, parameters: _Tensors) -> OfLayer:
        """The layer with its parameters."""
        return OfLayer(parameters, *self._of_layer)

    def find_backward(
        self, dy: Tensor, kept: _Tensors, weights: slice, call: OfCall, others: tuple[Any, ...]
    ) -> tuple[Any, _Tensors]:
        """What backward of such calls is run by, None where it is not to be by a program; and what it is to be given.

        weights: where parameters stand in kept; x comes before them, what was projected after them. others: what
        `find_layer_bwd` wants beside.
        """
        if type(dy) is not Tensor:
            return None, kept
        x = kept[weights.start - 1]
        moving = [dy, *([] if x is None else [x]), *(kept[weights.stop :] if kept[-1] is not None else ())]
        state = *lie_of(moving), kept[_PLACE_OF_MASK] is None, *self.module.settings()
        backward = self._backward  # other threads may set it meanwhile
        if backward is not None:
            pick, pick_weights, guard, addresses, known, found = backward
            given, those = pick(kept), pick_weights(kept)
            if guard(dy, *given, *those) and addresses == reader().addresses(those) and state == known:
                return found, kept
        self.check_dtypes(kept[weights])
        if not are_plain((dy, *kept)):
            return None, kept
        # What forward made is contiguous, but hooks on saved tensors may have put it elsewhere.
        kept = (*[one if one is None else one.contiguous() for one in kept[:_NUM_MADE]], *kept[_NUM_MADE:])
        # Offsets and coordinates of queries and keys may be the same tensors, which are looked at once.
        places = {id(one): place for place, one in enumerate(kept) if one is not None}.values()
        of_weights = range(*weights.indices(len(kept)))
        pick = _picker([place for place in places if place not in of_weights])
        pick_weights = _picker([place for place in places if place in of_weights])
        given, those = pick(kept), pick_weights(kept)
        free = [[size in call.numbers for size in one.shape] for one in (dy, *given)]
        guard, addresses = guard_of([dy, *given, *those], free), reader().addresses(those)
        found = self.module.find_layer_bwd(dy, kept, *others)
        self._backward = pick, pick_weights, guard, addresses, state, found
        return found, kept

    def check_dtypes(self, parameters: _Tensors) -> None:
        """Raises RuntimeError if parameters that backward reads were cast after the forward pass."""
        for one in parameters:
            if one is not None and one.dtype is not self._dtype:
                raise RuntimeError(
                    f"encoder_layer: expected parameters of {self._dtype} in backward, as in forward, got {one.dtype} "
                    f"of shape {list(one.shape)}; cast a model before its forward pass"
                )

    def forget_backward(self) -> None:
        """Looks backward's up anew from now on."""
        self._backward = None


def _picker(places: Sequence[int]) -> Callable[[_Tensors], Sequence[Tensor]]:
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda kept: [kept[place] for place in places]  # type: ignore[misc]


class LayerPrograms:
    """Calls of layers by programs of a back-end.

    op: for everybody else's calls, and where backward is watched. needless, kept, others: what it keeps, see
    `_define.py`. joined: the gradient that holds a parameter's, by the parameter's name.
    """

    def __init__(
        self,
        op: Op,
        needless: Callable[[Any, Set[str]], Iterable[str]],
        check_values: Callable[[EncoderLayer, int, int], None],
        kept: Sequence[str],
        others: Sequence[str],
        joined: Mapping[str, str],
    ) -> None:
        self._op, self._needless, self._check_values = op, needless, check_values
        self._kept, self._others, self._joined = (*kept, *PROJECTED), tuple(others), joined
        first = self._kept.index("query_weight")
        self._weights = slice(first, len(self._kept) - len(PROJECTED))

        def forward(ctx: Any, x: Tensor, *given: Any) -> Tensor:
            return self._forward(ctx, x, given)

        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            return *self._backward(ctx, dy), None, None

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._function = type("encoder_layer", (torch.autograd.Function,), methods)
        # Not `Function.apply`, which looks at each argument again.
        self._apply = super(torch.autograd.Function, self._function).apply  # type: ignore[misc]

    def __call__(self, form: Form, x: Tensor, projected: Projections, parameters: _Tensors, call: OfCall) -> Tensor:
        """y."""
        try:
            if form.keeps:
                return self._apply(x, *projected, *parameters, form, call)
            return self._run(form, x, projected, form.of(parameters), call)[0]  # type: ignore[return-value]
        except torch.OutOfMemoryError as error:
            name_call(error, "encoder_layer_fwd", (x,))
            raise

    def _run(self, form: Form, x: Tensor, projected: Projections, layer: OfLayer, call: OfCall) -> _Tensors:
        """(y, the fields of `Saved`)."""
        module, options = form.module, form.options
        if x.is_cpu:
            self._check_values(arguments(x, layer, call, options), call.numbers[1], call.numbers[0])
        found = form.found
        if found is None:
            found = form.found = module.find_layer(x, projected, layer, call, options)
        made: _Tensors | None = module.layer_of_model(found, x, projected, layer, call, options)
        if made is None:
            form.found = None  # what it refers to may be gone
            with torch.no_grad():
                made = module.OPS.forward(
                    arguments(x, layer, call, options), None if projected[0] is None else projected
                )
        return made

    def _forward(self, ctx: Any, x: Tensor, given: tuple[Any, ...]) -> Tensor:
        projected, parameters, form, call = given[:3], given[3:-2], given[-2], given[-1]
        layer = form.of(parameters)
        made = self._run(form, x, projected, layer, call)
        of_call = call.tensors if not x.is_cpu else _copied(call.tensors)
        if form.keeping is None:
            needs = ctx.needs_input_grad[:_NUM_GRADIENTS]
            form.keeping = needs, self._picker(form.options, needs), self._wanted(needs)
        keep_tensors(ctx, form.keeping[1]((*made, *of_call, x, *projected, *parameters, None)))
        ctx.others = form, layer, call
        return made[0]  # type: ignore[return-value]

    def _backward(self, ctx: Any, dy: Tensor) -> _Tensors:
        kept, (form, layer, call) = kept_tensors(ctx, self._kept), ctx.others
        options, module, (needs, _, wants) = form.options, form.module, form.keeping
        if not (torch.is_grad_enabled() or is_watched()):
            found, kept = form.find_backward(dy, kept, self._weights, call, (self._kept, layer, call, options, needs))
            if found is not None:
                try:
                    made: _Tensors | None = module.layer_of_model_bwd(
                        found, dy, kept, self._kept, layer, call, options, wants, needs
                    )
                except torch.OutOfMemoryError as error:
                    name_call(error, "encoder_layer_bwd", (dy,))
                    raise
                if made is not None:
                    return made
                form.forget_backward()
        else:
            form.check_dtypes(kept[self._weights])
        a = arguments(None, layer, call, options)
        if kept[-1] is not None:
            return self._backward_of_projected(a, dy, kept, needs, module)
        op = SimpleNamespace(
            saved_tensors=kept[: -len(PROJECTED)],
            others=(*[getattr(a, name) for name in self._others], form.backend),
            needs_input_grad=(needs[0], *needs[4:], *[False] * (len(EncoderLayer._fields) - 16)),
        )
        assert self._op.formula is not None
        of_x, *of_parameters = self._op.formula.backward(op, dy)[:17]
        return of_x, None, None, None, *of_parameters

    def _backward_of_projected(
        self, a: EncoderLayer, dy: Tensor, kept: tuple[Any, ...], needs: tuple[bool, ...], module: Any
    ) -> tuple[Tensor | None, ...]:
        """The gradients by the ops of the back-end, where projections were made by others."""
        given = dict(zip(self._kept, kept, strict=True))
        a = a._replace(**{name: one for name, one in given.items() if name in EncoderLayer._fields})
        outputs = [given[name] for name in ("y", *Saved._fields)]
        with torch.no_grad():
            made = module.OPS.backward(a, dy, *outputs, wants=self._wanted(needs), projected=kept[-len(PROJECTED) :])
            found = in_places(made, needs)
        if not torch.is_grad_enabled():
            return found
        # As ops do: who differentiates these is told.
        made = [one for one in found if one is not None]
        refuse = torch._C._functions.DelayedError(b"second derivatives of encoder_layer are not implemented", len(made))
        refused = refuse(*[one.detach().requires_grad_() for one in made])
        each = iter(refused if isinstance(refused, tuple) else (refused,))
        return tuple([one if one is None else next(each) for one in found])

    @functools.lru_cache(maxsize=1024)  # noqa: B019  there is one of these objects
    def _picker(self, options: Options, needs: tuple[bool, ...]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
        """The function that takes what backward reads, in the order of `kept`, of what forward has; else None."""
        layer = OfLayer((None,) * 16, 1, "", (0.0, 0.0, 0.0), (0, 0, 0), (0.0, 0.0))
        a = arguments(None, layer, OfCall((None,) * len(TENSORS), (0,) * 6, False, 0), options)
        dropped = set(self._needless(a._replace(rows=True if options.has_rows else None), self._wanted(needs)))  # type: ignore[arg-type]
        source = ("y", *Saved._fields, *TENSORS, "x", *PROJECTED, *EncoderLayer._fields[1:17], None)
        return operator.itemgetter(*[source.index(None if name in dropped else name) for name in self._kept])

    @functools.lru_cache(maxsize=1024)  # noqa: B019  there is one of these objects
    def _wanted(self, needs: tuple[bool, ...]) -> frozenset[str]:
        """The names of gradients that a back-end makes where these need one; "x" stands for what was projected, too."""
        names = ("x", *["x"] * len(PROJECTED), *EncoderLayer._fields[1:17])
        return frozenset(self._joined.get(name, name) for name, need in zip(names, needs, strict=True) if need)


def _copied(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The tensors of a call with offsets of their own, since a loader may fill its buffer again."""
    rows, offsets_q, offsets_k, *others = tensors
    assert offsets_q is not None and offsets_k is not None
    copy = offsets_q.clone()
    return rows, copy, copy if offsets_k is offsets_q else offsets_k.clone(), *others
