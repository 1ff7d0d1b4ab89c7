"""Runs under callgrind: `python -m tools.host_cost.child case,case precision,precision [kind]`; dumps each part of a step.

Prints a line of JSON for every dump, in their order: [case, precision, kind, layers, part].
"""

import ctypes
import gc
import json
import sys
import warnings

import torch

from tools.host_cost import build

__all__: list[str] = []


def main() -> None:
    requests = ctypes.PyDLL(str(build.requests()))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    with _left_to_the_library():
        from tools.null_driver.driver import start

        start("sm_90")
    torch.ops.load_library(str(build.products()))
    from tools.host_cost.cases import FEW, MANY, batches, make
    from tools.null_driver.steps import PARTS

    for case in sys.argv[1].split(","):
        warm, counted = batches(case)
        for precision in sys.argv[2].split(","):
            for kind in sys.argv[3:] or ("ours", "transformers"):
                for num_layers in (FEW, MANY):
                    step = make(case, precision, kind, num_layers)
                    for inputs in warm:
                        step.inputs = inputs
                        for part in PARTS:
                            step.run(part)
                    gc.collect()
                    gc.disable()
                    for inputs in counted:
                        step.inputs = inputs
                        for part in PARTS:
                            step.prepare(part)
                            requests.start_counting()
                            getattr(step, part)()
                            requests.stop_counting()
                            print(json.dumps([case, precision, kind, num_layers, part]), flush=True)
                    gc.enable()


class _left_to_the_library:  # noqa: N801  reads as what it does
    """The null driver's own products that compute nothing are not registered: the library's are."""

    def __enter__(self) -> None:
        self._impl = impl = torch.library.Library.impl

        def without(library: object, name: object, *args: object, **kwargs: object) -> object:
            if name in ("mm.dtype_out", "addmm.dtype_out"):
                return None
            return impl(library, name, *args, **kwargs)  # type: ignore[arg-type]

        torch.library.Library.impl = without  # type: ignore[method-assign,assignment]

    def __exit__(self, *_: object) -> None:
        torch.library.Library.impl = self._impl  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
