"""What instructions do to all threads: comparisons, conversions, moves, loads, stores, and who does the rest."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tools.witness import cooperation
from tools.witness.arithmetic import arithmetic
from tools.witness.machine import Machine, Mask, Run
from tools.witness.memory import Fault
from tools.witness.operands import TYPES, address, names, put, target, value
from tools.witness.ptx import Instruction
from tools.witness.rounding import bf16_to_fp32, fp32_to_bf16, fp32_to_tf32

_BITS: dict[str, Any] = {"bf16": np.uint16, "bf16x2": np.uint32, "f16x2": np.uint32}
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def compile_instruction(machine: Machine, one: Instruction) -> Run:
    """What carries out an instruction; one that is not known is an error when it is reached."""
    parts = one.parts
    make = _MAKERS.get(parts[0]) or cooperation.MAKERS.get(parts[0])
    if make is not None:
        return make(machine, one)
    operation = arithmetic(parts)
    if operation is None:
        return _unknown(one)
    function, sources, result = operation
    return _elementwise(machine, one, function, sources, result)


def _unknown(one: Instruction) -> Run:
    def run(mask: Mask) -> None:
        raise Fault("the witness does not know this instruction")

    return run


def _elementwise(
    machine: Machine, one: Instruction, function: Callable[..., Any], sources: list[Any], result: Any
) -> Run:
    read = [value(machine, operand, dtype) for operand, dtype in zip(one.operands[1:], sources, strict=False)]
    bits = target(machine, one.operands[0])

    def run(mask: Mask) -> None:
        made = function(*[one_value() for one_value in read])
        put(bits, made if result is None else np.asarray(made).astype(result, copy=False), mask)

    return run


def _compare(machine: Machine, one: Instruction) -> Run:
    """setp.<comparison>[u].<type> p[|q], a, b; of pairs of halves p is of the lower ones."""
    parts = one.parts
    kind, how = parts[-1], parts[1]
    dtype = _BITS.get(kind) or TYPES[kind]
    is_float = kind in _BITS or np.issubdtype(dtype, np.floating)
    a, b = (value(machine, operand, dtype) for operand in one.operands[1:3])
    results = [target(machine, name) for name in one.operands[0].split("|")]
    if len(one.operands) > 3 or len(results) != (2 if kind.endswith("x2") else 1):
        return _unknown(one)

    def run(mask: Mask) -> None:
        x, y = a(), b()
        for number, bits in enumerate(results):
            given = (_half(x, kind, number), _half(y, kind, number)) if kind in _BITS else (x, y)
            put(bits, _compared(how, *given, is_float=is_float), mask)

    return run


def _compared(how: str, x: Any, y: Any, *, is_float: bool) -> Any:
    unordered = np.isnan(x) | np.isnan(y) if is_float else np.False_
    if how in ("num", "nan"):
        return ~unordered if how == "num" else unordered
    if is_float and how in ("equ", "neu", "ltu", "leu", "gtu", "geu"):
        return _COMPARISONS[how[:2]](x, y) | unordered
    return _COMPARISONS[how](x, y) & ~unordered


def _compare_pairs(machine: Machine, one: Instruction) -> Run:
    """set.<comparison>[u].u32.f16x2 d, a, b: all bits of a half where it holds, else none."""
    parts = one.parts
    if parts[2:] != ["u32", "f16x2"]:
        return _unknown(one)
    a, b = (value(machine, operand, np.uint32) for operand in one.operands[1:])
    bits = target(machine, one.operands[0])

    def run(mask: Mask) -> None:
        x, y = a(), b()
        made = np.zeros(len(machine.threads), np.uint32)
        for number in range(2):
            holds = _compared(parts[1], _half(x, "f16x2", number), _half(y, "f16x2", number), is_float=True)
            made |= np.where(holds, np.uint32(0xFFFF << 16 * number), np.uint32(0))
        put(bits, made, mask)

    return run


def _half(bits: Any, kind: str, number: int) -> Any:
    """One of a pair of halves, or a bf16 itself, as a float."""
    bits = np.asarray(bits)
    half = (bits >> bits.dtype.type(16 * number)).astype(np.uint16)
    return bf16_to_fp32(half) if kind.startswith("bf16") else half.view(np.float16)


def _convert(machine: Machine, one: Instruction) -> Run:
    """cvt[.rounding].<to>.<from> d, a[, b]; none to whole numbers but from such."""
    parts = one.parts
    to, given = parts[-2], parts[-1]
    if {"rzi", "rmi", "rpi", "rni", "sat"} & {*parts}:
        return _unknown(one)
    bits = target(machine, one.operands[0])
    if to in ("bf16x2", "f16x2"):
        high, low = (value(machine, operand, np.float32) for operand in one.operands[1:3])
        narrow = fp32_to_bf16 if to == "bf16x2" else lambda x: np.asarray(x).astype(np.float16).view(np.uint16)

        def run_pair(mask: Mask) -> None:
            put(bits, narrow(high()).astype(np.uint32) << np.uint32(16) | narrow(low()).astype(np.uint32), mask)

        return run_pair
    read = value(machine, one.operands[1], np.uint16 if given == "bf16" else TYPES[given])

    def run(mask: Mask) -> None:
        x: Any = bf16_to_fp32(read()) if given == "bf16" else np.asarray(read())
        if to == "bf16":
            made: Any = fp32_to_bf16(x.astype(np.float32))
        elif to == "tf32":
            made = fp32_to_tf32(x)
        else:
            made = x.astype(TYPES[to])
        put(bits, made, mask)

    return run


def _move(machine: Machine, one: Instruction) -> Run:
    """mov: also of packed halves, into and out of braces."""
    to, given = one.operands
    kind = one.parts[1]
    if given.startswith("{"):
        names = [name.strip() for name in given[1:-1].split(",")]
        bits = target(machine, to)
        nbits = bits.itemsize * 8 // len(names)
        read = [value(machine, name, f"u{nbits // 8}") for name in names]

        def pack(mask: Mask) -> None:
            made = np.zeros(len(machine.threads), bits.dtype)
            for number, part in enumerate(read):
                made |= np.asarray(part()).astype(bits.dtype) << bits.dtype.type(nbits * number)
            put(bits, made, mask)

        return pack
    if to.startswith("{"):
        parts = [target(machine, name.strip()) for name in to[1:-1].split(",")]
        whole = value(machine, given, TYPES[kind])
        nbits = np.dtype(TYPES[kind]).itemsize * 8 // len(parts)

        def unpack(mask: Mask) -> None:
            source = np.asarray(whole()).copy()
            for number, part in enumerate(parts):
                held = source >> source.dtype.type(nbits * number) & source.dtype.type((1 << nbits) - 1)
                put(part, held.astype(f"u{nbits // 8}"), mask)

        return unpack
    return _elementwise(machine, one, lambda a: a, [TYPES[kind]], None)


def _load(machine: Machine, one: Instruction) -> Run:
    parts = one.parts
    if parts[1] == "param":
        return _load_parameter(machine, one)
    bits = [target(machine, name) for name in names(one.operands[0])]
    dtype = TYPES[parts[-1]]
    nbytes = np.dtype(dtype).itemsize
    where = address(machine, one.operands[1])

    def run(mask: Mask) -> None:
        chosen = slice(None) if mask is None else mask
        at = where()[chosen]
        if "shared" in parts[1]:
            found = machine.shared.load(at, machine.warps[chosen], nbytes, len(bits))
        else:
            found = machine.memory.load(at, nbytes, len(bits))
        for number, to in enumerate(bits):
            column = np.ascontiguousarray(found[:, number]).view(dtype)
            to[chosen] = column.astype(f"{column.dtype.kind}{to.itemsize}").view(to.dtype)

    return run


def _load_parameter(machine: Machine, one: Instruction) -> Run:
    """ld.param: at a parameter's name, or at an address that was made of one."""
    match = re.match(r"\[\s*([%\w]+)\s*(?:\+\s*(\d+))?\s*\]$", one.operands[1])
    assert match is not None, one
    offset = int(match[2] or 0)
    base = value(machine, match[1], np.uint64)
    bits = [target(machine, name) for name in names(one.operands[0])]
    dtype = np.dtype(TYPES[one.parts[-1]])

    def run(mask: Mask) -> None:
        at = np.broadcast_to(base(), machine.threads.shape).astype(np.int64) + offset
        for number, to in enumerate(bits):
            places = at[:, None] + number * dtype.itemsize + np.arange(dtype.itemsize)
            put(to, machine.parameters[places].view(dtype)[:, 0], mask)

    return run


