"""The ahead-of-time gate: every Triton kernel, in every launch configuration that ships, compiled without a GPU.

    python -m benchmarks.aot            compiles, prints the table and writes benchmarks/aot_table.json
    python -m benchmarks.aot --check    compiles and compares with the table; exit 1 on a spill, shared memory that does
                                        not fit, a lost 128-bit access, more registers, or dropout above its limit

What is compiled is what ships: each case calls the launchers themselves, with `JITFunction.run` replaced by a recorder,
and the recorded launch (kernel, argument types, constants, warps) is compiled for each target. So a new kernel family
needs only `aot_cases()` in its file of `benchmarks/families`.

Dropout's cost is the number of instructions in the main loop (the whole kernel where there is none) with dropout minus
that without, divided by the elements per thread that are not padding.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.aot_inspect import SHARED_LIMIT_BYTES, inspect
from benchmarks.case import AotCase, families

__all__ = ["TABLE_PATH", "capture", "compare", "main", "measure"]

TABLE_PATH = Path(__file__).with_name("aot_table.json")
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
# Above this the random numbers, not the memory, would set the speed of a memory-bound kernel: at 4.3 TB/s and 8 bytes
# per element an H200 has about 55 instruction slots per element, half of which a kernel can fill, 10 of it its own.
DROPOUT_LIMIT = {"sm_90": 18.0}
REGISTER_FILE = 65536  # 32-bit registers of an NVIDIA multiprocessor, handed out to warps 8 a thread at a time


@dataclass(frozen=True)
class Launch:
    """What a launcher asked for: enough to compile the kernel."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, object]
    divisible_by_16: tuple[str, ...]
    options: dict[str, object]


_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


