"""An op out of one record of its arguments: schemas, checks, fake implementations, what is saved, and the formula.

    class Linear(NamedTuple):                         # in reference/linear.py, where every argument is explained
        x: Annotated[Tensor, "x T K"]                 # dtype and shape, see `_signature.py`
        weight: Annotated[Tensor, "p N K"]
        bias: Annotated[Tensor | None, "p N"]

    _op = define("linear", Linear, outputs={"y": "x T N"}, backward="dy x? weight", gradients="x? weight? bias?")

registers `bert_fast::linear_fwd(x, weight, bias, backend)` and `bert_fast::linear_bwd(dy, x, weight, wants_dx,
wants_dweight, wants_dbias, backend)`, which run a back-end's `linear_fwd(a)` and `linear_bwd(a, dy, wants)`: `a` is the
record. In backward the fields that it is not given are None. An op cannot return None: what is not made leaves it
as an empty tensor. The request for a back-end travels with the arguments: backward runs where forward was asked to run.
"""

import inspect
import itertools
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from operator import itemgetter
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled

from bert_fast.backend import OpSpec, resolve
from bert_fast.ops._autocast import call_without_autocast, is_autocast_on
from bert_fast.ops._memory import name_call
from bert_fast.ops._register import Op, are_plain, is_watched
from bert_fast.ops._saved import keep_tensors, kept_tensors
from bert_fast.ops._signature import Line, empty_like_lines, lines_of

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_Predicate = Callable[[Any], Any]
_Gradients = Mapping[str, Tensor | None]


def define(
    name: str,
    record: Any,
    *,
    outputs: Mapping[str, str],
    backward: str,
    gradients: str,
    joined: Mapping[str, tuple[str, ...]] = _NOTHING,
    same: Mapping[str, tuple[str, _Predicate]] = _NOTHING,
    needless: Callable[[Any, Set[str]], Iterable[str]] | None = None,
    makes: Mapping[str, _Predicate] = _NOTHING,
    perhaps: Mapping[str, Callable[[ModuleType, Any], Any]] = _NOTHING,
    copies: Iterable[str] = (),
    last_dimension: str | None = None,
    implementation: str | None = None,
    run: Callable[[ModuleType, Any], Any] | None = None,
    run_backward: Callable[..., _Gradients] | None = None,
    check: Callable[[Any], None] | None = None,
    check_backward: Callable[..., None] | None = None,
    check_values: Callable[..., None] | None = None,
) -> Op:
    """Registers `<name>_fwd` and `<name>_bwd`; returns the first, to be called with a record's fields and a back-end.

    record: the NamedTuple. Its fields, in their order, are the op's arguments; the request for a back-end comes last.
    outputs: their lines; the first has a gradient, the others are for backward.
    backward: what backward is given, in order: "d" and the first output's name, then outputs and fields; "?" behind
        one that may be None there, "..." for the fields that are not named.
    gradients: what backward makes, in order; "?" behind one that is made only if it is wanted: its flag follows the
        arguments of backward.
    joined: gradients that hold those of several fields, one below the other.
    same: gradients that are another's where the predicate of the record holds: implementations return the one tensor
        for both, the registered op, whose outputs may not share memory, an empty one.
    needless: of the record and the names of wanted gradients, which with a "?" in `backward` are not kept; default:
        none.
    makes: of the record, whether an output is made; else always. perhaps: of the module and the record, the shape of an
        output that a back-end need not make; None where it is not made.
    copies: fields in memory which the caller may fill again before backward; on the CPU a copy is kept.
    last_dimension: the field of `OpSpec` that is told the size of the leading tensor's last dimension.
    implementation: its name in the table of back-ends, if not `name`.
    run, run_backward: (module, a) -> outputs; (module, a, dy, the outputs among `backward`, and the set of wanted
        gradients if any has a flag) -> gradients by name; default: the module's functions of these names.
    check, check_backward: (a); (a, and as run_backward from the outputs on): raise where arguments, each of which is
        right, do not go together. check_values: as run_backward from a on, for what only values tell, where backward is
        called by itself; `run` looks at them in forward.
    """
    pair = _Pair(name, record, outputs, backward.split(), gradients.split(), joined)
    pair.same, pair.makes, pair.perhaps = same, makes, perhaps
    pair.places_perhaps = [(pair.saved.index(one), len(pair.lines[one].sizes)) for one in perhaps]
    pair.needless = needless
    pair.copies = [pair.saved.index(one) for one in copies]
    pair.implementation = implementation or name
    pair.rows, pair.heads = last_dimension == "hidden_size", last_dimension == "head_dim"
    pair.run, pair.run_backward = run, run_backward
    op = Op(
        pair.forward_name,
        pair.forward,
        pair.lines,
        check and (lambda *values: check(record._make(values[:-1]))),
        None,
        declaration=declaration(pair.types, len(outputs)),
    )

    def check_given(*values: Any) -> None:
        a, _, *given = pair.read(values)
        if check is not None:
            check(a)
        if check_backward is not None:
            check_backward(a, *given)

    pair.backward_op = Op(
        pair.backward_name,
        pair.backward,
        pair.lines,
        check_given,
        check_values and (lambda *values: check_values(*pair.read(values))),
        declaration=declaration(pair.backward_types, len(pair.gradients)),
    )
    op.register_fake(pair.fake_forward)
    pair.backward_op.register_fake(pair.fake_backward)
    first_only = len(outputs) > 1
    op.register_autograd(
        pair.differentiate, setup_context=pair.save, first_only=first_only, run=pair.make if first_only else None
    )
    return op


