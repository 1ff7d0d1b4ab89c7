"""When the C++ routines can stand in for a chain of PyTorch operators: fp32, on the CPU, extension loaded."""

import functools
from types import ModuleType

import torch
from torch import Tensor

from bert_fast import native
from bert_fast.reference.dropout import dropout_scale, dropout_threshold


def routines(*tensors: Tensor | None) -> ModuleType | None:
    """The extension if it can work on these tensors (fp32 on the CPU), else None."""
    for t in tensors:  # a generator would take twice as long
        if t is not None and (t.dtype is not torch.float32 or not t.is_cpu):
            return None
    return native.load()


def address(tensor: Tensor | None) -> int:
    """Where a tensor's first element lies; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def dropout_arguments(p: float, seed: Tensor | None, site: int) -> tuple[int, int, int, float]:
    """(seed, site, threshold, scale) as the routines take them; threshold 0 means no dropout."""
    if p == 0.0 or seed is None:
        return 0, site, 0, 1.0
    return int(seed) & 0xFFFFFFFFFFFFFFFF, site, *_threshold_and_scale(p)


@functools.lru_cache(maxsize=1024)
def _threshold_and_scale(p: float) -> tuple[int, float]:
    return dropout_threshold(p), dropout_scale(p)
