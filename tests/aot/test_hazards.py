"""Registers of products in flight, in listings with a planted fault and without."""

import pytest

from benchmarks.aot.hazards import find_hazards
from benchmarks.aot.listings import Instruction, Listing

PRODUCT = ("HGMMA.64x16x16.F32.BF16", "R24, R48, gdesc[UR12].tnspB, R24, gsb0")
OTHER = ("HGMMA.64x16x16.F32.BF16", "R24, R52, gdesc[UR12].tnspB, R24, gsb0")
FENCE = ("WARPGROUP.ARRIVE", "")
NEXT = ("EXIT", "")


def waits(left: int) -> tuple[str, str]:
    return "WARPGROUP.DEPBAR.LE", f"gsb0, {left:#x}"


def found(*code: tuple[str, ...], branches: tuple[tuple[int, int], ...] = ()) -> list[str]:
    """code: opcode, operands and, where there is one, the predicate."""
    listing = [Instruction(opcode, operands, predicate="".join(rest)) for opcode, operands, *rest in code]
    return find_hazards(Listing(listing, list(branches)))


@pytest.mark.parametrize(
    ("opcode", "operands", "touched"),
    [
        ("LDSM.16.MT88.4", "R48, [R164+UR7]", "overwrites R48, R49, R50, R51"),
        ("LDG.E.64", "R50, desc[UR4][R2.64]", "overwrites R50, R51"),
        ("IMAD.WIDE", "R46, R3, 0x4, R46", ""),
        ("IMAD.WIDE", "R50, R3, 0x4, R6", "overwrites R50, R51"),
        ("SHFL.BFLY", "PT, R49, R3, 0x1, 0x1f", "overwrites R49"),
        ("ISETP.GE.AND", "P0, PT, R48, 0x20, PT", ""),  # reads A, which products do too
        ("STS.128", "[R48], R48", ""),
        ("FADD", "R3, R25, R4", "accesses R25"),
        ("MOV", "R31, R4", "accesses R31"),
        ("MOV", "R32, R4", ""),
        ("HGMMA.64x16x16.F32.BF16", "R64, R24, gdesc[UR12], R64, gsb0", "accesses R24, R25, R26, R27"),
        ("HGMMA.64x16x16.F32.BF16", "R48, gdesc[UR8], R48, gsb0", "overwrites R48, R49, R50, R51"),
        ("HGMMA.64x16x16.F32.BF16", "R24, gdesc[UR8], R24, gsb0", ""),  # on the same accumulator, in order
        pytest.param("UMOV", "UR48, 0x40000040", "", id="uniform register"),
    ],
)
def test_registers_of_a_product_in_flight(opcode: str, operands: str, touched: str) -> None:
    lines = found(FENCE, PRODUCT, (opcode, operands), waits(0), NEXT)
    assert bool(lines) == bool(touched)
    assert not touched or f"{touched} of {PRODUCT[0]} (instruction 1)" in lines[0]
    assert found(FENCE, PRODUCT, waits(0), FENCE, (opcode, operands), waits(0), NEXT) == [], "waited for"


def test_waiting_for_all_but_some() -> None:
    overwrite, other = ("MOV", "R48, R1"), ("MOV", "R52, R1")
    assert found(FENCE, PRODUCT, OTHER, waits(1), overwrite, waits(0), NEXT) == []
    assert len(found(FENCE, PRODUCT, OTHER, waits(1), other, waits(0), NEXT)) == 1
    assert len(found(FENCE, PRODUCT, OTHER, waits(2), overwrite, waits(0), NEXT)) == 1
    open_group = (PRODUCT[0], PRODUCT[1].replace(", gsb0", ""))
    assert len(found(FENCE, open_group, OTHER, waits(1), overwrite, NEXT)) == 1, "both are of one group"
    assert found(FENCE, open_group, OTHER, waits(0), overwrite, NEXT) == []


def test_a_loop_overwrites_what_its_last_round_reads() -> None:
    """As Triton 3.6 makes it: loaded, multiplied, waited for all but one, and back."""
    load, again = ("LDSM.16.MT88.4", "R48, [R4]"), ("BRA", "0x0", "@P0")
    lines = found(load, FENCE, PRODUCT, waits(1), again, waits(0), NEXT, branches=((4, 0),))
    assert len(lines) == 1 and "LDSM.16.MT88.4 (instruction 0) overwrites R48" in lines[0]
    assert found(load, FENCE, PRODUCT, waits(0), again, waits(0), NEXT, branches=((4, 0),)) == []
    elsewhere = ("LDSM.16.MT88.4", "R52, [R4]")
    assert found(elsewhere, FENCE, PRODUCT, waits(1), again, waits(0), NEXT, branches=((4, 0),)) == []


def test_what_is_written_behind_the_fence() -> None:
    (line,) = found(FENCE, ("LDSM.16.MT88.4", "R48, [R4]"), PRODUCT, waits(0), NEXT)
    assert "writes behind the fence R48" in line
    assert found(("LDSM.16.MT88.4", "R48, [R4]"), FENCE, PRODUCT, waits(0), NEXT) == []


def test_many_groups_end() -> None:
    lines = found(FENCE, *[PRODUCT] * 40, ("MOV", "R49, R1"), waits(0), NEXT)
    assert len(lines) == 1
    loop = found(FENCE, PRODUCT, ("BRA", "0x0", "@P0"), waits(0), ("MOV", "R49, R1"), NEXT, branches=((2, 0),))
    assert loop == []


def test_what_stands_behind_the_end_is_reached_by_branches_alone() -> None:
    """Waiting for a copy is tried again out of line: for the one before the product, and for one after it."""
    code = (
        FENCE,
        PRODUCT,
        waits(0),
        ("MOV", "R24, R1"),
        NEXT,
        ("TRY", ""),
        ("BRA", "0x0"),
        ("TRY", ""),
        ("BRA", "0x30"),
    )
    out_of_line = ((6, 0), (8, 3))
    assert found(*code, branches=out_of_line) == []
    again = (*code[:6], ("BRA", "0x0", "@!P0"), *code[7:])
    assert found(*again, branches=out_of_line) == [], "reached by no branch"
    entered = (("BRA", "0x50", "@P1"), *code[1:])
    assert found(*entered, branches=((0, 5), (6, 1), (8, 3))) == []
    skipped = (FENCE, PRODUCT, ("BRA", "0x70", "@P1"), *code[3:])
    assert len(found(*skipped, branches=((2, 7), (8, 3)))) == 1, "the wait is jumped over"