class _Plan(NamedTuple):
    """What backward has to make where certain fields need a gradient, and to whom it goes."""

    wanted: frozenset[str]
    flags: tuple[bool, ...]
    flagged: tuple[frozenset[str], ...]  # what is wanted of gradients that have flags, where there are any: one set
    results: tuple[tuple[str, tuple[int | None, ...]], ...]  # a gradient, and the places of the fields that it is of


class _Reader(NamedTuple):
    """How to find in a tuple what backward works on."""

    fields: Callable[[tuple[Any, ...]], tuple[Any, ...]]  # of the record
    outputs: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    lead: Callable[[tuple[Any, ...]], Tensor]  # the tensor that back-ends are chosen by


class _Pair:
    """Forward and backward of one record: what each is given, and how one's arguments become the other's."""

    same: Mapping[str, tuple[str, _Predicate]]
    needless: Callable[[Any, Set[str]], Iterable[str]] | None
    makes: Mapping[str, _Predicate]
    perhaps: Mapping[str, Callable[[ModuleType, Any], Any]]
    places_perhaps: list[tuple[int, int]]  # among what is saved, and dimensions
    copies: list[int]  # places among what is saved
    rows: bool  # whether the leading tensor's last dimension is the hidden size, and back-ends ask for it
    heads: bool  # whether it is that of a head
    implementation: str
    run: Callable[[ModuleType, Any], Any] | None
    run_backward: Callable[..., _Gradients] | None
    backward_op: Op

    def __init__(
        self, name: str, record: type, outputs: Mapping[str, str], backward: Sequence[str], gradients: Sequence[str],
        joined: Mapping[str, tuple[str, ...]],
    ) -> None:  # fmt: skip
        self.forward_name, self.backward_name = f"{name}_fwd", f"{name}_bwd"
        self.record, self.outputs, self.joined = record, tuple(outputs), joined
        self.types = typing.get_type_hints(record) | {"backend": str}
        if backward[-1] == "...":
            backward = [*backward[:-1], *(one for one in self.types if one not in (*backward, "backend"))]
        self.upstream, *given = (word.removesuffix("?") for word in backward)
        self.gradients = tuple(word.removesuffix("?") for word in gradients)
        self.flags = tuple(word[:-1] for word in gradients if word.endswith("?"))
        of_all = self.types | dict.fromkeys(outputs, Tensor)
        of_all |= {word[:-1]: of_all[word[:-1]] | None for word in backward if word.endswith("?")}
        flags = {f"wants_d{flag}": bool for flag in self.flags}
        of_given = {one: of_all[one] for one in given}
        self.backward_types = {self.upstream: Tensor} | of_given | flags | {"backend": str}
        self.lines = lines_of(record) | {one: Line.parse(line) for one, line in outputs.items()}
        self.lines[self.upstream] = self.lines[self.outputs[0]]
        for gradient, parts in joined.items():
            self.lines[gradient] = self.lines[parts[0]].stacked(len(parts))
        # Fields that backward is always given: where they are None they were so in forward, and have no gradient.
        self.optional = {one for one in given if one in self.types and f"{one}?" not in backward}

        # What autograd keeps, of forward's arguments and outputs; and backward's arguments, of what it kept.
        self.saved = tuple(one for one in given if one in self.lines)
        others = (*(one for one in given if one not in self.lines), "backend")
        everything = (*self.types, *outputs)
        self._places = {one: place for place, one in enumerate(self.saved)}
        self._pick_saved, self._pick_others = _picker(everything, self.saved), _picker(everything, others)
        kept = (self.upstream, *self.saved, *others, *flags)
        self._pick_arguments = _picker(kept, tuple(self.backward_types))
        # The record and outputs, of backward's arguments or of what was kept; a None stands for fields not given.
        fields = tuple(one if one in given else None for one in self.types if one != "backend")
        known = tuple(one for one in given if one in outputs)
        self._of_arguments, self._of_kept = (
            _Reader(_picker((*names, None), fields), _picker((*names, None), known), _first(self._leads_among(names)))
            for names in (tuple(self.backward_types), kept)
        )
        self._pick_flags = _picker(tuple(self.backward_types), tuple(flags))
        self._lead = self._leads_among(tuple(self.types))[0]
        self._plans: dict[tuple[bool, ...], _Plan] = {}
        self._wanted: dict[tuple[bool, ...], frozenset[str]] = {}

    def _leads_among(self, names: Sequence[str]) -> list[int]:
        return [place for place, one in enumerate(names) if one in self.lines and self.lines[one].kind == "x"]

    def read(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Of backward's arguments: the record as far as it is given, dy, outputs, and wanted gradients."""
        reader, with_none = self._of_arguments, (*values, None)
        a: Any = tuple.__new__(self.record, reader.fields(with_none))
        outputs = reader.outputs(with_none)
        if not self.flags:
            return a, values[0], *outputs
        flags = self._pick_flags(values)
        wants = self._wanted.get(flags)
        if wants is None:  # there are few choices
            wants = self._wanted[flags] = frozenset(itertools.compress(self.flags, flags))
        if not wants.isdisjoint(self.optional):
            wants = frozenset(one for one in wants if one not in self.optional or getattr(a, one) is not None)
        return a, values[0], *outputs, wants

    def forward(self, *values: Any) -> Any:
        """The implementation of the forward op."""
        made = self.make(*values)
        return made if isinstance(made, Tensor) else _without_none(made, values[self._lead])

    def make(self, *values: Any) -> Any:
        """What the forward op makes, contiguous as the fake implementation promises; None for what is not there."""
        lead = values[self._lead]
        if _is_any_autocast_enabled() and is_autocast_on(lead):
            return call_without_autocast(lead, self.make, *values)
        a: Any = tuple.__new__(self.record, values[:-1])
        module = self._module(lead, values[-1])
        made = getattr(module, self.forward_name)(a) if self.run is None else self.run(module, a)
        if isinstance(made, Tensor):
            return made.contiguous()
        return tuple([one if one is None else one.contiguous() for one in made])

    def backward(self, *values: Any) -> Any:
        """The implementation of the backward op."""
        if _is_any_autocast_enabled() and is_autocast_on(values[0]):
            return call_without_autocast(values[0], self.backward, *values)
        module, given = self._module(self._of_arguments.lead(values), values[-1]), self.read(values)
        made = self._gradients(module, given)
        twice = {one for one, (_, holds) in self.same.items() if holds(given[0])}  # outputs may not share memory
        gradients = _without_none([None if one in twice else made.get(one) for one in self.gradients], values[0])
        return gradients if len(gradients) > 1 else gradients[0]

    def _gradients(self, module: Any, given: tuple[Any, ...]) -> _Gradients:
        try:
            if self.run_backward is None:
                return getattr(module, self.backward_name)(*given)
            return self.run_backward(module, *given)
        except torch.OutOfMemoryError as error:
            name_call(error, self.backward_name, given[1:2])
            raise

    def _module(self, lead: Tensor, request: str) -> Any:
        """The back-end's module for a call that this tensor leads."""
        last: int | None = lead.shape[-1]
        if type(last) is not int:  # a size that is left open while a call is traced
            last = None
        hidden_size = last if self.rows else None
        head_dim = last if self.heads else None
        spec = tuple.__new__(OpSpec, (lead.device, lead.dtype, hidden_size, head_dim, Tensor))
        return resolve(self.implementation, spec, request)

    def fake_forward(self, *values: Any) -> Any:
        """Outputs of the shapes and dtypes that forward's have."""
        a: Any = tuple.__new__(self.record, values[:-1])
        lead = values[self._lead]
        always = [one for one in self.outputs if one not in self.perhaps]
        made = [one for one in always if one not in self.makes or self.makes[one](a)]
        empty = empty_like_lines(self.lines, dict(zip(self.types, values, strict=True)), made)
        for one, shape_of in self.perhaps.items():
            shape = shape_of(self._module(lead, values[-1]), a)
            if shape is not None:
                empty[one] = lead.new_empty(shape, dtype=torch.int32)
        outputs = _without_none([empty.get(one) for one in self.outputs], lead)
        return outputs if len(outputs) > 1 else outputs[0]

    def fake_backward(self, *values: Any) -> Any:
        """Gradients of the shapes and dtypes that backward's have."""
        given = dict(zip(self.backward_types, values, strict=True))
        a = self.read(values)[0]
        is_made = [
            given.get(f"wants_d{one}", True)
            and not (one in self.optional and given[one] is None)
            and not (one in self.same and self.same[one][1](a))
            for one in self.gradients
        ]
        empty = empty_like_lines(self.lines, given, list(itertools.compress(self.gradients, is_made)))
        gradients = _without_none([empty.get(one) for one in self.gradients], values[0])
        return gradients if len(gradients) > 1 else gradients[0]

    def save(self, ctx: Any, inputs: Any, output: Any) -> None:
        """What autograd keeps of a call."""
        outputs = (output,) if isinstance(output, Tensor) else tuple(output)
        if len(outputs) > 1:
            ctx.mark_non_differentiable(*[one for one in outputs[1:] if one is not None])
            ctx.set_materialize_grads(False)
        everything = (*inputs, *outputs)
        saved: Any = self._pick_saved(everything)
        if self.needless is not None or self.copies or self.perhaps:
            saved = list(saved)
        for place, dims in self.places_perhaps:
            if saved[place] is not None and saved[place].dim() != dims:  # the empty tensor that stands for None
                saved[place] = None
        if self.needless is not None:
            a: Any = tuple.__new__(self.record, inputs[:-1])
            # PyTorch's dispatcher adds a last argument of its own.
            needs = ctx.needs_input_grad[: len(self.types)]
            for one in self.needless(a, (self._plans.get(needs) or self._plan(needs)).wanted):
                saved[self._places[one]] = None
        if self.copies and inputs[0].is_cpu:
            copies: dict[int, Tensor] = {}
            for place in self.copies:
                given = saved[place]
                if given is not None:
                    saved[place] = copies.get(id(given))
                    if saved[place] is None:
                        saved[place] = copies[id(given)] = given.clone()
        keep_tensors(ctx, saved)
        ctx.others = self._pick_others(everything)

    def differentiate(self, ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        """The formula: gradients of the fields, and None for the back-end."""
        gradients: list[Tensor | None] = [None] * len(self.types)
        if upstream is None:
            return tuple(gradients)
        plan = self._plans.get(ctx.needs_input_grad) or self._plan(ctx.needs_input_grad)
        kept = (upstream, *kept_tensors(ctx, self.saved), *ctx.others)
        if torch.is_grad_enabled() or _is_any_autocast_enabled() or is_watched() or not are_plain(kept):
            made = self._by_op(kept, plan)
        else:  # what the op does, without packing the arguments for it
            reader, with_none = self._of_kept, (*kept, *plan.flags, None)
            a: Any = tuple.__new__(self.record, reader.fields(with_none))
            module = self._module(reader.lead(kept), kept[-1])
            made = self._gradients(module, (a, upstream, *reader.outputs(with_none), *plan.flagged))
        for name, places in plan.results:
            gradient: Any = made[name].contiguous()  # type: ignore[union-attr]
            parts = (gradient,) if len(places) == 1 else gradient.tensor_split(len(places))
            for place, part in zip(places, parts, strict=True):
                if place is not None:
                    gradients[place] = part
        return tuple(gradients)

    def _by_op(self, kept: tuple[Any, ...], plan: _Plan) -> _Gradients:
        returned = self.backward_op(*self._pick_arguments((*kept, *plan.flags)))
        returned = (returned,) if isinstance(returned, Tensor) else returned
        made = dict(zip(self.gradients, returned, strict=True))
        if self.same:
            a: Any = tuple.__new__(self.record, self._of_kept.fields((*kept, *plan.flags, None)))
            made |= {one: made[other] for one, (other, holds) in self.same.items() if holds(a)}
        return made

    def _plan(self, needs: tuple[bool, ...]) -> _Plan:
        """A new one; those of before are in `_plans`."""
        needed = {field for field, need in zip(self.types, needs, strict=True) if need}
        places = {field: place if field in needed else None for place, field in enumerate(self.types)}
        parts_of = {name: self.joined.get(name, (name,)) for name in self.gradients}
        results = tuple(
            (name, tuple(places[part] for part in parts)) for name, parts in parts_of.items() if needed & {*parts}
        )
        wanted = frozenset(name for name, _ in results)
        flags = tuple(flag in wanted for flag in self.flags)
        flagged = (wanted.intersection(self.flags),) if flags else ()
        plan = self._plans[needs] = _Plan(wanted, flags, flagged, results)
        return plan


def _first(places: Sequence[int]) -> Callable[[tuple[Any, ...]], Any]:
    """The function that takes the first value at one of these places that is given; None is never at place 0."""
    if places[0] == 0:
        return itemgetter(0)
    return lambda values: next(values[place] for place in places if values[place] is not None)


def _without_none(made: Iterable[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    """What leaves an op: contiguous, as the fake implementations promise, and empty instead of None."""
    return tuple([like.new_empty(0) if one is None else one.contiguous() for one in made])


def _picker(source: Sequence[Any], wanted: Sequence[Any]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """The function that takes what is called `wanted` out of values that are called `source`."""
    places = [source.index(one) for one in wanted]
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))  # one alone would not be a tuple


def declaration(types: Mapping[str, Any], num_outputs: int) -> Callable[..., Any]:
    """A function that is never called, with the signature that a schema is inferred from."""

    def declared() -> None:
        """Nothing."""

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in types.items()]
    returned: Any = (None, Tensor)[num_outputs] if num_outputs < 2 else tuple[(Tensor,) * num_outputs]  # type: ignore[misc]
    declared.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
    return declared
