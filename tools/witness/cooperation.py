"""What threads do together: barriers, exchanges within a warp, copies that run by themselves."""

import re
from collections.abc import Callable

import numpy as np

from tools.witness import bulk_copies, matrix_products
from tools.witness.machine import Machine, Mask, Run
from tools.witness.memory import Fault
from tools.witness.operands import TYPES, address, put, target, value
from tools.witness.ptx import Instruction


def _barrier(machine: Machine, one: Instruction) -> Run:
    """bar.sync 0: of the whole program. bar.warp.sync: threads of a warp take each step together anyway."""
    if one.opcode.startswith("bar.warp"):
        return lambda mask: None
    is_whole = one.operands[0] == "0" and len(one.operands) == 1

    def run(mask: Mask) -> None:
        if mask is not None or not is_whole:
            raise Fault("only barriers of a whole program are known")
        machine.shared.interval += 1

    return run


def _shuffle(machine: Machine, one: Instruction) -> Run:
    """shfl.sync.<bfly|idx>.b32 d, a, b, c, members."""
    how = one.parts[2]
    if how not in ("bfly", "idx") or "|" in one.operands[0]:
        raise ValueError(f"unknown exchange {one.opcode}")
    bits = target(machine, one.operands[0])
    given, by, clamp = (value(machine, operand, np.uint32) for operand in one.operands[1:4])
    lanes = machine.lanes.astype(np.int64)
    first = np.arange(len(lanes)) - lanes

    def run(mask: Mask) -> None:
        distance = np.broadcast_to(by(), lanes.shape).astype(np.int64) & 31
        limit = np.broadcast_to(clamp(), lanes.shape).astype(np.int64)
        segment = limit >> 8 & 31
        last = lanes & segment | limit & 31 & ~segment
        source = lanes ^ distance if how == "bfly" else lanes & segment | distance & ~segment
        source = np.where(source <= last, source, lanes)
        x = np.broadcast_to(given(), lanes.shape)
        put(bits, x[first + source], mask)

    return run


def _reduce_in_warp(machine: Machine, one: Instruction) -> Run:
    """redux.sync.<op>.<type> d, a, members."""
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[one.parts[2]]
    bits = target(machine, one.operands[0])
    given = value(machine, one.operands[1], TYPES[one.parts[-1]])

    def run(mask: Mask) -> None:
        x = np.broadcast_to(given(), machine.threads.shape).reshape(-1, 32)
        put(bits, np.repeat(function.reduce(x, 1, dtype=x.dtype), 32), mask)

    return run


def _copy(machine: Machine, one: Instruction) -> Run:
    """cp.async: groups of copies to shared memory; cp.async.bulk: boxes of a tensor."""
    parts = one.parts
    if parts[2] == "bulk":
        return bulk_copies.make(machine, one)
    if parts[2] == "commit_group":

        def commit(mask: Mask) -> None:
            machine.copies.append([])

        return commit
    if parts[2] == "wait_group":
        left = int(one.operands[0])

        def wait(mask: Mask) -> None:
            while len(machine.copies) - 1 > left:
                for copy in machine.copies.pop(0):
                    copy(None)

        return wait
    return _start_copy(machine, one)


def _start_copy(machine: Machine, one: Instruction) -> Run:
    """cp.async.<ca|cg>.shared.global [to], [from], bytes[, bytes that are there]; the rest is filled with zeros."""
    to, given = (address(machine, operand) for operand in one.operands[:2])
    nbytes = int(one.operands[2], 0)
    there = value(machine, one.operands[3], np.uint32) if len(one.operands) > 3 else None

    def run(mask: Mask) -> None:
        chosen = slice(None) if mask is None else mask
        at, source = to()[chosen].copy(), given()[chosen].copy()
        warps = machine.warps[chosen]
        sizes = np.full(len(at), nbytes)
        if there is not None:
            sizes = np.broadcast_to(there(), machine.threads.shape)[chosen].astype(np.int64)
        if np.any((sizes != 0) & (sizes != nbytes)):
            raise Fault("copies of a part are not known")
        read = sizes != 0
        machine.shared.note_write(at.astype(np.int64)[:, None] // 2 + np.arange(nbytes // 2), warps)

        def finish(_: Mask) -> None:
            values = np.zeros((len(at), nbytes // 4), np.uint32)
            if read.any():
                values[read] = machine.memory.load(source[read], 4, nbytes // 4)
            machine.shared.store(at, warps, values)

        machine.copies[-1].append(finish)

    return run


def _elect(machine: Machine, one: Instruction) -> Run:
    """elect.sync d|p, members: the first lane of each warp."""
    name, _, predicate = one.operands[0].partition("|")
    bits, chosen = target(machine, name), target(machine, predicate)

    def run(mask: Mask) -> None:
        put(bits, np.uint32(0), mask)
        put(chosen, machine.lanes == 0, mask)

    return run


def _by_modifier(makers: dict[str, Callable[[Machine, Instruction], Run]]) -> Callable[[Machine, Instruction], Run]:
    def make(machine: Machine, one: Instruction) -> Run:
        return makers[re.split(r"[.:]", one.opcode)[1]](machine, one)

    return make


MAKERS: dict[str, Callable[[Machine, Instruction], Run]] = {
    "bar": _barrier, "barrier": _barrier, "shfl": _shuffle, "redux": _reduce_in_warp, "cp": _copy, "elect": _elect,
    "ldmatrix": matrix_products.load_matrices, "stmatrix": matrix_products.store_matrices,
    "mma": matrix_products.warp_product, "wgmma": _by_modifier(matrix_products.WARPGROUP),
    "mbarrier": bulk_copies.barrier,
}  # fmt: skip
