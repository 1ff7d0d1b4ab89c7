"""Derives the polynomial behind the fp32 GELU of `csrc/cpu/kernels_linear.h`; prints its coefficients and its error.

    python tools/fit_normal_tail.py

Wanted: Phi(-a) = exp(-a^2 / 2) t p(t) for a >= 0, Phi the normal distribution function and t = 1 / (1 + SHAPE a), the
form of which Hastings (1955) made his approximations. p of degree DEGREE has the least relative error over 0 <= a <=
END, where exp(-a^2 / 2) leaves the normal numbers of fp32: Lawson's iteration of weighted least squares on a grid.
"""

import math

import numpy as np

SHAPE, DEGREE, END = 0.35, 8, 13.3
GRID, ROUNDS = 6000, 300


def fit() -> tuple[np.ndarray, float]:
    """Coefficients of p, the highest power first, and the largest relative error."""
    lowest = 1.0 / (1.0 + SHAPE * END)
    nodes = np.cos((np.arange(GRID) + 0.5) / GRID * np.pi)
    t = (1.0 + lowest) / 2.0 + (1.0 - lowest) / 2.0 * nodes
    a = (1.0 / t - 1.0) / SHAPE
    wanted = np.array([0.5 * math.erfc(x / math.sqrt(2.0)) * math.exp(x * x / 2.0) for x in a]) / t
    powers = np.vander(t, DEGREE + 1)
    weights = np.full(GRID, 1.0 / GRID)
    for _ in range(ROUNDS):
        scale = np.sqrt(weights) / wanted
        coefficients = np.linalg.lstsq(powers * scale[:, None], wanted * scale, rcond=None)[0]
        errors = np.abs(powers @ coefficients / wanted - 1.0)
        weights *= errors
        weights /= weights.sum()
    return coefficients, float(errors.max())


if __name__ == "__main__":
    found, error = fit()
    print(", ".join(f"{one:.9e}f" for one in found))
    print(f"relative error {error:.1e}")
