"""The one precision rule of the reference: compute wide, round once at the end.

Statistics, softmax, losses and every sum are taken in fp32, or in fp64 when the inputs are fp64; results go back to the
dtype of the inputs. So the fp64 reference is exact enough to judge every other path, and the reference in a narrow
dtype errs by the rounding of its inputs and outputs alone.
"""

import functools

import torch
from torch import Tensor


@functools.cache  # a call of Python takes longer
def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    """x in the dtype the reference computes in; x itself where it has that dtype already."""
    return x.to(wide_dtype(x.dtype))
