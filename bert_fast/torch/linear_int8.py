"""A linear layer in 8 bits by the C++ routine (`csrc/cpu/linear_int8.h`); without the extension, the reference."""

import torch
from torch import Tensor

from bert_fast.reference import linear_int8 as reference
from bert_fast.reference.linear_int8 import LinearInt8
from bert_fast.torch._native import address, routines


def linear_int8_fwd(a: LinearInt8) -> Tensor:
    """y, as `reference.linear_int8`, to the bit."""
    lib = routines(a.x)
    if lib is None:
        return reference.linear_int8_fwd(a)
    x, packed, scale, sums = (one.contiguous() for one in a[:4])
    bias = None if a.bias is None else a.bias.contiguous()
    y = x.new_empty((x.shape[0], scale.shape[0]))
    if y.numel():
        weight = packed.data_ptr(), scale.data_ptr(), sums.data_ptr()
        lib.linear_int8(
            x.data_ptr(), weight, address(bias), y.data_ptr(), *y.shape, x.shape[1], torch.get_num_threads()
        )
    return y
