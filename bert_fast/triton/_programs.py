"""Composites of kernels, run by programs: what launchers choose for a kind of call is chosen once, for any sizes.

A layer's forward pass is three products and four launches; around them are some two hundred calls of Python that come
to the same each time: which tile, how many programs, what memory. A program (`_program.py`) has what they come to,

    x, w, .. -> [memory, product, launch, memory, launch, ...] -> y, ..

with the numbers of tokens, sequences and the like left open. Calls are of one kind where all else is equal that
decides: dtypes, other sizes, strides and alignment of tensors, which of them there are, numbers and names, the device,
and what PyTorch is set to. Values are never looked at. The first call of a kind makes the program (`_tracing.py`);
where a launcher's choice depended on a size, the program is for sizes of the same choice, and others have one of their
own. A composite that cannot be traced runs in Python, launch by launch. So does every call while launches are observed
through Triton (launch hooks, a replaced `JITFunction.run`, its debug mode), because a program's do not go through it.
"""

import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from bert_fast.addresses import reader
from bert_fast.remembered import Remembered, guard_of
from bert_fast.triton import _launch_plan
from bert_fast.triton._launch import assumed_architecture
from bert_fast.triton._native_program import NativeProgram, native_program
from bert_fast.triton._products import are_by_address, with_products
from bert_fast.triton._program import Call, Empty, Launch, Program
from bert_fast.triton._sizes import evaluate
from bert_fast.triton._tracing import Trace

_ALIGNMENT = 16  # bytes; what launchers and Triton choose by
_MAX_KINDS = 256
_MAX_FORMS = 16  # of tensors that come with the same other arguments
_MAX_PROGRAMS = 64  # of a kind: as many choices by sizes as a layer has, and more
_is_none = functools.partial(operator.is_, None)
_Group = tuple[Tensor | None, ...]


class Kind:
    """Calls that are alike in all but numbers. runners: of their programs; None where calls cannot be traced."""

    __slots__ = ("runners",)

    def __init__(self) -> None:
        self.runners: list[_Runner] | None = []


class _Form:
    """Tensors of calls of one kind. words: their letters; letters: in the order of numbers."""

    def __init__(self, kind: Kind, tensors: list[Tensor], words: list[str], letters: list[str]) -> None:
        self.kind, self.letters = kind, letters
        self._guard = guard_of(tensors, [[letter != "_" for letter in word] for word in words])
        # The guard does not check contiguity: a single row is contiguous with any stride, several rows are not.
        self._lies = reader().lies(tensors)
        places = [(i, d, letter) for i, word in enumerate(words) for d, letter in enumerate(word) if letter != "_"]
        first = {letter: (i, d) for i, d, letter in reversed(places)}
        self._first = [first[letter] for letter in letters]
        self._same = [(i, d, letters.index(letter)) for i, d, letter in places if (i, d) != first[letter]]

    def numbers(self, tensors: list[Tensor]) -> tuple[int, ...] | None:
        """Sizes of a call with these tensors; None where they are of another form."""
        if len(tensors) != len(self._lies) or not self._guard(*tensors) or self._lies != reader().lies(tensors):
            return None
        numbers = tuple([tensors[i].shape[d] for i, d in self._first])
        for i, d, place in self._same:
            if tensors[i].shape[d] != numbers[place]:
                return None
        return numbers


