"""Zeros that cost nothing until they are written to."""

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)  # 0 on Windows


def zeros_on_touch(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `torch.zeros` on the CPU, of fresh pages, which the system makes when they are first written.

    For large tensors of which few rows are written: pages that are only read share one of zeros. The storage cannot be
    resized.
    """
    count = math.prod(shape)
    if _PRIVATE and count:
        try:
            pages = mmap.mmap(-1, count * dtype.itemsize, flags=_PRIVATE)
        except OSError:
            pass  # there is no room: the allocator says so in its own words
        else:
            return torch.frombuffer(pages, dtype=dtype).view(*shape)
    return torch.zeros(shape, dtype=dtype)
