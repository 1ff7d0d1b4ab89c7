"""Arithmetic on all threads at once: what an opcode computes, of which types.

Products with sums are rounded once but for ties that double precision cannot tell; the approximate functions are exact
here. Numbers that are too small for their exponent are kept, not flushed.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tools.witness.operands import TYPES
from tools.witness.rounding import bf16_to_fp32, fp32_to_bf16

_WIDER = {np.int32: np.int64, np.uint32: np.uint64, np.int16: np.int32, np.uint16: np.uint32}


def _shift(function: Any, dtype: Any) -> Callable[[Any, Any], Any]:
    nbits = np.dtype(dtype).itemsize * 8

    def shifted(a: Any, count: Any) -> Any:
        far = np.asarray(count) >= nbits
        made = function(a, np.minimum(count, nbits - 1).astype(dtype))
        if function is np.right_shift and np.issubdtype(dtype, np.signedinteger):
            return made  # by all bits but one: the sign
        return np.where(far, dtype(0), made)

    return shifted


def _bit_field(dtype: Any) -> Callable[[Any, Any, Any], Any]:
    def extracted(a: Any, at: Any, count: Any) -> Any:
        at, count = int(np.max(at)) & 255, int(np.max(count)) & 255
        made = np.asarray(a).astype(np.int64) >> at & (1 << count) - 1
        if np.issubdtype(dtype, np.signedinteger) and count:
            made = np.where(made >> (count - 1) & 1, made - (1 << count), made)
        return made.astype(dtype)

    return extracted


def _permute(a: Any, b: Any, selector: Any) -> Any:
    both = np.asarray(b).astype(np.uint64) << np.uint64(32) | np.asarray(a).astype(np.uint64)
    made = np.zeros(np.broadcast(a, b, selector).shape, np.uint32)
    for byte in range(4):
        choice = np.asarray(selector) >> np.uint32(4 * byte) & np.uint32(15)
        picked = (both >> (choice & np.uint32(7)).astype(np.uint64) * np.uint64(8)).astype(np.uint32) & np.uint32(255)
        sign = np.where(picked & np.uint32(128), np.uint32(255), np.uint32(0))
        made |= np.where(choice & np.uint32(8), sign, picked) << np.uint32(8 * byte)
    return made


def _divide(a: Any, b: Any) -> Any:
    """Towards zero."""
    a, b = np.broadcast_arrays(a, b)
    if not np.all(b):
        b = np.where(b == 0, 1, b).astype(b.dtype)
    if a.dtype.kind == "u":
        return a // b
    made = np.abs(a.astype(np.int64)) // np.abs(b.astype(np.int64))
    return (made * np.sign(a.astype(np.int64)) * np.sign(b.astype(np.int64))).astype(a.dtype)


def _remainder(a: Any, b: Any) -> Any:
    return (a - _divide(a, b) * b).astype(np.asarray(a).dtype)


def _multiply_add(a: Any, b: Any, c: Any) -> Any:
    if np.asarray(a).dtype == np.float64:
        return a * b + c
    dtype = np.asarray(c).dtype
    return (np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64)).astype(dtype)


def _high(dtype: Any) -> Callable[[Any, Any], Any]:
    wide = _WIDER[dtype]
    nbits = np.dtype(dtype).itemsize * 8
    return lambda a, b: (np.asarray(a).astype(wide) * np.asarray(b).astype(wide) >> wide(nbits)).astype(dtype)


def _wide(dtype: Any) -> Callable[[Any, Any], Any]:
    return lambda a, b: np.asarray(a).astype(_WIDER[dtype]) * np.asarray(b).astype(_WIDER[dtype])


def _min_max(parts: list[str], dtype: Any) -> Callable[[Any, Any], Any]:
    is_min = parts[0] == "min"
    if np.issubdtype(dtype, np.floating) and "NaN" not in parts:
        chosen: Any = np.fmin if is_min else np.fmax
    else:
        chosen = np.minimum if is_min else np.maximum
    if "relu" in parts:
        return lambda a, b: np.maximum(chosen(a, b), dtype(0))
    return chosen


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "abs": np.abs, "neg": np.negative, "not": np.invert, "ex2": np.exp2, "sqrt": np.sqrt,
    "rsqrt": lambda a: (1 / np.sqrt(np.asarray(a, np.float64))).astype(np.asarray(a).dtype),
}  # fmt: skip
_TWO: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


_COMPUTE = {"add", "sub", "mul", "fma", "div", "sqrt", "rsqrt", "ex2", "min", "max"}
_NANS = {
    "f16": np.asarray(0x7FFF, np.uint16).view(np.float16),
    "f32": np.asarray(0x7FFFFFFF, np.uint32).view(np.float32),
    "f64": np.asarray(0x7FFFFFFFFFFFFFFF, np.uint64).view(np.float64),
}


def _paired(function: Callable[..., Any], count: int, is_bf16: bool) -> Callable[..., Any]:
    """Of both halves of 32 bits."""

    def made(*values: Any) -> Any:
        halves = []
        for shift in (0, 16):
            bits = [(np.asarray(one) >> np.uint32(shift)).astype(np.uint16) for one in values[:count]]
            given = [bf16_to_fp32(one) if is_bf16 else one.view(np.float16) for one in bits]
            result = np.asarray(function(*given))
            halves.append(fp32_to_bf16(result) if is_bf16 else result.astype(np.float16).view(np.uint16))
        return halves[0].astype(np.uint32) | halves[1].astype(np.uint32) << np.uint32(16)

    return made


def _of_both_halves(function: Callable[..., Any], *values: Any) -> Any:
    """Of whole numbers of 16 bits, two to a register."""
    lower, upper = (
        function(*[(np.asarray(one) >> np.uint32(shift)).astype(np.uint16) for one in values]) for shift in (0, 16)
    )
    return lower.astype(np.uint32) | upper.astype(np.uint32) << np.uint32(16)


def _with_one_nan(function: Callable[..., Any], nan: Any) -> Callable[..., Any]:
    """What is no number has the same bits, whichever operand it comes from: lanes that add in another order agree."""

    def made(*values: Any) -> Any:
        result = function(*values)
        wrong = np.isnan(result)
        return np.where(wrong, nan, result) if np.any(wrong) else result

    return made


def arithmetic(parts: list[str]) -> tuple[Callable[..., Any], list[Any], Any] | None:
    """(function, types of operands, type of the result or None for the function's) of an instruction on numbers."""
    found = _arithmetic(parts)
    if found is None or parts[-1] not in _NANS or parts[0] not in _COMPUTE:
        return found
    return (_with_one_nan(found[0], _NANS[parts[-1]]), *found[1:])


def _arithmetic(parts: list[str]) -> tuple[Callable[..., Any], list[Any], Any] | None:
    name, kind = parts[0], parts[-1]
    if kind in ("bf16x2", "f16x2") or kind == "bf16":
        plain = arithmetic([*parts[:-1], "f32"])
        if plain is None:
            return None
        if kind == "bf16":
            function, sources, _ = plain
            return (
                lambda *values: fp32_to_bf16(np.asarray(function(*map(bf16_to_fp32, values)))),
                [np.uint16] * len(sources), None,
            )  # fmt: skip
        return _paired(plain[0], len(plain[1]), kind == "bf16x2"), [np.uint32] * len(plain[1]), None
    if kind == "u16x2" and name in ("min", "max"):
        chosen = np.minimum if name == "min" else np.maximum
        return (lambda a, b: _of_both_halves(chosen, a, b)), [np.uint32] * 2, None
    dtype = TYPES.get(kind)
    if dtype is None:
        return None
    if name in _TWO:
        return _TWO[name], [dtype] * 2, dtype
    if name in ("min", "max"):
        return _min_max(parts, dtype), [dtype] * 2, dtype
    if name in _FUNCTIONS:
        return _FUNCTIONS[name], [dtype], dtype
    if name == "mul":
        if "wide" in parts:
            return _wide(dtype), [dtype] * 2, None
        return (_high(dtype) if "hi" in parts else np.multiply), [dtype] * 2, dtype
    if name in ("mad", "fma"):
        if "wide" in parts:
            wide = _wide(dtype)
            return lambda a, b, c: wide(a, b) + c, [dtype, dtype, _WIDER[dtype]], None
        if name == "fma":
            return _multiply_add, [dtype] * 3, dtype
        product: Any = _high(dtype) if "hi" in parts else np.multiply
        return lambda a, b, c: product(a, b) + c, [dtype] * 3, dtype
    if name == "div":
        return (np.divide if np.issubdtype(dtype, np.floating) else _divide), [dtype] * 2, dtype
    if name == "rem":
        return _remainder, [dtype] * 2, dtype
    if name in ("shl", "shr"):
        return _shift(np.left_shift if name == "shl" else np.right_shift, dtype), [dtype, np.uint32], dtype
    if name == "bfe" and dtype in (np.int32, np.uint32):
        return _bit_field(dtype), [dtype, np.uint32, np.uint32], dtype
    if name == "prmt":
        return _permute, [np.uint32] * 3, None
    if name == "selp":
        return (lambda a, b, chosen: np.where(chosen, a, b)), [dtype, dtype, np.bool_], dtype
    return None