def _record(kernel: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> Launch:
    """The launch as Triton's own specialization would see it on a device."""
    values = dict(zip(kernel.arg_names, args, strict=False))
    values.update({name: kwargs.pop(name) for name in list(kwargs) if name in kernel.arg_names})
    signature: dict[str, str] = {}
    constants: dict[str, object] = {}
    divisible = []
    for param in kernel.params:
        value = values[param.name]
        specialized = not (param.is_constexpr or param.do_not_specialize)
        if param.is_constexpr or value is None or (specialized and type(value) is int and value == 1):
            signature[param.name] = "constexpr"
            constants[param.name] = value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = "*" + _TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                divisible.append(param.name)
        elif isinstance(value, int):
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if specialized and value % 16 == 0:
                divisible.append(param.name)
        else:
            signature[param.name] = "fp32"
    return Launch(kernel, signature, constants, tuple(divisible), kwargs)


@contextmanager
def capture() -> Iterator[list[Launch]]:
    """Within the context Triton launches are recorded in the returned list instead of run."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    run = lambda kernel, *args, **kwargs: launches.append(_record(kernel, *args, **kwargs))  # noqa: E731
    with mock.patch.object(JITFunction, "run", run):
        yield launches


@dataclass(frozen=True)
class _Job:
    """One compilation, named so that a worker process can find it again (kernels do not pickle)."""

    family: str
    case_index: int
    launch_index: int
    target: str


def _launches_of(case: AotCase) -> list[Launch]:
    with capture() as launches:
        case.launch()
    return launches


def _compile(job: _Job) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    case = list(families()[job.family].aot_cases())[job.case_index]
    launch = _launches_of(case)[job.launch_index]
    names = launch.kernel.arg_names
    source = ASTSource(
        fn=launch.kernel,
        signature=launch.signature,
        constexprs={(names.index(name),): value for name, value in launch.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in launch.divisible_by_16},
    )
    backend, arch, warp_size = TARGETS[job.target]
    compiled = triton.compile(source, target=GPUTarget(backend, arch, warp_size), options=launch.options)
    row = inspect(compiled, job.target)
    threads = warp_size * int(launch.options.get("num_warps", 4))  # type: ignore[call-overload]
    live = case.live_elements.get(launch.kernel.__name__)
    resident = case.resident_programs.get(launch.kernel.__name__, 1)
    return row | {"elements_per_thread": live / threads if live else None, "resident_threads": resident * threads}


def _jobs() -> dict[str, _Job]:
    """Key of the table -> how to compile it; launches that differ in nothing that matters appear once."""
    jobs: dict[str, _Job] = {}
    seen = set()
    for family, module in families().items():
        for case_index, case in enumerate(module.aot_cases()):
            for launch_index, launch in enumerate(_launches_of(case)):
                name = launch.kernel.__name__.removeprefix("_").removesuffix("_kernel")
                key = f"{name} {case.name}"
                if launch.kernel.__name__ in case.live_elements:
                    key += " dropout" if case.has_dropout else " plain"
                identity = (name, str(launch.signature), str(launch.constants), launch.divisible_by_16)
                if identity in seen:
                    continue
                seen.add(identity)
                for target in TARGETS:
                    jobs[f"{key} {target}"] = _Job(family, case_index, launch_index, target)
    return jobs


def measure() -> dict[str, Any]:
    """Compiles everything, two at a time (Triton's own cache answers what was compiled before); returns the table."""
    import triton

    jobs = _jobs()
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        rows = dict(zip(jobs, pool.map(_compile, jobs.values(), chunksize=8), strict=True))
    for key, row in rows.items():
        plain = rows.get(key.replace(" dropout ", " plain "))
        if " dropout " in key and plain is not None:
            extra = row["loop_instructions"] - plain["loop_instructions"]
            row["dropout_instructions_per_element"] = round(extra / row["elements_per_thread"], 2)
    return {"triton": triton.__version__, "kernels": rows}


def compare(measured: dict[str, Any], table: dict[str, Any]) -> list[str]:
    """What is wrong with a measured table, given the committed one; an empty list when nothing is.

    Registers are compared only when both were made by the same Triton: another version allocates differently.
    """
    problems = []
    if missing := sorted(set(table["kernels"]) - set(measured["kernels"])):
        problems.append(f"no longer compiled, though in the table: {', '.join(missing)}")
    for key, row in measured["kernels"].items():
        target = key.rsplit(" ", 1)[1]
        if row["spill_bytes"] or row["spill_instructions"]:
            problems.append(f"{key}: spills ({row['spill_bytes']} bytes, {row['spill_instructions']} instructions)")
        if row["shared_bytes"] > SHARED_LIMIT_BYTES[target]:
            problems.append(f"{key}: {row['shared_bytes']} bytes of shared memory, limit {SHARED_LIMIT_BYTES[target]}")
        allocated = -(-row["registers"] // 8) * 8 * row["resident_threads"]
        if target.startswith("sm_") and allocated > REGISTER_FILE:
            problems.append(f"{key}: {allocated} registers for the programs meant to run at once, of {REGISTER_FILE}")
        cost = row.get("dropout_instructions_per_element")
        if cost is not None and cost > DROPOUT_LIMIT.get(target, float("inf")):
            problems.append(f"{key}: dropout costs {cost} instructions an element, limit {DROPOUT_LIMIT[target]}")
        before = table["kernels"].get(key)
        if before is None:
            problems.append(f"{key}: not in the table; run python -m benchmarks.aot")
            continue
        for field in ("loads_128", "stores_128"):
            if row[field] < before[field]:
                problems.append(f"{key}: {row[field]} {field.replace('_', ' of ')} bits, {before[field]} in the table")
        if row["registers"] > before["registers"] and measured["triton"] == table["triton"]:
            problems.append(f"{key}: {row['registers']} registers, {before['registers']} in the table")
    return problems


_COLUMNS = {
    "registers": "regs",
    "spill_bytes": "spill",
    "shared_bytes": "shared",
    "loads_128": "ld128",
    "loads": "ld",
    "stores_128": "st128",
    "stores": "st",
    "instructions": "instr",
    "loop_instructions": "loop",
    "dropout_instructions_per_element": "dropout/el",
}


def render(measured: dict[str, Any]) -> str:
    """The table as text, one kernel a line."""
    width = max(map(len, measured["kernels"]))
    lines = [f"Triton {measured['triton']}", " " * width + "".join(f"{name:>11}" for name in _COLUMNS.values())]
    for key, row in measured["kernels"].items():
        cells = ("-" if row.get(field) is None else row[field] for field in _COLUMNS)
        lines.append(f"{key:<{width}}" + "".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot", description="Ahead-of-time gate of all kernels.")
    parser.add_argument("--check", action="store_true", help="compare with the committed table instead of writing it")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 replaces the compiler by the interpreter; unset it")
    measured = measure()
    print(render(measured))
    if not options.check:
        problems = compare(measured, measured)
        TABLE_PATH.write_text(json.dumps(measured, indent=1) + "\n")
        print(f"written: {TABLE_PATH.name}")
    else:
        problems = compare(measured, json.loads(TABLE_PATH.read_text()))
    for problem in problems:
        print(f"FAIL {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
