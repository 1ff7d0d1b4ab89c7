"""`make gpu`: all that a GPU is needed for, within nine minutes, the most important first; needs no network.

    python -m benchmarks.gpu [--results FOLDER] [--commit HASH] [--minutes N] [--parts NAMES] [--families NAMES]
    python -m benchmarks.gpu --parts smoke --minutes 1.5 [--only-red FILE]  every kernel once; the first thing to run
    python -m benchmarks.gpu --parts memcheck,racecheck                     every kernel once under compute-sanitizer
    python -m benchmarks.gpu --parts ahead --device sm_90 --minutes 60      compiles on a machine without a GPU

Every part runs in processes of its own (a kernel that crashes the device's context takes its own process with it) and
has a budget; what an earlier part does not use goes to those after it, so a part always has at least its budget. A
process that overruns is killed with all it started and recorded as killed; later parts still run. Results are lines of
FOLDER/<gpu>.jsonl, written as they come. `docs/benchmarks.md` has the parts, the order and the fields.

This process imports no torch.
"""

import argparse
import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.families import family_names
from benchmarks.gpu import ahead, sanitizer, status
from benchmarks.gpu.driver import Part, Process, run_parts, say
from benchmarks.gpu.run import Run, chosen, is_dry, probe, process_environment
from benchmarks.gpu.smoke import WHOLE, Smoke, red_cases
from benchmarks.gpu.summary import red, summary
from benchmarks.kit.results import RESULTS, ROOT, Recorder, slug
from tools.null_driver.driver import DEVICES

END_SHARE = 0.02  # of the time, for ending what hangs and for the summary
CASE_S, START_S = 30.0, 60.0  # the longest that a smoke case, and what comes before a process' first, may take

# What a part reads of others in the same run: they run too where it is asked for alone.
NEEDS = {
    "compile": ("verify",),
    "time": ("verify", "ceilings"),
    "steps": ("ceilings",),
    "finetune": ("ceilings",),
    "runs": ("ceilings",),
    "peers": ("time",),
}

# What runs only where it is asked for, and not beside others, and what its processes are called in `parts.py`.
APART = {"smoke": "smoke", "memcheck": "sanitized", "racecheck": "sanitized", "ahead": "prepare"}


def command_of(part: str, run_file: Path, device: str = "cuda") -> tuple[str, ...]:
    """A process of a part, without its options."""
    module = ("benchmarks.gpu.dry", device) if is_dry(device) else ("benchmarks.gpu.parts",)
    return (sys.executable, "-m", *module, part, "--run", str(run_file))


def parts_apart(names: Sequence[str], run_file: Path, only: Mapping[str, list[str] | None] | None) -> list[Part]:
    """Those of APART that are named. only: family -> cases of a smoke run; None for all cases of the run's families."""
    run, parts = Run.read(run_file), []
    families = run.families or ()
    for name in names:
        command, progress = command_of(APART[name], run_file, run.device), run_file.with_name(f"progress-{name}")
        if name == "smoke":
            # On few processors, as where there is no GPU, what compiles waits for the others.
            factor = 1 if run.device == "cuda" else 10
            one = Smoke(command, run.recorder, progress, factor * CASE_S, factor * START_S)
            processes = one.processes(only or dict.fromkeys(families))
        elif name == "ahead":
            whats = ahead.in_order(families)
            processes = tuple(Process(f"ahead {what}", (*command, "--family", what)) for what in whats)
        else:
            processes = sanitizer.processes(name, command, progress, run)
        parts.append(Part(name, 60.0, processes, at_once=max(2, os.cpu_count() or 1)))
    return parts


