"""`make gpu`: all that a GPU is needed for, within nine minutes, the most important first; needs no network.

    python -m benchmarks.gpu [--results FOLDER] [--commit HASH] [--minutes N] [--parts NAMES] [--families NAMES]
    python -m benchmarks.gpu --ptxas FILE        what compares, once more by kernels that another ptxas has made

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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu import status
from benchmarks.gpu.driver import Part, Process, run_parts, say
from benchmarks.gpu.run import Run, chosen, probe
from benchmarks.gpu.summary import summary
from benchmarks.kit.assembler import use_assembler
from benchmarks.kit.record import RESULTS, ROOT, Recorder, slug

RESERVE_S = 20  # for starting and for the summary

# What a part reads of others in the same run: they run too where it is asked for alone.
NEEDS = {
    "compile": ("verify",),
    "time": ("verify", "ceilings"),
    "steps": ("ceilings",),
    "finetune": ("ceilings",),
    "runs": ("ceilings",),
    "peers": ("time",),
    "tiles": ("verify",),
}


# What compares and times nothing: all that another ptxas than Triton's own is asked for.
COMPARING = "verify,tests"


def parts_of(run_file: Path, families: Sequence[str], cores: int) -> list[Part]:
    """The parts in order. Their budgets sum up to 520 s, which leaves 20 for starting and for the summary.

    What is verified comes before what is timed, since red cases are not timed; tests at full shapes repeat `verify` on
    more shapes and dtypes, so they come second; steps of fine-tuning and profiles tell most in little time; steps are
    what the kernels are for; all that follows adds to results that stand without it. One process times all families,
    in an order of its own: each start costs seconds.
    """
    python = (sys.executable, "-m")
    run = ("--run", str(run_file))
    # Families side by side: most of the time is Triton's and the compiler's, which run on the CPU. The same setting for
    # `compile` and `time`, so that nothing keeps the second from what the first has stored.
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, min(8, cores // max(1, len(families)))))}

    def part(name: str, family: str) -> Process:
        command = (*python, "benchmarks.gpu.parts", name, *run, "--family", family, "--until", "{until}")
        progress = run_file.with_name("-".join(("progress", name, family)) + ".jsonl")
        return Process(f"{name} {family}".strip(), (*command, "--progress", str(progress)), threads, progress)

    def at_once(name: str, budget_s: float, *others: Process) -> Part:
        return Part(name, budget_s, (*(part(name, family) for family in families), *others))

    # Tests wait for Triton's compiler, which runs on the CPU: as many as leave some of it to this process.
    workers = ("-n", str(min(12, cores - 2))) if cores >= 4 and importlib.util.find_spec("xdist") else ()
    limit = ("--timeout", "60") if importlib.util.find_spec("pytest_timeout") else ()
    begun = run_file.with_name("progress-tests.jsonl")
    tests = (*python, "pytest", "-q", "-m", "gpu", "-p", "benchmarks.gpu.pytest_plugin", "--gpu-run", str(run_file))
    tests += ("--gpu-progress", str(begun), *workers, *limit, "--durations", "5", *gpu_test_files())
    # Kernels do not need it. Beside them, and whatever a compiler warns of that nobody has met: tests come after it.
    extension = Process("extension", (sys.executable, "setup.py", "-q", "build_ext", "--inplace"))
    return [
        at_once("verify", 85, extension),
        Part("tests", 52, (Process("tests", tests, progress=begun),)),
        Part("ceilings", 12, (part("ceilings", ""),)),
        Part("finetune", 25, (part("finetune", ""),)),
        Part("profile", 70, (part("profile", ""),)),
        at_once("compile", 45, part("prepare", ""), part("prepare", "steps")),
        Part("time", 64, (part("time", ""),)),
        Part("steps", 51, (part("steps", ""),)),
        Part("embedding", 15, (part("embedding", ""),)),
        Part("runs", 15, (part("runs", ""),)),
        Part("gemm", 25, (part("gemm", ""),)),
        Part("peers", 15, (part("peers", ""),)),
        Part("tiles", 10, (part("tiles", ""),)),
        Part("models", 8, (part("models", ""),)),
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
    """Command line; 1 if a part failed or was killed, or a case was red."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results; default: %(default)s")
    parser.add_argument("--commit", help="of a copy of the project without its history")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything; budgets are scaled to it")
    parser.add_argument("--parts", help="some only, separated by commas, and those that they need")
    parser.add_argument("--families", help="kernel cases of some families only, separated by commas")
    parser.add_argument("--ptxas", type=Path, help="make kernels by this one; runs " + COMPARING)
    options = parser.parse_args(arguments)
    names, made_by = options.parts, {}
    if options.ptxas is not None:
        names = ",".join(chosen("parts with --ptxas", names, COMPARING.split(",")))
        made_by = {"ptxas": use_assembler(options.ptxas)}
    found = probe(options.commit)
    if found is None:
        print(f"no CUDA or ROCm device that the torch of {sys.executable} can use: nothing was run")
        return 1
    environment, there = found
    environment |= made_by
    families = chosen("families", options.families, there)
    options.results.mkdir(parents=True, exist_ok=True)
    name = slug(environment["gpu"])
    recorder = Recorder((options.results / f"{name}.jsonl").absolute(), environment)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that `finally` ends what is running
    with tempfile.TemporaryDirectory() as folder, open(options.results / f"{name}.log", "w", encoding="utf-8") as log:
        run_file = Path(folder) / "run.json"
        Run(str(recorder.path), environment, families=families).write(run_file)
        parts = some(parts_of(run_file, families, os.cpu_count() or 1), names)
        share = (60 * options.minutes - RESERVE_S) / sum(part.budget_s for part in parts)
        scaled = [replace(part, budget_s=part.budget_s * share) for part in parts]
        lines = run_parts(scaled, recorder, log)
        # Earlier results count too, where this run's are kept elsewhere.
        owed = status.owed(options.results, status.RESULTS)
        say(summary(recorder, lines, [f"{file}: {kernel} ({source})" for file, kernel, source in owed]), log)
    red = [line for line in recorder.of_this_run("verify") if not line["ok"]]
    return 1 if red or any(line["outcome"] != "ok" for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
