"""Names of the kernels that cases of all ops launch, as JSON: `python -m tests.benchmarks.case_launches SIZE ...`.

Over the null driver, without compiling anything, and on zeros: drawing random numbers took most of the time.
SIZE: of the cases, "smoke", "gpu"; of cases that differ in rows alone, the one with the fewest.
"""

import json
import re
import sys
from collections.abc import Iterable
from typing import Any
from unittest import mock

import benchmarks.smoke.dry

benchmarks.smoke.dry.start("sm_90")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.aot.launches import capture  # noqa: E402
from benchmarks.kernels.case import KernelCase  # noqa: E402
from benchmarks.kernels.timing import results_of  # noqa: E402
from benchmarks.registry import family_names, kernel_cases  # noqa: E402


def fewest_rows(cases: Iterable[KernelCase]) -> list[KernelCase]:
    """Of each family, dtype, variant and widths."""
    found: dict[tuple[object, ...], KernelCase] = {}
    for case in sorted(cases, key=lambda case: [int(n) for n in re.findall(r"\d+", case.shape)]):
        found.setdefault((case.family, case.dtype, case.variant, case.shape.partition("x")[2]), case)
    return list(found.values())


def zeros(*size: Any, generator: torch.Generator | None = None, **options: Any) -> torch.Tensor:
    """In place of `torch.randn`; NumPy's, since memory that nobody writes to costs nothing."""
    (shape,) = size if isinstance(size[0], tuple) else (size,)
    return torch.from_numpy(np.zeros(shape, np.float32)).to(**options)


def main(sizes: list[str]) -> None:
    found: dict[str, dict[str, list[str]]] = {}
    for size in sizes:
        of_size = found[size] = {}
        for case in fewest_rows(kernel_cases(size, family_names())):
            with capture() as launches, mock.patch.object(torch, "randn", zeros):
                results_of(case.make(torch.device("cpu")))
            of_size[case.name] = sorted({launch.kernel.__name__ for launch in launches})
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
