"""Compiles launch configurations for GPUs that are not there, in parallel, and remembers what came out.

What was measured lies in `build/aot`, one small file per compilation, named by a hash of everything that decides it:
the kernel's source with that of its helpers, signature, constants, options, target, Triton's version, and the code that
reads listings. So a second run compiles nothing, disassembles nothing and starts no other process. (Triton's own cache
alone leaves 0.2 s of `nvdisasm` to every kernel.)
"""

import functools
import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks import aot_inspect
from benchmarks.aot_device import TARGETS
from benchmarks.aot_launches import Configuration, configurations

__all__ = ["CACHE_DIR", "measure"]

CACHE_DIR = Path(__file__).resolve().parent.parent / "build" / "aot"
Job = tuple[str, str]  # name of a configuration, target


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure(
    wanted: list[Configuration],
    targets: Iterable[str],
    families: tuple[str, ...],
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, dict[str, Any]]:
    """Row of the table for every configuration and target, in that order; only what is not remembered is compiled.

    wanted: some of `configurations(families)`.
    report: called with (number compiled, number to compile) as compilations end.

    Raises:
        RuntimeError: a kernel does not compile; the message names it.
    """
    targets = list(targets)
    files = {(one.name, target): _file(one, target) for one in wanted for target in targets}
    rows: dict[Job, dict[str, Any]] = {}
    for job, path in files.items():
        if path.exists():
            rows[job] = json.loads(path.read_text())
    missing = [job for job in files if job not in rows]
    if missing:
        CACHE_DIR.mkdir(parents=True, exist_ok=True)
        for number, (job, row) in enumerate(_compile_all(_slow_first(missing), families), start=1):
            _write(files[job], row)
            rows[job] = row
            report(number, len(missing))
        _remember_times(rows)
    return {
        f"{one.name} {target}": rows[one.name, target] | one.row_facts(TARGETS[target].warp_size)
        for one in wanted
        for target in targets
    }


def _compile_all(jobs: list[Job], families: tuple[str, ...]) -> Iterable[tuple[Job, dict[str, Any]]]:
    # Started afresh, not forked: a fork of a process that has run torch may hold locks of threads that are not there.
    workers = min(available_cores(), len(jobs))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_compile, job, families): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@functools.cache
def _configurations_of(families: tuple[str, ...]) -> dict[str, Configuration]:
    """In a worker: kernels do not pickle, so each worker calls the launchers for itself, once."""
    return {one.name: one for one in configurations(families)}


def _compile(job: Job, families: tuple[str, ...]) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    name, target_name = job
    launch, target = _configurations_of(families)[name].launch, TARGETS[target_name]
    index = launch.kernel.arg_names.index
    source = ASTSource(
        fn=launch.kernel,
        signature=launch.signature,
        constexprs={(index(parameter),): value for parameter, value in launch.constants.items()},
        attrs={(index(parameter),): [["tt.divisibility", 16]] for parameter in launch.divisible_by_16},
    )
    start = monotonic()
    try:
        gpu = GPUTarget(target.backend, target.arch, target.warp_size)
        compiled = triton.compile(source, target=gpu, options=launch.options)
        row = aot_inspect.inspect(compiled, target_name)
    except Exception as error:  # of any kind: the compiler's messages do not say which configuration failed
        raise RuntimeError(f"{name} {target_name} does not compile: {type(error).__name__}: {error}") from None
    return row | {"seconds": round(monotonic() - start, 2)}


def _file(one: Configuration, target: str) -> Path:
    import triton

    reader = hashlib.sha256(Path(aot_inspect.__file__).read_bytes()).hexdigest()
    key = f"{one.launch.identity} {target} {triton.__version__} {reader}"
    return CACHE_DIR / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


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