def parts_of(run_file: Path, families: Sequence[str], cores: int) -> list[Part]:
    """The parts in order. Their budgets sum up to 502 s, which leaves 38 for starting and for the summary.

    What is verified comes before what is timed, since red cases are not timed; tests at full shapes repeat `verify` on
    more shapes and dtypes, so they come second; steps of fine-tuning and profiles tell most in little time; steps are
    what the kernels are for; all that follows adds to results that stand without it. One process times all families,
    in an order of its own: each start costs seconds.
    """
    # Families side by side: most of the time is Triton's and the compiler's, which run on the CPU. The same setting for
    # `compile` and `time`, so that nothing keeps the second from what the first has stored.
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, min(8, cores // max(1, len(families)))))}

    def part(name: str, family: str, share: str = "0/1") -> Process:
        title = f"{name} {family} {share}".removesuffix("0/1").strip()
        progress = run_file.with_name(f"progress {title}".replace("/", " of "))
        command = (*command_of(name, run_file), "--family", family, "--share", share, "--until", "{until}")
        return Process(title, (*command, "--progress", str(progress)), threads, progress)

    def at_once(name: str, budget_s: float, *others: Process) -> Part:
        return Part(name, budget_s, (*(part(name, family) for family in families), *others))

    # Tests wait for Triton's compiler, which runs on the CPU: as many as leave some of it to this process.
    workers = ("-n", str(min(12, cores - 2))) if cores >= 4 and importlib.util.find_spec("xdist") else ()
    limit = ("--timeout", "60") if importlib.util.find_spec("pytest_timeout") else ()
    begun = run_file.with_name("progress-tests.jsonl")
    tests = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "benchmarks.gpu.pytest_plugin")
    tests += ("--gpu-run", str(run_file), "--gpu-progress", str(begun), *workers, *limit, "--durations", "5")
    # Kernels do not need it. Beside them, and whatever a compiler warns of that nobody has met: tests come after it.
    extension = Process("extension", (sys.executable, "setup.py", "-q", "build_ext", "--inplace"))
    several = min(8, max(1, cores // 2))
    tuned = [part("prepare", "tuned", f"{index}/{several}") for index in range(several)]
    return [
        at_once("verify", 85, extension),
        Part("tests", 52, (Process("tests", (*tests, *gpu_test_files()), progress=begun),)),
        Part("ceilings", 12, (part("ceilings", ""),)),
        Part("finetune", 25, (part("finetune", ""),)),
        Part("profile", 70, (part("profile", ""),)),
        at_once("compile", 45, *tuned, part("prepare", "compiled")),
        Part("time", 64, (part("time", ""),)),
        Part("steps", 51, (part("steps", ""),)),
        Part("embedding", 15, (part("embedding", ""),)),
        Part("runs", 15, (part("runs", ""),)),
        Part("gemm", 25, (part("gemm", ""),)),
        Part("peers", 15, (part("peers", ""),)),
        Part("compiled", 10, (part("steps", "compiled"),)),
        Part("compiled_finetune", 10, (part("finetune", "compiled"),)),
        # Tiles that are the likeliest to hang: nothing comes after them.
        Part("specialized", 8, (part("gemm", "specialized"),)),
    ]  # fmt: skip


def some(parts: list[Part], names: str | None) -> list[Part]:
    """The parts of a list of names, and those that they need; all for None. SystemExit names one that is not there."""
    wanted = chosen("parts", names, [part.name for part in parts])
    for kind in wanted:  # which grows
        wanted += [needed for needed in NEEDS.get(kind, ()) if needed not in wanted]
    found = [part for part in parts if part.name in wanted]
    # The C++ extension is built for tests.
    if "tests" not in wanted:
        found = [replace(part, processes=tuple(p for p in part.processes if p.name != "extension")) for part in found]
    return found


def gpu_test_files() -> list[str]:
    """Files below tests/ that mark tests with `gpu`; nothing else is imported, hence nothing else must be installed."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if "mark.gpu" in path.read_text(encoding="utf-8")]


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 if something is red, or was not run."""
    assert __doc__ is not None
    start = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, help="folder; default: benchmarks/results, without a GPU build/gpu")
    parser.add_argument("--commit", help="of a copy of the project without its history")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything; budgets are scaled to it")
    parser.add_argument("--parts", help=f"some only, and those that they need; or some of {','.join(APART)}")
    parser.add_argument("--families", help="kernel cases of some families only, separated by commas")
    parser.add_argument("--only-red", type=Path, metavar="FILE", help="smoke cases that were not green in this file")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu", *DEVICES), help="default: %(default)s")
    parser.add_argument("--size", default="gpu", choices=("gpu", "small"), help="of the cases; small: for a CPU")
    options = parser.parse_args(arguments)
    names = options.parts
    apart = [name for name in APART if name in (names or "").split(",")]
    if apart:
        chosen("parts", names, apart)
    if options.only_red and apart != ["smoke"]:
        parser.error("--only-red: expected part smoke")
    if apart != ["smoke"] and is_dry(options.device) != (apart == ["ahead"]):
        parser.error("--device: expected a null driver (sm_90) for part ahead, and one for ahead and smoke only")
    families = chosen("families", options.families, [*([WHOLE] if apart == ["smoke"] else []), *family_names()])
    only = red_cases(options.only_red) if options.only_red else None
    if only == {}:
        print(f"nothing is red in {options.only_red}")
        return 0
    environment = probe(options.device, options.commit)
    if environment is None:
        print(f"no CUDA or ROCm device that the torch of {sys.executable} can use: nothing was run")
        return 1
    results = options.results or (RESULTS if options.device == "cuda" else ROOT / "build" / "gpu")
    results.mkdir(parents=True, exist_ok=True)
    name = slug(environment["gpu"] or f"no gpu {options.device}")
    recorder = Recorder((results / f"{name}.jsonl").absolute(), environment)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that `finally` ends what is running
    with tempfile.TemporaryDirectory() as folder, open(results / f"{name}.log", "a", encoding="utf-8") as log:
        run_file = Path(folder) / "run.json"
        Run(str(recorder.path), environment, options.device, options.size, families=families).write(run_file)
        say(", ".join(f"{key} {value}" for key, value in environment.items() if value), log)
        if apart:
            parts = parts_apart(apart, run_file, only)
        else:
            parts = some(parts_of(run_file, families, os.cpu_count() or 1), names)
        seconds = 60 * options.minutes * (1 - END_SHARE) - (time.monotonic() - start)
        share = seconds / sum(part.budget_s for part in parts)
        lines = run_parts([replace(part, budget_s=part.budget_s * share) for part in parts], recorder, log)
        # Earlier results count too, where this run's are kept elsewhere.
        owed = None if apart else ["{}: {} ({})".format(*one) for one in status.owed(results, status.RESULTS)]
        say(summary(recorder, lines, owed), log)
    if apart == ["ahead"]:
        cache = Path(process_environment()["TRITON_CACHE_DIR"])
        kernels, size = ahead.prune(cache)
        print(f"{kernels} kernels, {size / 2**20:.0f} MiB: {cache}")
    return 1 if red(recorder, lines) else 0


if __name__ == "__main__":
    sys.exit(main())
