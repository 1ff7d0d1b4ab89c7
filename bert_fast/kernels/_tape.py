"""What a composite of kernels asks of the device, noted once and asked again without the Python in between.

A layer's forward pass is three products and four launches; around them are some two hundred calls of Python that come
to the same each time: which tile, how many programs, what memory. A tape has what they came to, for calls that are
alike:

    x, w, .. -> [empty, mm, launch, empty, launch, ...] -> y, ..

Calls are alike where all that decides is equal: dtypes, shapes, strides and alignment of all tensors, which of them are
the same, all numbers and names but those that are `slots`, the device, and what PyTorch is set to. Values are never
looked at. The first calls of a kind run as they stand; then one is noted (a dispatch mode sees every operator of
PyTorch, `_launch_plan` every kernel), and the others are replayed: memory is allocated and freed in the same order, on
the current stream. What cannot be noted (operators that ask the device, tensors that come from elsewhere) is never
replayed, nor is a call while somebody watches launches. Inputs that are rounded to another dtype one by one, as
weights are under autocast, are rounded all at once, in one launch, unless a step before may have written to them.

To note a call takes as long as ten replays save. So a kind must have come more often than one step of a model has
layers, lest batches that are all of another size are noted in vain; and where no call has been replayed for long, few
are looked at.
"""

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bert_fast.kernels import _launch_plan
from bert_fast.kernels._tape_recorder import Number, Recorder, Tape
from bert_fast.remembered import Remembered

__all__ = ["Taped"]

_ALIGNMENT = 16  # bytes; what launchers and Triton choose by
_form_of = operator.attrgetter("dtype", "shape")
_is_none = functools.partial(operator.is_, None)
_MAX_TAPES = 256
_SIGHTS = 24  # calls of a kind that run as they stand before one is noted
_IDLE, _PROBES = 256, 16  # after so many calls without a replay one of so many is looked at
_Group = tuple[Tensor | None, ...]


class Taped:
    """A function of tensors, numbers and names that returns tensors, with the tapes of its calls.

    function: takes the values one by one and returns a tuple of tensors and None, or a dictionary of tensors. It asks
    the device by PyTorch's operators and launch plans alone. slots: places of numbers that only launches are given.
    settings: what else the function looks at. lasting: places of tensors that come again and again, as parameters do.
    helpers: of these, the tensors that the function will find by itself.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        slots: Sequence[int] = (),
        settings: Callable[[], tuple[Any, ...]] = tuple,
        *,
        lasting: slice = slice(0, 0),
        helpers: Callable[[_Group], _Group] = lambda group: (),
    ) -> None:
        self._function, self._settings = function, settings
        self._slots, self._lasting, self._helpers = tuple(slots), lasting, helpers
        self._num_lasting = lasting.stop - lasting.start
        # How often a kind of call was seen, then its tape; None for those that cannot be replayed.
        self._tapes: dict[Any, Tape | int | None] = {}
        self._idle = 0  # calls since the last one that was replayed
        self._kinds: dict[tuple[Any, ...], int] = {}  # of lasting tensors, numbered
        self._look_at = Remembered(self._look, by_address=True)

    def __call__(self, values: tuple[Any, ...]) -> Any:
        """What the function returns."""
        self._idle += 1
        if (self._idle > _IDLE and self._idle % _PROBES) or _launch_plan.is_watched():
            return self._function(*values)
        lasting, others = values[self._lasting], [*values]
        others[self._lasting] = ()
        kind, references = self._look_at(lasting)
        helpers = [one if one is None else one() for one in references]
        if torch.is_grad_enabled() or [*map(_is_none, helpers)] != [*map(_is_none, references)]:
            helpers = [*self._helpers(lasting)]
        tensors = [one for one in others if isinstance(one, Tensor)]
        inputs = [one for one in (*tensors, *lasting, *helpers) if one is not None]
        device = inputs[0].get_device()
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):  # prepared launches leave it as it is
                return self(values)
        if not {*map(id, tensors)}.isdisjoint(map(id, (*lasting, *helpers))):
            return self._function(*values)
        key = self._key(kind, others, tensors, helpers, device)
        tape = self._tapes.get(key, 0)
        if type(tape) is Tape:
            self._idle = 0
            return tape.run(inputs, tuple([values[place] for place in self._slots]))
        if type(tape) is not int or tape < _SIGHTS:
            if tape == 0 and len(self._tapes) >= _MAX_TAPES:
                self._tapes.pop(next(iter(self._tapes)), None)
            if type(tape) is int:
                self._tapes[key] = tape + 1
            return self._function(*values)
        self._tapes[key] = None  # for good, if it raises
        marked = list(values)
        for index, place in enumerate(self._slots):
            marked[place] = Number(values[place])
            marked[place].place = index
        try:
            with Recorder(inputs) as recorder:
                made = self._function(*marked)
        except torch.OutOfMemoryError:  # with a smaller model or batch beside it, there may be enough
            self._tapes[key] = tape
            raise
        self._tapes[key] = recorder.tape(made)
        return made

    def _key(
        self, kind: int, others: list[Any], tensors: list[Tensor], helpers: list[Tensor | None], device: int
    ) -> tuple[Any, ...]:
        rest = [Tensor if isinstance(one, Tensor) else one for one in others]  # a key keeps no memory
        for place in self._slots:
            rest[place if place < self._lasting.start else place - self._num_lasting] = None
        return (
            kind, *rest, *_kind_of(tensors), *[one is None for one in helpers], device,
            torch.is_inference_mode_enabled(), *self._settings(),
        )  # fmt: skip

    def _look(self, lasting: _Group) -> tuple[int, list[Any]]:
        """A number that is the same for all that are alike, and weak references to their helpers."""
        kind = (*[one is None for one in lasting], *_kind_of([one for one in lasting if one is not None]))
        references = [None if one is None else weakref.ref(one) for one in self._helpers(lasting)]
        return self._kinds.setdefault(kind, len(self._kinds)), references


def _kind_of(tensors: list[Tensor]) -> list[Any]:
    """What makes tensors alike: which of them are the same, dtypes, shapes, strides, alignment."""
    first: dict[int, int] = {}
    kind: list[Any] = [first.setdefault(id(one), place) for place, one in enumerate(tensors)]
    kind += map(_form_of, tensors)
    kind += map(Tensor.stride, tensors)
    addresses = [*map(Tensor.data_ptr, tensors)]
    if functools.reduce(operator.or_, addresses, 0) % _ALIGNMENT:
        kind += [address % _ALIGNMENT for address in addresses]
    return kind
