"""Registers of matrix products in flight: who touches them before their product is waited for?

On Hopper a product (HGMMA, `wgmma.mma_async` in PTX) runs on after the instruction. Its first operand, A, may be in
registers, and its accumulator always is. The PTX manual (wgmma.wait_group) leaves undefined what happens where
such a register is accessed before a wait that includes the product. Compilers must not do that, and have done it:
Triton 3.6 and 3.7 (triton#9433, mended in 3.8 by #9514 and #9530) overwrite A while it may still be read. That is a
wrong result now and then, which no test on a device is sure to see. So machine code is read here.

An instruction with `gsb0` ends a group of products; `WARPGROUP.DEPBAR.LE gsb0, n` waits until at most n are left;
`WARPGROUP.ARRIVE` is the fence (wgmma.fence) between what wrote a register and the product that reads it. All ways
through the kernel are followed, each branch that has a condition both ways.
"""

import re
from typing import Any

from benchmarks.aot.listings import Instruction, Listing, disassemble

_REGISTER = re.compile(r"(?<![A-Z])R(\d+)\b")
_PREDICATE = re.compile(r"!?U?P(\d|T)$")
# What leaves no result in registers though one is named first.
_NO_RESULT = (
    "BAR", "BRA", "DEPBAR", "FENCE", "FSETP", "DSETP", "HSETP", "ISETP", "LDGDEPBAR", "LDGSTS", "MEMBAR", "PLOP3",
    "PSETP", "R2P", "RED.", "ST", "WARPGROUP",
)  # fmt: skip
_WIDE = ("DADD", "DFMA", "DMUL", "IMAD.WIDE")  # results of 64 bits
_MOST_GROUPS = 8  # in flight, told apart

Groups = tuple[frozenset[int], ...]  # products in flight, by their numbers, oldest first; the last one is not closed


def hazards_of(compiled: list[Any]) -> list[list[str]]:
    """`find_hazards` of each kernel that `triton.compile` made for sm_90."""
    cubins = [one.asm["cubin"] if "wgmma.mma_async" in one.asm["ptx"] else None for one in compiled]
    given = [cubin for cubin in cubins if cubin is not None]
    found = iter(disassemble(given, 90) if given else [])
    return [[] if cubin is None else find_hazards(next(found)) for cubin in cubins]


def find_hazards(listing: Listing) -> list[str]:
    """One line for each instruction that touches a register of a product in flight; none for sound code."""
    code = listing.instructions
    writes = [_written(one) for one in code]
    reads = [_read(one) for one in code]
    first = {index: _first_operand(one) for index, one in enumerate(code) if one.opcode.startswith("HGMMA")}
    found: dict[int, str] = {}
    targets = dict(listing.branches)
    seen: set[tuple[int, Groups]] = set()
    waiting: list[tuple[int, Groups]] = [(0, (frozenset(),))]
    while waiting:
        index, groups = waiting.pop()
        if index >= len(code) or (index, groups) in seen:
            continue
        seen.add((index, groups))
        one = code[index]
        for product in frozenset().union(*groups):
            touched = writes[index] & first[product]
            if touched:
                found[index] = _line(one, index, touched, "overwrites", code[product], product)
            # Products on one accumulator follow each other by themselves.
            touched = (first[index] if index in first else writes[index] | reads[index]) & writes[product]
            if touched:
                found[index] = _line(one, index, touched, "accesses", code[product], product)
        if index in first:
            groups = (*groups[:-1], groups[-1] | {index})
            if "gsb0" in one.operands:
                groups = (*groups, frozenset())
                if len(groups) > _MOST_GROUPS:
                    groups = (groups[0] | groups[1], *groups[2:])
        elif one.opcode.startswith("WARPGROUP.DEPBAR"):
            left = int(re.search(r"gsb0, 0x([0-9a-f]+)", one.operands)[1], 16)  # type: ignore[index]
            groups = groups[max(0, len(groups) - 1 - left) :]
        if index in targets:
            waiting.append((targets[index], groups))
        if not _ends(one):
            waiting.append((index + 1, groups))
    return [found[index] for index in sorted(found)] + _after_fence(code, writes, first)


def _ends(one: Instruction) -> bool:
    """Whether no thread goes on with the next instruction."""
    return one.opcode.startswith(("BRA", "EXIT")) and not one.predicate and "," not in one.operands


def _after_fence(code: list[Instruction], writes: list[frozenset[int]], first: dict[int, frozenset[int]]) -> list[str]:
    """Registers that are written between the last fence and the product that has them for A."""
    found = []
    for product, registers in first.items():
        for index in range(product - 1, -1, -1):
            opcode = code[index].opcode
            if opcode.startswith(("WARPGROUP.ARRIVE", "BRA", "EXIT")):
                break
            touched = writes[index] & registers
            if touched:
                found.append(_line(code[index], index, touched, "writes behind the fence", code[product], product))
    return found


def _line(one: Instruction, index: int, registers: frozenset[int], verb: str, product: Instruction, number: int) -> str:
    named = ", ".join(f"R{register}" for register in sorted(registers))
    return f"{one.opcode} (instruction {index}) {verb} {named} of {product.opcode} (instruction {number})"


def _operands(one: Instruction) -> list[str]:
    return [operand.strip() for operand in one.operands.rstrip(" ;").split(",")]


def _registers(operand: str, count: int) -> frozenset[int]:
    match = _REGISTER.match(operand)
    return frozenset(range(int(match[1]), int(match[1]) + count)) if match else frozenset()


def _first_operand(product: Instruction) -> frozenset[int]:
    """Registers of A; none where it is in shared memory. 64 rows of 32 bytes, by 128 threads."""
    return _registers(_operands(product)[1], 4)


def _written(one: Instruction) -> frozenset[int]:
    if one.opcode.startswith(_NO_RESULT):
        return frozenset()
    for operand in _operands(one):
        if not _PREDICATE.match(operand):
            return _registers(operand, _width(one.opcode))
    return frozenset()


def _width(opcode: str) -> int:
    """Registers of a result."""
    parts = opcode.split(".")
    if parts[0] == "HGMMA":
        columns = int(parts[1].split("x")[1])
        return columns // 2 if "F32" in parts else columns // 4
    if parts[0] == "HMMA":
        return 4 if "F32" in parts else 2
    if parts[0] == "LDSM":
        return int(parts[-1]) if parts[-1].isdigit() else 1
    if parts[0] == "CS2R":
        return 1 if "32" in parts else 2
    if parts[0].startswith("LD") or parts[0].startswith("ATOM"):
        return 4 if "128" in parts else 2 if "64" in parts else 1
    return 2 if opcode.startswith(_WIDE) or "F64" in parts else 1


def _read(one: Instruction) -> frozenset[int]:
    """Registers that are named otherwise than as the result; of a pair, the first."""
    named = [int(match) for match in _REGISTER.findall(one.operands)]
    if named and named[0] in _written(one):
        del named[0]
    return frozenset(named)
