"""Reads what a compiled Triton kernel became: registers, spills, shared memory, instructions, width of accesses.

NVIDIA: `cuobjdump` and `nvdisasm` of the Triton wheel, on the cubin. AMD: the assembly text that Triton keeps.

Instructions are counted in the main loops: the innermost loops that move most of the bytes, added up (a kernel that
passes over its data twice has two), or the whole kernel where there is none. So a count stands for one pass over the
elements that a program treats at a time; what runs before and after the loops is in `instructions` alone. A kernel with
matrix products has one main loop: the shortest innermost one with products, the others being for tiles at the edges.
`tile_...` counts what such a kernel does once per tile of its output, be it within that loop or around it.
"""

import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Instruction:
    """One machine instruction, and how many bytes per thread it moves between global memory and registers.

    multiply_adds: of a matrix product, per thread of those that execute it; None where it is none. predicate: what
    decides whether a thread executes it, such as @!P0; empty where all do, or where the operands say it.
    """

    opcode: str
    operands: str = ""
    load_bytes: int = 0
    store_bytes: int = 0
    multiply_adds: int | None = None
    predicate: str = ""


@dataclass(frozen=True)
class Listing:
    """A disassembled kernel: instructions in order, and its branches as (index of the branch, index of its target)."""

    instructions: list[Instruction]
    branches: list[tuple[int, int]]


def _nvidia_tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _run_on(tool: list[str], content: bytes) -> str:
    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.write(content)
    try:
        return subprocess.run([*tool, file.name], capture_output=True, text=True, check=True).stdout
    finally:
        os.unlink(file.name)


