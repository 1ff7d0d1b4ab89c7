"""What launchers share: facts about devices and dtypes, and arguments in the form that kernels take them."""

import functools

import torch
from torch import Tensor

from bert_fast.reference.dropout import dropout_scale, dropout_threshold

__all__ = ["ceil_div", "dropout_arguments", "next_power_of_2", "num_multiprocessors", "unit_stride", "vector_elements"]

# Triton's interpreter runs programs one after another: two are enough to exercise every loop and partial sum.
_INTERPRETER_MULTIPROCESSORS = 2


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n; n >= 1."""
    return 1 << (n - 1).bit_length()


def vector_elements(dtype: torch.dtype) -> int:
    """Elements of the widest load of one thread, 128 bits: 4 for fp32, 8 for bf16 and fp16."""
    return 16 // dtype.itemsize


@functools.cache
def _cuda_multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors (compute units) of a CUDA or ROCm device, asked once; a stand-in for the interpreter."""
    if device.type != "cuda":
        return _INTERPRETER_MULTIPROCESSORS
    return _cuda_multiprocessors(torch.cuda.current_device() if device.index is None else device.index)


def unit_stride(x: Tensor) -> Tensor:
    """x [T, H] itself if neighbouring columns are neighbours in memory (rows may be anywhere), else a copy that is so."""
    return x if x.stride(1) == 1 else x.contiguous()


def dropout_arguments(dropout_p: float) -> tuple[int, float]:
    """(drop_max, scale) of `kernels/_math.py:keep_values`, drop_max as the signed 32-bit number with the same bits.

    Undefined for a threshold of 0 (p below 2**-17), where nothing is dropped: launchers then take the path without.
    """
    drop_max = (dropout_threshold(dropout_p) << 16) - 1
    return drop_max - (1 << 32) if drop_max >= 1 << 31 else drop_max, dropout_scale(dropout_p)
