"""`make gpu-sanitize`: NVIDIA's compute-sanitizer over all kernels, forward and backward, on small shapes.

    python -m benchmarks.gpu.sanitizer [--tools NAMES] [--families NAMES] [--minutes N] [--results FOLDER]
    python -m benchmarks.gpu.sanitizer --cases --families NAMES [--device cuda]        what runs under the tool

One process for each tool (memcheck, then racecheck): to start one takes longer than most cases. One that crashes is
started again behind the case that it crashed in. The tool is looked for on PATH and in CUDA_HOME. Where it is not, or
refuses the device, the result is "skipped" with the reason. "passed" needs three things: exit status 0, the tool's own
summary of 0 errors, and the line that the cases print when they are through.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.families import family_names
from benchmarks.gpu.driver import GRACE_S, OWN_GROUP, RESTARTS
from benchmarks.gpu.run import Run, chosen, probe, process_environment
from benchmarks.kit.crashes import Progress
from benchmarks.kit.record import RESULTS, ROOT, slug

TOOL = "compute-sanitizer"
THROUGH = "sanitized cases:"
FOUND_STATUS = 86  # of the tool when it has found an error; any other says that something else went wrong
# Tool -> its options, and the line it ends with when it has found nothing.
TOOLS = {
    # Padding after every allocation: an access just past the end must not land in the next tensor. Calls of the driver
    # that PyTorch makes to see whether they fail are no errors of a kernel.
    "memcheck": (("--padding", "256", "--report-api-errors", "no"), r"ERROR SUMMARY: 0 errors"),
    "racecheck": ((), r"RACECHECK SUMMARY: 0 hazards"),
}
REFUSED = r"[^\n]*(?:[Dd]evice not supported|Unable to find injection library)[^\n]*"


def find_tool() -> str | None:
    """Path of compute-sanitizer, from PATH, CUDA_HOME or CUDA_PATH, or where CUDA is installed by default."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    folders = [str(Path(home) / part) for home in homes if home for part in ("bin", "compute-sanitizer")]
    return shutil.which(TOOL, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *folders]))


def judge(tool: str, status: int, output: str) -> tuple[str, str]:
    """(outcome, what the tool said): passed, failed, skipped (it refused the device) or error (it did not finish)."""
    said = [line for line in output.splitlines() if line.startswith("=========")]
    summary = next((line for line in reversed(said) if "SUMMARY" in line), None)
    clean = re.search(TOOLS[tool][1] + r"\b", output)
    if status == 0 and clean and THROUGH in output:
        return "passed", str(summary).strip("= ")
    if refused := re.search(REFUSED, output):
        return "skipped", f"{TOOL} refused: {refused[0].strip('= ')}"
    if status == FOUND_STATUS or (summary and not clean):
        return "failed", "\n".join(said[:40])
    return "error", f"exit status {status}\n{output[-2000:]}"


def check(tool: str, families: Sequence[str], run: Run, seconds: float) -> list[str]:
    """Runs the small cases of the families under the tool; records an outcome for each process, and returns them."""
    path = find_tool()
    if path is None:
        _record(run, tool, families, "skipped", f"{TOOL} is neither on PATH nor in CUDA_HOME", "")
        return ["skipped"]
    outcomes: list[str] = []
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder) / "progress.jsonl"
        cases = [sys.executable, "-m", "benchmarks.gpu.sanitizer", "--cases", "--families", ",".join(families)]
        cases += ["--device", run.device, "--progress", str(progress)]
        # Importing torch under the tool takes longer than the usual 10 s. What Python starts (Triton's assembler) has
        # no kernels.
        options = ["--error-exitcode", str(FOUND_STATUS), "--launch-timeout", "120"]
        options += ["--target-processes", "application-only"]
        while len(outcomes) <= RESTARTS:
            status, output = _run([path, "--tool", tool, *options, *TOOLS[tool][0], *cases], end - time.monotonic())
            at = Progress(progress).current()
            if status is None:
                outcome, said = "error", f"not through within {seconds:.0f} s, at {at}"
            else:
                outcome, said = judge(tool, status, output)
                said = f"at {at}: {said}" if outcome == "error" and at is not None else said
            _record(run, tool, families, outcome, said, output)
            outcomes.append(outcome)
            if outcome != "error" or at is None or status is None:
                break
    return outcomes


def _run(command: list[str], seconds: float) -> tuple[int | None, str]:
    """(exit status, None for what was ended after the seconds; output)."""
    # With PyTorch's cache of blocks the tool would know the blocks and not the tensors in them.
    environment = process_environment() | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes, **OWN_GROUP) as process:
        try:
            output, _ = process.communicate(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate(timeout=GRACE_S)
            return None, output.decode(errors="replace")
    return process.returncode, output.decode(errors="replace")


def _record(run: Run, tool: str, families: Sequence[str], outcome: str, said: str, output: str) -> None:
    through = next((line for line in output.splitlines() if line.startswith(THROUGH)), "")
    kernels = through.removeprefix(THROUGH).split()
    fields: dict[str, Any] = {"tool": tool, "families": list(families), "kernels": kernels}
    run.recorder.write("sanitizer", **fields, outcome=outcome, said=said)
    print(f"{tool}: {outcome}: {said}", flush=True)


def run_cases(families: Sequence[str], device: str, progress: Progress) -> None:
    """Forward and backward, or a step, of every small case not begun before; nothing is compared here."""
    import torch

    from benchmarks.kernels.timing import launched_kernels
    from benchmarks.registry import kernel_cases

    begun = set(progress.begun())
    with launched_kernels() as kernels:
        for case in kernel_cases("small", list(families)):
            if case.name in begun:
                continue
            progress.begin(case.name)
            torch.manual_seed(0)
            problem = case.make(torch.device(device))
            output: Any = problem.fast(*problem.inputs)
            if problem.upstream is not None:
                leaves = [t for t in problem.inputs if t.requires_grad]
                torch.autograd.grad(output, leaves, problem.upstream.to(output.dtype))
            if device == "cuda":
                torch.cuda.synchronize()
            progress.end(case.name)
    print(THROUGH, *sorted(kernels), flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Command line; 1 if a tool found something or could not go through."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.sanitizer", description=__doc__.splitlines()[0])
    parser.add_argument("--tools", help="separated by commas; default: " + ",".join(TOOLS))
    parser.add_argument("--families", help="some only, separated by commas")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results; default: %(default)s")
    parser.add_argument("--commit", help="of a copy of the project without its history")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--cases", action="store_true", help="run the cases here, without the tool")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--progress", type=Path)
    options = parser.parse_args(arguments)
    if options.cases:
        families = options.families.split(",") if options.families else family_names()
        run_cases(families, options.device, Progress(options.progress))
        return 0
    tools = chosen("tools", options.tools, TOOLS)
    families = chosen("families", options.families, family_names())
    found = probe(options.commit)
    if found is None:
        print(f"no CUDA device that the torch of {sys.executable} can use: nothing was run")
        return 1
    environment, _ = found
    options.results.mkdir(parents=True, exist_ok=True)
    run = Run(str((options.results / f"{slug(environment['gpu'])}.jsonl").absolute()), environment)
    outcomes = [one for tool in tools for one in check(tool, families, run, 60 * options.minutes / len(tools))]
    return 0 if set(outcomes) <= {"passed", "skipped"} else 1


if __name__ == "__main__":
    sys.exit(main())