def machine_code(cubin: bytes) -> bytes:
    """The instructions of a cubin (ELF, 64 bits, little-endian) that holds one kernel: its section .text.<kernel>."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + index * size) for index in range(count)]
    names_at = headers[names_index][4]
    sections = [(cubin[names_at + name :].split(b"\0", 1)[0], at, length) for name, _, _, _, at, length in headers]
    [(at, length)] = [(at, length) for name, at, length in sections if name.startswith(b".text.")]
    return cubin[at : at + length]


def disassemble(cubins: list[bytes], arch: int) -> list[Listing]:
    """All in one call: starting `nvdisasm` costs 0.2 s, an instruction next to nothing."""
    codes = [machine_code(cubin) for cubin in cubins]
    feature = "a" if arch >= 90 else ""  # Triton compiles for sm_90a and sm_100a
    text = _run_on([_nvidia_tool("nvdisasm"), "--binary", f"SM{arch}{feature}"], b"".join(codes))
    return parse_sass(text, [len(code) for code in codes])


def main_loops(listing: Listing) -> list[range]:
    """The loops that do the work, as ranges of instructions that do not overlap; the whole kernel where none does.

    A loop that encloses others counts as a whole unless those move at least half of its bytes. Loops of less than an
    eighth of the kernel do not count: AMD's compiler writes such a loop around a single load.
    """
    if any(i.multiply_adds is not None for i in listing.instructions):
        return [_product_loop(listing)]
    moved = [i.load_bytes + i.store_bytes for i in listing.instructions]

    def nbytes(span: range) -> int:
        return sum(moved[span.start : span.stop])

    spans = {range(target, branch + 1) for branch, target in listing.branches if target <= branch}
    loops = sorted(
        (s for s in spans if nbytes(s) and len(s) * 8 >= len(listing.instructions)), key=lambda s: (s.start, -s.stop)
    )

    def unfold(loop: range) -> list[range]:
        inner = [s for s in loops if s != loop and loop.start <= s.start and s.stop <= loop.stop]
        outermost = _outermost(inner)
        if sum(map(nbytes, outermost)) * 2 >= nbytes(loop) and outermost:
            return [leaf for s in outermost for leaf in unfold(s)]
        return [loop]

    return [leaf for s in _outermost(loops) for leaf in unfold(s)] or [range(len(listing.instructions))]


def _product_loop(listing: Listing) -> range:
    """The shortest loop with matrix products, the whole kernel where none has any.

    Inner loops are shorter than those around them; a loop over whole tiles is shorter than one that checks bounds.
    """
    spans = _loops(listing)
    has_products = [s for s in spans if any(listing.instructions[i].multiply_adds is not None for i in s)]
    return min(has_products, key=len, default=range(len(listing.instructions)))


def _loops(listing: Listing) -> list[range]:
    """Everything between a branch backwards and its target.

    What stands after the kernel's end goes back, too, but is no loop: there waiting for a barrier is tried again.
    """
    ends = [index for index, one in enumerate(listing.instructions) if one.opcode == "EXIT"]
    end = ends[-1] if ends else len(listing.instructions)
    return [range(target, branch + 1) for branch, target in listing.branches if target <= branch <= end]


def _once_per_tile(listing: Listing, loop: range) -> list[int]:
    """Of a loop with products: the instructions around them that run once per tile of the output, not once per step.

    Either the loop jumps over them but for the last step (steps of all tiles in one loop), or a loop over tiles stands
    around it; none where every program makes a single tile.
    """
    has_product = [one.multiply_adds is not None for one in listing.instructions]
    skipped = [
        range(branch + 1, target)
        for branch, target in listing.branches
        if loop.start <= branch < target < loop.stop and not any(has_product[branch + 1 : target])
    ]
    longest = max(skipped, key=len, default=range(0))
    if 2 * len(longest) > len(loop):
        return list(longest)
    around = [s for s in _loops(listing) if s.start <= loop.start and loop.stop <= s.stop and len(s) > len(loop)]
    # Two groups of warps have a loop each: a loop around both is that of neither.
    products = sum(has_product[loop.start : loop.stop])
    around = [s for s in around if sum(has_product[s.start : s.stop]) == products]
    return [index for index in min(around, key=len, default=range(0)) if index not in loop]


def _outermost(loops: list[range]) -> list[range]:
    """Those of the loops, sorted by start and then longest first, that begin after the one before has ended."""
    found: list[range] = []
    for loop in loops:
        if not found or loop.start >= found[-1].stop:
            found.append(loop)
    return found


_BARRIERS = ("BAR.", "s_barrier")  # of a whole program


def _counts(
    listing: Listing,
    in_flight: Callable[[list[Instruction]], int],
    half_rate: tuple[str, ...],
    special: tuple[str, ...],
) -> dict[str, Any]:
    """What both vendors' listings are asked; half_rate, special: how opcodes of those pipes start."""
    everything = listing.instructions
    loops = [everything[s.start : s.stop] for s in main_loops(listing)]
    looped = [i for body in loops for i in body]
    loads, stores = [i for i in everything if i.load_bytes], [i for i in everything if i.store_bytes]
    has_products = any(i.multiply_adds is not None for i in everything)
    once = [everything[i] for i in _once_per_tile(listing, main_loops(listing)[0])] if has_products else []
    return {
        "instructions": len(everything),
        "loop_instructions": len(looped),
        "loop_half_rate": sum(i.opcode.startswith(half_rate) for i in looped) if half_rate else 0,
        "loop_special": sum(i.opcode.startswith(special) for i in looped),
        "loop_multiply_adds": sum(i.multiply_adds or 0 for i in looped),
        "tile_instructions": len(once),
        "tile_half_rate": sum(i.opcode.startswith(half_rate) for i in once) if half_rate else 0,
        "tile_special": sum(i.opcode.startswith(special) for i in once),
        "loop_barriers": sum(i.opcode.startswith(_BARRIERS) for i in looped),
        "loop_bytes": sum(i.load_bytes + i.store_bytes for i in looped),
        "loads": len(loads),
        "loads_128": sum(i.load_bytes >= 16 for i in loads),
        "stores": len(stores),
        "stores_128": sum(i.store_bytes >= 16 for i in stores),
        "in_flight_bytes": max(map(in_flight, loops)),
        "tensor_core_instructions": sum(i.multiply_adds is not None for i in everything),
    }


