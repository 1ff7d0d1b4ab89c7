"""Starts Triton over the null driver, in a process that has launched nothing yet."""

import ctypes
import os
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tools.null_driver import build, device_answers


@dataclass(frozen=True)
class Device:
    """What the driver says of a GPU. shared_bytes: the most of a block."""

    capability: int
    multiprocessors: int
    shared_bytes: int


DEVICES = {
    "sm_80": Device(80, 108, 163 * 1024),  # A100
    "sm_86": Device(86, 84, 99 * 1024),  # RTX 3090
    "sm_89": Device(89, 128, 99 * 1024),  # RTX 4090
    "sm_90": Device(90, 132, 227 * 1024),  # H100, H200
    "sm_100": Device(100, 148, 227 * 1024),  # B200
    "sm_120": Device(120, 170, 99 * 1024),  # RTX 5090
}


@dataclass(frozen=True)
class Launch:
    """What `cuLaunchKernelEx` was asked for.

    parameters: their bytes as the kernel reads them; empty unless the driver was told to note them.
    """

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    parameters: bytes = b""


class _Device(ctypes.Structure):
    _fields_ = (("capability", ctypes.c_int), ("multiprocessors", ctypes.c_int), ("shared_per_block", ctypes.c_int))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("parameter_bytes", ctypes.c_uint32),
        ("parameters", ctypes.c_void_p),
    )


class NullDriver:
    """The log of a started driver: what was launched, encoded and refused since the last `reset`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        # By this name Triton's modules find it again, wherever it lies.
        self.lib = ctypes.CDLL(str(build.stub() / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
        for name in ("launches", "tensor_maps", "refusals"):
            getattr(self.lib, f"null_num_{name}").restype = ctypes.c_size_t
        self.lib.null_note_parameters.argtypes = (ctypes.c_bool,)
        self.lib.null_fail_launch.argtypes = (ctypes.c_size_t,)
        self.lib.null_capture.argtypes = (ctypes.c_bool,)
        self.lib.null_launches.restype = ctypes.POINTER(_Launch)
        self.lib.null_last_refusal.restype = ctypes.c_char_p
        chosen = _Device(device.capability, device.multiprocessors, device.shared_bytes)
        self.lib.null_choose_device(ctypes.byref(chosen))
        self.compiled: list[str] = []  # names of kernels, as they were compiled or read from Triton's cache

    def reset(self) -> None:
        """Forgets all of it."""
        self.lib.null_reset()
        self.compiled.clear()

    @property
    def num_launches(self) -> int:
        """How many launches were accepted."""
        return self.lib.null_num_launches()

    @property
    def num_tensor_maps(self) -> int:
        """How many tensor maps were encoded."""
        return self.lib.null_num_tensor_maps()

    @property
    def refusals(self) -> tuple[int, str]:
        """How many calls were refused, and why the last one was."""
        return self.lib.null_num_refusals(), self.lib.null_last_refusal().decode()

    def launches(self) -> list[Launch]:
        """All accepted launches, in their order."""
        found = self.lib.null_launches()
        return [
            Launch(one.kernel.decode(), tuple(one.grid), one.threads, one.shared_bytes, _parameters(one))
            for one in (found[i] for i in range(self.num_launches))
        ]

    def note_parameters(self, wanted: bool = True) -> None:
        """Whether bytes of parameters are noted from the next launch on, which takes time."""
        self.lib.null_note_parameters(wanted)

    def fail_launch(self, number: int) -> None:
        """Makes the n-th launch from now on fail, 1 being the next; 0 cancels it."""
        self.lib.null_fail_launch(number)

    def capture(self, wanted: bool = True) -> None:
        """Whether streams answer that they are being captured; launches are made all the same."""
        self.lib.null_capture(wanted)

    def by_kernel(self) -> dict[str, int]:
        """Launches by the kernel's name."""
        return dict(sorted(Counter(launch.kernel for launch in self.launches()).items()))


def _parameters(launch: _Launch) -> bytes:
    return ctypes.string_at(launch.parameters, launch.parameter_bytes) if launch.parameter_bytes else b""


def start(name: str = "sm_90", *, empties_kernels: bool = False) -> NullDriver:
    """Makes Triton's NVIDIA driver the active one over a device of `DEVICES`; bert_fast takes it for CPU tensors.

    empties_kernels: kernels lose their bodies before they are compiled, which takes a fifth of the time. Their names,
    grids and parameters stay what they are; registers and shared memory do not, so this is not for tests of what fits.

    Once a process, before bert_fast is imported. What is replaced, and nothing else:
        libcuda.so.1                      by the one built here
        Triton's questions of torch.cuda  current device 0, its capability, stream 0
        bert_fast's questions             whether tensors are a GPU's, and which (`device_answers.py`)
        Tensor.pin_memory                 a copy
    """
    reason = build.missing()
    if reason is not None:
        raise RuntimeError(reason)
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET=1 replaces the compiler by the interpreter; unset it")
    device = DEVICES[name]
    os.environ["TRITON_LIBCUDA_PATH"] = str(build.stub())
    os.environ.setdefault("TRITON_CACHE_DIR", str(build.CACHE_DIR / ("triton_empty" if empties_kernels else "triton")))
    device_answers.install(device.capability, device.multiprocessors, device.shared_bytes)
    driver = NullDriver(device)
    _activate(device)
    if empties_kernels:
        _empty_kernels()
    _note_compilations(driver.compiled)
    return driver


def _activate(device: Device) -> None:
    import torch  # noqa: F401  the driver asks it where it is imported
    import triton
    from triton.backends.nvidia.driver import CudaDriver

    active = CudaDriver()
    active.get_current_device = lambda: 0
    active.set_current_device = lambda index: None
    active.get_device_capability = lambda index=0: divmod(device.capability, 10)
    active.get_current_stream = lambda index=0: 0
    triton.runtime.driver.set_active(active)


def _empty_kernels() -> None:
    """Removes the bodies of kernels that Triton compiles from now on, but for those that take tensor descriptors.

    Triton derives the encoding of a tensor map from the loads in the body.
    """
    from triton._C.libtriton import ir
    from triton.backends.nvidia.compiler import CUDABackend

    make_ttir = CUDABackend.make_ttir

    def make_empty(module: Any, *arguments: Any) -> Any:
        signature = re.search(r"^ *tt\.func public @.*", str(module), re.MULTILINE)
        assert signature is not None
        if "!tt.tensordesc" in signature[0]:
            return make_ttir(module, *arguments)
        header = re.sub(r" loc\((#\w+|[^()]*\(#\w+\))\)", "", signature[0])
        with tempfile.NamedTemporaryFile("w", suffix=".ttir") as file:
            file.write(f"module {{\n{header}\n  tt.return\n}}\n}}\n")
            file.flush()
            empty = ir.parse_mlir_module(file.name, module.context)
        empty.context = module.context
        return make_ttir(empty, *arguments)

    CUDABackend.make_ttir = staticmethod(make_empty)


def _note_compilations(compiled: list[str]) -> None:
    """Every kernel that Triton did not know in this process, whether its cache folder did or not."""
    from triton import knobs

    def note(*, fn: Any, **_: Any) -> None:
        compiled.append(fn.name)

    knobs.runtime.jit_post_compile_hook = note
