"""What the targets of the ahead-of-time gate can hold and issue, and what follows for a compiled kernel.

Three questions about a kernel that should be limited by memory alone, each answered from its listing:

1. Occupancy: how many warps are resident on a multiprocessor, from registers, shared memory and warps per program.
2. Issue slots (sm_90): an H200 issues one instruction per scheduler and clock, 132 x 4 x 32 lanes x 1.755 GHz = 2.97e13
   lane slots a second, against 4.3e12 bytes a second that its memory was measured to copy: 6.9 slots a byte. A kernel
   whose floor is b bytes an element may thus issue 6.9 b instructions an element before it is slower than memory.
   Instructions of the arithmetic-logic pipe (integer, logic, compare, convert) issue at half that rate: a second bound.
3. Bytes in flight (sm_90, Little's law): bandwidth x latency must be outstanding at any time. Latency: 480 cycles for a
   load from global memory on an idle H100 (Luo et al. 2024, arXiv:2402.13499, memory latencies), doubled for a busy
   one, which is our assumption: 960 cycles, or 17 KB for each of the 132 multiprocessors. Supplied: resident warps x
   32 x the most bytes that a thread has asked for and not yet used. Loads that hit a cache are counted too.

A kernel with matrix products is asked for clocks instead: how long a multiprocessor of sm_90 takes for 1,000 elements
(scores) if nothing but issuing bound it (128 lanes a clock), nothing but the arithmetic-logic pipe (64), the special
function unit (16: exponentials, reciprocals), or the tensor cores (2,048 multiply-adds of half precision). The largest
of the four is the least that it takes.

A matrix product proper (`product_bounds`) repeats a step along K and then finishes its tile. A step takes the longest
of its tensor-core clocks; its shared-memory clocks, at 128 bytes a clock for what the copy engine writes and for what
the tensor cores read (64 rows of a and all columns of b for every instruction of four warps); and its issue clocks.
Finishing takes the longest of its issue, half-rate and special clocks. Where a multiprocessor holds two programs, one
multiplies while the other finishes, and issuing is shared; where it holds one, they add up. The bound is the share of
tensor-core clocks in that time, of the 790 TFLOP/s that an H200 was measured to reach with large products. Latencies,
tiles that do not go round, and what the L2 cache delivers (a step's operands, within the step) are left out.

The figures bound from above what a GPU can do; they do not say that it does.

Sources: CUDA C++ Programming Guide, technical specifications per compute capability; registers are handed out to a warp
in units of 256 (8 a thread), a quarter of the file to each scheduler; throughputs of its table of arithmetic
instructions; tensor cores: H100's 989 TFLOP/s over 132 multiprocessors at 1.83 GHz. AMD: LLVM's user guide for the
AMDGPU back-end (gfx942: 512 registers a lane and SIMD in units of 8, at most 8 waves a SIMD, 4 SIMDs a compute unit).
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """One GPU architecture: how Triton names it, and what a multiprocessor (compute unit) of it holds."""

    backend: str
    arch: int | str
    warp_size: int
    registers: int  # per lane of a scheduler (SIMD), over all of its warps
    max_warps: int
    max_programs: int
    shared_bytes: int  # of a multiprocessor
    shared_limit_bytes: int  # of one program
    reserved_bytes: int  # of shared memory, taken by the system for each program
    schedulers: int = 4


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 512, 64, 32, 164 * 1024, 163 * 1024, 1024),
    "sm_90": Target("cuda", 90, 32, 512, 64, 32, 228 * 1024, 227 * 1024, 1024),
    "sm_100": Target("cuda", 100, 32, 512, 64, 32, 228 * 1024, 227 * 1024, 1024),
    "gfx942": Target("hip", "gfx942", 64, 512, 32, 32, 64 * 1024, 64 * 1024, 0),
}
# What people own, of which less is kept (`cards.py`).
CARDS = {
    "sm_86": Target("cuda", 86, 32, 512, 48, 16, 100 * 1024, 99 * 1024, 1024),  # A10, RTX 3090
    "sm_89": Target("cuda", 89, 32, 512, 48, 24, 100 * 1024, 99 * 1024, 1024),  # L4, L40S, RTX 4090
    "sm_120": Target("cuda", 120, 32, 512, 48, 24, 100 * 1024, 99 * 1024, 1024),  # RTX 5090
}
EVERY = TARGETS | CARDS

_MULTIPROCESSORS, _CLOCK_HZ, _COPY_BYTES_PER_S = 132, 1.755e9, 4.3e12  # H200
_LATENCY_CYCLES = 2 * 480
# Of a multiprocessor of sm_90: lanes a clock, or multiply-adds.
LIMITS = {"issue": 128, "half_rate": 64, "special": 16, "products": 2048}
_SHARED_BYTES = 128  # of a multiprocessor and clock
_PRODUCT_TFLOP_S = 790.0  # measured, large products by the library
ISSUE_SLOTS_PER_BYTE = _MULTIPROCESSORS * 4 * 32 * _CLOCK_HZ / _COPY_BYTES_PER_S
NEEDED_IN_FLIGHT_BYTES = _COPY_BYTES_PER_S * _LATENCY_CYCLES / _CLOCK_HZ / _MULTIPROCESSORS


def resident_warps(target: Target, registers: int, shared_bytes: int, num_warps: int) -> int:
    """Warps of programs of `num_warps` warps that one multiprocessor holds at once; 0 where a program does not fit."""
    by_scheduler = target.registers // max(8, -(-registers // 8) * 8)
    by_registers = by_scheduler * target.schedulers // num_warps
    taken = shared_bytes + target.reserved_bytes
    by_shared = target.shared_bytes // taken if taken else target.max_programs
    return min(by_registers, by_shared, target.max_programs, target.max_warps // num_warps) * num_warps


def derive(row: dict[str, Any], name: str) -> dict[str, Any]:
    """What follows from a measured row of the table for the target `name`; None where nothing is known.

    warps, occupancy: resident on a multiprocessor, and their share of the most that it can hold.
    per_element: instructions per element in the main loops. issue_share, half_rate_share: of the issue slots, and of
    those of the arithmetic-logic pipe, that memory leaves to an element. in_flight_share: bytes in flight over those
    needed. clocks: of a kernel with matrix products on sm_90, for 1,000 elements: issue, half_rate, special, products.
    """
    target = TARGETS[name]
    warps = resident_warps(target, row["registers"], row["shared_bytes"], row["num_warps"])
    elements, nbytes = row["elements_per_thread"], row["bytes_per_element"]
    derived: dict[str, Any] = {
        "warps": warps,
        "occupancy": round(warps / target.max_warps, 2),
        "per_element": round(row["loop_instructions"] / elements, 1) if elements else None,
    }
    known = name == "sm_90" and elements and nbytes
    slots = elements * nbytes * ISSUE_SLOTS_PER_BYTE if known else 0
    derived["issue_share"] = round(row["loop_instructions"] / slots, 2) if known else None
    derived["half_rate_share"] = round(2 * row["loop_half_rate"] / slots, 2) if known else None
    supplied = warps * target.warp_size * row["in_flight_bytes"]
    derived["in_flight_share"] = round(supplied / NEEDED_IN_FLIGHT_BYTES, 2) if name == "sm_90" else None
    derived["clocks"] = _clocks(row) if name == "sm_90" and row["multiply_adds_per_element"] else None
    return derived


def _clocks(row: dict[str, Any]) -> dict[str, int]:
    """Clocks that a multiprocessor of sm_90 takes for 1,000 elements by each of its four limits."""
    counts = {
        "issue": row["loop_instructions"],
        "half_rate": row["loop_half_rate"],
        "special": row["loop_special"],
        "products": row["loop_multiply_adds"],
    }
    return {limit: round(1000 * count / row["elements_per_thread"] / LIMITS[limit]) for limit, count in counts.items()}


def product_bounds(row: dict[str, Any], *lengths: int) -> dict[str, Any]:
    """What bounds a matrix product of half precision on sm_90; see the module's text.

    lengths: K of the products to bound. Returns clocks of a multiprocessor: step_products, step_shared, step_issue (one
    step along K), finish (one tile), shared (of issue slots, both together, for a step); then for every K
    ("tflop_s", K): the bound, and ("not_overlapped", K): if finishing were never hidden.
    """
    rows, cols, step = row["product_tile"]
    # Of a specialized program, two groups of four warps multiply; counts are those of one group, as of a plain warp.
    warps = 2 * row["num_warps"] if row["is_specialized"] else row["num_warps"]
    skipped = row["tile_instructions"] if row["tile_instructions"] < row["loop_instructions"] else 0
    products = rows * cols * step // LIMITS["products"]
    nbytes = 2 * step * (rows // 64 * (64 + cols) + rows + cols)
    issue = (row["loop_instructions"] - skipped) * warps * 32 // LIMITS["issue"]
    counts = (("tile_instructions", "issue"), ("tile_half_rate", "half_rate"), ("tile_special", "special"))
    finish_by = {limit: row[count] * warps * 32 // LIMITS[limit] for count, limit in counts}
    finish = max(finish_by.values())
    one_step = max(products, nbytes // _SHARED_BYTES, issue)
    bounds: dict[str, Any] = {
        "step_products": products,
        "step_shared": nbytes // _SHARED_BYTES,
        "step_issue": issue,
        "finish": finish,
        "finish_by": finish_by,
    }
    programs = resident_warps(TARGETS["sm_90"], row["registers"], row["shared_bytes"], row["num_warps"])
    has_twin = programs // row["num_warps"] >= 2 and row["resident_threads"] >= 64 * row["num_warps"]
    for length in lengths:
        steps = -(-length // step)
        added = steps * one_step + finish
        overlapped = max(steps * one_step, steps * issue + finish_by["issue"], finish)
        for name, taken in (("tflop_s", overlapped if has_twin else added), ("not_overlapped", added)):
            bounds[f"{name} {length}"] = round(_PRODUCT_TFLOP_S * steps * products / taken)
    return bounds
