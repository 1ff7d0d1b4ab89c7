"""Operands of instructions: registers, constants, special registers, addresses. Values are bits of all threads."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tools.witness.machine import Array, Machine, Mask
from tools.witness.memory import Fault

TYPES: dict[str, Any] = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16,
    "s16": np.int16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "b64": np.uint64, "u64": np.uint64,
    "s64": np.int64, "f16": np.float16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip


def value(machine: Machine, operand: str, dtype: Any) -> Callable[[], Any]:
    """What reads an operand: a register, a constant, a special register."""
    if operand.startswith("%") and re.match(r"%(tid|ctaid|nctaid)\.", operand):
        return _special(machine, operand, dtype)
    if re.match(r"-?\d|0[fFdDxX]", operand):
        constant = _constant(operand, dtype)
        return lambda: constant
    if operand.startswith(("global_smem", "$")):
        constant = np.asarray(0, dtype)
        return lambda: constant
    if operand in machine.kernel.parameters:  # where it lies
        constant = np.asarray(machine.kernel.parameters[operand][0], dtype)
        return lambda: constant
    if operand.startswith("!"):
        inverted = machine.register(operand[1:])
        return lambda: ~inverted
    bits = machine.register(operand)
    if bits.dtype == np.bool_ or bits.itemsize == np.dtype(dtype).itemsize:
        seen = bits.view(dtype) if bits.dtype != np.bool_ else bits
        return lambda: seen
    narrow = {2: np.uint16, 4: np.uint32, 1: np.uint8, 8: np.uint64}[np.dtype(dtype).itemsize]
    return lambda: bits.astype(narrow).view(dtype)


def _constant(operand: str, dtype: Any) -> Any:
    if match := re.match(r"0[fF]([0-9a-fA-F]{8})$", operand):
        number: Any = np.frombuffer(bytes.fromhex(match[1])[::-1], np.float32)[0]
        return number if dtype == np.float32 else np.asarray([number], np.float32).view(np.uint32)[0]
    if match := re.match(r"0[dD]([0-9a-fA-F]{16})$", operand):
        return np.frombuffer(bytes.fromhex(match[1])[::-1], np.float64)[0]
    whole = int(operand.rstrip("U"), 0)
    if dtype == np.bool_:
        return np.bool_(whole)
    if np.issubdtype(dtype, np.floating):  # bits of a half
        return np.asarray([whole], np.uint16).view(np.float16)[0] if dtype == np.float16 else dtype(whole)
    nbits = np.dtype(dtype).itemsize * 8
    return np.asarray([whole % (1 << nbits)], f"u{nbits // 8}").view(dtype)[0]


def _special(machine: Machine, operand: str, dtype: Any) -> Callable[[], Any]:
    name, _, axis = operand[1:].partition(".")
    number = "xyz".index(axis)
    if name == "tid":
        fixed = machine.threads.astype(dtype) if number == 0 else np.asarray(0, dtype)
        return lambda: fixed
    if name == "ctaid":
        return lambda: np.asarray(machine.program[number], dtype)
    return lambda: np.asarray(machine.grid[number], dtype)


def target(machine: Machine, operand: str) -> Array:
    """The bits of a register that is written; a place of its own for "_"."""
    return np.zeros(len(machine.threads), np.uint64) if operand == "_" else machine.register(operand)


def put(bits: Array, result: Any, mask: Mask) -> None:
    """Writes a result of the register's width, or of a wider one that it holds."""
    result = np.asarray(result)
    if result.dtype != bits.dtype:
        if result.dtype.itemsize == bits.dtype.itemsize and bits.dtype != np.bool_:
            result = result.view(bits.dtype) if result.ndim else result.reshape(1).view(bits.dtype)[0]
        elif result.dtype.itemsize < bits.dtype.itemsize and result.dtype.kind == "i":
            result = result.astype(f"i{bits.dtype.itemsize}").view(bits.dtype)
        elif result.dtype.kind == "f":
            raise Fault(f"a {result.dtype} for a register of {bits.dtype.itemsize} bytes")
        else:
            result = result.astype(bits.dtype)
    np.copyto(bits, result, where=True if mask is None else mask)


def address(machine: Machine, operand: str) -> Callable[[], Array]:
    """What reads "[register + offset]", uint64 [threads]."""
    match = re.match(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]$", operand)
    if match is None:
        raise ValueError(f"no address: {operand}")
    name, offset = match[1], np.uint64(int(match[2] or 0) % (1 << 64))
    if name.startswith("global_smem"):
        fixed = np.full(len(machine.threads), offset, np.uint64)
        return lambda: fixed
    bits = machine.register(name)
    if bits.itemsize == 4:
        narrow = np.uint32(int(offset) % (1 << 32))
        return lambda: (bits + narrow).astype(np.uint64)
    return lambda: bits + offset


def names(operand: str) -> list[str]:
    """The registers of `{a, b}`, or the one that there is."""
    return [name.strip() for name in operand[1:-1].split(",")] if operand.startswith("{") else [operand]
