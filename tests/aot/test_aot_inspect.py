"""Reading listings: loops, widths of accesses, bytes in flight; what a target can hold."""

import struct

import pytest

from benchmarks.aot.device import (
    ISSUE_SLOTS_PER_BYTE,
    NEEDED_IN_FLIGHT_BYTES,
    TARGETS,
    derive,
    product_bounds,
    resident_warps,
)
from benchmarks.aot.listings import (
    Instruction,
    Listing,
    _once_per_tile,
    machine_code,
    main_loops,
    parse_sass,
    read_amdgcn,
    read_sass,
)

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/              @!P0 LDG.E.128.CONSTANT R8, desc[UR4][R2.64] ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R8], desc[UR4][R2.64] ;
        /*0040*/               @P1 STG.E.64 desc[UR4][R2.64], R8 ;
        /*0050*/                   STL [R1], R4 ;
        /*0060*/                   HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;
        /*0070*/                   HFMA2.MMA R5, -RZ, RZ, 0, 0 ;
        /*0080*/                   ISETP.GE.AND P0, PT, R3, UR4, PT ;
        /*0090*/                   MUFU.EX2 R3, R3 ;
        /*00a0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00b0*/              @!P2 BRA 0x20 ;
        /*00c0*/                   EXIT ;
        /*00d0*/                   BRA 0xd0;
        /*00e0*/                   NOP ;
        /*00f0*/                   LDG.E R4, desc[UR4][R2.64] ;
        /*0100*/                   BRA.U UP0, 0xf0 ;
"""


def test_reading_sass() -> None:
    first, second = parse_sass(SASS, [0xF0, 0x20])
    assert read_sass(first) == {
        "instructions": 14,
        "loop_instructions": 10,
        "loop_barriers": 1,
        "loop_half_rate": 1,
        "loop_bytes": 40,
        "loads": 3,
        "loads_128": 3,
        "stores": 1,
        "stores_128": 0,
        "loop_special": 1,
        "loop_multiply_adds": 512,
        "in_flight_bytes": 16,  # the copy stays outstanding, the load into R8 is used by the next instruction
        "spill_instructions": 1,
        "tensor_core_instructions": 1,
        "warpgroup_products": 1,
        "bulk_copy_instructions": 0,
        "register_reallocations": 0,
        "tile_instructions": 0,
        "tile_half_rate": 0,
        "tile_special": 0,
    }
    assert [i.predicate for i in first.instructions] == ["", "", "@!P0", "", "@P1", *[""] * 6, "@!P2", "", ""]
    assert [i.opcode for i in second.instructions] == ["LDG.E", "BRA.U"]
    assert second.branches == [(1, 0)]


def test_code_of_a_cubin() -> None:
    """Three sections in an ELF file: none, names, code."""
    names, code = b"\0.shstrtab\0.text._kernel\0", bytes(range(32))
    sections = [(0, 0, 0), (1, 64, len(names)), (11, 64 + len(names), len(code))]
    table = b"".join(struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, at, size, 0, 0, 0, 0) for name, at, size in sections)
    head = bytearray(64)
    struct.pack_into("<Q", head, 0x28, 64 + len(names) + len(code))
    struct.pack_into("<HHH", head, 0x3A, 64, len(sections), 1)
    assert machine_code(bytes(head) + names + code + table) == code


def in_flight(*lines: str) -> int:
    numbered = [f"        /*{16 * i:04x}*/                   {line} ;" for i, line in enumerate(lines)]
    return read_sass(parse_sass("\n".join(numbered), [16 * len(lines)])[0])["in_flight_bytes"]


def test_bytes_in_flight() -> None:
    loads = ["LDG.E.128 R4, desc[UR4][R2.64]", "LDG.E.64 R8, desc[UR4][R2.64+0x10]", "LDG.E.U16 R10, desc[UR4][R2.64]"]
    assert in_flight(*loads, "FADD R12, R4, R8") == 26
    assert in_flight(loads[0], "FADD R12, R4, R4", *loads[1:]) == 16  # used before the others are asked for
    assert in_flight(loads[0], "FADD R12, R13, R40", *loads[1:]) == 26  # R40 is not R4
    copy = "LDGSTS.E.BYPASS.128 [R20], desc[UR4][R2.64]"
    assert in_flight(copy, copy, "LDGDEPBAR", "DEPBAR.LE SB0, 0x0", copy) == 32


AMDGCN = """
kernel:
	s_load_dwordx2 s[0:1], s[4:5], 0x0
