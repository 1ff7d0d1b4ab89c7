"""Counts what steps of BERT launch, over a CUDA driver that runs nothing.

    python -m tools.null_driver            launches, small launches, Python calls; what is above tests/launches.json
    python -m tools.null_driver --record   writes them down

docs/null_driver.md says what the numbers mean.
"""

import argparse
import sys

import torch

from tools.null_driver import build, table
from tools.null_driver.driver import DEVICES, start


def _arguments() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m tools.null_driver", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", choices=DEVICES, default="sm_90", help="default: %(default)s, which the record is of"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="steps whose name holds this text")
    parser.add_argument("--kernels", action="store_true", help="launches by kernel, small launches by operator")
    parser.add_argument("--record", action="store_true", help="write the numbers down")
    arguments = parser.parse_args()
    if arguments.record and (arguments.only or arguments.device != "sm_90"):
        parser.error("--record writes all steps, of sm_90")
    reason = build.missing()
    if reason is not None:
        parser.error(reason)
    return arguments


def _print_counts(found: table.Table, kernels: bool) -> None:
    print(f"{'':<58}{'launches':>9}{'maps':>6}{'products':>9}{'small':>6}{'calls':>7}")
    for step, part, *numbers in table.rows(found):
        print(f"{step + ', ' + part:<58}" + "".join(f"{n:>{w}}" for n, w in zip(numbers, (9, 6, 9, 6, 7), strict=True)))
        if kernels:
            for kind in ("launches", "small"):
                for name, n in found[step][part][kind].items():
                    print(f"    {n:>4} {name}")


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # results that nobody wrote hold any bits, and slow the CPU's products
    driver = start(arguments.device)
    found = table.measure(driver, arguments.only)
    _print_counts(found, arguments.kernels)
    if driver.refusals[0]:
        print(f"refused: {driver.refusals[0]}, the last one: {driver.refusals[1]}")
    if arguments.record:
        table.write(found)
    if arguments.device != "sm_90":
        return 0
    wrong = table.risen(found, table.read())
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
