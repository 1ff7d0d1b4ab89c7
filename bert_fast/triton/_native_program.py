"""Programs (`_program.py`) run by the C++ extension: memory, PyTorch's products and launches without Python between.

    kernel = kernel_of(ready)                     # None: launches of this kernel stay the plan's
    native = native_program(program, readies)     # None: the program is run in Python
    outputs = native.run(inputs, numbers)         # None: not made for these, nothing was done

A kernel is launched by its handle, with parameters put together in C++. What is taken for granted of Triton is checked
when a kernel is prepared: number, places and sizes of parameters against its cubin, tensor maps against Triton's own.

`run` does not ask whether launches are watched (`_launch_plan.are_launches_watched`), nor for dtypes and shapes of
inputs: its caller does. It refuses a call where the kernels' device is not the current one, where the first input or
one that a kernel reads is on another device, and where operands, integers or guards are others than the program was
made for.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor

from bert_fast import native
from bert_fast.addresses import exchange
from bert_fast.triton._launch_plan import _Ready
from bert_fast.triton._program import Launch, Program, scratch_of

_MAX_SHARED_BYTES = 228 * 1024  # more needs an attribute of the launch
_WARP = 32
_kernels: "WeakKeyDictionary[_Ready, Any]" = WeakKeyDictionary()


class NativeProgram(Protocol):
    """A program in C++; it may be run by several threads at a time."""

    def run(self, inputs: Sequence[Tensor | None], numbers: tuple[int, ...], /) -> tuple[Tensor | None, ...] | None:
        """The outputs; None where it is not made for these, before anything was asked of the device.

        inputs: a tuple or list.
        """


def kernel_of(ready: _Ready) -> Any | None:
    """The compiled kernel, prepared for launches from C++; None where anything about it is not known.

    Warns where that is since Triton is not as it is taken to be.
    """
    if ready not in _kernels:
        try:
            _kernels[ready] = _prepare(ready)
        except (AttributeError, KeyError, ValueError, TypeError, IndexError) as error:
            _kernels[ready] = None
            warnings.warn(
                f"bert_fast launches this kernel by Triton, which takes the host longer: Triton "
                f"{triton.__version__} is not as expected ({type(error).__name__}: {error})",
                RuntimeWarning, stacklevel=2,
            )  # fmt: skip
    return _kernels[ready]


def native_program(program: Program, readies: Sequence[_Ready]) -> NativeProgram | None:
    """The program in C++, None where there is no extension or a kernel is not one for it.

    readies: of each `Launch`, in the order of steps.
    """
    extension = native.load()
    launches = [step.what for step in program.steps if isinstance(step.what, Launch)]
    kernels = tuple(map(kernel_of, readies))
    if extension is None or not kernels or len(launches) != len(kernels) or None in kernels:
        return None
    for launch, ready in zip(launches, readies, strict=True):
        if sorted((one.place, one.tile) for one in launch.windows) != sorted(one[:2] for one in ready.windows):
            return None
    first, active = readies[0], triton.runtime.driver.active
    device = torch.device("cpu") if first.tensor_device < 0 else torch.device("cuda", first.tensor_device)
    functions = {
        "tensor": Tensor, "empty_strided": _empty_strided(device), "exchange": exchange(), "data_ptr": Tensor.data_ptr,
        "get_device": Tensor.get_device,
        "current_device": active.get_current_device, "current_stream": active.get_current_stream,
    }  # fmt: skip
    try:
        return extension.make_program(
            program, kernels, device=first.device, tensor_device=first.tensor_device, scratch=scratch_of(program),
            functions=functions,
        )  # fmt: skip
    except ValueError:
        return None


def _empty_strided(device: torch.device) -> Callable[..., Tensor]:
    """A function that allocates on the current device of this type, by sizes, strides and dtype.

    Programs that PyTorch's compiler makes call `_empty_strided_<device>`, which does less than `torch.empty`. It is not
    public: a PyTorch without it allocates by `torch.empty_strided`.
    """
    known: Callable[..., Tensor] | None = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if known is not None:
        return known
    return lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def _prepare(ready: _Ready) -> Any | None:
    """As `kernel_of`; raises where something is not as Triton 3.6 to 3.9 have it."""
    from triton.backends.nvidia.driver import CudaLauncher

    extension, compiled = native.load(), ready.compiled
    metadata, launcher = compiled.metadata, compiled.run
    num_warps, num_ctas, shared_bytes = compiled.packed_metadata
    if (
        extension is None
        or metadata.target.backend != "cuda"
        or type(launcher) is not CudaLauncher
        or launcher.global_scratch_size
        or launcher.profile_scratch_size
        or getattr(launcher, "gsan_enabled", False)
        or launcher.launch_cooperative_grid
        or launcher.launch_pdl
        or (num_warps, num_ctas, shared_bytes) != (metadata.num_warps, 1, metadata.shared)
        or metadata.warp_size != _WARP
        or shared_bytes > _MAX_SHARED_BYTES
    ):
        return None
    return extension.Kernel(
        name=metadata.name,
        function=compiled.function,
        cubin=compiled.asm["cubin"],
        threads=num_warps * _WARP,
        shared_bytes=shared_bytes,
        device=ready.device,
        arguments=_arguments(compiled),
        owner=compiled,
    )


def _arguments(compiled: Any) -> tuple[tuple[Any, ...], ...]:
    """Of each argument its kind and what the kernel was compiled for."""
    source = compiled.src
    windows = iter(compiled.metadata.tensordesc_meta or ())
    found: list[tuple[Any, ...]] = []
    for place, (param, type_name) in enumerate(zip(source.fn.params, source.signature.values(), strict=True)):
        attributes = source.attrs.get((place,), [])
        if any(name != "tt.divisibility" or value != 16 for name, value in attributes):
            raise ValueError(f"{compiled.name}: argument {param.name} has attributes {attributes}")
        is_divisible = bool(attributes)
        if type_name == "constexpr":
            found.append((_kind_of_constant(param, source.constants.get((place,))),))
        elif type_name.startswith("*"):
            found.append(("pointer", is_divisible))
        elif type_name.startswith("tensordesc<"):
            found.append(("window", *_window(next(windows))))
        else:
            found.append((type_name, not param.do_not_specialize, is_divisible))
    if next(windows, None) is not None:
        raise ValueError(f"{compiled.name}: more tensor maps than arguments")
    return tuple(found)


def _kind_of_constant(param: Any, value: Any) -> str:
    if param.is_constexpr:
        return "constant"
    if value is None:
        return "none"
    if type(value) is int and value == 1:
        return "one"
    raise ValueError(f"argument {param.name} became the constant {value}")


def _window(metadata: dict[str, Any]) -> tuple[Any, ...]:
    """What a tensor map is made with, and maps that Triton makes."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    known = {"swizzle", "elem_size", "elem_type", "block_size", "fp4_padded", "is_im2col"}
    if not metadata.keys() <= known or metadata["fp4_padded"] or metadata.get("is_im2col", False):
        raise ValueError(f"a tensor map of {metadata}")
    swizzle, size = metadata["swizzle"], metadata["elem_size"]
    element_type = TMA_DTYPE_DEVICE_TO_HOST[metadata["elem_type"]]
    box_rows, box_cols = metadata["block_size"]
    utils = triton.runtime.driver.active.utils
    encode = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor
    samples = []
    # Smaller than 128 KB, for which Triton changes what some drivers make, a little larger, and large.
    for rows, cols, row_stride in (
        (3, box_cols, box_cols),
        (1024, 64, 64),
        (1025, 256 // size, 256),
        (4100, 1024, 3072),
    ):
        address = 1 << 40 | rows << 8
        theirs = encode(address, swizzle, size, element_type, [box_rows, box_cols], [rows, cols], [row_stride, 1], 0)
        samples.append((address, rows, cols, row_stride, theirs))
    return element_type, size, swizzle, box_rows, box_cols, tuple(samples)
