"""What a device can reach: copy bandwidth at several sizes, and the rate of a large bf16 matrix product."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.timing import ROTATION_BYTES, Ceilings, Contestant, copies, make_clock, take_turns

# Bytes read and written in all: those of [4096, 768] to [32768, 1024] in bf16, four tensors of each, and much more.
COPY_BYTES = (25 * 10**6, 100 * 10**6, 270 * 10**6, 1000 * 10**6, 4000 * 10**6)
MATMUL_SIZE = 8192
ROUNDS = 20


def measure_ceilings(
    device: torch.device, copy_bytes: tuple[int, ...] = COPY_BYTES, matmul_size: int = MATMUL_SIZE, rounds: int = ROUNDS
) -> Iterator[dict[str, Any]]:
    """Yields a result for each size of copy, then one for the matrix product; random content, caches cold.

    The ceiling of copying is the highest median of all sizes; a size that does not fit into memory is left out.
    """
    for size in copy_bytes:
        try:
            count = max(1, ROTATION_BYTES // size) if device.type == "cuda" else 1
            contestant = Contestant("copy", "copy", copies(size, count, device), make_clock(device))
            result = _measured(contestant, rounds)
            yield {"what": "copy", "bytes": size, **result, "gb_s": round(size / result["us"] / 1e3, 1)}
        except torch.OutOfMemoryError:
            break
    a, b = (torch.randn(matmul_size, matmul_size, device=device).to(torch.bfloat16) for _ in range(2))
    contestant = Contestant("matmul", "matmul", [partial(torch.matmul, a, b)], make_clock(device))
    result, flops = _measured(contestant, rounds), 2 * matmul_size**3
    # Digits, not decimals: others divide by it, however slow it was.
    tflop_s = float(f"{flops / result['us'] / 1e6:.4g}")
    yield {"what": "matmul_bf16", "flops": flops, **result, "tflop_s": tflop_s}


def _measured(contestant: Contestant, rounds: int) -> dict[str, float]:
    take_turns([contestant], rounds)
    return contestant.times.microseconds()


def ceilings_of(lines: list[dict[str, Any]]) -> Ceilings:
    """The highest rates among stored lines of kind "ceiling"."""
    copy = [line["gb_s"] for line in lines if "gb_s" in line]
    matmul = [line["tflop_s"] for line in lines if "tflop_s" in line]
    return Ceilings(max(copy, default=None), max(matmul, default=None))
