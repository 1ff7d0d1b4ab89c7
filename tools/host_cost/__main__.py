"""Counts the instructions that the host spends on a training step, ours beside transformers': docs/host_cost.md.

    python -m tools.host_cost            all steps, some ten minutes
    python -m tools.host_cost --only X   steps whose name holds X
    python -m tools.host_cost --record   writes tests/host_cost.json
    python -m tools.host_cost --replayed the share of calls that ran by a program that was there
"""

import argparse
import json
import sys

from tools.host_cost import build, counts
from tools.host_cost.table import RECORD, PRECISIONS, lines, rows

__all__: list[str] = []


def main() -> int:
    from tools.host_cost.cases import CASES

    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m tools.host_cost", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--replayed", action="store_true")
    arguments = parser.parse_args()
    if arguments.replayed:
        from tools.host_cost.replayed import shares

        for name, share, programs in shares():
            print(f"{name:<40}{share:>8.1%}{programs:>5} programs", flush=True)
        return 0
    reason = build.missing()
    if reason is not None:
        parser.error(reason)
    found: counts.Counts = {}
    for case in CASES:
        if arguments.only in case:
            found |= counts.count([case], PRECISIONS)
            print("\n".join(lines(rows({k: v for k, v in found.items() if k.startswith(f"{case}, ")}))), flush=True)
    if arguments.record:
        RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
