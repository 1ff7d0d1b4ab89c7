"""What an op family tells the ahead-of-time gate: calls of its launchers, and what the listings are judged by."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class KernelFacts:
    """What the listing of a compiled kernel is judged by and does not say itself; None: nothing is claimed.

    live_elements: of one [T, H] tensor that one program treats at a time, padding left out; of attention, scores of a
        tile.
    bytes_per_element: that the floor reads and writes per live element (for issue-slot budgets).
    resident_programs: that the launcher counts on one NVIDIA multiprocessor to hold at once.
    multiply_adds: of its matrix products per live element.
    needs_warpgroup_products: whether dtype and tiles (64 rows for four warps) let sm_90 use its fastest products.
    product_tile: (rows, columns, step along the sum) of the output tile of a matrix product.
    needs_bulk_copies: whether sm_90's copy engine moves the operands; is_specialized: with warps of its own for it.
    """

    live_elements: int | None = None
    bytes_per_element: float | None = None
    resident_programs: int = 1
    multiply_adds: int | None = None
    needs_warpgroup_products: bool = False
    product_tile: tuple[int, int, int] | None = None
    needs_bulk_copies: bool = False
    is_specialized: bool = False


@dataclass(frozen=True)
class AotCase:
    """One call of a family's launchers, with tensors of a few rows; every kernel that it launches is compiled.

    name: stable, without the dropout flag; has_dropout: whether something is dropped, None for a family without.
    kernels: by name; a kernel that is not there is compiled, and nothing is claimed of it.
    """

    name: str
    launch: Callable[[], object]
    kernels: Mapping[str, KernelFacts] = field(default_factory=dict)
    has_dropout: bool | None = None


def facts_of_rows(
    op: str, config: Any, width: int, *, forward_bytes: float, backward_bytes: float
) -> dict[str, KernelFacts]:
    """Facts of an op's forward and backward kernels, whose programs treat tiles of whole rows.

    config: the family's launch configuration. width: of a row. forward_bytes, backward_bytes: per element.
    """
    passes = (("fwd", "forward", forward_bytes), ("bwd", "backward", backward_bytes))
    return {
        f"_{op}_{short}_kernel": KernelFacts(
            getattr(config, name).rows * width, nbytes, getattr(config, f"{name}_programs_per_multiprocessor", 1)
        )
        for short, name, nbytes in passes
    }
