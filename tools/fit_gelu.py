"""Derives the polynomials behind the short GELU of `bert_fast/triton/_activations.py`; prints them as constants.

    python tools/fit_gelu.py

Wanted: p(a) close to f(a) = log2 Phi(-a) on [0, END], Phi the normal distribution function. An error of d in p is a
relative error of d ln 2 in 2^p. Two results are made of it, for x = -a (for x = a they are larger and err no more):

    gelu(x)  = -a 2^p                     relative error |d| ln 2
    gelu'(x) = 2^p - a phi(a)             relative error |d| ln 2 Phi(-a) / |Phi(-a) - a phi(a)|

gelu' is 0 at a = ROOT, so d must be 0 there: p(a) = f(ROOT) + (a - ROOT) q(a). q minimises the larger of the two
errors over the interval, by Remez' exchange on a grid. Below the smallest normal number of the output type, errors are
measured against that number: its units in the last place get no finer. Where results are 0 after rounding, a small
weight still leads p down, so that 2^p is 0 from CLAMP on: then gelu(-inf) = -inf * 0 is NaN, as in PyTorch, and p needs
no values beyond. Pure Python: math.erfc is all that is asked for.
"""

import math

# output type -> (degree of p, END, log2 of the smallest normal number, bits of the significand)
TYPES = {"fp16": (7, 15.0, -14, 11), "bf16": (8, 13.7, -126, 8)}
CLAMP = 16.0
MIN_WEIGHT = 1e-6
ROOT = 0.7517915246935645  # of Phi(-a) = a phi(a)
GRID = 3000
LN2 = math.log(2.0)


def lower_tail(a: float) -> float:
    """Phi(-a)."""
    return 0.5 * math.erfc(a / math.sqrt(2.0))


def density(a: float) -> float:
    return math.exp(-0.5 * a * a) / math.sqrt(2.0 * math.pi)


def weight(a: float, log2_normal: int) -> float:
    """The larger relative error of the two results for an error of 1 in p."""
    tail, smallest = lower_tail(a), 2.0**log2_normal
    value, derivative = a * tail, abs(tail - a * density(a))
    relative_errors = a / max(value, smallest) if a else 1.0 / tail, 1.0 / max(derivative, smallest, 1e-9)
    return max(MIN_WEIGHT, LN2 * tail * max(relative_errors))


def solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination with row pivots."""
    n = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for k in range(n):
        pivot = max(range(k, n), key=lambda i: abs(rows[i][k]))
        rows[k], rows[pivot] = rows[pivot], rows[k]
        for i in range(k + 1, n):
            factor = rows[i][k] / rows[k][k]
            rows[i] = [x - factor * y for x, y in zip(rows[i], rows[k], strict=True)]
    solution = [0.0] * n
    for k in reversed(range(n)):
        solution[k] = (rows[k][n] - sum(rows[k][j] * solution[j] for j in range(k + 1, n))) / rows[k][k]
    return solution


def chebyshev(t: float, count: int) -> list[float]:
    """T_0(t) .. T_{count - 1}(t)."""
    values = [1.0, t]
    while len(values) < count:
        values.append(2.0 * t * values[-1] - values[-2])
    return values[:count]


def extrema(errors: list[float], count: int) -> list[int]:
    """Indices of `count` extrema of alternating sign, the largest ones."""
    found: list[int] = []
    for i, error in enumerate(errors):
        if found and (error > 0) == (errors[found[-1]] > 0):
            if abs(error) > abs(errors[found[-1]]):
                found[-1] = i
        else:
            found.append(i)
    while len(found) > count:
        found.pop(0 if abs(errors[found[0]]) < abs(errors[found[-1]]) else -1)
    return found


def fit(degree: int, end: float, log2_normal: int) -> tuple[list[float], float]:
    """Coefficients of q in Chebyshev polynomials of 2 a / end - 1, and the largest weighted error."""
    ts = [-math.cos(math.pi * i / (GRID - 1)) for i in range(GRID)]
    grid = [(t + 1.0) * end / 2.0 for t in ts]
    at_root = math.log2(lower_tail(ROOT))
    # As a fit of q alone, which has no zero to share with its error: signs alternate there.
    wanted = [(math.log2(lower_tail(a)) - at_root) / (a - ROOT) for a in grid]
    weights = [weight(a, log2_normal) * abs(a - ROOT) for a in grid]
    chosen = [round(i * (GRID - 1) / degree) for i in range(degree + 1)]
    for _ in range(60):
        matrix = [[*chebyshev(ts[i], degree), (-1.0) ** k / weights[i]] for k, i in enumerate(chosen)]
        q = solve(matrix, [wanted[i] for i in chosen])[:degree]
        errors = [
            w * (sum(c * v for c, v in zip(q, chebyshev(t, degree), strict=True)) - g)
            for t, g, w in zip(ts, wanted, weights, strict=True)
        ]
        previous, chosen = chosen, extrema(errors, degree + 1)
        if chosen == previous or len(chosen) <= degree:
            break
    return q, max(map(abs, errors))


def monomials(q: list[float], end: float) -> list[float]:
    """Coefficients of 1, a, a^2, ... of f(ROOT) + (a - ROOT) q(2 a / end - 1)."""

    def times(p: list[float], factor: list[float]) -> list[float]:
        product = [0.0] * (len(p) + len(factor) - 1)
        for i, x in enumerate(p):
            for j, y in enumerate(factor):
                product[i + j] += x * y
        return product

    def plus(p: list[float], r: list[float]) -> list[float]:
        size = max(len(p), len(r))
        return [x + y for x, y in zip(p + [0.0] * (size - len(p)), r + [0.0] * (size - len(r)), strict=True)]

    t = [-1.0, 2.0 / end]
    polynomials = [[1.0], t]
    while len(polynomials) < len(q):
        polynomials.append(plus([2.0 * x for x in times(polynomials[-1], t)], [-x for x in polynomials[-2]]))
    total = [0.0]
    for coefficient, polynomial in zip(q, polynomials, strict=False):
        total = plus(total, [coefficient * x for x in polynomial])
    return plus(times(total, [-ROOT, 1.0]), [math.log2(lower_tail(ROOT))])


def main() -> None:
    for name, (degree, end, log2_normal, bits) in TYPES.items():
        q, error = fit(degree, end, log2_normal)
        print(
            f"{name}: degree {degree} on [0, {end}], largest relative error {error:.2e} = {error * 2**bits:.4f} units"
        )
        coefficients = monomials(q, end)
        at_clamp = sum(c * CLAMP**power for power, c in enumerate(coefficients))
        print(f"    p({CLAMP}) = {at_clamp:.1f}; the exponential is 0 below -126 (bf16: p + 24 is what it takes)")
        for power, coefficient in enumerate(coefficients):
            print(f"    {coefficient:.9e},  # a^{power}")


if __name__ == "__main__":
    main()