.LBB0_1:
	global_load_dwordx4 v[0:3], v[4:5], off
	global_load_ushort v6, v[4:5], off
	s_waitcnt vmcnt(1)
	v_add_f32_e32 v0, v0, v1
	global_store_dword v[4:5], v0, off
	s_cbranch_scc1 .LBB0_1
	s_endpgm
    .private_segment_fixed_size: 12
    .sgpr_spill_count: 1
    .vgpr_count:     40
    .vgpr_spill_count: 2
"""


def test_reading_amd_assembly() -> None:
    counts = read_amdgcn(AMDGCN)
    assert counts["registers"] == 40
    assert counts["spill_bytes"] == 12
    assert counts["spill_instructions"] == 3
    assert (counts["instructions"], counts["loop_instructions"], counts["loop_bytes"]) == (8, 6, 22)
    assert (counts["loads"], counts["loads_128"], counts["stores"], counts["stores_128"]) == (2, 1, 1, 0)
    assert counts["in_flight_bytes"] == 18


def listing(size: int, memory: dict[int, int], *loops: tuple[int, int]) -> Listing:
    """`size` instructions; memory: index -> bytes loaded there; loops: (first, last) instruction."""
    instructions = [Instruction("LDG" if i in memory else "FADD", "", memory.get(i, 0)) for i in range(size)]
    return Listing(instructions, [(last, first) for first, last in loops])


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (listing(40, {3: 16}), [range(40)]),
        (listing(40, {12: 16}, (10, 19)), [range(10, 20)]),
        (listing(40, {12: 16}, (30, 39)), [range(40)]),  # a loop without memory is not the main one
        (listing(40, {12: 16}, (11, 14)), [range(40)]),  # less than an eighth of the kernel
        (listing(40, {12: 16, 25: 16}, (10, 19), (22, 29)), [range(10, 20), range(22, 30)]),  # two passes
        (listing(40, {12: 4, 20: 16}, (10, 34), (18, 27)), [range(18, 28)]),  # the inner loop moves most
        (listing(40, {12: 16, 20: 4}, (10, 34), (18, 27)), [range(10, 35)]),  # the outer loop does
        (listing(60, {12: 16, 30: 16}, (5, 50), (10, 19), (28, 37)), [range(10, 20), range(28, 38)]),
    ],
)
def test_main_loops(kernel: Listing, expected: list[range]) -> None:
    assert main_loops(kernel) == expected


def products(size: int, at: set[int], end: int, *branches: tuple[int, int]) -> Listing:
    """`size` instructions, with products at these places and the kernel's end; branches: (from, to)."""
    instructions = [Instruction("HGMMA", multiply_adds=64) if i in at else Instruction("FADD") for i in range(size)]
    instructions[end] = Instruction("EXIT")
    return Listing(instructions, list(branches))


@pytest.mark.parametrize(
    ("kernel", "loop", "once_per_tile"),
    [
        # steps in a loop of their own, in a loop over tiles
        (products(60, {21}, 59, (24, 20), (50, 10)), range(20, 25), 36),
        # steps of all tiles in one loop, which jumps over the rest but for the last step of a tile
        (products(60, {12}, 59, (50, 10), (15, 48)), range(10, 51), 32),
        # waiting is tried again by code behind the end, which is no loop
        (products(60, {12}, 52, (50, 10), (15, 48), (11, 53), (53, 11)), range(10, 51), 32),
        # two groups of warps with a loop over tiles each, within a loop that gives them their work
        (products(60, {12, 32}, 59, (13, 11), (20, 10), (33, 31), (40, 30), (50, 5)), range(11, 14), 8),
        # one tile a program
        (products(60, {12}, 59, (14, 10)), range(10, 15), 0),
    ],
)
def test_what_is_done_once_per_tile(kernel: Listing, loop: range, once_per_tile: int) -> None:
    assert main_loops(kernel) == [loop]
    assert len(_once_per_tile(kernel, loop)) == once_per_tile


