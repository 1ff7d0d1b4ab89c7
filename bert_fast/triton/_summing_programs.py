"""How many programs share rows of which each leaves its sums."""

import torch

from bert_fast.triton._launch import ceil_div, persistent_programs
from bert_fast.triton._sizes import larger

# Rows of fp32 that a program adds up, term after term. A sum of N terms by P programs is off by some 2^-24 N / sqrt(P):
# of 32,768 rows 132 programs' sum is nearly twice as far off as 512 programs', in RMS. Terms of half precision are
# rounded more than that.
_MOST_ROWS = 64


def summing_programs(
    num_groups: int, rows: int, per_multiprocessor: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Programs for `num_groups` groups of `rows` rows of this dtype: all that run at once, of fp32 more if need be."""
    programs = persistent_programs(num_groups, per_multiprocessor, device)
    if dtype != torch.float32:
        return programs
    return larger(programs, ceil_div(num_groups, max(1, _MOST_ROWS // rows)))
