"""A part of `make gpu` over the null driver: kernels are compiled and launched, nothing runs, nothing is computed.

    python -m benchmarks.gpu.dry DEVICE PART --run FILE ...        the rest as of `benchmarks.gpu.parts`

What is left of a case's time is the host's: imports, Triton's compilation, launches.
"""

import sys
import warnings
from typing import Any

_libraries: list[Any] = []  # implementations are gone with the object that holds them


def start(name: str) -> None:
    """Before bert_fast is imported. The library's matrix products return memory that nobody has written."""
    from tools.null_driver.driver import start as start_driver

    start_driver(name)
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Warning only once for all operators")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("mm", lambda a, b: a.new_zeros(a.shape[0], b.shape[1]), "CPU")
    aten.impl("mm.out", lambda a, b, *, out: out, "CPU")
    aten.impl("addmm", lambda x, a, b, *, beta=1, alpha=1: a.new_zeros(a.shape[0], b.shape[1]), "CPU")
    aten.impl("addmm.out", lambda x, a, b, *, beta=1, alpha=1, out: out, "CPU")
    aten.impl("addmm_", lambda x, a, b, *, beta=1, alpha=1: x, "CPU")
    _libraries.append(aten)


if __name__ == "__main__":
    start(sys.argv[1])
    from benchmarks.gpu import parts

    sys.exit(parts.main(sys.argv[2:]))
