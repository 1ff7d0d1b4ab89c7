"""Rehearses what ships: every launch configuration on every chip, compiled, launched over the null driver, twice.

    python -m tools.null_driver.rehearsal                          all chips, each in a process, one on each core
    python -m tools.null_driver.rehearsal --device sm_86 --only "gelu wide"
    python -m tools.null_driver.rehearsal --record                 families that differ from the record; --all: all

The calls are those that the ahead-of-time gate compiles kernels of (`aot_cases` of `benchmarks/families`), so kernels
come from Triton's cache where the gate has run. docs/null_driver.md says what is looked at.
"""

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.families import family_names
from benchmarks.kit.programs import KERNELS, imports, kernel_names, program_of, short
from tools import kernel_record
from tools.null_driver import build
from tools.null_driver.driver import DEVICES, NullDriver, start

ROOT = Path(__file__).resolve().parents[2]
# Launched where a table of addresses is not kept already, so by where memory happens to lie.
_BY_ADDRESS = ("_store_addresses_kernel",)


def rehearse(driver: NullDriver, cases: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """What the launches of these cases take of the driver's chip, and "faults", a line each.

    cases: (name, `AotCase`). Each is called twice: the second time Triton has nothing to compile, prepared launches
    take its place, and must ask for the same. Programs and shared bytes are the most of one launch.
    """
    found = dict.fromkeys(("calls", "launches", "tensor_maps", "programs", "shared_bytes"), 0)
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
            found["launches"] += len(first["launches"])
            found["tensor_maps"] += first["tensor_maps"]
            for launch in first["launches"]:
                found["shared_bytes"] = max(found["shared_bytes"], launch.shared_bytes)
                found["programs"] = max(found["programs"], math.prod(launch.grid))
    return found | {"faults": faults}


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
        "tensor_maps": driver.num_tensor_maps,
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


def _cases(family: str, only: list[str]) -> Iterable[tuple[str, Any]]:
    from benchmarks.registry import aot_cases

    for _, case in aot_cases([family]):
        name = f"{family} {case.name}"
        if not only or any(text in name for text in only):
            yield name, case


def digests() -> dict[str, str]:
    """Key of the record -> digest of what decides a family's launches on a chip.

    That is the chip, the programs of the family's launchers, and what their kernels are compiled from.
    """
    compiled = kernel_record.read()["compiled"]
    found = {}
    for family in family_names():
        needed = sorted({family} | imports(family))
        programs = [program_of(KERNELS / f"{file}.py") for file in needed]
        kernels = [short(name) for file in needed for name in kernel_names(file)]
        for chip, device in DEVICES.items():
            # A kernel that the gate has not seen yet has none.
            of_kernels = [str(compiled.get(f"{kernel} {chip}", {}).get("digest")) for kernel in kernels]
            parts = [repr(device), *programs, *of_kernels]
            found[f"{family} {chip}"] = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]
    return found


def _in_a_process(chip: str, families: list[str], only: list[str]) -> dict[str, Any]:
    """Families as `rehearse` finds them on one chip; a process has one device."""
    cache = {"TRITON_CACHE_DIR": str(Path.home() / ".triton" / "cache")}  # Triton's own, where the gate's kernels are
    options = [f"--{name}={text}" for name, texts in (("family", families), ("only", only)) for text in texts]
    done = subprocess.run(
        [sys.executable, "-m", "tools.null_driver.rehearsal", "--device", chip, "--json", *options],
        cwd=ROOT, env=cache | dict(os.environ), stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Command line; returns the exit code."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m tools.null_driver.rehearsal", description=__doc__.splitlines()[0])
    parser.add_argument("--device", action="append", choices=DEVICES, help="this chip only")
    parser.add_argument("--family", action="append", choices=family_names(), help="calls of this family of ops only")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="calls whose name holds this text")
    parser.add_argument("--record", action="store_true", help="write down what was found of families that differ")
    parser.add_argument("--all", action="store_true", help="with --record, all families")
    parser.add_argument("--json", action="store_true", help="of one chip, in this process, for programs")
    arguments = parser.parse_args()
    families, chips = arguments.family or family_names(), [*(arguments.device or DEVICES)]
    if arguments.record and (arguments.device or arguments.only or arguments.family):
        parser.error("--record writes all chips and calls")
    reason = build.missing()
    if reason is not None:
        parser.error(reason)
    if arguments.json:
        import torch

        [chip] = chips
        driver = start(chip)
        torch.set_num_threads(1)
        print(json.dumps({family: rehearse(driver, _cases(family, arguments.only)) for family in families}))
        return 0
    current = digests()
    if arguments.record and not arguments.all:
        stale = [key.split(" ") for key in kernel_record.stale("rehearsed", current)]
        families = [family for family in families if any(family == one for one, _ in stale)]
        chips = [chip for chip in chips if any(chip == one for _, one in stale)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [*pool.map(lambda chip: _in_a_process(chip, families, arguments.only), chips)]
    rows = {f"{family} {chip}": one[family] for family in families for chip, one in zip(chips, found, strict=True)}
    faults = [f"{key}: {fault}" for key, row in rows.items() for fault in row.pop("faults")]
    for key, row in rows.items():
        if row["calls"] and not arguments.record:
            print(f"{key}: " + ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in row.items()))
    print(f"{sum(row['calls'] for row in rows.values()):,} calls of {len(families)} families; faults: {len(faults)}")
    print("".join(f"FAULT {fault}\n" for fault in faults), end="")
    if arguments.record and not faults:
        kernel_record.update("rehearsed", {key: row | {"digest": current[key]} for key, row in rows.items()}, current)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
