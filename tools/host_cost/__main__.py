"""Counts the instructions that the host spends on steps of BERT, by callgrind over a CUDA driver that runs nothing.

    python -m tools.host_cost            all lines, beside transformers' with SDPA; what is above tests/host_cost.json
    python -m tools.host_cost --record   writes them down
    python -m tools.host_cost --programs the share of layers run by a program that was there, for real lengths

docs/host_cost.md says what is counted and what is not.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product

from tools.host_cost import build, table
from tools.host_cost.cases import CASES, CONTESTANTS, PRECISIONS
from tools.host_cost.measure import counted


def _arguments() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m tools.host_cost", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="cases, or distributions, whose name holds this text"
    )
    parser.add_argument("--precision", choices=PRECISIONS, help="default: all")
    parser.add_argument("--contestant", choices=CONTESTANTS, help="default: all")
    parser.add_argument("--record", action="store_true", help="write the numbers down")
    parser.add_argument("--programs", action="store_true", help="count calls that find a program instead")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes at once; default: %(default)s")
    arguments = parser.parse_args()
    if arguments.record and (arguments.only or arguments.precision or arguments.contestant):
        parser.error("--record writes all lines")
    reason = build.missing(needs_valgrind=not arguments.programs)
    if reason is not None:
        parser.error(reason)
    return arguments


def main() -> int:
    arguments = _arguments()
    if arguments.programs:
        from tools.host_cost.programs import print_shares

        return print_shares(arguments.only)
    names = [case.name for case in CASES if arguments.only in case.name]
    precisions = [arguments.precision] if arguments.precision else PRECISIONS
    contestants = [arguments.contestant] if arguments.contestant else CONTESTANTS
    build.all_libraries()
    runs = [*product(precisions, contestants)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        made = dict(zip(runs, pool.map(lambda run: counted(run[0], run[1], names), runs), strict=True))
    found: table.Table = {
        precision: {name: {one: made[precision, one][name] for one in contestants} for name in names}
        for precision in precisions
    }
    print(f"{'millions of instructions':<62}" + "".join(f"{one:>14}" for one in contestants) + f"{'share':>8}")
    for precision, case, part, numbers, share in table.rows(found):
        told = "" if share is None else f"{share:>8.2f}"
        print(f"{f'{precision}, {case}, {part}':<62}" + "".join(f"{number:>14.3f}" for number in numbers) + told)
    if arguments.record:
        table.write(found)
    wrong = table.risen(found, table.read()) if "fused" in contestants else []
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
