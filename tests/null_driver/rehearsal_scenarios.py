"""What the tests of the rehearsal plant: calls of which some do not fit, and of which some change."""

import itertools
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from tools.null_driver.driver import NullDriver
from tools.null_driver.rehearsal import rehearse


@triton.jit
def _store_kernel(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), n)


def planted(driver: NullDriver) -> dict[str, Any]:
    """A product whose tile is too large for cards, kernels that change from call to call, one that is all right."""
    from bert_fast.triton import _gemm
    from bert_fast.triton._gemm_tiles import Tile

    x, weight = (torch.zeros(256, 256, dtype=torch.bfloat16) for _ in range(2))
    y, counter = torch.zeros(128), itertools.count(1)
    large = Tile(128, 128, 64, 8, 5)  # five stages of 32 KB, of which one is in registers

    def change_grid() -> None:
        _store_kernel[(next(counter),)](y, 5, BLOCK=128)

    def stop() -> None:
        raise ValueError("a launcher's own")

    calls = {
        "all right": lambda: _store_kernel[(1,)](y, 5, BLOCK=128),
        "large": lambda: _gemm.product(x, weight, tile=large),
        "another kernel": lambda: _store_kernel[(1,)](y, 5, BLOCK=128, num_warps=2 ** (next(counter) % 3)),
        "another grid": change_grid,
        "no programs": lambda: driver.lib.cuLaunchKernel(None, 0, 1, 1, 32, 1, 1, 0, None, None, None),
        "stops": stop,
    }
    return rehearse(driver, [(name, SimpleNamespace(launch=launch)) for name, launch in calls.items()])


REHEARSAL_SCENARIOS = {"planted": planted}
