"""What GPUs are, as back-ends and launchers care: each is asked once. What speaks against Triton's kernels on one."""

import functools
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bert_fast.env import SETTINGS

# NVIDIA's first chip that kernels are compiled for and looked at; on older ones they spill thousands of bytes.
_OLDEST = (8, 0)
# The most that a program of any kernel may take on the chips with least (sm_86, sm_89, sm_120).
_SHARED_BYTES = 99 * 1024

WideProduct = Literal["addmm", "mm", "widened"]


class Chip(NamedTuple):
    """One GPU.

    name: of its instruction set, "sm_86" or "gfx942". product: as it is sold. shared_bytes: the most of a program.
    """

    name: str
    product: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int


def _index_of(device: torch.device) -> int:
    """The number of a CUDA or ROCm device: the current one's where it has none."""
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def chip(index: int) -> Chip:
    """What the CUDA or ROCm device of this number is."""
    properties = torch.cuda.get_device_properties(index)
    capability = properties.major, properties.minor
    name = "sm_{}{}".format(*capability)
    if torch.version.hip is not None:
        name = str(properties.gcnArchName).split(":")[0]
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    return Chip(name, properties.name, capability, properties.multi_processor_count, shared_bytes)


def name_of(device: torch.device) -> str:
    """A device for messages: as it is sold, and its instruction set."""
    if device.type != "cuda":
        return str(device)
    one = chip(_index_of(device))
    return f"{one.product} ({one.name})"


def triton_problems(device: torch.device) -> list[str]:
    """What speaks against every Triton kernel on a CUDA or ROCm device; nothing is compiled to find out."""
    found = []
    one = chip(_index_of(device))
    if torch.version.hip is None:
        who = name_of(device)
        if one.capability < _OLDEST:
            found.append(f"{who} is older than sm_80, on which kernels no longer fit into a thread's registers")
        elif one.shared_bytes < _SHARED_BYTES:
            found.append(f"{who} has {one.shared_bytes} bytes of shared memory a program, kernels take {_SHARED_BYTES}")
    problem = launcher_problem()
    return found if problem is None else [*found, problem]


@functools.cache
def launcher_problem() -> str | None:
    """What Triton lacks to build its launchers, which it does in C when it first launches a kernel; asked once."""
    module = sys.modules.get("triton")
    if module is not None and module.knobs.build.impl is not None:
        return None
    wanted = SETTINGS.c_compiler
    if wanted is not None and shutil.which(wanted) is None:
        return f"Triton builds its launchers with a C compiler, and CC={wanted} is none that can be run"
    if wanted is None and not any(map(shutil.which, ("gcc", "clang"))):
        return "Triton builds its launchers with a C compiler, and neither gcc nor clang is there (or named by CC)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return f"Triton builds its launchers with Python's headers, and there is no Python.h for {sys.executable}"
    return None


_ASK_TRITON = """
from triton.backends.nvidia.compiler import get_ptxas
found = get_ptxas({arch})
print("ptxas", found.version, "at", found.path)
"""
_ASSEMBLER_S = 60


@functools.cache
def assembler(capability: tuple[int, int]) -> str | None:
    """The ptxas that Triton's kernels for NVIDIA's chip of this capability are made by: "ptxas 12.9.86 at <path>".

    None where Triton has none, or cannot say. Another process asks, so that nothing is imported here; what
    `TRITON_PTXAS_PATH` and `TRITON_PTXAS_BLACKWELL_PATH` (which Triton 3.9 reads from sm_90 on) name is what it finds.
    """
    script = _ASK_TRITON.format(arch=10 * capability[0] + capability[1])
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_ASSEMBLER_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    said = done.stdout.strip()
    return said if said.startswith("ptxas ") and "\n" not in said else None


class _WideProducts(dict[tuple[torch.device, torch.dtype], WideProduct]):
    """How the library makes an fp32 product of half-precision operands on a CUDA device, never rounded to theirs.

    addmm: what is added to, too, in one launch. mm: the product in one launch, which is added in another: the sums are
    fp32 before and after, so that there is one rounding more nowhere. widened: of operands in fp32, which hold the same
    numbers (TF32 as well). Each is asked once, for two tiny products, and only what it refuses is gone round.

    While a graph is captured nothing is asked, as the graph would ask at every replay: a product that comes for the
    first time then is widened, and nothing is remembered of it. `graphs.CapturedStep` warms up, and so has asked.
    """

    def __missing__(self, asked: tuple[torch.device, torch.dtype]) -> WideProduct:
        device, dtype = asked
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "widened"
        way: WideProduct = "widened"
        if _takes(torch.addmm, device, dtype, torch.zeros(16, 16, device=device)):
            way = "addmm"
        elif _takes(torch.mm, device, dtype):
            way = "mm"
        self[asked] = way
        return way


wide_products = _WideProducts()


def _takes(product: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, *addend: Tensor) -> bool:
    """Whether a product of the library takes half-precision operands and writes fp32; raises what is no answer."""
    a, out = torch.zeros(16, 16, dtype=dtype, device=device), torch.empty(16, 16, device=device)
    try:
        product(*addend, a, a, out_dtype=torch.float32, out=out)
    except (TypeError, RuntimeError) as error:
        if not _is_refusal(error):
            raise
        return False
    return True


# cuBLAS' words for a product that it does not have; others tell of a device that is busy, full or broken.
_REFUSALS = ("CUBLAS_STATUS_NOT_SUPPORTED", "CUBLAS_STATUS_INVALID_VALUE", "CUBLAS_STATUS_ARCH_MISMATCH")
# Errors of a device, which may stem from launches long before; PyTorch has a class for most.
_DEVICE_ERRORS = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))


def _is_refusal(error: Exception) -> bool:
    """Whether an error says that there is no such product: no overload, none for a device or dtype, none in cuBLAS."""
    if isinstance(error, _DEVICE_ERRORS):
        return False
    text = str(error)
    return any(one in text for one in _REFUSALS) or not ("CUDA error" in text or "CUBLAS_STATUS" in text)
