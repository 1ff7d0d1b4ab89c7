"""BERT's activations and their derivatives on fp32 tiles, as cheap as the output type allows; no loads or stores.

`activation(x, NAME, OUT)` and `activation_derivative(x, NAME, OUT)` serve elementwise kernels and epilogues of matrix
products alike. x is the fp32 pre-activation; OUT is the dtype that the result will be rounded to and decides the form:

- fp32: the formulas of `reference/activations.py` (erf by the library, about 34 instructions).
- fp16, bf16: short forms, below 0.05 units in the last place of OUT before rounding, in the tails too, down to the
  smallest subnormal. They know two cheap instructions: 2^x, and 1/sqrt(x), whose square is the quotient 1/x.

gelu_erf, short form: Phi(-a) = 2^p(a) for a = |x|, with p a polynomial close to log2 Phi(-a); Phi(a) = 1 - Phi(-a). The
coefficients are printed, with their errors, by `tools/fit_gelu.py`; docs/kernels/bias_gelu.md has the derivation.

Everything else is a logistic function s = 1 / (1 + 2^z), z a polynomial in x (Hendrycks and Gimpel 2016,
arXiv:1606.08415, section 2, for tanh-GELU).

2^x flushes numbers below 2^-126 to 0, and bf16 results that are as small as 2^-133 would be lost with them. So in bf16
the tails are computed times SCALE = 2^24, and the last multiplication takes it out.

Not finite: NaN gives NaN, inf gives inf (tanh: 1), -inf gives NaN (-inf * 0, as in PyTorch; tanh: -1; relu: 0).
"""

import triton
import triton.language as tl

# From here on 2^p is 0 in either type, even times SCALE.
_CLAMP = tl.constexpr(16.0)
_SCALE = tl.constexpr(16777216.0)
_LOG2_SCALE = tl.constexpr(24.0)

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_LOG2E = tl.constexpr(1.4426950408889634)
_SQRT_HALF_LOG2E = tl.constexpr(0.8493218002880191)  # 2^-(this x)^2 = exp(-x^2 / 2)
_LOG2_DENSITY = tl.constexpr(-1.090131251208608)  # 2^this = 1 / (sqrt(2 pi) * sqrt(log2(e) / 2))
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
# tanh-GELU is x s with the logit log(s / (1 - s)) = 2 sqrt(2 / pi) (x + 0.044715 x^3)
_TANH_LINEAR = tl.constexpr(1.5957691216057308)
_TANH_CUBIC = tl.constexpr(0.07135481627260025)
# Below this |x|, tanh(x) comes from its series: 1 - 2 s would cancel.
_TANH_SERIES_HALF = tl.constexpr(0.0625)
_TANH_SERIES_FP32 = tl.constexpr(0.25)


@triton.jit
def _has_scale(OUT: tl.constexpr):
    return OUT == tl.bfloat16


@triton.jit
def _log2_lower_tail(a, OUT: tl.constexpr):
    """p(a), close to log2 Phi(-a) for a from 0 to _CLAMP, plus log2 SCALE in bf16."""
    if OUT == tl.float16:
        p = -1.302852572e-06 * a + 5.318463998e-05
        p = p * a - 8.794917266e-04
        p = p * a + 8.359695876e-03
        p = p * a - 5.375197384e-02
        p = p * a - 4.585868747e-01
        p = p * a - 1.151233221e00
        return p * a - 9.999950816e-01
    else:
        p = 2.879086643e-08 * a - 1.817410760e-06
        p = p * a + 4.941098385e-05
        p = p * a - 7.645398216e-04
        p = p * a + 7.549030914e-03
        p = p * a - 5.125138874e-02
        p = p * a - 4.620261227e-01
        p = p * a - 1.149476807e00
        return p * a + (_LOG2_SCALE - 1.000202119e00)


@triton.jit
def _unscaled(x, OUT: tl.constexpr):
    if _has_scale(OUT):
        return x * (1.0 / _SCALE)
    else:
        return x


@triton.jit
def _normal_cdf(x, OUT: tl.constexpr):
    """Phi(x), times SCALE in bf16; OUT is fp16 or bf16."""
    tail = tl.exp2(_log2_lower_tail(tl.minimum(tl.abs(x), _CLAMP), OUT))
    # 1 - tail where x > 0, else tail, as |1 - tail| and |0 - tail|: no selection.
    upper = tl.where(x > 0.0, 1.0, 0.0)
    if _has_scale(OUT):
        # As one instruction: a product of its own would be folded into the selection, which then costs two.
        return tl.abs(tl.fma(upper, -_SCALE, tail))
    else:
        return tl.abs(upper - tail)


@triton.jit
def _logistic(z, OUT: tl.constexpr):
    """s = 1 / (1 + 2^z), times SCALE in bf16. 2^z may overflow: s is 0 then."""
    if OUT == tl.float32:
        return 1.0 / (1.0 + tl.exp2(z))
    else:
        if _has_scale(OUT):
            root = tl.rsqrt(tl.exp2(z - _LOG2_SCALE) + 1.0 / _SCALE)
        else:
            root = tl.rsqrt(1.0 + tl.exp2(z))
        return root * root


