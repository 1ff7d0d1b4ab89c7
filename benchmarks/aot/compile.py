"""Compiles launch configurations for GPUs that are not there, in parallel, and remembers what came out.

What was measured lies in `build/aot`, one small file per compilation, named by a hash of everything that decides it:
the kernel's source with that of its helpers, signature, constants, options, target, Triton's version, and the code that
reads listings. So a second run compiles nothing, disassembles nothing and starts no other process.

Kernels are disassembled a dozen at a time: starting `nvdisasm` takes 0.2 s, as long as compiling a small kernel.
"""

import functools
import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.aot import listings
from benchmarks.aot.device import CARDS, EVERY
from benchmarks.aot.hazards import hazards_of
from benchmarks.aot.launches import Configuration, Launch
from benchmarks.kit.programs import program_of
from benchmarks.kit.results import ROOT

CACHE_DIR = ROOT / "build" / "aot"
Job = tuple[str, str]  # name of a configuration, target
_BATCH = 12


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure(
    wanted: dict[str, list[Configuration]],
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, dict[str, Any]]:
    """A row for every configuration and target; only what is not remembered is compiled.

    wanted: target -> some of its `configurations`. Rows come configuration by configuration.
    report: called with (number compiled, number to compile) as compilations end.

    Raises:
        RuntimeError: a kernel does not compile, or touches registers of a product in flight; the message names it.
    """
    chosen = {(one.name, target): one for target, ones in wanted.items() for one in ones}
    codes = {job: code_of(one, job[1]) for job, one in chosen.items()}
    files = {job: CACHE_DIR / f"{code}.json" for job, code in codes.items()}
    rows: dict[Job, dict[str, Any]] = {}
    for job, path in files.items():
        if path.exists():
            rows[job] = json.loads(path.read_text())
    missing = [job for job in files if job not in rows]
    if missing:
        CACHE_DIR.mkdir(parents=True, exist_ok=True)
        launches = {job: chosen[job].launch for job in _slow_first(missing)}
        for number, (job, row) in enumerate(_compile_all(launches), start=1):
            _write(files[job], row)
            rows[job] = row
            report(number, len(missing))
        _remember_times({job: row for job, row in rows.items() if "seconds" in row})
    names = dict.fromkeys(name for name, _ in chosen)
    return {
        f"{name} {target}": rows[name, target]
        | chosen[name, target].row_facts(EVERY[target].warp_size)
        | {"code": codes[name, target]}
        for name in names
        for target in wanted
        if (name, target) in chosen
    }


def _compile_all(launches: dict[Job, Launch]) -> Iterable[tuple[Job, dict[str, Any]]]:
    batches = _batches([*launches])
    workers = min(available_cores(), len(batches))
    # Started afresh, not forked: a fork of a process that has run torch may hold locks of threads that are not there.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_compile, batch, [launches[job] for job in batch]): batch for batch in batches}
        try:
            for future in as_completed(futures):
                yield from zip(futures[future], future.result(), strict=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _batches(jobs: list[Job]) -> list[list[Job]]:
    """Jobs of one target that share a call of the disassembler, in the order of the first of each; smaller for few."""
    size = max(1, min(_BATCH, len(jobs) // (4 * available_cores())))
    by_target = [[job for job in jobs if job[1] == target] for target in dict.fromkeys(target for _, target in jobs)]
    batches = [group[at : at + size] for group in by_target for at in range(0, len(group), size)]
    return sorted(batches, key=lambda batch: jobs.index(batch[0]))


def compiled_row(target: str, name: str, launch: Launch) -> dict[str, Any]:
    """What a kernel compiles to for one target, in this process; RuntimeError names it where it does not compile."""
    (row,) = _compile([(name, target)], [launch])
    return row


def _compile(jobs: list[Job], launches: list[Launch]) -> list[dict[str, Any]]:
    """Rows of kernels for one target, in a worker."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target_name = jobs[0][1]
    target = EVERY[target_name]
    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    compiled, seconds = [], []
    for (name, _), launch in zip(jobs, launches, strict=True):
        start = sum(os.times()[:4])  # of this process and those that it started
        index = launch.kernel.arg_names.index
        source = ASTSource(
            fn=launch.kernel,
            signature=launch.signature,
            constexprs={(index(parameter),): value for parameter, value in launch.constants.items()},
            attrs={(index(parameter),): [["tt.divisibility", 16]] for parameter in launch.divisible_by_16},
        )
        try:
            compiled.append(triton.compile(source, target=gpu, options=launch.options))
        except Exception as error:  # of any kind: the compiler's messages do not say which configuration failed
            raise RuntimeError(f"{name} {target_name} does not compile: {type(error).__name__}: {error}") from None
        seconds.append(round(sum(os.times()[:4]) - start, 2))
    if target_name == "sm_90":
        for (name, _), hazards in zip(jobs, hazards_of(compiled), strict=True):
            if hazards:
                raise RuntimeError(f"{name} {target_name}, Triton {triton.__version__}: {hazards[0]}")
    rows = _of_card(compiled) if target_name in CARDS else listings.inspect(compiled, target_name)
    return [row | {"seconds": took} for row, took in zip(rows, seconds, strict=True)]


def _of_card(compiled: list[Any]) -> list[dict[str, Any]]:
    """What is kept of a card's kernels, without a listing."""
    return [listings._resources(one.asm["cubin"]) | {"shared_bytes": int(one.metadata.shared)} for one in compiled]


@functools.cache
def _reader() -> str:
    """Digest of what reads compiled kernels."""
    return program_of(Path(listings.__file__))


def code_of(one: Configuration, target: str) -> str:
    """Hash of all that decides what a row says: the launch, the target, the compiler's version, and who reads it."""
    import triton

    key = f"{one.launch.identity} {target} {triton.__version__} {_reader()}"
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _write(path: Path, content: object) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


def _slow_first(jobs: list[Job]) -> list[Job]:
    """What took long the last time, then the rest, then what was quick, so that no process is left with a slow one."""
    path = CACHE_DIR / "seconds.json"
    seconds = json.loads(path.read_text()) if path.exists() else {}
    typical = sorted(seconds.values())[len(seconds) // 2] if seconds else 0.0
    return sorted(jobs, key=lambda job: -seconds.get(" ".join(job), typical))


def _remember_times(rows: dict[Job, dict[str, Any]]) -> None:
    path = CACHE_DIR / "seconds.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    _write(path, known | {" ".join(job): row["seconds"] for job, row in rows.items()})
