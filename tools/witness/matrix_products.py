"""Matrix products of a warp (mma) and of four (wgmma), and what brings their operands to registers.

Which element lies in which register of which thread is that of the PTX ISA: "Matrix Fragments for mma.m16n8k16",
"Register Fragments for wgmma.mma_async", "Shared Memory Matrix Layout", "Matrix Descriptor Format".
"""

import re
from collections.abc import Callable

import numpy as np

from tools.witness.machine import Array, Machine, Mask, Run
from tools.witness.memory import Fault
from tools.witness.operands import address, names, target, value
from tools.witness.ptx import Instruction
from tools.witness.rounding import bf16_to_fp32, fp32_to_tf32

_LANES = np.arange(32)
_GROUP, _PLACE = _LANES // 4, _LANES % 4  # row of 8, pair of columns
_SWIZZLES = {0: (0, 16), 1: (3, 128), 2: (2, 64), 3: (1, 32)}  # code -> bits that are exchanged, bytes of a row


def _decode(bits: Array, kind: str) -> Array:
    """fp64 of elements, given as their bits."""
    if kind == "bf16":
        return bf16_to_fp32(bits).astype(np.float64)
    if kind == "tf32":
        return fp32_to_tf32(bits.view(np.float32)).astype(np.float64)
    return bits.view({"f16": np.float16, "f32": np.float32}[kind]).astype(np.float64)


def _rows_of_matrices(machine: Machine, one: Instruction, where: Callable[[], Array], count: int) -> Array:
    """Addresses [warps, count, 8]: lane 8 i + r holds that of row r of matrix i."""
    return where().reshape(-1, 32)[:, : 8 * count].reshape(-1, count, 8)


def load_matrices(machine: Machine, one: Instruction) -> Run:
    """ldmatrix.sync.aligned.m8n8.x<n>[.trans].shared.b16 {..}, [row]."""
    bits = [target(machine, name) for name in names(one.operands[0])]
    where = address(machine, one.operands[1])
    is_turned = "trans" in one.parts

    def run(mask: Mask) -> None:
        rows = _rows_of_matrices(machine, one, where, len(bits))
        num_warps = len(rows)
        live = np.ones(num_warps, bool) if mask is None else mask.reshape(-1, 32).all(1)
        warps = np.repeat(np.arange(num_warps, dtype=np.int32)[live], rows[0].size)
        found = machine.shared.load(rows[live].reshape(-1), warps, 2, 8).reshape(-1, len(bits), 8, 8)
        matrices = np.zeros((num_warps, len(bits), 8, 8), np.uint16)
        matrices[live] = found
        for number, to in enumerate(bits):
            one_matrix = matrices[:, number].swapaxes(1, 2) if is_turned else matrices[:, number]
            pair = [one_matrix[:, _GROUP, 2 * _PLACE + e].astype(np.uint32) for e in (0, 1)]
            made = (pair[0] | pair[1] << np.uint32(16)).reshape(-1)
            np.copyto(to, made, where=True if mask is None else mask)

    return run


def store_matrices(machine: Machine, one: Instruction) -> Run:
    """stmatrix.sync.aligned.m8n8.x<n>[.trans].shared.b16 [row], {..}."""
    bits = [target(machine, name) for name in names(one.operands[1])]
    where = address(machine, one.operands[0])
    is_turned = "trans" in one.parts

    def run(mask: Mask) -> None:
        rows = _rows_of_matrices(machine, one, where, len(bits))
        num_warps = len(rows)
        live = np.ones(num_warps, bool) if mask is None else mask.reshape(-1, 32).all(1)
        matrices = np.zeros((num_warps, len(bits), 8, 8), np.uint16)
        for number, given in enumerate(bits):
            pairs = given.reshape(-1, 32)
            for e in (0, 1):
                half = (pairs >> np.uint32(16 * e)).astype(np.uint16)
                if is_turned:
                    matrices[:, number, 2 * _PLACE + e, _GROUP] = half
                else:
                    matrices[:, number, _GROUP, 2 * _PLACE + e] = half
        warps = np.repeat(np.arange(num_warps, dtype=np.int32)[live], rows[0].size)
        machine.shared.store(rows[live].reshape(-1), warps, matrices[live].reshape(-1, 8))

    return run


