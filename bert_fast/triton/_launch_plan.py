"""Launches of kernels, prepared: what Triton finds out anew at every launch is kept from the first one.

A launch by Triton takes the host 15 to 40 microseconds: it binds arguments to names, asks each what to specialise the
kernel for, makes a key of the answers as text, compares every global constant that the kernel reads. A plan has all but
addresses and numbers bound, and knows by a short key of its own which compiled kernel they are for:

    plan = launch_plan(kernel, BLOCK=64, num_warps=4)         # one for each set of constants
    plan((num_programs,), (x, y, None), (num_rows, 0.1))      # the rest, in the kernel's order

The key is all that a kernel is specialised for: which tensors there are, their dtypes, whether addresses are multiples
of 16, the types of numbers, the value of those that Triton may specialise for, and the device. A key that is new is
launched by Triton, which compiles; so is every launch that somebody wants to see (Triton's hooks, a profiler, a
replaced `JITFunction.run`), one with a number of more than 32 bits, one of tensors of another device than the current
one, all on AMD's processors and all in the interpreter. Streams are the current ones.

Kernels take their arguments in this order: tensors (some as tensor descriptors), numbers, constants.
"""

import functools
import inspect
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_ALIGNMENT = 16  # bytes; Triton specialises kernels for addresses that are multiples of it
_MAX_INT32 = 2**31 - 1
_MAX_KEYS = 1024  # of a plan; more would be of numbers that change all the time
_MAX_MAPS = 1024  # tensor maps of a compiled kernel, about a kilobyte each
_run_by_triton = JITFunction.run
_runtime = triton.knobs.runtime
_enter_hook, _exit_hook = _runtime.launch_enter_hook, _runtime.launch_exit_hook  # chains of calls


Window = tuple[int, int] | None  # rows and columns of the tiles by which a copy engine moves a row-major matrix
_Pick = Callable[[Any], tuple[Any, ...]]


def are_launches_watched() -> bool:
    """Whether a launch has to be Triton's, since somebody looks."""
    return (
        JITFunction.run is not _run_by_triton
        or _runtime.launch_enter_hook is not _enter_hook
        or _runtime.launch_exit_hook is not _exit_hook
        or bool(_enter_hook.calls or _exit_hook.calls)
        or _runtime.debug
        or _runtime.add_stages_inspection_hook is not None
    )


# By thread, what is told of every launch while a program is made (`_tracing.py`).
recorders: dict[int, Any] = {}


class LaunchPlan:
    """One kernel with its constants, to be launched again and again.

    kernel: of `triton.jit`. windows: for the first operands, the tiles of those that the kernel takes as tensor
    descriptors, None for the others. constants: its `tl.constexpr` arguments and the options of the launch.
    """

    def __init__(self, kernel: Any, windows: tuple[Window, ...] = (), **constants: Any) -> None:
        self._kernel = kernel
        self.windows = windows
        self._constants = constants
        self._known: dict[tuple[type, ...], _OfTypes] = {}  # by the types of numbers

    def __call__(
        self, grid: tuple[int, ...], operands: tuple[Tensor | None, ...], numbers: tuple[float, ...] = ()
    ) -> None:
        """Launches the kernel.

        grid: numbers of programs, one or two. operands: tensors and None in the kernel's order, not all None; numbers:
        what follows them up to the constants.
        """
        if recorders:
            recorder = recorders.get(threading.get_ident())
            if recorder is not None:
                recorder.note_launch(self, grid, operands, numbers)
                return
        found = self._find(operands, numbers)
        if found is not None and not are_launches_watched() and not self._kernel.pre_run_hooks:
            ready, addresses = found
            windows = ready.windows
            matrices = [operands[place] for place, _, _ in windows] if windows else ()
            if ready.launch(grid, matrices, addresses, numbers):
                return
        self._launch_by_triton(grid, operands, numbers)

    def _find(
        self, operands: tuple[Tensor | None, ...], numbers: tuple[float, ...]
    ) -> "tuple[_Ready, list[Any]] | None":
        """The compiled kernel and the addresses, if the kernel was launched before."""
        known = self._known.get(tuple(map(type, numbers)))
        if known is None or known.has_wide(numbers):
            return None
        addresses, key = known.key(operands, numbers)
        ready = known.kernels.get(key)
        return None if ready is None else (ready, addresses)

    def are_specialised(self, num_operands: int) -> list[bool]:
        """Of the kernel's arguments behind so many operands: whether Triton may compile one for an integer's value."""
        params = getattr(self._kernel, "params", ())  # the interpreter compiles none
        return [not param.do_not_specialize for param in params[num_operands:]]

    def ready(self, operands: tuple[Tensor | None, ...], numbers: tuple[float, ...]) -> "_Ready | None":
        """The compiled kernel of such a launch, if there is one that Triton is not needed for."""
        found = self._find(operands, numbers)
        return None if found is None or self._kernel.pre_run_hooks else found[0]

    def _launch_by_triton(
        self, grid: tuple[int, ...], operands: tuple[Tensor | None, ...], numbers: tuple[float, ...]
    ) -> None:
        arguments: list[Any] = list(operands)
        for place, tile in enumerate(self.windows):
            if tile is not None and arguments[place] is not None:
                arguments[place] = _descriptor(arguments[place], tile)
        with torch.cuda.device_of(_first(operands)):
            compiled = self._kernel[grid](*arguments, *numbers, **self._constants)
            if type(compiled) is CompiledKernel and compiled.metadata.target.backend == "cuda":
                self._keep(compiled, operands, numbers)

    def _keep(self, compiled: CompiledKernel, operands: tuple[Tensor | None, ...], numbers: tuple[float, ...]) -> None:
        """Remembers what was launched for the next time."""
        params = self._kernel.params[len(operands) :]
        types = tuple(map(type, numbers))
        known = self._known.get(types)
        if known is None:
            known = self._known[types] = _OfTypes(types, self.are_specialised(len(operands))[: len(numbers)])
        if known.has_wide(numbers):
            return
        if len(known.kernels) >= _MAX_KEYS:
            known.kernels.clear()
        constants = tuple(self._constants.get(param.name, param.default) for param in params[len(numbers) :])
        windows = [(i, tile) for i, tile in enumerate(self.windows) if tile is not None and operands[i] is not None]
        device = _first(operands).get_device()
        known.kernels[known.key(operands, numbers)[1]] = _Ready(compiled, device, windows, constants)


