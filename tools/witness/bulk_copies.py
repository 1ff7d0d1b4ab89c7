"""Copies of boxes of a tensor (TMA), and the barriers in shared memory (mbarrier) that tell when they are done.

A box comes to shared memory when somebody finds its barrier's phase complete, and leaves it when its group is awaited.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tools.witness.machine import Array, Machine, Mask, Run
from tools.witness.memory import Fault
from tools.witness.operands import address, put, target, value
from tools.witness.ptx import Instruction


@dataclass
class TensorMap:
    """A row-major matrix and the box by which it is copied. swizzle: 0 to 3, rows of 16 bytes and up."""

    address: int
    rows: int
    columns: int
    row_bytes: int
    box: tuple[int, int]
    element_bytes: int
    swizzle: int

    @property
    def nbytes(self) -> int:
        """Of a box."""
        return self.box[0] * self.box[1] * self.element_bytes

    def places(self, start: int) -> Array:
        """Addresses [rows, columns] of a box's elements in shared memory."""
        row, column = np.arange(self.box[0])[:, None], np.arange(self.box[1])[None, :]
        at = start + (row * self.box[1] + column) * self.element_bytes
        return at ^ (at >> 7 & (1 << self.swizzle) - 1) << 4

    def addresses(self, first_row: int, first_column: int) -> tuple[Array, Array]:
        """(addresses [rows, columns] of a box's elements, whether they are in the matrix)."""
        row, column = first_row + np.arange(self.box[0])[:, None], first_column + np.arange(self.box[1])[None, :]
        inside = (row >= 0) & (row < self.rows) & (column >= 0) & (column < self.columns)
        at = self.address + row * self.row_bytes + column * self.element_bytes
        return np.where(inside, at, 0).astype(np.uint64), inside


@dataclass
class Barrier:
    """An mbarrier: arrivals that complete a phase, those still missing, bytes awaited, and copies under way."""

    count: int
    missing: int
    phase: int = 0
    awaited: int = 0
    copies: list[tuple[int, Run]] = field(default_factory=list)

    def is_complete(self, parity: int) -> bool:
        """Whether the phase of this parity is over; it ends here if all has come."""
        if self.missing == 0 and sum(nbytes for nbytes, _ in self.copies) == self.awaited:
            for _, copy in self.copies:
                copy(None)
            self.copies.clear()
            self.awaited, self.missing = 0, self.count
            self.phase += 1
        return self.phase % 2 != parity


def _barrier_at(machine: Machine, address: int) -> Barrier:
    if address not in machine.barriers:
        raise Fault(f"there is no barrier at shared address {address:#x}")
    return machine.barriers[address]


def barrier(machine: Machine, one: Instruction) -> Run:
    """mbarrier.<init|inval|arrive|try_wait>..."""
    how = one.parts[1]
    place = next(operand for operand in one.operands if operand.startswith("["))
    where = address(machine, place)
    last = value(machine, one.operands[-1], np.uint32) if one.operands[-1] != place else None

    def number(thread: int) -> int:
        return int(np.broadcast_to(last(), machine.threads.shape)[thread]) if last is not None else 1

    def threads(mask: Mask) -> Any:
        return range(len(machine.threads)) if mask is None else np.flatnonzero(mask)

    def init(mask: Mask) -> None:
        for thread in threads(mask):
            machine.barriers[int(where()[thread])] = Barrier(number(thread), number(thread))

    def inval(mask: Mask) -> None:
        for thread in threads(mask):
            if _barrier_at(machine, int(where()[thread])).copies:
                raise Fault("a barrier ends while copies are under way")
            del machine.barriers[int(where()[thread])]

    def arrive(mask: Mask) -> None:
        for thread in threads(mask):
            found = _barrier_at(machine, int(where()[thread]))
            if "expect_tx" in one.parts:
                found.awaited += number(thread)
            found.missing -= 1
            if found.missing < 0:
                raise Fault("more arrivals than the barrier awaits")

    def try_wait(mask: Mask) -> None:
        chosen = np.zeros(len(machine.threads), bool)
        parity = np.broadcast_to(value(machine, one.operands[2], np.uint32)(), chosen.shape)
        for thread in threads(mask):
            chosen[thread] = _barrier_at(machine, int(where()[thread])).is_complete(int(parity[thread]))
        put(target(machine, one.operands[0]), chosen, mask)

    return {"init": init, "inval": inval, "arrive": arrive, "try_wait": try_wait}[how]