def _store(machine: Machine, one: Instruction) -> Run:
    parts = one.parts
    dtype = np.dtype(TYPES[parts[-1]])
    read = [value(machine, name, dtype.type) for name in names(one.operands[1])]
    where = address(machine, one.operands[0])

    def run(mask: Mask) -> None:
        chosen = slice(None) if mask is None else mask
        at = where()[chosen]
        columns = [np.broadcast_to(np.asarray(part()), machine.threads.shape)[chosen] for part in read]
        values = np.stack(columns, 1).view(f"u{dtype.itemsize}")
        if "shared" in parts[1]:
            machine.shared.store(at, machine.warps[chosen], values)
        else:
            machine.memory.store(at, values)

    return run


def _as_it_is(machine: Machine, one: Instruction) -> Run:
    return _elementwise(machine, one, lambda a: a, [TYPES[one.parts[-1]]], None)


def _nothing(machine: Machine, one: Instruction) -> Run:
    return lambda mask: None


_MAKERS: dict[str, Callable[[Machine, Instruction], Run]] = {
    "setp": _compare, "set": _compare_pairs, "cvt": _convert, "mov": _move, "ld": _load, "st": _store,
    "cvta": _as_it_is, "bra": _nothing, "ret": _nothing, "exit": _nothing, "fence": _nothing, "membar": _nothing,
    "prefetch": _nothing, "griddepcontrol": _nothing,
}  # fmt: skip
