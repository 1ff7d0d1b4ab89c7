"""The stored tables of matrix products, made from the results of parts `gemm` and `specialized` of `make gpu`.

    python -m benchmarks.gemm_tuning --write-table     tables from all stored results
    python -m benchmarks.gemm_tuning --admit           compiles every table's tiles by the Triton at hand, and says in
                                                       the table whether it is for this one

Neither needs a GPU.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.gemm_tuning.table import admit, write_tables
from benchmarks.kit.results import RESULTS


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 where no table can be made, or one is not for this Triton."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gemm_tuning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write-table", action="store_true", help="write tables")
    action.add_argument("--admit", action="store_true", help="whether stored tables are for this Triton")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results; default: %(default)s")
    parser.add_argument("--output", type=Path, help="folder of the tables; default: that of the package")
    options = parser.parse_args(arguments)
    return write_tables(options.results, options.output) if options.write_table else admit(options.output)


if __name__ == "__main__":
    sys.exit(main())