class Programs:
    """A function of tensors, numbers and names that returns a tuple of tensors and None, or a dictionary of tensors.

    function: takes the values one by one. It asks the device by PyTorch's operators and launch plans alone. sizes: by a
    tensor's place, a letter for each dimension whose size is a number of the call, "_" for others; sizes of one letter
    are equal. A tensor of several numbers of dimensions has such a word for each. integers: places of further numbers
    of the call. settings: what else the function looks at. lasting: places of tensors that come again and again, as
    parameters do. joined: for tensors of `lasting` by their indices, the one that they are together, where they lie
    side by side.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        sizes: Mapping[int, str],
        integers: Sequence[int] = (),
        settings: Callable[[], tuple[Any, ...]] = tuple,
        lasting: slice = slice(0, 0),
        joined: Callable[[_Group], Mapping[tuple[int, ...], Tensor | None]] = lambda group: {},
    ) -> None:
        self._function, self._settings, self._integers = function, settings, tuple(integers)
        # By a tensor's place and its number of dimensions.
        self._sizes = {(place, len(word)): word for place, words in sizes.items() for word in words.split()}
        self._lasting, self._joined = lasting, joined
        self._kinds: dict[Any, Kind] = {}
        self._forms: dict[Any, list[_Form]] = {}  # by all but tensors and numbers
        _all.add(self)
        self._look_at = Remembered(self._look, by_address=True)

    def __call__(self, values: tuple[Any, ...]) -> Any:
        """What the function returns."""
        if _launch_plan.are_launches_watched():
            return self._function(*values)
        lasting = values[self._lasting]
        if not lasting:
            return self._by_form(values)
        of_lasting, references = self._look_at(lasting)
        together = [None if one is None else one() for one in references]
        if torch.is_grad_enabled() or [*map(_is_none, together)] != [*map(_is_none, references)]:
            together = [*self._joined(lasting).values()]
        given = [one for one in values if isinstance(one, Tensor)]
        key, letters = self._key(values, of_lasting, together)
        numbers = (*letters.values(), *[values[place] for place in self._integers])
        inputs = (*given, *[one for one in together if one is not None])
        trace = functools.partial(self._trace, values=values, together=together, letters=[*letters])
        made = self.run(self.kind_of(key), inputs, numbers, trace)
        return self._function(*values) if made is None else made

    def _by_form(self, values: tuple[Any, ...]) -> Any:
        """As a call, where no tensors are lasting: the key of a call is made once for tensors of its form."""
        given, others = list[Any](), list[Any]()
        for value in values:
            if isinstance(value, Tensor):
                given.append(value)
                others.append(_Form)
            else:
                others.append(value)
        for place in self._integers:
            others[place] = None
        asked = (*others, *self._settings(), torch.is_inference_mode_enabled())
        forms = self._forms.get(asked)
        numbers, form = None, None
        for form in forms or ():
            numbers = form.numbers(given)
            if numbers is not None:
                break
        else:
            key, letters = self._key(values, None, [])
            form, numbers = _Form(self.kind_of(key), given, self._letters(values), [*letters]), (*letters.values(),)
            if len(self._forms) >= _MAX_KINDS:
                self._forms.clear()
            self._forms[asked] = [form, *(forms or [])][:_MAX_FORMS]
        trace = functools.partial(self._trace, values=values, together=[], letters=form.letters)
        integers = [values[place] for place in self._integers]
        made = self.run(form.kind, tuple(given), (*numbers, *integers), trace)
        return self._function(*values) if made is None else made

    def _letters(self, values: tuple[Any, ...]) -> list[str]:
        """Of each tensor."""
        tensors = [(place, one) for place, one in enumerate(values) if isinstance(one, Tensor)]
        return [self._sizes.get((place, one.dim()), "_" * one.dim()) for place, one in tensors]

    def kind_of(self, key: Any) -> Kind:
        """The kind of calls with this key: all that decides beside the numbers. To be kept by who will call again."""
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= _MAX_KINDS:
                self._kinds.pop(next(iter(self._kinds)), None)
            kind = self._kinds[key] = Kind()
        return kind

    def run(
        self, kind: Kind, inputs: tuple[Tensor | None, ...], numbers: tuple[int, ...], trace: Callable[[Trace], Any]
    ) -> Any:
        """What a program makes of inputs and numbers; None where there is none for such calls.

        trace: notes a call in a `Trace` of these numbers, to which it adds the inputs in their order, and returns what
        the function does.
        """
        runners = kind.runners
        if runners is None or _launch_plan.are_launches_watched():
            return None
        for runner in runners:
            made = runner.run(inputs, numbers)
            if made is not None:
                if runner is not runners[0]:  # the next layer of this step will ask for the same
                    # A list of its own: other threads go through this one.
                    kind.runners = [runner, *[one for one in runners if one is not runner]]
                return None if made is _AS_IT_STANDS else made
        if not _is_current(first := _first(inputs)):
            with torch.cuda.device(first.get_device()):  # prepared launches leave it as it is
                return self.run(kind, inputs, numbers, trace)
        if len(runners) >= _MAX_PROGRAMS:
            return None
        for runner in runners:  # one that `_native` refused, for a reason that no other program would change
            made = runner.run_here(inputs, numbers)
            if made is not None:
                return None if made is _AS_IT_STANDS else made
        runner = _traced(_first(inputs).device, numbers, trace)
        if runner.is_for_none:
            kind.runners = None
            return None
        made = runner.run(inputs, numbers)
        if made is not None:
            kind.runners = [runner, *runners]
        return None if made is _AS_IT_STANDS else made

    def forget(self) -> None:
        """Makes programs anew from now on."""
        for kind in self._kinds.values():
            kind.runners = []
        self._kinds.clear()
        self._forms.clear()

    def _key(self, values: Any, of_lasting: Any, together: list[Any]) -> tuple[tuple[Any, ...], dict[str, int]]:
        """All that decides beside the call's numbers, and sizes by their letters."""
        first, last = self._lasting.start, self._lasting.stop
        letters: dict[str, int] = {}
        kind: list[Any] = [of_lasting, *map(_is_none, together), torch.is_inference_mode_enabled(), *self._settings()]
        addresses = 0
        for place, value in enumerate(values):
            if first <= place < last:
                continue
            if isinstance(value, Tensor):
                shape, sizes = value.shape, self._sizes.get((place, value.dim()), "")
                if not sizes:  # one that stands for None, too
                    kind += value.dtype, shape
                else:
                    kind.append(value.dtype)
                    for letter, size in zip(sizes, shape, strict=True):
                        if letter == "_":
                            kind.append(size)
                        elif letters.setdefault(letter, size) != size:
                            kind.append((place, letter, size))  # nothing that was made for equal sizes
                kind.append(None if value.is_contiguous() else value.stride())
                addresses |= value.data_ptr()
            elif place in self._integers:
                kind.append(None)
            else:
                kind.append(value)
        if addresses % _ALIGNMENT:
            kind += [one.data_ptr() % _ALIGNMENT for one in values if isinstance(one, Tensor)]
        kind.append(next(one for one in values if isinstance(one, Tensor)).device)
        kind.append("".join(letters))
        return tuple(kind), letters

    def _look(self, lasting: _Group) -> tuple[Any, list[Any]]:
        """What tells lasting tensors from others, and weak references to those that they are together."""
        given = [one for one in lasting if one is not None]
        kind: list[Any] = [one is None for one in lasting]
        for one in given:
            kind += one.dtype, one.shape, one.stride(), one.data_ptr() % _ALIGNMENT, one.get_device()
        references = [None if one is None else weakref.ref(one) for one in self._joined(lasting).values()]
        return tuple(kind), references

    def _trace(self, trace: Trace, *, values: Any, together: list[Any], letters: list[str]) -> Any:
        of_letters = dict(zip(letters, trace.numbers.arguments, strict=False))
        given = list(values)
        for place, value in enumerate(values):
            if isinstance(value, Tensor):
                given[place] = trace.input_like(value, self._sizes.get((place, value.dim()), ""), of_letters)
        for place, number in zip(self._integers, trace.numbers.arguments[len(letters) :], strict=True):
            given[place] = number
        lasting = given[self._lasting]
        for indices, one in zip(self._joined(values[self._lasting]), together, strict=True):
            if one is not None:
                trace.join([lasting[index] for index in indices], trace.input_like(one))
        return self._function(*given)