def _a_fragment(registers: list[Array], kind: str) -> Array:
    """A [warps, 16, k], fp64: four registers a thread, or two for half the columns."""
    per_register = 1 if kind in ("tf32",) else 2
    halves = len(registers) // 2  # of columns
    made = np.zeros((len(registers[0]) // 32, 16, 4 * per_register * halves))
    for number, register in enumerate(registers):
        row, block = number % 2 * 8, number // 2
        parts = register.reshape(-1, 32)
        for e in range(per_register):
            bits = parts if per_register == 1 else (parts >> np.uint32(16 * e)).astype(np.uint16)
            columns = block * 4 * per_register + per_register * _PLACE + e
            made[:, row + _GROUP, columns] = _decode(np.ascontiguousarray(bits), kind)
    return made


def _b_fragment(registers: list[Array], kind: str) -> Array:
    """B [warps, k, 8], fp64."""
    per_register = 1 if kind == "tf32" else 2
    made = np.zeros((len(registers[0]) // 32, 4 * per_register * len(registers), 8))
    for block, register in enumerate(registers):
        parts = register.reshape(-1, 32)
        for e in range(per_register):
            bits = parts if per_register == 1 else (parts >> np.uint32(16 * e)).astype(np.uint16)
            rows = block * 4 * per_register + per_register * _PLACE + e
            made[:, rows, _GROUP] = _decode(np.ascontiguousarray(bits), kind)
    return made


def warp_product(machine: Machine, one: Instruction) -> Run:
    """mma.sync.aligned.m16n8k<k>.row.col.f32.<a>.<b>.f32 d, a, b, c."""
    if "m16n8k" not in one.opcode or one.parts[-1] != "f32":
        raise ValueError(f"unknown product {one.opcode}")
    kind = one.parts[-3]
    result, a, b = ([target(machine, name) for name in names(operand)] for operand in one.operands[:3])
    given = [value(machine, name, np.float32) for name in names(one.operands[3])]

    def run(mask: Mask) -> None:
        product = _a_fragment(a, kind) @ _b_fragment(b, kind)
        for number, (to, before) in enumerate(zip(result, given, strict=True)):
            part = product[:, number // 2 * 8 + _GROUP, 2 * _PLACE + number % 2].reshape(-1)
            made = (part + before()).astype(np.float32).view(np.uint32)
            np.copyto(to, made, where=True if mask is None else mask)

    return run


def _offsets(descriptor: int, rows: int, is_turned: bool, nbytes: int) -> Array:
    """Addresses [rows, k] of elements (m or n, k) of nbytes each in shared memory; all k take 32 bytes."""
    start, leading, stride = (int(descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    bits, width = _SWIZZLES[int(descriptor >> 62 & 3)]
    if descriptor >> 49 & 7:
        raise Fault("matrix descriptors with a base offset are not known")
    row, k = np.arange(rows)[:, None], np.arange(32 // nbytes)[None, :]
    per_core, per_row = 16 // nbytes, width // nbytes  # elements
    if not is_turned:  # neighbours along k
        if width == 16:
            linear = row % 8 * 16 + row // 8 * stride + k // per_core * leading + k % per_core * nbytes
        else:
            linear = row % 8 * width + row // 8 * stride + k * nbytes
    elif nbytes != 2:
        raise Fault("only elements of two bytes are turned")
    elif width == 16:
        linear = k % 8 * 16 + k // 8 * leading + row // 8 * stride + row % 8 * 2
    else:
        linear = k % 8 * width + k // 8 * stride + row // per_row * leading + row % per_row * 2
    at = start + linear
    return at ^ (at >> 7 & (1 << bits) - 1) << 4


def _warpgroup_product(machine: Machine, one: Instruction) -> Run:
    """wgmma.mma_async.sync.aligned.m64n<n>k<k>.f32.<a>.<b> d, a, b, scale-d, sign a, sign b[, turn a], turn b."""
    match = re.search(r"m64n(\d+)k(?:16|8)\.f32\.(\w+)\.(\w+)$", one.opcode)
    if match is None:
        raise ValueError(f"unknown product {one.opcode}")
    columns, kind = int(match[1]), match[2]
    nbytes = 4 if kind == "tf32" else 2
    result = [target(machine, name) for name in names(one.operands[0])]
    in_registers = one.operands[1].startswith("{")
    a = [target(machine, name) for name in (names(one.operands[1]) if in_registers else [one.operands[1]])]
    b = target(machine, one.operands[2])
    keeps = value(machine, one.operands[3], np.bool_)
    signs = [int(sign) for sign in one.operands[4:6]]
    turns = [sign == "1" for sign in one.operands[6:]]
    turn_a, turn_b = (False, turns[-1]) if in_registers and turns else turns or (False, False)
    number = np.arange(len(result))
    rows = 16 * np.arange(4)[:, None, None] + _GROUP[None, :, None] + 8 * (number // 2 % 2)[None, None, :]
    cols = 8 * (number // 4)[None, None, :] + 2 * _PLACE[None, :, None] + (number % 2)[None, None, :]

    def matrix(bits: Array, group: int, count: int, is_turned: bool) -> Array:
        held = bits[128 * group : 128 * group + 128]
        if np.any(held != held[0]):
            raise Fault("the threads of a group of four warps name different matrices")
        places = _offsets(int(held[0]), count, is_turned, nbytes)
        machine.shared.note_read_by_group(places // 2, group)
        return _decode(machine.shared.matrix(places, nbytes), kind)

    def carry_out(group: int, keep: bool, descriptors: list[Array]) -> None:
        own = slice(128 * group, 128 * group + 128)
        if in_registers:
            left = _a_fragment([register[own] for register in a], kind).reshape(64, -1)
        else:
            left = matrix(descriptors[0], group, 64, turn_a)
        product = left @ matrix(descriptors[1], group, columns, turn_b).T * (signs[0] * signs[1])
        made = product[rows, cols].reshape(128, -1)
        for register, part in zip(result, made.T, strict=True):
            before = register[own].view(np.float32) if keep else 0.0
            register[own] = (part + before).astype(np.float32).view(np.uint32)

    def run(mask: Mask) -> None:
        for group, groups in enumerate(machine.products):
            own = slice(128 * group, 128 * group + 128)
            if mask is not None and not mask[own].any():
                continue
            kept = np.broadcast_to(keeps(), machine.threads.shape)[own]
            keep = bool(kept[0])
            descriptors = [a[0].copy(), b.copy()]
            groups[-1].append(lambda _, group=group, keep=keep, d=descriptors: carry_out(group, keep, d))

    return run


def _groups_of(machine: Machine, mask: Mask) -> list[list[list[Run]]]:
    return [
        groups
        for number, groups in enumerate(machine.products)
        if mask is None or mask[128 * number : 128 * number + 128].any()
    ]


def _commit(machine: Machine, one: Instruction) -> Run:
    def run(mask: Mask) -> None:
        for groups in _groups_of(machine, mask):
            groups.append([])

    return run


def _wait(machine: Machine, one: Instruction) -> Run:
    left = int(one.operands[0])

    def run(mask: Mask) -> None:
        for groups in _groups_of(machine, mask):
            while len(groups) - 1 > left:
                for product in groups.pop(0):
                    product(None)

    return run


WARPGROUP: dict[str, Callable[[Machine, Instruction], Run]] = {
    "mma_async": _warpgroup_product, "commit_group": _commit, "wait_group": _wait,
    "fence": lambda machine, one: lambda mask: None,
}  # fmt: skip