# Instructions of the arithmetic-logic pipe of sm_90: 64 lanes a clock and multiprocessor, half of what the schedulers
# issue (CUDA C++ Programming Guide, table of arithmetic throughputs: integer add, compare, shift, logic, conversions).
# IMAD is not among them: it runs beside FFMA, and the compiler moves work there for that reason.
_HALF_RATE = (
    "BMSK", "F2FP", "FMNMX", "FSEL", "FSETP", "I2FP", "IABS", "IADD", "IMNMX", "ISETP", "LEA", "LOP", "PLOP3", "PRMT",
    "SEL", "SHF", "SGXT", "VIADD", "VIMNMX", "FSET", "HSETP", "HMNMX",
)  # fmt: skip
_WIDTHS = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


def _sass_bytes(opcode: str) -> int:
    return next((_WIDTHS[part] for part in opcode.split(".")[1:] if part in _WIDTHS), 4)


def _sass_multiply_adds(opcode: str) -> int | None:
    """Of HMMA.16816 (16 x 8 x 16 by a warp) or HGMMA.64x64x16 (by four), per thread; 0 where no sizes are named."""
    if not opcode.split(".")[0].endswith("MMA"):  # HFMA2.MMA is none
        return None
    if match := re.search(r"\.(\d+)x(\d+)x(\d+)", opcode):
        return int(match[1]) * int(match[2]) * int(match[3]) // 128
    if match := re.search(r"MMA\.168(\d+)", opcode):
        return 16 * 8 * int(match[1]) // 32
    return 0


def parse_sass(sass: str, sizes: list[int]) -> list[Listing]:
    """The kernels of a listing of `nvdisasm --binary`, which follow one another; sizes: of their code, in bytes."""
    found: list[Listing] = []
    instructions: list[Instruction] = []
    index_at: dict[int, int] = {}
    jumps: list[tuple[int, int]] = []
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]

    def finish() -> None:
        nonlocal instructions, index_at, jumps
        found.append(Listing(instructions, [(at, index_at[target]) for at, target in jumps if target in index_at]))
        instructions, index_at, jumps = [], {}, []

    for line in sass.splitlines():
        match = re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)", line)
        if match is None:
            continue
        address, predicate, opcode, operands = int(match[1], 16), (match[2] or "").strip(), match[3], match[4]
        while address >= ends[len(found)]:
            finish()
        index_at[address] = len(instructions)
        if opcode == "NOP":
            continue
        if opcode.startswith("BRA") and (target := re.search(r"0x([0-9a-f]+)", operands)):
            jumps.append((len(instructions), int(target[1], 16)))
        load = _sass_bytes(opcode) if opcode.startswith(("LDG.", "LDGSTS.")) else 0
        store = _sass_bytes(opcode) if opcode.startswith("STG.") else 0
        instructions.append(Instruction(opcode, operands, load, store, _sass_multiply_adds(opcode), predicate))
    while len(found) < len(sizes):
        finish()
    return found


def _sass_in_flight(body: list[Instruction]) -> int:
    """The most bytes per thread that were asked for and not yet used, at any point of straight-line code.

    A load is outstanding until an instruction names its first register (a warp issues in order and waits there), a copy
    to shared memory until the next wait for copies.
    """
    outstanding: dict[str, int] = {}
    copies = most = 0
    for instruction in body:
        named = re.findall(r"\bR\d+\b", instruction.operands)
        for register in named:
            outstanding.pop(register, None)
        if instruction.opcode.startswith("LDGSTS"):
            copies += instruction.load_bytes
        elif instruction.load_bytes and named:
            outstanding[named[0]] = instruction.load_bytes
        elif instruction.opcode.startswith("DEPBAR"):
            copies = 0
        most = max(most, copies + sum(outstanding.values()))
    return most


def read_sass(listing: Listing) -> dict[str, Any]:
    """Counts of one kernel of `parse_sass`."""
    opcodes = [i.opcode for i in listing.instructions]
    return _counts(listing, _sass_in_flight, _HALF_RATE, ("MUFU",)) | {
        "spill_instructions": sum(op.startswith(("LDL", "STL")) for op in opcodes),
        "warpgroup_products": sum(op.startswith("HGMMA") for op in opcodes),
        "bulk_copy_instructions": sum(op.startswith(("UTMALDG", "UTMASTG", "UBLKCP")) for op in opcodes),
        "register_reallocations": sum(op.startswith("USETMAXREG") for op in opcodes),
    }


