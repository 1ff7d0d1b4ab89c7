"""The ahead-of-time gate: every Triton kernel, in every launch configuration that ships, compiled without a GPU.

    python -m benchmarks.aot            compiles, prints, and writes the table
    python -m benchmarks.aot --check    compiles and compares with the table; exit 1 where `check.py` finds fault
    python -m benchmarks.aot --quick    writes, but takes rows of unchanged code as they are, all but a sample
    python -m benchmarks.aot --check --quick
                                        the same without writing: what `make test` calls
    python -m benchmarks.aot --family layer_norm --target sm_90 --only "H=768 bf16"
                                        compiles and prints a part; never writes (each option may be given repeatedly)

What is compiled is what ships: the launchers are called, with a recorder in the place of Triton's launcher
(`launches.py`). Results are remembered in `build/aot` (`compile.py`), so only what changed is compiled again.

Every row of the table holds a hash of all that decides it (`code_of`): the source of the kernel and of its helpers,
signature, constants, options, target, Triton's version. `--quick` calls all launchers too, and trusts the table for
what hashes to the same; what it compiles in spite of that, drawn by hash (one in 16, of cards one in 128), must agree.

A table belongs to one version of Triton: there is one of the newest, and one of the oldest that is supported, for sm_90
alone, which a run under that version writes and checks in the same way. Under a version between them `--check` leaves
out the comparison of registers, which another version allocates differently; all that holds for every compiler is
checked as always. `--quick` compiles one configuration in 4 then.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Container
from time import monotonic
from typing import Any

from benchmarks.aot import cards, table
from benchmarks.aot.check import compare, with_dropout_cost
from benchmarks.aot.compile import code_of, measure
from benchmarks.aot.device import CARDS, EVERY, TARGETS
from benchmarks.aot.launches import configurations
from benchmarks.registry import family_names
from bert_fast.terminal import Part, StatusLine

# With `--quick`: of the rows that it would take from the table one in so many is compiled all the same; and of all
# configurations under another version of Triton, of which no table knows anything.
_ONE_IN, _ONE_IN_OF_ANOTHER_TRITON = 16, 4
_FEWER_OF_CARDS = 8  # times


def measured(
    families: list[str], targets: list[str], only: list[str], *, quick: bool = False, verbose: bool = False
) -> dict[str, Any]:
    """The table of everything that the filters admit.

    only: words of which a name must hold all; dropout is given its price wherever the kernel without is there too.
    quick: rows of unchanged code come from the committed table, but for a sample.
    """
    import triton

    line = StatusLine(is_transient=True)

    def report(done: int, total: int) -> None:
        if verbose:
            line.show([Part(f"compiled {done} of {total}", 0)], done / total)

    def admitted(name: str) -> bool:
        # The kernel without dropout is measured with the one that drops: the price is their difference.
        return all(text in name or text in name.replace(" plain", " dropout") for text in only)

    wanted = {target: [one for one in configurations(families, target) if admitted(one.name)] for target in targets}
    known = {}
    if quick:
        committed = _committed(triton.__version__)
        is_same = committed["triton"] == triton.__version__
        for target, ones in wanted.items():
            one_in = (_ONE_IN if is_same else _ONE_IN_OF_ANOTHER_TRITON) * (_FEWER_OF_CARDS if target in CARDS else 1)
            rows = [row for key, row in committed["kernels"].items() if key.endswith(f" {target}")]
            if is_same:
                known |= {row["code"]: row for row in rows if not _is_drawn(row["code"], one_in)}
            else:
                wanted[target] = [one for one in ones if _is_drawn(code_of(one, target), one_in)]
    with contextlib.closing(line):
        if verbose:
            line.open(is_patient=True)
        rows = with_dropout_cost(measure(wanted, report, known))
    return {"triton": triton.__version__, "kernels": rows}


def _committed(version: str) -> dict[str, Any]:
    """What is written down of all targets for this version of Triton, or for the newest."""
    if _is_oldest(version):
        return table.read(table.OLDEST_PATH)
    found = table.read()
    return found | {"kernels": found["kernels"] | cards.read()["kernels"]}


def _is_oldest(version: str) -> bool:
    return version == table.read(table.OLDEST_PATH)["triton"]


def _part(found: dict[str, Any], targets: Container[str]) -> dict[str, Any]:
    """The rows of these targets."""
    return found | {"kernels": {key: row for key, row in found["kernels"].items() if key.rsplit(" ", 1)[1] in targets}}


def _is_drawn(code: str, one_in: int) -> bool:
    return int(code, 16) % one_in == 0


def _write(found: dict[str, Any], *, is_oldest: bool) -> None:
    """The records of this version of Triton."""
    if is_oldest:
        written = {table.OLDEST_PATH: table.to_json(found)}
    else:
        written = {
            table.TABLE_PATH: table.to_json(_part(found, TARGETS)),
            cards.CARDS_PATH: cards.to_json(_part(found, CARDS)),
        }
    for path, text in written.items():
        path.write_text(text)
    print("written: " + ", ".join(path.name for path in written))


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot", description="Ahead-of-time gate of all kernels.")
    parser.add_argument("--check", action="store_true", help="compare with the committed table instead of writing it")
    parser.add_argument("--quick", action="store_true", help="compile what changed, and a sample")
    parser.add_argument("--family", action="append", choices=family_names(), help="this op family only")
    parser.add_argument("--target", action="append", choices=list(EVERY), help="this GPU architecture only")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="names that contain TEXT only")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 replaces the compiler by the interpreter; unset it")
    import triton

    is_oldest = _is_oldest(triton.__version__)
    whole = not (options.family or options.target or options.only)
    targets = options.target or (["sm_90"] if is_oldest else list(EVERY))
    start = monotonic()
    found = measured(
        sorted(options.family or family_names()), targets, options.only, quick=options.quick, verbose=True
    )  # fmt: skip
    if not (options.check and whole):
        print(table.text(_part(found, TARGETS)))
        print(cards.text(_part(found, CARDS)))
    print(f"{len(found['kernels'])} compilations looked at in {monotonic() - start:.0f} s, Triton {found['triton']}")
    if whole and not options.check:
        _write(found, is_oldest=is_oldest)
        problems = compare(found, found)
    else:
        problems = compare(found, _committed(found["triton"]), whole=whole)
    for problem in problems:
        print(f"FAIL {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