def test_bounds_of_products() -> None:
    """A wide tile with an epilogue of 1,000 instructions a thread, by hand; and twins, which hide it."""
    row = {
        "product_tile": [128, 256, 64], "is_specialized": False, "num_warps": 8, "registers": 200,
        "shared_bytes": 160 * 1024, "loop_instructions": 1100, "tile_instructions": 1000, "tile_half_rate": 100,
        "tile_special": 0, "resident_threads": 256,
    }  # fmt: skip
    bounds = product_bounds(row, 768)
    assert (bounds["step_products"], bounds["step_shared"], bounds["step_issue"]) == (1024, 1024, 200)
    assert bounds["finish"] == 1000 * 8 * 32 // 128
    assert bounds["tflop_s 768"] == bounds["not_overlapped 768"] == round(790 * 12288 / (12288 + 2000))
    twin = row | {"product_tile": [128, 128, 64], "num_warps": 4, "shared_bytes": 100 * 1024}
    bounds = product_bounds(twin, 768)
    assert (bounds["step_products"], bounds["step_shared"], bounds["step_issue"]) == (512, 640, 100)
    assert bounds["tflop_s 768"] == round(790 * 512 / 640)
    assert bounds["not_overlapped 768"] == round(790 * 12 * 512 / (12 * 640 + 1000))


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_warps", "warps"),
    [
        (32, 0, 4, 64),
        (33, 0, 4, 48),  # handed out by eights: 40
        (168, 0, 4, 12),
        (169, 0, 4, 8),
        (255, 0, 8, 8),
        (255, 0, 16, 0),
        (64, 100 * 1024, 4, 8),  # two programs by shared memory
        (32, 114 * 1024, 4, 4),  # and a kilobyte of each goes to the system
        (32, 0, 1, 32),  # 32 programs at most
    ],
)
def test_resident_warps_of_hopper(registers: int, shared_bytes: int, num_warps: int, warps: int) -> None:
    assert resident_warps(TARGETS["sm_90"], registers, shared_bytes, num_warps) == warps


@pytest.mark.parametrize(("registers", "warps"), [(64, 32), (72, 28), (128, 16), (136, 12), (512, 4)])
def test_resident_waves_of_cdna3(registers: int, warps: int) -> None:
    assert resident_warps(TARGETS["gfx942"], registers, 0, 4) == warps


def test_budgets() -> None:
    assert round(ISSUE_SLOTS_PER_BYTE, 1) == 6.9  # 2.97e13 slots a second against 4.3e12 bytes
    assert round(NEEDED_IN_FLIGHT_BYTES) == 17819
    row = {
        "registers": 64, "shared_bytes": 0, "num_warps": 4, "elements_per_thread": 24.0, "bytes_per_element": 8.0,
        "loop_instructions": 720, "loop_half_rate": 240, "in_flight_bytes": 96,
        "multiply_adds_per_element": None,
    }  # fmt: skip
    derived = derive(row, "sm_90")
    assert derived["warps"] == 32 and derived["occupancy"] == 0.5
    assert derived["per_element"] == 30.0
    assert derived["issue_share"] == round(30 / (8 * ISSUE_SLOTS_PER_BYTE), 2)
    assert derived["half_rate_share"] == round(2 * 10 / (8 * ISSUE_SLOTS_PER_BYTE), 2)
    assert derived["in_flight_share"] == round(32 * 32 * 96 / NEEDED_IN_FLIGHT_BYTES, 2)
    assert derive(row | {"bytes_per_element": None}, "sm_90")["issue_share"] is None
    assert derive(row, "sm_80")["issue_share"] is None
