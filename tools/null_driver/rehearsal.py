"""Rehearses what ships: every launch configuration on every chip, compiled, launched over the null driver, twice.

    python -m tools.null_driver.rehearsal                          all chips, each in a process, one on each core
    python -m tools.null_driver.rehearsal --device sm_86 --only "gelu wide"
    python -m tools.null_driver.rehearsal --record                 all, writes record and table

The calls are those that the ahead-of-time gate compiles kernels of (`aot_cases` of `benchmarks/families`), so kernels
come from Triton's cache where the gate has run. docs/null_driver.md says what is looked at.
"""

import argparse
import ast
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from tools.null_driver import build
from tools.null_driver.driver import DEVICES, NullDriver, start

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "rehearsal.json"
PAGE = ROOT / "docs" / "null_driver.md"
# Launched where a table of addresses is not kept already, so by where memory happens to lie.
_BY_ADDRESS = ("_store_addresses_kernel",)


def rehearse(driver: NullDriver, cases: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """What the launches of these cases take of the driver's chip, and "faults", a line each.

    cases: (name, `AotCase`). Each is called twice: the second time Triton has nothing to compile, prepared launches
    take its place, and must ask for the same.
    """
    found: dict[str, Any] = {
        "calls": 0,
        "kernels": 0,
        "launches": 0,
        "tensor maps": 0,
        "shared bytes": 0,
        "programs": 0,
    }
    faults = []
    with _keys_of_the_gate():
        for name, case in cases:
            first, second = _call(driver, case), _call(driver, case)
            faults += [f"{name}: {what}" for what in (*first["faults"], *second["faults"])]
            if second["compiled"]:
                faults.append(f"{name}: compiled again: {', '.join(second['compiled'])}")
            before, after = first["launches"], second["launches"]
            if before != after and not first["faults"]:
                gone, new = [one for one in before if one not in after], [one for one in after if one not in before]
                faults.append(f"{name}: launched otherwise: {gone}, then {new}")
            found["calls"] += 1
            found["kernels"] += len(first["compiled"])
            found["launches"] += len(first["launches"])
            found["tensor maps"] += first["tensor maps"]
            for launch in first["launches"]:
                found["shared bytes"] = max(found["shared bytes"], launch.shared_bytes)
                found["programs"] = max(found["programs"], launch.grid[0] * launch.grid[1] * launch.grid[2])
    return found | {"shared limit": driver.device.shared_bytes, "faults": faults}


def _call(driver: NullDriver, case: Any) -> dict[str, Any]:
    driver.reset()
    faults = []
    try:
        case.launch()
    except Exception as error:  # whatever stops a launch: Triton's, the driver's, the launcher's
        faults.append(f"{type(error).__name__}: {error}".splitlines()[0])
    count, reason = driver.refusals
    if count:
        faults.append(f"refused {count} times, the last time: {reason}")
    return {
        "faults": faults,
        "compiled": [*driver.compiled],
        "launches": [one for one in driver.launches() if one.kernel not in _BY_ADDRESS],
        "tensor maps": driver.num_tensor_maps,
    }


def _keys_of_the_gate() -> Any:
    """Within the context what Triton compiles has the key that the gate's compilation of the same has in its cache.

    Triton's own launches name all arguments, those of which nothing is known with an empty list.
    """
    from triton.runtime.jit import JITFunction

    do_compile = JITFunction._do_compile

    def without_empty(self: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any,
                      warmup: bool) -> Any:  # fmt: skip
        known = {path: facts for path, facts in attrs.items() if facts}
        return do_compile(self, key, signature, device, constexprs, options, known, warmup)

    return mock.patch.object(JITFunction, "_do_compile", without_empty)


def _cases(families: list[str], only: list[str]) -> Iterable[tuple[str, Any]]:
    from benchmarks.registry import aot_cases

    for family, case in aot_cases(families or None):
        name = f"{family} {case.name}"
        if not only or any(text in name for text in only):
            yield name, case


def sources(chip: str) -> str:
    """Hash of what decides a chip's rehearsal: kernels and launchers, comments aside, and what the gate knows of it."""
    from benchmarks.aot import cards, table
    from benchmarks.aot.device import CARDS

    record = cards if chip in CARDS else table
    codes = sorted(row["code"] for key, row in record.read()["kernels"].items() if key.endswith(f" {chip}"))
    files = sorted((ROOT / "bert_fast" / "triton").glob("*.py"))
    trees = [_tree(path.read_text(encoding="utf-8")) for path in files]
    return hashlib.sha256("\0".join([repr(DEVICES[chip]), *codes, *trees]).encode()).hexdigest()[:16]


@functools.cache  # chips have the same files
def _tree(source: str) -> str:
    return repr(_contents(ast.parse(source)))


def _contents(node: Any) -> Any:
    """A syntax tree without fields that are empty, of which Pythons have different ones."""
    if isinstance(node, list):
        return [_contents(one) for one in node]
    if not isinstance(node, ast.AST):
        return node
    fields = {name: _contents(value) for name, value in ast.iter_fields(node) if value is not None and value != []}
    return type(node).__name__, fields


def read() -> dict[str, dict[str, Any]]:
    """What was written down, by chip."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def rows(record: dict[str, dict[str, Any]]) -> list[str]:
    """The record as a table of the documentation."""
    columns = ("calls", "kernels", "launches", "tensor maps", "programs", "shared bytes", "shared limit")
    lines = [f"| chip | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    return lines + [
        f"| {chip} | " + " | ".join(f"{found[column]:,}" for column in columns) + " |" for chip, found in record.items()
    ]


def _with_rows(page: str, table: list[str]) -> str:
    """The page with this table in place of the one that has its first line."""
    lines = page.splitlines()
    first = lines.index(table[0])
    end = next(i for i in range(first, len(lines)) if not lines[i].startswith("|"))
    return "\n".join([*lines[:first], *table, *lines[end:]]) + "\n"


def _in_a_process(chip: str, arguments: list[str]) -> dict[str, Any]:
    """The rehearsal on one chip; a process has one device."""
    cache = {"TRITON_CACHE_DIR": str(Path.home() / ".triton" / "cache")}  # Triton's own, where the gate's kernels are
    done = subprocess.run(
        [sys.executable, "-m", "tools.null_driver.rehearsal", "--device", chip, "--json", *arguments],
        cwd=ROOT, env=cache | dict(os.environ), stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Command line; returns the exit code."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m tools.null_driver.rehearsal", description=__doc__.splitlines()[0])
    parser.add_argument("--device", action="append", choices=DEVICES, help="this chip only")
    parser.add_argument("--family", action="append", default=[], help="calls of this family of ops only")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="calls whose name holds this text")
    parser.add_argument("--record", action="store_true", help="write down what was found")
    parser.add_argument("--json", action="store_true", help="of one chip, in this process, for programs")
    arguments = parser.parse_args()
    is_part = arguments.device or arguments.only or arguments.family
    if arguments.record and is_part:
        parser.error("--record writes all chips and calls")
    reason = build.missing()
    if reason is not None:
        parser.error(reason)
    if arguments.json:
        import torch

        [chip] = arguments.device
        driver = start(chip)
        torch.set_num_threads(1)
        print(json.dumps(rehearse(driver, _cases(arguments.family, arguments.only))))
        return 0
    passed_on = [f"--{name}={text}" for name in ("family", "only") for text in getattr(arguments, name)]
    chips = [*(arguments.device or DEVICES)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(chips, pool.map(lambda chip: _in_a_process(chip, passed_on), chips), strict=True))
    print("\n".join(rows(found)))
    faults = [f"{chip}: {fault}" for chip, one in found.items() for fault in one["faults"]]
    print("\n".join(f"FAULT {fault}" for fault in faults))
    if arguments.record and not faults:
        kept = {chip: {"sources": sources(chip)} | one for chip, one in found.items()}
        RECORD.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(_with_rows(PAGE.read_text(encoding="utf-8"), rows(kept)), encoding="utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