@triton.jit
def _logistic_derivative(x, z, slope, OUT: tl.constexpr):
    """d(x s)/dx = s + x s (1 - s) slope, with slope the derivative of -z log(2)."""
    s = _logistic(z, OUT)
    if OUT == tl.float32:
        complement = _logistic(z * -1.0, OUT)  # 1 - s would cancel, and x slope is large where it does
    else:
        complement = 1.0 - _unscaled(s, OUT)
    # s (1 - s) x first: it is 0 where s is, however large the slope.
    return _unscaled(s + s * complement * x * slope, OUT)


@triton.jit
def _tanh_gelu_z(x):
    return x * (x * x * (-_TANH_CUBIC * _LOG2E) - _TANH_LINEAR * _LOG2E)


@triton.jit
def _tanh(x, OUT: tl.constexpr):
    # 2 s - 1 with s unscaled: it does not vanish in the tails.
    square = x * x
    if OUT == tl.float32:
        large = 2.0 / (1.0 + tl.exp2(x * (-2.0 * _LOG2E))) - 1.0
        series = ((square * (62.0 / 2835.0) - 17.0 / 315.0) * square + 2.0 / 15.0) * square - 1.0 / 3.0
        limit: tl.constexpr = _TANH_SERIES_FP32
    else:
        root = tl.rsqrt(1.0 + tl.exp2(x * (-2.0 * _LOG2E)))
        large = 2.0 * root * root - 1.0
        series = -1.0 / 3.0
        limit: tl.constexpr = _TANH_SERIES_HALF
    return tl.where(tl.abs(x) < limit, x * (square * series + 1.0), large)


@triton.jit
def _tanh_derivative(x, OUT: tl.constexpr):
    """1 - tanh(x)^2 = 4 e / (1 + e)^2 with e = exp(-2 |x|), which cancels nowhere."""
    if OUT == tl.float32:
        e = tl.exp2(tl.abs(x) * (-2.0 * _LOG2E))
        inverse = 1.0 / (1.0 + e)
        return 4.0 * e * inverse * inverse
    elif _has_scale(OUT):
        e = tl.exp2(tl.abs(x) * (-2.0 * _LOG2E) + _LOG2_SCALE)
        root = tl.rsqrt(e * (1.0 / _SCALE) + 1.0)
        inverse = root * root
        return e * inverse * (inverse * (4.0 / _SCALE))
    else:
        e = tl.exp2(tl.abs(x) * (-2.0 * _LOG2E))
        root = tl.rsqrt(1.0 + e)
        inverse = root * root
        return e * inverse * (inverse * 4.0)


@triton.jit
def activation(x, NAME: tl.constexpr, OUT: tl.constexpr):
    """act(x) of an fp32 tile, accurate enough to be rounded to OUT.

    NAME: "gelu_erf", "gelu_tanh", "relu", "silu" or "tanh"; OUT: tl.float32, tl.float16 or tl.bfloat16.
    """
    if NAME == "gelu_erf":
        if OUT == tl.float32:
            return x * (0.5 + 0.5 * tl.erf(x * _SQRT_HALF))
        else:
            return x * _unscaled(_normal_cdf(x, OUT), OUT)
    elif NAME == "gelu_tanh":
        return x * _unscaled(_logistic(_tanh_gelu_z(x), OUT), OUT)
    elif NAME == "silu":
        return x * _unscaled(_logistic(x * -_LOG2E, OUT), OUT)
    elif NAME == "tanh":
        return _tanh(x, OUT)
    else:
        tl.static_assert(NAME == "relu")
        return tl.where(x <= 0.0, 0.0, x)


@triton.jit
def activation_derivative(x, NAME: tl.constexpr, OUT: tl.constexpr):
    """act'(x) of an fp32 tile, accurate enough to be rounded to OUT; NAME, OUT as for `activation`."""
    if NAME == "gelu_erf":
        # x phi(x) = scaled_x density; both numbers live in one multiplication and one exponential.
        scaled_x = x * _SQRT_HALF_LOG2E
        exponent = scaled_x * scaled_x * -1.0
        if OUT == tl.float32:
            return scaled_x * tl.exp2(exponent + _LOG2_DENSITY) + (0.5 + 0.5 * tl.erf(x * _SQRT_HALF))
        elif _has_scale(OUT):
            density = tl.exp2(exponent + (_LOG2_DENSITY + _LOG2_SCALE))
            return _unscaled(scaled_x * density + _normal_cdf(x, OUT), OUT)
        else:
            return scaled_x * tl.exp2(exponent + _LOG2_DENSITY) + _normal_cdf(x, OUT)
    elif NAME == "gelu_tanh":
        return _logistic_derivative(x, _tanh_gelu_z(x), x * x * (3.0 * _TANH_CUBIC) + _TANH_LINEAR, OUT)
    elif NAME == "silu":
        return _logistic_derivative(x, x * -_LOG2E, 1.0, OUT)
    elif NAME == "tanh":
        return _tanh_derivative(x, OUT)
    else:
        tl.static_assert(NAME == "relu")
        return tl.where(x <= 0.0, 0.0, 1.0)