_all: "weakref.WeakSet[Programs]" = weakref.WeakSet()


def forget() -> None:
    """Makes all programs anew from now on, as who changed what launchers choose wants it."""
    for programs in _all:
        programs.forget()


def by_programs(
    record: Any,
    sizes: Mapping[str, str],
    *others: str,
    integers: Sequence[str] = (),
    settings: Callable[[], tuple[Any, ...]] = lambda: (assumed_architecture(),),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates an op of this back-end: its calls run by programs.

    record: of the op's first argument. others: names of its further ones. sizes, integers, settings: of `Programs`, by
    the names of fields and arguments.
    """
    names, count = (*record._fields, *others), len(record._fields)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            return function(record(*values[:count]), *values[count:])

        of_places = {names.index(name): letters for name, letters in sizes.items()}
        programs = Programs(run, sizes=of_places, integers=[*map(names.index, integers)], settings=settings)

        @functools.wraps(function)
        def by_program(a: Any, *given: Any) -> Any:
            if given and isinstance(given[-1], Set):  # "wants", which is to be hashed
                given = (*given[:-1], frozenset(given[-1]))
            return programs((*a, *given))

        return by_program

    return decorate


def _first(inputs: Sequence[Tensor | None]) -> Tensor:
    return next(one for one in inputs if one is not None)


def _is_current(tensor: Tensor) -> bool:
    """Whether a tensor's device is the current one, or the CPU."""
    index = tensor.get_device()
    return index < 0 or index == torch.cuda.current_device()


def _traced(device: torch.device, numbers: tuple[int, ...], run: Callable[[Trace], Any]) -> "_Runner":
    trace = Trace(device, numbers)
    try:
        with trace:
            made = run(trace)
        names = tuple(made) if isinstance(made, dict) else None
        return _Runner(trace.program(tuple(made.values()) if names else tuple(made)), names)
    except Exception:  # whatever a function may do that tensors which are not there do not know
        asked = trace.numbers
        return _Runner(Program(0, 0, tuple(asked.expressions), tuple(asked.guards.items()), (), ()), None, is_one=False)


_AS_IT_STANDS = object()
_UNKNOWN: list[int] = []


class _Runner:
    """A program that runs: here step by step, and by `_native` once every kernel of it is there.

    is_one: else the guards tell the calls that cannot be traced.
    """

    def __init__(self, program: Program, names: tuple[str, ...] | None, *, is_one: bool = True) -> None:
        self.program, self._names, self._is_one = program, names, is_one
        self.is_for_none = not is_one and not program.guards
        self._room = [None] * (program.num_slots - program.num_inputs)
        self._known: dict[tuple[int, ...], list[int] | None] = {}
        self._native: NativeProgram | None = None
        self._is_tried = False

    def run(self, inputs: tuple[Tensor | None, ...], numbers: tuple[int, ...]) -> Any:
        """What the function returns; None where the program is not for these, `_AS_IT_STANDS` where none is.

        Nor is it for tensors of another device than the current one.
        """
        if self._native is None:
            return self.run_here(inputs, numbers) if _is_current(_first(inputs)) else None
        made = self._native.run(inputs, numbers)
        return made if self._names is None else self._named(made)

    def run_here(self, inputs: tuple[Tensor | None, ...], numbers: tuple[int, ...]) -> Any:
        """As `run`, without `_native`."""
        if not self._is_one:
            return None if self._values(numbers) is None else _AS_IT_STANDS
        return self._named(self.run_in_python(inputs, numbers))

    def _named(self, made: tuple[Tensor | None, ...] | None) -> Any:
        return made if self._names is None or made is None else dict(zip(self._names, made, strict=True))

    def run_in_python(
        self, inputs: tuple[Tensor | None, ...], numbers: tuple[int, ...]
    ) -> tuple[Tensor | None, ...] | None:
        """The outputs, step by step, by plans of launches."""
        values = self._values(numbers)
        if values is None:
            return None
        slots: list[Any] = [*inputs, *self._room]
        device = _first(inputs).device
        readies: list[Any] = []
        for what, last_used in self.program.steps:
            if type(what) is Empty:
                size = [values[one] for one in what.shape]
                slots[what.slot] = torch.empty(size, dtype=what.dtype, device=device)
            elif type(what) is Call:
                _call(what, slots, values)
            elif type(what) is Launch:
                readies.append(_launch(what, slots, values, self._is_tried))
            for slot in last_used:
                slots[slot] = None
        if not self._is_tried:
            self._is_tried = True
            if None not in readies:
                is_by_address = are_by_address()
                program = with_products(self.program) if is_by_address else self.program
                self._native = native_program(program, readies)
        return tuple([None if slot < 0 else slots[slot] for slot in self.program.outputs])

    def _values(self, numbers: tuple[int, ...]) -> list[int] | None:
        known = self._known.get(numbers, _UNKNOWN)
        if known is not _UNKNOWN:
            return known
        values: list[int] | None = evaluate(self.program.expressions, numbers)
        if any(values[place] != wanted for place, wanted in self.program.guards):  # type: ignore[index]
            values = None
        if len(self._known) >= _MAX_KINDS:
            self._known.clear()
        self._known[numbers] = values
        return values


def _call(what: Call, slots: list[Any], values: list[int]) -> None:
    given: list[Any] = []
    for kind, value in what.arguments:
        if kind == "slot":
            given.append(slots[value])
        elif kind == "constant":
            given.append(value)
        elif kind == "slots":
            given.append([slots[one] for one in value])
        elif kind == "number":
            given.append(values[value])
        else:
            given.append(tuple([values[one] for one in value]))
    num_named = len(what.names)
    if num_named:
        made = what.function(*given[:-num_named], **dict(zip(what.names, given[-num_named:], strict=True)))
    else:
        made = what.function(*given)
    if len(what.slots) == 1:
        slots[what.slots[0]] = made
    else:
        for slot, one in zip(what.slots, made if what.slots else (), strict=True):
            slots[slot] = one


def _launch(what: Launch, slots: list[Any], values: list[int], is_known: bool) -> Any:
    """Launches; returns the compiled kernel, None where it is known already or Triton's alone."""
    operands: list[Any] = [None if one is None else _at(slots[one[0]], values[one[1]]) for one in what.operands]
    for place, rows, cols, row_stride, _ in what.windows:
        operands[place] = operands[place].as_strided((values[rows], values[cols]), (values[row_stride], 1))
    numbers = tuple([values[value] if is_integer else value for is_integer, value in what.numbers])
    what.plan(tuple([values[one] for one in what.grid]), tuple(operands), numbers)
    return None if is_known else what.plan.ready(tuple(operands), numbers)


def _at(tensor: Tensor, offset: int) -> Tensor:
    """The tensor from so many bytes on, for a kernel that is told where it lies."""
    if not offset:
        return tensor
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + offset // tensor.element_size())
