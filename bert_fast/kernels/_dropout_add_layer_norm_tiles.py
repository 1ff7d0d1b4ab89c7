"""How rows of dropout_add_layer_norm are laid over threads, and how many programs a multiprocessor holds at once."""

import functools
from dataclasses import dataclass

import torch

from bert_fast.kernels._launch import RowTile, ceil_div, row_tile

__all__ = ["LaunchConfig", "launch_config"]


@dataclass(frozen=True)
class LaunchConfig:
    """How rows of one width and dtype are laid over threads, and how many programs a multiprocessor holds at once."""

    forward: RowTile
    forward_programs_per_multiprocessor: int
    backward: RowTile
    backward_programs_per_multiprocessor: int
    few_registers: bool  # of backward
    backward_stages: int  # rounds whose loads are in flight
    keeps_h: bool  # where `saves` leaves the choice


@functools.cache
def launch_config(hidden_size: int, dtype: torch.dtype, name: str) -> LaunchConfig:
    """For rows of 1 to 8,192 columns of fp32, fp16 or bf16; name: of the processor, by `_launch.architecture`."""
    # Forward: 32 elements of a row in a thread make a row of 1,024 the business of one warp, whose sums need neither
    # shared memory nor a barrier. Up to 24 take at most 80 registers, 32 take 104, fp32 up to 168: 20, 16 or 12 warps
    # to a multiprocessor (65,536 registers). Even these keep 60 KB of loads in flight, several times what the latency
    # of memory asks for.
    forward = row_tile(hidden_size, dtype, max_elements=32, best_elements=32)
    forward_elements = ceil_div(hidden_size, forward.chunk_cols) * forward.vector
    forward_warps = 12 if dtype == torch.float32 else 16 if forward_elements > 24 else 20
    # Backward: an element also costs a thread three running sums and the inverse of its weight. 24 fill the registers
    # without spilling (H = 768: a row to a warp); 32 do not, so H = 1,024 takes two warps to a row. With 8 to a thread
    # there are 20 warps and room to load two rows ahead, of up to 768 columns, or one, for barriers and more
    # instructions: an H200 takes 0.7 to 0.85 of the time at H = 768, 0.87 at 1,024
    # (docs/kernels/dropout_add_layer_norm.md). Measured there alone.
    is_fp32 = dtype == torch.float32
    loads_ahead = name == "sm_90" and not is_fp32 and 512 < hidden_size <= 1024
    most, best = (8, 8) if loads_ahead else (24, 16)
    backward = row_tile(hidden_size, dtype, max_elements=most, best_elements=best)
    elements = ceil_div(hidden_size, backward.chunk_cols) * backward.vector
    # Warps that the register file holds: 8 of up to 255, 12 of up to 168, 20 of up to 96. More programs would run in a
    # second, nearly empty round. The ahead-of-time gate checks the registers behind this, and those of forward.
    backward_warps = 20 if loads_ahead else 8 if elements > 16 else 12
    # 512 threads to a row, as of 4,097 columns, have 128 registers each. fp32 has instructions to spare: an element
    # leaves time for twice as many as in half precision. Together there is no room to recover n.
    is_wide = backward.num_warps >= 16
    return LaunchConfig(
        forward,
        max(1, forward_warps // forward.num_warps),
        backward,
        max(1, backward_warps // backward.num_warps),
        few_registers=is_wide or (is_fp32 and elements >= 16),
        backward_stages=1 if not loads_ahead else 3 if hidden_size <= 768 else 2,
        keeps_h=is_wide and is_fp32,
    )