def make(machine: Machine, one: Instruction) -> Run:
    """cp.async.bulk: a box to or from shared memory, and groups of those from it."""
    if "commit_group" in one.parts:

        def commit(mask: Mask) -> None:
            machine.stores.append([])

        return commit
    if "wait_group" in one.parts:
        left = int(one.operands[0])

        def wait(mask: Mask) -> None:
            while len(machine.stores) - 1 > left:
                for store in machine.stores.pop(0):
                    store(None)

        return wait
    if ".tensor.2d." not in one.opcode:
        raise ValueError(f"unknown copy {one.opcode}")
    return _load(machine, one) if "mbarrier::complete_tx::bytes" in one.opcode else _store(machine, one)


def _box(machine: Machine, operand: str) -> Any:
    """What reads "[map, {column, row}]": of a thread the tensor map, first row and first column."""
    match = re.match(r"\[\s*([%\w]+)\s*,\s*\{\s*([%\w-]+)\s*,\s*([%\w-]+)\s*\}\s*\]$", operand)
    assert match is not None, operand
    name = machine.register(match[1])
    column, row = (value(machine, match[i], np.int32) for i in (2, 3))

    def read(thread: int) -> tuple[TensorMap, int, int]:
        shape = machine.threads.shape
        found = machine.maps[int(name[thread])]
        return found, int(np.broadcast_to(row(), shape)[thread]), int(np.broadcast_to(column(), shape)[thread])

    return read


def _load(machine: Machine, one: Instruction) -> Run:
    to, box, bar = address(machine, one.operands[0]), _box(machine, one.operands[1]), address(machine, one.operands[2])

    def run(mask: Mask) -> None:
        for thread in range(len(machine.threads)) if mask is None else np.flatnonzero(mask):
            found, row, column = box(thread)
            places = found.places(int(to()[thread]))
            warp = machine.warps[thread : thread + 1]
            machine.shared.note_write(places.reshape(1, -1) // 2, warp)

            def finish(
                _: Mask, found: TensorMap = found, row: int = row, column: int = column, places: Array = places
            ) -> None:
                at, inside = found.addresses(row, column)
                values = np.zeros((places.size, 1), f"u{found.element_bytes}")
                flat = inside.reshape(-1)
                if flat.any():
                    values[flat] = machine.memory.load(at.reshape(-1)[flat], found.element_bytes, 1)
                machine.shared.arrive(places.reshape(-1), values)

            barrier_at = _barrier_at(machine, int(bar()[thread]))
            barrier_at.copies.append((found.nbytes, finish))

    return run


def _store(machine: Machine, one: Instruction) -> Run:
    box, given = _box(machine, one.operands[0]), address(machine, one.operands[1])

    def run(mask: Mask) -> None:
        for thread in range(len(machine.threads)) if mask is None else np.flatnonzero(mask):
            found, row, column = box(thread)
            places = found.places(int(given()[thread])).reshape(-1)
            warps = np.full(places.size, machine.warps[thread], np.int32)
            machine.shared.load(places.astype(np.uint64), warps, found.element_bytes, 1)

            def finish(
                _: Mask, found: TensorMap = found, row: int = row, column: int = column, places: Array = places,
                warps: Array = warps,
            ) -> None:  # fmt: skip
                at, inside = found.addresses(row, column)
                values = machine.shared.load(places.astype(np.uint64), warps, found.element_bytes, 1)
                flat = inside.reshape(-1)
                if flat.any():
                    machine.memory.store(at.reshape(-1)[flat], values[flat])

            machine.stores[-1].append(finish)

    return run
