"""Runs in a process under valgrind: takes steps, and has callgrind count the parts of some of them.

    python -m tools.host_cost.count PRECISION CONTESTANT CASE [CASE ...]

Without valgrind it does the same and counts nothing, which leaves compiled kernels in Triton's cache.
"""

import ctypes
import gc
import os
import sys
from typing import Any
from unittest import mock

NUM_WARM, NUM_COUNTED = 8, 3
CAPABILITY = "sm_90"


def start() -> Any:
    """Starts the null driver, and replaces operators by ones that compute nothing."""
    import torch

    from tools.host_cost import build
    from tools.null_driver import driver

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    impl = torch.library.Library.impl

    def others(library: Any, name: Any, *arguments: Any, **keywords: Any) -> None:
        if str(name) not in ("mm.dtype_out", "addmm.dtype_out"):  # in Python; the library has them in C++
            impl(library, name, *arguments, **keywords)

    with mock.patch.object(torch.library.Library, "impl", others):
        null_driver = driver.start(CAPABILITY, empties_kernels=True)
    torch.ops.load_library(str(build.no_arithmetic()))
    if os.environ.get("BERT_FAST_PRODUCTS") == "cublaslt":
        from tools.null_driver.products import NullProducts

        NullProducts()
    return null_driver


def main() -> int:
    precision, contestant, *names = sys.argv[1:]
    driver = start()
    from tools.host_cost import build
    from tools.host_cost.cases import CASES, LAYERS, batches, make
    from tools.null_driver.steps import PARTS

    callgrind = ctypes.PyDLL(str(build.callgrind_library()))
    steps = {}
    for case in [one for one in CASES if one.name in names]:
        for num_layers in LAYERS:
            steps[case, num_layers] = step = make(case, precision, contestant, num_layers)
            for step.inputs in batches(case, NUM_WARM, seed=1):
                for part in PARTS:
                    step.run(part)
    gc.collect()
    gc.disable()
    callgrind.host_cost_begin()
    for (case, num_layers), step in steps.items():
        for step.inputs in batches(case, NUM_COUNTED, seed=2):
            for part in PARTS:
                step.prepare(part)
                run, label = getattr(step, part), f"{case.name}|{num_layers}|{part}".encode()
                callgrind.host_cost_start()
                run()
                callgrind.host_cost_stop(label)
    if driver.refusals[0]:
        raise RuntimeError(f"the null driver refused {driver.refusals[0]} calls, the last one: {driver.refusals[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