@functools.lru_cache(maxsize=4096)
def launch_plan(kernel: Any, windows: tuple[Window, ...] = (), **constants: Any) -> LaunchPlan:
    """The plan of a kernel with these constants, made once."""
    return LaunchPlan(kernel, windows, **constants)


class LaunchByNames:
    """Plans of one kernel for arguments by name: tensors are called `..._ptr`.

    options: of the launch, and constants that change with it.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        parameters = inspect.signature(kernel.fn).parameters.values()
        constants = [one.name for one in parameters if one.annotation is not inspect.Parameter.empty]
        numbers = [one.name for one in parameters if one.annotation is inspect.Parameter.empty]
        operands = [name for name in numbers if name.endswith("_ptr")]
        self._kernel, self._options = kernel, options
        self._names = [name for name in constants if name not in options]
        self._pick_operands, self._pick_numbers, self._pick_constants = (
            _picker(names) for names in (operands, numbers[len(operands) :], self._names)
        )
        self._plans: dict[tuple[Any, ...], LaunchPlan] = {}  # by the values of constants

    def __call__(self, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        """Launches the kernel with those of the arguments that it takes."""
        values = self._pick_constants(arguments)
        plan = self._plans.get(values)
        if plan is None:
            constants = dict(zip(self._names, values, strict=True))
            plan = self._plans[values] = LaunchPlan(self._kernel, **constants, **self._options)
        plan(grid, self._pick_operands(arguments), self._pick_numbers(arguments))


class _OfTypes:
    """The compiled kernels for numbers of these types.

    are_specialised: of each number, whether Triton may compile a kernel for its value, which it does of integers.
    """

    def __init__(self, types: tuple[type, ...], are_specialised: Sequence[bool]) -> None:
        integers = [place for place, one in enumerate(types) if one is int]
        self._integers = _picker(integers)
        self._specialised = _picker([place for place in integers if are_specialised[place]])
        self.kernels: dict[tuple[Any, ...], _Ready] = {}

    def has_wide(self, numbers: tuple[float, ...]) -> bool:
        """Whether an integer does not fit into 32 bits."""
        integers = self._integers(numbers)
        return max(integers, default=0) > _MAX_INT32 or min(integers, default=0) < -_MAX_INT32

    def key(self, operands: tuple[Tensor | None, ...], numbers: tuple[float, ...]) -> tuple[list[Any], tuple[Any, ...]]:
        """The addresses (0 for None), and what tells the compiled kernel."""
        addresses: list[Any] = [0 if one is None else one.data_ptr() for one in operands]
        key: list[Any] = [None if one is None else one.dtype for one in operands]
        lead = operands[0]
        key.append((_first(operands) if lead is None else lead).get_device())
        key += self._specialised(numbers)
        if functools.reduce(operator.or_, addresses) % _ALIGNMENT:
            key += [address % _ALIGNMENT == 0 for address in addresses]
        return addresses, tuple(key)


class _Ready:
    """A compiled kernel with what its launcher wants beside addresses, numbers and constants.

    device: the index of the tensors' device; -1 is the CPU's, which stands for the current one. windows: places and
    tiles of matrices that are taken as tensor descriptors.
    """

    def __init__(
        self,
        compiled: CompiledKernel,
        device: int,
        windows: list[tuple[int, tuple[int, int]]],
        constants: tuple[Any, ...],
    ) -> None:
        active = triton.runtime.driver.active
        self._current_device = active.get_current_device
        self.tensor_device, self.device = device, self._current_device() if device < 0 else device
        self._stream_of = active.get_current_stream
        self._constants = constants
        # The last one first: each becomes longer.
        self.windows = [(place, tile, number) for number, (place, tile) in enumerate(windows)][::-1]
        self._maps: dict[tuple[Any, ...], list[Any]] = {}
        self.compiled, self._launcher = compiled, compiled.run
        self._function, self._metadata = compiled.function, compiled.packed_metadata
        # What the launcher of recent Tritons does in its `__call__` where a kernel wants no workspace.
        launcher = self._launcher
        self._is_bare = hasattr(launcher, "arg_annotations") and not (
            launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False)
        )
        if self._is_bare:
            self._bare = active.utils.launch
            self._options = launcher.launch_cooperative_grid, launcher.launch_pdl
            self._signature = launcher.arg_annotations, launcher.kernel_signature

    def launch(
        self,
        grid: tuple[int, ...],
        matrices: Sequence[Tensor | None],
        addresses: list[Any],
        numbers: tuple[float, ...],
    ) -> bool:
        """Puts the kernel into the current stream; False where its device is not the current one.

        matrices: of `windows`. addresses: of all operands, 0 for None; the list is used up.
        """
        if self._current_device() != self.device:
            return False
        programs, blocks = grid if len(grid) == 2 else (*grid, 1)
        stream = self._stream_of(self.device)
        if self._is_bare:
            for (place, tile, number), matrix in zip(self.windows, matrices, strict=True):
                addresses[place : place + 1] = self._map(matrix, addresses[place], tile, number)
            self._bare(
                programs, blocks, 1, stream, self._function, *self._options, self._metadata, None, None, None, None,
                None, *self._signature, (*addresses, *numbers, *self._constants),
            )  # fmt: skip
            return True
        for (place, tile, _), matrix in zip(self.windows, matrices, strict=True):
            addresses[place] = _descriptor(matrix, tile)  # type: ignore[arg-type]
        self._launcher(
            programs, blocks, 1, stream, self._function, self._metadata, None, None, None,
            *addresses, *numbers, *self._constants,
        )  # fmt: skip
        return True

    def _map(self, matrix: Any, address: int, tile: tuple[int, int], number: int) -> list[Any]:
        """What the launcher takes for a window: the encoded map, sizes and strides. number: among all windows."""
        key = (number, address, matrix.shape, matrix.stride(0))
        found = self._maps.get(key)
        if found is None:
            from triton.backends.nvidia.driver import make_tensordesc_arg

            if len(self._maps) >= _MAX_MAPS:
                self._maps.clear()
            metadata = self.compiled.metadata.tensordesc_meta[number]
            # Recent Tritons pass a third argument, which is not looked at; 3.7 takes none.
            more = (None,) * (make_tensordesc_arg.__code__.co_argcount - 2)
            found = self._maps[key] = make_tensordesc_arg(_descriptor(matrix, tile), metadata, *more)
        return found


def _descriptor(matrix: Tensor, tile: tuple[int, int]) -> TensorDescriptor:
    """A window as Triton takes it; made on the host, so that no workspace is needed."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), list(tile))


def _first(operands: tuple[Tensor | None, ...]) -> Tensor:
    return next(one for one in operands if one is not None)


def _picker(keys: Sequence[Any]) -> _Pick:
    """The function that takes what is at these places, or of these names, as a tuple."""
    if len(keys) > 1:
        return operator.itemgetter(*keys)
    if keys and isinstance(keys[0], str):
        return lambda values: (values[keys[0]],)
    return operator.itemgetter(slice(keys[0], keys[0] + 1) if keys else slice(0))
