"""Names of the kernels that cases of all ops launch, as JSON: `python -m tests.benchmarks.case_launches SIZE ...`.

Over the null driver, without compiling anything, and on zeros: drawing random numbers, and computing with what was
drawn, took most of the time.
SIZE: of the cases, "smoke", "gpu"; of cases that differ in rows alone, the one with the fewest.
"""

import json
import math
import mmap
import re
import sys
from collections.abc import Iterable
from typing import Any

import benchmarks.gpu.dry

benchmarks.gpu.dry.start("sm_90")

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from benchmarks.aot.launches import capture  # noqa: E402
from benchmarks.kernels.case import KernelCase  # noqa: E402
from benchmarks.kernels.timing import results_of  # noqa: E402
from benchmarks.registry import family_names, kernel_cases  # noqa: E402

aten = torch.ops.aten


def fewest_rows(cases: Iterable[KernelCase]) -> list[KernelCase]:
    """Of each family, dtype, variant and widths."""
    found: dict[tuple[object, ...], KernelCase] = {}
    for case in sorted(cases, key=lambda case: [int(n) for n in re.findall(r"\d+", case.shape)]):
        found.setdefault((case.family, case.dtype, case.variant, case.shape.partition("x")[2]), case)
    return list(found.values())


class OnZeros(TorchDispatchMode):
    """Replaces random numbers, and results of elementwise functions of large tensors, by zeros from the system, whose
    pages take no time until a program writes to them. Integers are computed as usual, since launches depend on them.
    """

    DRAWN = (aten.randn.default, aten.randn.generator)
    ELEMENTWISE = (
        aten._to_copy.default, aten.add.Tensor, aten.mul.Tensor, aten.pow.Tensor_Scalar, aten.rand_like.default,
    )  # fmt: skip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.DRAWN:
            return zeros(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if func in self.ELEMENTWISE and args[0].is_floating_point() and args[0].numel() > 2**16:
            dtype = kwargs.get("dtype") or (torch.result_type(*args[:2]) if args[1:] else args[0].dtype)
            tensors = [one for one in args if isinstance(one, torch.Tensor)]
            if dtype.is_floating_point and all(one.is_contiguous() for one in tensors):
                return zeros(torch.broadcast_shapes(*(one.shape for one in tensors)), dtype)
        return func(*args, **kwargs)


def zeros(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    size = math.prod(shape := tuple(shape)) * dtype.itemsize
    memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8) if size else torch.zeros(0, dtype=torch.uint8)
    return memory.view(dtype).view(shape)


def main() -> None:
    found: dict[str, dict[str, list[str]]] = {}
    for size in sys.argv[1:]:
        of_size = found[size] = {}
        for case in fewest_rows(kernel_cases(size, family_names())):
            with OnZeros():
                problem = case.make(torch.device("cpu"))
            with capture() as launches:
                results_of(problem)
            of_size[case.name] = sorted({launch.kernel.__name__ for launch in launches})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
