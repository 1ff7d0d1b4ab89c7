"""What parts of a step ask of a GPU and of the host: launches by kernel, small ones, Python calls."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tools.null_driver.driver import NullDriver
from tools.null_driver.steps import PARTS, Step

_PACKAGE = str(Path(__file__).resolve().parents[2] / "bert_fast")
# What torch's operators are on a GPU beside kernels: memory, views, questions of the host.
_NO_KERNEL = (
    "empty",
    "new_empty",
    "detach",
    "alias",
    "lift_fresh",
    "_local_scalar_dense",
    "is_same_size",
    "resize_",
    "set_",
    "_unsafe_view",
    "is_pinned",
    "_record_function",
)
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot"}

Counts = dict[str, dict[str, int]]


class _Operators(TorchDispatchMode):
    """Counts operators that would be kernels: "products" of the library, and others by name."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.small: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.rstrip("_") in _PRODUCTS:
            self.products += 1
        elif not func.is_view and not name.startswith(_NO_KERNEL):
            self.small[name] += 1
        return func(*args, **(kwargs or {}))


# Operators that return to the host what lies on a device, or whose results have a size that only values tell; and
# methods that do so without one where memory is the CPU's.
_SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_consecutive")
_READS = ("tolist", "numpy", "cpu")


class _Syncs(TorchDispatchMode):
    """Names what the host would wait for a GPU for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_bool = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        kwargs = kwargs or {}
        # A cast in backward names the device too, its own.
        goes = name == "_to_copy" and kwargs.get("device") is not None and kwargs.get("dtype") in (None, args[0].dtype)
        if name in _SYNCS or by_bool or goes:
            self.found.append(name)
        return func(*args, **kwargs)

    def reading(self, name: str) -> Callable[..., Any]:
        """The method of tensors of this name, noted."""
        method = getattr(torch.Tensor, name)

        def read(*args: Any, **kwargs: Any) -> Any:
            self.found.append(name)
            return method(*args, **kwargs)

        return read


@contextmanager
def counted_syncs() -> Iterator[list[str]]:
    """What the host waited for within the context: names of operators and methods. Ops take their usual way."""
    from bert_fast.ops import _register

    with ExitStack() as stack:
        mode = _Syncs()
        for name in _READS:
            stack.enter_context(mock.patch.object(torch.Tensor, name, mode.reading(name)))
        stack.enter_context(mock.patch.object(_register, "_len_torch_dispatch_stack", return_value=0))
        stack.enter_context(mode)
        yield mode.found


def calls_of(function: Callable[[], Any]) -> int:
    """Calls of the package's functions while the function runs."""
    count = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(_PACKAGE)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@contextmanager
def counted_operators() -> Iterator[_Operators]:
    """Ops take the way that they take when nobody watches."""
    from bert_fast.ops import _register

    with mock.patch.object(_register, "_len_torch_dispatch_stack", return_value=0), _Operators() as mode:
        yield mode


def count(step: Step, driver: NullDriver) -> dict[str, Any]:
    """Of every part of a step that has run: launches by kernel, products, small launches by operator, Python calls."""
    from bert_fast.triton import _launch_plan, _programs, encoder_layer

    found: dict[str, Any] = {part: {} for part in PARTS}
    programs = encoder_layer._of_model, encoder_layer._forward, encoder_layer._backward
    # Plans keep encoded maps by address, and addresses differ from run to run. Here plans encode every map anew.
    with mock.patch.object(_launch_plan, "_MAX_MAPS", 0):
        with mock.patch.object(_programs, "native_program", _none):
            _warm(step, programs)
            for part in PARTS:
                step.prepare(part)
                driver.reset()
                getattr(step, part)()
                found[part]["launches"] = driver.by_kernel()
                found[part]["tensor maps"] = driver.num_tensor_maps
        _warm(step, programs)
        for part in PARTS:
            step.prepare(part)
            found[part]["python calls"] = calls_of(getattr(step, part))
    for part in PARTS:  # last: what is remembered of tensors is looked at again where a mode is on, and after it
        step.prepare(part)
        with counted_operators() as operators:
            getattr(step, part)()
        found[part]["products"] = operators.products
        found[part]["small"] = dict(sorted((+operators.small).items()))
    return found


def _warm(step: Step, programs: Sequence[Any]) -> None:
    for one in programs:
        one.forget()
    for part in PARTS * 3:
        step.run(part)


def _none(*_: Any) -> None:
    """No program is run by the extension."""
