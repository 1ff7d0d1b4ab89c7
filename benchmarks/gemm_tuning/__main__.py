"""Our matrix products beside the library's, tile by tile: what the stored table of a GPU is made from.

    python -m benchmarks.gemm_tuning [--seconds N] [--only TEXT] [--specialized]
                                                                     times on this GPU, the most telling products first
    python -m benchmarks.gemm_tuning --write-table                   tables from all stored results; needs no GPU
    python -m benchmarks.gemm_tuning --admit                         compiles every table's tiles by the Triton at hand,
                                                                     and says in the table whether it is for this one
    python -m benchmarks.gemm_tuning --list

Part `gemm` of `make gpu` does the first within its budget. For every product of BERT's layers and of its vocabulary,
forward and backward, the library with separate kernels and our kernel with every candidate tile (`_gemm_tiles.py` of
bert_fast/triton) take turns; a contestant is timed only after its results were found right. Those far behind after a
few rounds drop out.
"""

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.gemm_tuning.products import PRODUCTS
from benchmarks.gemm_tuning.table import admit, write_tables
from benchmarks.gpu.parts import Job, gemm
from benchmarks.gpu.run import Run
from benchmarks.kit.results import RESULTS, gpu_environment, slug


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 without a device, or where no table can be made."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gemm_tuning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write-table", action="store_true", help="write tables instead of timing")
    parser.add_argument("--admit", action="store_true", help="whether stored tables are for this Triton")
    parser.add_argument("--list", action="store_true", help="print the products and stop")
    parser.add_argument("--specialized", action="store_true", help="tiles with warps for loads, instead of all others")
    parser.add_argument("--only", default="", help="products whose name contains a text")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all products together")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results; default: %(default)s")
    parser.add_argument("--output", type=Path, help="folder of the tables; default: that of the package")
    options = parser.parse_args(arguments)
    products = [product for product in PRODUCTS if options.only in product.name]
    if options.list:
        print("\n".join(product.name for product in products))
        return 0
    if options.write_table:
        return write_tables(options.results, options.output)
    if options.admit:
        return admit(options.output)
    if not torch.cuda.is_available():
        print("no CUDA or ROCm device: nothing was timed")
        return 1
    shared = gpu_environment()
    run = Run(str((options.results / f"{slug(shared['gpu'])}.jsonl").absolute()), shared)
    gemm(Job("gemm", run, "specialized" if options.specialized else "", options.seconds), products)
    return 0


if __name__ == "__main__":
    sys.exit(main())
