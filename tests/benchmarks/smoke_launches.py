"""Names of the kernels that the smoke cases of all ops launch, as JSON: `python -m tests.benchmarks.smoke_launches`.

Over the null driver, and without compiling anything.
"""

import json

import benchmarks.smoke.dry

benchmarks.smoke.dry.start("sm_90")

import torch  # noqa: E402

from benchmarks.aot.launches import capture  # noqa: E402
from benchmarks.kernels.timing import results_of  # noqa: E402
from benchmarks.registry import family_names, kernel_cases  # noqa: E402


def main() -> None:
    found: dict[str, list[str]] = {}
    for case in kernel_cases("smoke", family_names()):
        with capture() as launches:
            results_of(case.make(torch.device("cpu")))
        found[case.name] = sorted({launch.kernel.__name__ for launch in launches})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
