"""Matrix products of linear layers by what multiplies fastest on this CPU.

Forward products of few tokens in fp32 are our own (`csrc/cpu/linear.h`), the others PyTorch's: MKL, which uses AVX-512
on Intel's processors only. oneDNN, in the same PyTorch build, uses it wherever it is there: twice the rate on AMD's, of
few tokens too (`docs/decisions/0004-onednn-gemm.md`). Which one runs depends on the machine and the number of tokens,
never on a measurement, so that results repeat bit for bit.
"""

import functools
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from bert_fast.batch_invariance import is_asked, refuse_on_gpu
from bert_fast.devices import wide_products
from bert_fast.torch._native import address, routines

_HALF = (torch.float16, torch.bfloat16)
# Tokens up to which our own product is as fast as MKL's (docs/decisions/0024-weights-read-as-they-lie.md).
_FEW = 256


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """t.to(dtype), which costs a microsecond also where there is nothing to do."""
    return t if t.dtype is dtype else t.to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] @ weight [N, K]^T + bias [N], of the dtype of x, which parameters are rounded to."""
    if not x.is_cpu:
        refuse_on_gpu("linear", x)
    if weight.dtype is not x.dtype:
        weight = weight.to(x.dtype)
    if bias is not None and bias.dtype is not x.dtype:
        bias = bias.to(x.dtype)
    lib = _own_routine(x, weight, bias)
    if lib is None:
        return matmul(x, weight.t(), bias)
    y = x.new_empty((len(x), len(weight)))
    if bias is not None:
        bias = bias.contiguous()
    lib.linear(
        x.data_ptr(), x.stride(0), weight.data_ptr(), weight.stride(0), address(bias), y.data_ptr(), *y.shape,
        x.shape[1], torch.get_num_threads(),
    )  # fmt: skip
    return y


def _own_routine(x: Tensor, weight: Tensor, bias: Tensor | None) -> ModuleType | None:
    """The extension where its own product is taken."""
    lib = routines(x, weight, bias)
    if lib is None or lib.simd_level() == "portable" or x.stride(1) != 1 or weight.stride(1) != 1:
        return None
    return lib if is_asked() or (len(x) <= _FEW and not _mkl_lacks_avx512()) else None


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [M, K] @ b [K, N] + bias [N]; transposed views of contiguous matrices are as good as contiguous ones."""
    rows, inner = a.shape
    if bias is None and inner == 1:  # the weight gradient of one token: libraries take up to twice as long
        return a * b
    # oneDNN has no product over an empty inner dimension (the weight gradient of no tokens), and none of a vector: one
    # token's products take it up to five times as long as MKL.
    if rows > 1 and inner > 1 and a.dtype is torch.float32 and a.is_cpu and _mkl_lacks_avx512():
        if bias is not None and not bias.is_contiguous():  # it would read what lies between the elements
            bias = bias.contiguous()
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")
    if a.is_cpu and a.dtype in _HALF:
        a, b = _without_gaps(a), _without_gaps(b)
    return a @ b if bias is None else torch.addmm(bias, a, b)


def matmul_add(a: Tensor, b: Tensor, addend: Tensor) -> Tensor:
    """a [M, K] @ b [K, N] + addend [M, N]; addend's memory may be reused for the result."""
    rows, inner = a.shape
    if rows > 1 and inner > 1 and a.dtype is torch.float32 and a.is_cpu and _mkl_lacks_avx512():
        return torch.ops.mkldnn._linear_pointwise.binary(a, addend, b.t(), None, "add")
    if a.is_cpu and a.dtype in _HALF:
        a, b = _without_gaps(a), _without_gaps(b)
    return addend.addmm_(a, b)


def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """dy [T, N]^T @ x [T, K], as `dtype`: what the weight has, fp32 beside half-precision activations or theirs.

    On CUDA an fp32 gradient of half-precision operands is the product's accumulator, never rounded in between.
    """
    if dtype != x.dtype and x.device.type == "cuda" and torch.version.hip is None:
        if wide_products[x.device, x.dtype] == "widened":
            return torch.mm(dy.t().float(), x.float())
        return torch.mm(dy.t(), x, out_dtype=dtype)
    return cast(matmul(dy.t(), x), dtype)


def _without_gaps(t: Tensor) -> Tensor:
    """t, or a copy where its rows lie apart: products in half precision read what is between, on some processors.

    Seen with fp16 of PyTorch 2.13 on Intel's: NaN between the rows of a view came out as NaN. A copy of a transposed
    view is one too: another layout is another routine, whose sums round otherwise.
    """
    if t.dim() != 2 or t.is_contiguous() or t.t().is_contiguous():
        return t
    return t.t().contiguous().t() if t.stride(0) == 1 else t.contiguous()


@functools.cache
def _mkl_lacks_avx512() -> bool:
    """Whether this processor has AVX-512 that MKL will not use, and oneDNN is there to do so."""
    has_op = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not (has_op and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text(encoding="ascii", errors="ignore")[:4096]
