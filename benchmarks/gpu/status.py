"""What is owed to a GPU: one line per Triton kernel that no GPU result is of; nothing when none is owed.

    python -m benchmarks.gpu.status [--results FOLDER]

Needs neither torch nor triton. A result is a line of FOLDER/*.jsonl (benchmarks/results) that a case left which was
verified and timed on a GPU, or a tile of a matrix product (kind "gemm"), since a case may leave its products to the
library. It counts for the kernels that were launched, as long as what they are made of is what the line names
(benchmarks/kit/programs.py).
"""

import argparse
import sys
from pathlib import Path

from benchmarks.kit.programs import digest, files, kernel_names
from benchmarks.kit.results import RESULTS, read_lines


def measured(*folders: Path) -> set[tuple[str, str]]:
    """(kernel, digest) of everything that was verified and timed on a GPU, by the results in the folders."""
    lines = (line for folder in folders for path in sorted(folder.glob("*.jsonl")) for line in read_lines(path))
    return {
        (kernel, made_of)
        for line in lines
        if (line.get("kind"), line.get("provider")) in {("timing", "bert_fast"), ("gemm", None)}
        if line.get("gpu") and line.get("verified") is True
        for kernel, made_of in line.get("kernels", {}).items()
    }


def owed(*folders: Path) -> list[tuple[str, str, str]]:
    """(file, kernel, digest) of every kernel that no GPU result is of.

    folders: where results are; benchmarks/results where none is named.
    """
    done = measured(*(folders or (RESULTS,)))
    kernels = [(file, kernel, digest(file, kernel)) for file in files() for kernel in kernel_names(file)]
    return [(file, kernel, made_of) for file, kernel, made_of in kernels if (kernel, made_of) not in done]


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.status", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with the results; default: %(default)s")
    for file, kernel, current in owed(parser.parse_args(arguments).results):
        print(f"{file}: {kernel} ({current})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