def _resources(cubin: bytes) -> dict[str, Any]:
    usage = _run_on([_nvidia_tool("cuobjdump"), "-res-usage"], cubin)
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert match is not None, usage
    registers, stack, local = map(int, match.groups())
    return {"registers": registers, "spill_bytes": stack + local}


_AMD_SPECIAL = ("v_exp", "v_log", "v_rcp", "v_rsq", "v_sqrt")
_AMD_WIDTHS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}


def _amd_bytes(opcode: str) -> int:
    last = opcode.split("_")[-1]
    if last in _AMD_WIDTHS:
        return _AMD_WIDTHS[last]
    return 2 if "short" in opcode or "b16" in opcode else 1


def _parse_amdgcn(assembly: str) -> Listing:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    for line in assembly.splitlines():
        if label := re.match(r"(\.?LBB\d+_\d+):", line):
            labels[label[1]] = len(instructions)
        elif match := re.match(r"\s+((?:s|v|ds|global|buffer|flat|scratch)_\w+)\s*(.*)", line):
            opcode, operands = match[1], match[2].split(";")[0].strip()
            if opcode.startswith(("s_branch", "s_cbranch")):
                jumps.append((len(instructions), operands))
            load = _amd_bytes(opcode) if opcode.startswith(("global_load", "buffer_load")) else 0
            store = _amd_bytes(opcode) if opcode.startswith(("global_store", "buffer_store")) else 0
            shape = re.search(r"mfma_\w+?_(\d+)x(\d+)x(\d+)", opcode)
            products = int(shape[1]) * int(shape[2]) * int(shape[3]) // 64 if shape else None
            instructions.append(Instruction(opcode, operands, load, store, products))
            if opcode == "s_endpgm":
                break
    return Listing(instructions, [(at, labels[name]) for at, name in jumps if name in labels])


def _amd_in_flight(body: list[Instruction]) -> int:
    """As `_sass_in_flight`; loads are awaited in order, by the number that may remain: s_waitcnt vmcnt(n)."""
    waiting: list[int] = []
    most = 0
    for instruction in body:
        if instruction.load_bytes or instruction.store_bytes:
            waiting.append(instruction.load_bytes)
        elif instruction.opcode == "s_waitcnt" and (left := re.search(r"vmcnt\((\d+)\)", instruction.operands)):
            waiting = waiting[len(waiting) - int(left[1]) :] if int(left[1]) < len(waiting) else waiting
        most = max(most, sum(waiting))
    return most


def read_amdgcn(assembly: str) -> dict[str, Any]:
    """Counts of AMD assembly text; its metadata lies at the end, as YAML."""

    def metadata(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", assembly)
        assert match is not None, name
        return int(match[1])

    listing = _parse_amdgcn(assembly)
    return {
        "registers": metadata("vgpr_count"),
        "spill_bytes": metadata("private_segment_fixed_size"),
        **_counts(listing, _amd_in_flight, (), _AMD_SPECIAL),
        "spill_instructions": metadata("vgpr_spill_count") + metadata("sgpr_spill_count"),
        "warpgroup_products": 0,
        "bulk_copy_instructions": 0,
        "register_reallocations": 0,
    }


def inspect(compiled: list[Any], target: str) -> list[dict[str, Any]]:
    """What is read of kernels that `triton.compile` made for a target."""
    if target.startswith("sm_"):
        cubins = [one.asm["cubin"] for one in compiled]
        listings = disassemble(cubins, int(target.removeprefix("sm_")))
        rows = [_resources(cubin) | read_sass(listing) for cubin, listing in zip(cubins, listings, strict=True)]
    else:
        rows = [read_amdgcn(one.asm["amdgcn"]) for one in compiled]
    return [
        row | {"shared_bytes": int(one.metadata.shared), "conversions": one.asm["ttgir"].count("ttg.convert_layout ")}
        for row, one in zip(rows, compiled, strict=True)
    ]
