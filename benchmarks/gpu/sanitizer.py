"""NVIDIA's compute-sanitizer over the kernels of one family, forward and backward, on small shapes.

    python -m benchmarks.gpu.sanitizer memcheck|racecheck --family NAME --run FILE [--port N]
    python -m benchmarks.gpu.sanitizer cases --family NAME [--device cuda]        what runs under the tool

The tool is looked for on PATH and in CUDA_HOME. Where it is not, or refuses the device, the result is "skipped" with
the reason. "passed" needs three things: exit status 0, the tool's own summary of 0 errors, and the line that the cases
print when they are through.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.run import Run
from benchmarks.kit.record import ROOT
from benchmarks.registry import kernel_cases

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


def check(tool: str, family: str, run: Run, port: int) -> str:
    """Runs the family's small cases under the tool and records the outcome."""
    path = find_tool()
    if path is None:
        outcome, said, kernels = "skipped", f"{TOOL} is neither on PATH nor in CUDA_HOME", []
    else:
        cases = [sys.executable, "-m", "benchmarks.gpu.sanitizer", "cases", "--family", family, "--device", run.device]
        # Several run at once: each needs ports of its own. Importing torch takes longer than the usual 10 s then. What
        # Python starts (Triton's assembler) has no kernels.
        options = ["--error-exitcode", str(FOUND_STATUS), "--port", str(port), "--launch-timeout", "120"]
        options += ["--target-processes", "application-only"]
        command = [path, "--tool", tool, *options, *TOOLS[tool][0], *cases]
        # With PyTorch's cache of blocks the tool would know the blocks and not the tensors in them.
        env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        output = done.stdout.decode(errors="replace")
        outcome, said = judge(tool, done.returncode, output)
        kernels = next((line.split()[2:] for line in output.splitlines() if line.startswith(THROUGH)), [])
    run.recorder.write("sanitizer", family=family, tool=tool, outcome=outcome, said=said, kernels=kernels)
    print(f"{family} {tool}: {outcome}: {said}", flush=True)
    return outcome


def run_cases(family: str, device: str) -> None:
    """Forward and backward, or a step, of every small case; nothing is compared here."""
    import torch

    from benchmarks.kernels.timing import launched_kernels

    with launched_kernels() as kernels:
        for case in kernel_cases("small", [family]):
            torch.manual_seed(0)
            problem = case.make(torch.device(device))
            output: Any = problem.fast(*problem.inputs)
            if problem.upstream is not None:
                leaves = [t for t in problem.inputs if t.requires_grad]
                torch.autograd.grad(output, leaves, problem.upstream.to(output.dtype))
        if device == "cuda":
            torch.cuda.synchronize()
    print(THROUGH, *sorted(kernels), flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.sanitizer", description=__doc__.splitlines()[0])
    parser.add_argument("tool", choices=[*TOOLS, "cases"])
    parser.add_argument("--family", required=True)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--port", type=int, default=49152)
    options = parser.parse_args(arguments)
    if options.tool == "cases":
        run_cases(options.family, options.device)
        return 0
    if options.run is None:
        parser.error("--run says where the result goes")
    outcome = check(options.tool, options.family, Run.read(options.run), options.port)
    return 0 if outcome in {"passed", "skipped"} else 1


if __name__ == "__main__":
    sys.exit(main())
