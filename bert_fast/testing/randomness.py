"""Statistical tests of random bits, each as a number of standard deviations, for tests of dropout masks.

Every figure is what a fair generator would exceed with the probability that a normal variable exceeds it: 4 means one
in 16,000 for one comparison. Where the largest of many is taken, its limit is wider (`testing/tolerances.py`).
"""

import math

import torch
from torch import Tensor

VALUE_BITS = 16


def _sigmas(successes: Tensor, trials: int, probability: float = 0.5) -> float:
    """The largest distance of these counts from their expectation, in standard deviations."""
    spread = math.sqrt(trials * probability * (1 - probability))
    return float((successes.double() - trials * probability).abs().max()) / spread


def mask_bias(keep: Tensor, dropout_p: float) -> float:
    """How far the share of dropped elements of a mask (bool) is from the probability as rounded to 2**-16."""
    probability = round(dropout_p * 65536) / 65536
    return _sigmas((~keep).sum(), keep.numel(), probability)


def bit_bias(values: Tensor) -> float:
    """How far any of the 16 bits of these values (integers in [0, 65536)) is from being set half of the time."""
    return max(_sigmas(((values >> bit) & 1).sum(), values.numel()) for bit in range(VALUE_BITS))


def byte_chi_square(values: Tensor) -> float:
    """Chi-square over the 256 values of the upper and of the lower byte, less its mean, over its deviation; the larger.

    Sees what `bit_bias` cannot: bits that are fair one by one and depend on one another.
    """
    expected, freedom = values.numel() / 256, 255
    figures = []
    for byte in (values >> 8, values & 255):
        counts = torch.bincount(byte.flatten(), minlength=256).double()
        chi_square = float(((counts - expected) ** 2).sum()) / expected
        figures.append(abs(chi_square - freedom) / math.sqrt(2 * freedom))
    return max(figures)


def agreement(a: Tensor, b: Tensor) -> float:
    """How far two arrays of fair bits (bool) are from agreeing half of the time."""
    return _sigmas((a == b).sum(), a.numel())


def bit_agreement(a: Tensor, b: Tensor) -> float:
    """`agreement` of each of the 16 bits of two arrays of values with each bit of the other's; the largest of 256."""
    bits_a = torch.stack([(a.flatten() >> bit) & 1 for bit in range(VALUE_BITS)]).double()
    bits_b = torch.stack([(b.flatten() >> bit) & 1 for bit in range(VALUE_BITS)]).double()
    count = bits_a.shape[1]
    equal = bits_a @ bits_b.T + (1 - bits_a) @ (1 - bits_b).T  # [16, 16], exact: counts below 2**53
    return _sigmas(equal, count)
