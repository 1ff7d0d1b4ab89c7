"""How a tape is made: every operator of PyTorch and every launch of one call, as steps on slots."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bert_fast.kernels import _launch_plan

__all__ = ["Number", "Recorder", "Tape"]

_aten = torch.ops.aten
_TO_COPY = _aten._to_copy.default
_EMPTY = {_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default}
# What costs less to call than PyTorch's overloads, with the same arguments.
_CALLS: dict[Any, Callable[..., Any]] = {
    _aten.mm.default: torch.mm, _aten.addmm.default: torch.addmm, _aten.t.default: Tensor.t,
    _aten.view.default: Tensor.view, _aten.add_.Tensor: Tensor.add_,
}  # fmt: skip
# What depends on values, or on more than its arguments.
_NEVER = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}

Slots = list[Any]
_Step = Callable[[Slots, tuple[int, ...]], None]


class Number(int):
    """A number that another call may have another value of."""

    place: int


class Tape:
    """Steps on slots: the inputs come first, then what steps make."""

    def __init__(self, steps: list[tuple[_Step, tuple[int, ...]]], num_made: int, outputs: Any) -> None:
        self._steps = steps
        self._room = [None] * num_made
        self._outputs = outputs  # slots, -1 for None, in a tuple or a dictionary

    def run(self, inputs: list[Tensor], numbers: tuple[int, ...]) -> Any:
        slots: Slots = [*inputs, *self._room]
        for step, last_used in self._steps:
            step(slots, numbers)
            for slot in last_used:
                slots[slot] = None
        if isinstance(self._outputs, dict):
            return {name: slots[slot] for name, slot in self._outputs.items()}
        return tuple([None if slot < 0 else slots[slot] for slot in self._outputs])


class _Noted:
    """A step while it is noted: which slots it reads and makes."""

    def __init__(self, run: _Step, reads: list[int], makes: list[int], what: str = "operator") -> None:
        """what: "operator", "mutation" (of what it reads), "view", "memory", "cast" (by itself) or "launch"."""
        self.run, self.reads, self.makes, self.what = run, reads, makes, what


class Recorder(TorchDispatchMode):
    """Notes all that one thread asks of the device."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self._alive: list[Tensor] = []  # so that no other tensor gets the name of one of these
        self._slots: dict[int, int] = {}
        self._base: list[tuple[int, int]] = []  # of every slot: the slot whose memory it is in, and bytes from there
        self._steps: list[_Noted] = []
        self._is_spoilt = self._is_paused = False
        for one in inputs:
            self._new_slot(one)
        self._num_inputs = len(self._base)

    def _new_slot(self, tensor: Tensor, base: int | None = None) -> int:
        slot = len(self._base)
        self._alive.append(tensor)
        self._slots.setdefault(id(tensor), slot)
        if base is None:
            self._base.append((slot, 0))
        else:
            root, offset = self._base[base]
            self._base.append((root, offset + tensor.data_ptr() - self._alive[base].data_ptr()))
        return slot

    def _slot_of(self, tensor: Tensor) -> int:
        slot = self._slots.get(id(tensor))
        if slot is None:  # from elsewhere: another call would have to find it again
            self._is_spoilt = True
            return 0
        return slot

    def __enter__(self) -> "Recorder":
        _launch_plan.recorders[threading.get_ident()] = self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        _launch_plan.recorders.pop(threading.get_ident(), None)
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if self._is_paused:
            return made
        if not _NEVER.isdisjoint(func.tags):
            self._is_spoilt = True
        if not self._is_spoilt:
            self._note_operator(func, args, kwargs, made)
        return made

    def _note_operator(self, func: Any, args: Any, kwargs: dict[str, Any], made: Any) -> None:
        if func in _EMPTY and made.is_contiguous():
            slot = self._new_slot(made)
            self._steps.append(_Noted(_empty(slot, made), [], [slot], "memory"))
            return
        if any(isinstance(one, Tensor) for one in kwargs.values() if one is not kwargs.get("out")):
            self._is_spoilt = True
            return
        reads: list[int] = []

        def pattern(value: Any) -> tuple[int, Any]:
            """0 and a constant, 1 and a slot, 2 and a list of slots."""
            if isinstance(value, Tensor):
                reads.append(self._slot_of(value))
                return 1, reads[-1]
            if isinstance(value, list | tuple) and any(isinstance(one, Tensor) for one in value):
                slots = [self._slot_of(one) for one in value if isinstance(one, Tensor)]
                if len(slots) < len(value):
                    self._is_spoilt = True
                reads.extend(slots)
                return 2, slots
            return 0, value

        patterns = [pattern(one) for one in args]
        of_kwargs = {name: pattern(one) for name, one in kwargs.items()}
        outputs = [made] if isinstance(made, Tensor) else list(made) if isinstance(made, tuple | list) else [None]
        if self._is_spoilt or not all(isinstance(one, Tensor) for one in outputs):
            self._is_spoilt = True
            return
        is_view = func.is_view
        makes = []
        for one in outputs:
            known = self._slots.get(id(one))
            makes.append(self._new_slot(one, reads[0] if is_view else None) if known is None else known)
        if is_view and len(outputs) == 1 and _are_alike(made, self._alive[reads[0]]):
            self._slots[id(made)] = reads[0]
            return
        step = _operator(_CALLS.get(func, func), patterns, of_kwargs, makes, isinstance(made, Tensor))
        what = "view" if is_view else "mutation" if func._schema.is_mutable else "operator"
        if func is _TO_COPY and of_kwargs.keys() == {"dtype"} and made.is_contiguous():
            what = "cast"
        self._steps.append(_Noted(step, reads, makes, what))

    def note_launch(
        self, plan: Any, grid: tuple[int, ...], operands: tuple[Tensor | None, ...], numbers: tuple[Any, ...]
    ) -> None:
        """Makes a launch, and notes it. numbers: some perhaps of the class that `Taped` marks slots with."""
        marked = [(index, one.place) for index, one in enumerate(numbers) if type(one) is Number]
        plain = tuple([int(one) if type(one) is Number else one for one in numbers])
        self._is_paused = True  # the interpreter has tensors of its own
        del _launch_plan.recorders[threading.get_ident()]
        plan(grid, operands, plain)
        _launch_plan.recorders[threading.get_ident()] = self
        self._is_paused = False
        places = [None if one is None else self._slot_of(one) for one in operands]
        if self._is_spoilt:
            return
        ready = plan.ready(operands, plain)
        if ready is None:  # by Triton, or in the interpreter
            reads = [slot for slot in places if slot is not None]
            self._steps.append(_Noted(_launch_of_tensors(plan, grid, places, plain, marked), reads, [], plan.what))
            return
        windows = [places[place] for place, _, _ in ready.windows]
        at = [None if slot is None else (slot, 0) if slot in windows else self._base[slot] for slot in places]
        reads = [one[0] for one in at if one is not None]
        self._steps.append(_Noted(_launch_of_addresses(ready, grid, at, plain, marked), reads, [], plan.what))

    def spoil(self) -> None:
        """Something was done that a tape cannot do again."""
        self._is_spoilt = True

    def tape(self, made: Any) -> "Tape | None":
        """The tape of a call that returned this; None if it cannot be replayed."""
        returned = made.values() if isinstance(made, dict) else made
        outputs = [-1 if one is None else self._slot_of(one) for one in returned]
        if self._is_spoilt:
            return None
        self._cast_together()
        # Memory like that of a tensor that stays is had for less.
        stays = {slot for slot in outputs if slot >= 0}.union(range(self._num_inputs))
        like: dict[Any, int] = {}
        for slot in range(self._num_inputs):
            self._offer(like, slot)
        for step in self._steps:
            if step.what == "memory":
                (slot,) = step.makes
                model = like.get(_memory_of(self._alive[slot]))
                if model is not None:
                    step.run, step.reads = _empty_like(slot, model), [model]
            for slot in step.makes:
                if slot in stays:
                    self._offer(like, slot)
        # Backwards: a view that nobody reads is left out, and what is read for the last time goes.
        needed = {slot for slot in outputs if slot >= 0}
        steps: list[tuple[_Step, tuple[int, ...]]] = []
        for step in reversed(self._steps):
            if step.what == "view" and needed.isdisjoint(step.makes):
                continue
            used = {*step.reads, *step.makes}
            steps.append((step.run, tuple(slot for slot in used - needed if slot >= self._num_inputs)))
            needed |= used
        num_made = len(self._base) - self._num_inputs
        kept = dict(zip(made, outputs, strict=True)) if isinstance(made, dict) else outputs
        return Tape(steps[::-1], num_made, kept)

    def _cast_together(self) -> None:
        """Makes one step of the casts of inputs that nothing may have written to, where the first of them was."""
        casts: list[_Noted] = []
        written: set[int] = set()  # storages, perhaps: a launch may write wherever it is given an address
        for step in self._steps:
            storages = {self._alive[slot].untyped_storage().data_ptr() for slot in step.reads}
            if step.what == "cast" and step.reads[0] < self._num_inputs and written.isdisjoint(storages):
                casts.append(step)
            elif step.what in ("launch", "mutation"):
                written |= storages
        if len(casts) < 2:
            return
        pairs = [(step.reads[0], step.makes[0], self._alive[step.makes[0]].dtype) for step in casts]
        together = _Noted(_casts(pairs), [pair[0] for pair in pairs], [pair[1] for pair in pairs])
        self._steps[self._steps.index(casts[0])] = together
        self._steps = [step for step in self._steps if step not in casts]

    def _offer(self, like: dict[Any, int], slot: int) -> None:
        tensor = self._alive[slot]
        if tensor.is_contiguous() and type(tensor) is Tensor:
            like.setdefault(_memory_of(tensor), slot)


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _are_alike(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def _empty(slot: int, like: Tensor) -> _Step:
    size, dtype, device, empty = tuple(like.shape), like.dtype, like.device, torch.empty

    def run(slots: Slots, numbers: tuple[int, ...]) -> None:
        slots[slot] = empty(size, dtype=dtype, device=device)

    return run


def _empty_like(slot: int, model: int) -> _Step:
    empty_like = torch.empty_like

    def run(slots: Slots, numbers: tuple[int, ...]) -> None:
        slots[slot] = empty_like(slots[model])

    return run


def _casts(pairs: list[tuple[int, int, torch.dtype]]) -> _Step:
    """pairs: (slot to read, slot to make, dtype)."""
    empty_like, copy = torch.empty_like, torch._foreach_copy_

    def run(slots: Slots, numbers: tuple[int, ...]) -> None:
        given = [slots[slot] for slot, _, _ in pairs]
        made = [empty_like(slots[slot], dtype=dtype) for slot, _, dtype in pairs]
        copy(made, given)
        for (_, slot, _), one in zip(pairs, made, strict=True):
            slots[slot] = one

    return run


def _operator(
    call: Callable[..., Any],
    patterns: list[tuple[int, Any]],
    of_kwargs: dict[str, tuple[int, Any]],
    makes: list[int],
    is_one: bool,
) -> _Step:
    """A call of an operator with constants and slots in their places, and into slots."""
    constants = [what if kind == 0 else None for kind, what in patterns]
    places = [(place, what) for place, (kind, what) in enumerate(patterns) if kind == 1]
    lists = [(place, what) for place, (kind, what) in enumerate(patterns) if kind == 2]
    names = {name: what for name, (kind, what) in of_kwargs.items() if kind == 0}
    out = [(name, what) for name, (kind, what) in of_kwargs.items() if kind == 1]

    def run(slots: Slots, numbers: tuple[int, ...]) -> None:
        given, named = constants.copy(), names
        for place, slot in places:
            given[place] = slots[slot]
        for place, several in lists:
            given[place] = [slots[slot] for slot in several]
        if out:
            named = names | {name: slots[slot] for name, slot in out}
        made = call(*given, **named)
        if is_one:
            slots[makes[0]] = made
            return
        for slot, one in zip(makes, made, strict=True):
            slots[slot] = one

    if of_kwargs or not is_one or len(places) < len(patterns) or len(places) not in (1, 2):
        return run
    first, second, made = places[0][1], places[-1][1], makes[0]

    def run_on_one(slots: Slots, numbers: tuple[int, ...]) -> None:
        slots[made] = call(slots[first])

    def run_on_two(slots: Slots, numbers: tuple[int, ...]) -> None:
        slots[made] = call(slots[first], slots[second])

    return run_on_one if len(places) == 1 else run_on_two


def _launch_of_addresses(
    ready: Any,
    grid: tuple[int, ...],
    at: list[tuple[int, int] | None],
    plain: tuple[Any, ...],
    marked: list[tuple[int, int]],
) -> _Step:
    """at: slots and bytes from there."""
    windows = [at[place][0] for place, _, _ in ready.windows]  # type: ignore[index]

    def run(slots: Slots, numbers: tuple[int, ...]) -> None:
        addresses = [0 if one is None else slots[one[0]].data_ptr() + one[1] for one in at]
        matrices = [slots[slot] for slot in windows] if windows else windows
        if not ready.launch(grid, matrices, addresses, _filled(plain, marked, numbers) if marked else plain):
            raise RuntimeError("a kernel was not launched: its device is not the current one")

    return run


def _launch_of_tensors(
    plan: Any, grid: tuple[int, ...], places: list[int | None], plain: tuple[Any, ...], marked: list[tuple[int, int]]
) -> _Step:
    def run(slots: Slots, numbers: tuple[int, ...]) -> None:
        plan(grid, tuple([None if slot is None else slots[slot] for slot in places]), _filled(plain, marked, numbers))

    return run


def _filled(plain: tuple[Any, ...], marked: list[tuple[int, int]], numbers: tuple[int, ...]) -> tuple[Any, ...]:
    """The numbers of a launch with those of this call."""
    given = list(plain)
    for index, place in marked:
        given[index] = numbers[place]
    return tuple(given)
