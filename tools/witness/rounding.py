"""Between fp32 and the formats that numpy has not, to the nearest, ties to even."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def bf16_to_fp32(bits: Any) -> Array:
    """fp32 of bf16, given as uint16."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def fp32_to_bf16(x: Any) -> Array:
    """bf16, as uint16."""
    bits = np.asarray(x, np.float32).reshape(np.shape(x)).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def fp32_to_tf32(x: Any) -> Array:
    """fp32 with 10 bits of mantissa, ties away from zero."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
