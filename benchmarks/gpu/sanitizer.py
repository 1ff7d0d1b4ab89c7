"""Parts `memcheck` and `racecheck`: NVIDIA's compute-sanitizer over all kernels, forward and backward, on small shapes.

One process for each: to start one takes longer than most cases. The tool is looked for on PATH and in CUDA_HOME. Where
it is not, or refuses the device, the result is "skipped" with the reason. "passed" needs three things: exit status 0,
the tool's own summary of 0 errors, and the line that the cases print when they are through.

Importing this module imports no torch.
"""

import os
import re
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu.driver import Ended, Process
from benchmarks.gpu.run import Run

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
# Importing torch under the tool takes longer than the usual 10 s. What Python starts (Triton's assembler) has no
# kernels.
OPTIONS = (
    "--error-exitcode", str(FOUND_STATUS), "--launch-timeout", "120", "--target-processes", "application-only",
)  # fmt: skip
REFUSED = r"[^\n]*(?:[Dd]evice not supported|Unable to find injection library)[^\n]*"


def find_tool() -> str | None:
    """Path of compute-sanitizer, from PATH, CUDA_HOME or CUDA_PATH, or where CUDA is installed by default."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    folders = [str(Path(home) / part) for home in homes if home for part in ("bin", "compute-sanitizer")]
    return shutil.which(TOOL, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *folders]))


def judge(tool: str, status: int | None, output: str) -> tuple[str, str]:
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


def processes(tool: str, command: tuple[str, ...], progress: Path, run: Run) -> tuple[Process, ...]:
    """The cases, which `command` runs, under the tool; none where it is not there, which is recorded."""
    path = find_tool()
    if path is None:
        _store(run, tool, "skipped", f"{TOOL} is neither on PATH nor in CUDA_HOME", [])
        return ()
    # With PyTorch's cache of blocks the tool would know the blocks and not the tensors in them.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = (path, "--tool", tool, *OPTIONS, *TOOLS[tool][0], *command, "--progress", str(progress))
    return (Process(tool, command, environment, progress, ended=partial(_ended, tool, run)),)


def _ended(tool: str, run: Run, ended: Ended) -> str:
    """Stores what the tool says of a process; only where it did not finish another goes on."""
    outcome, said = judge(tool, ended.status, "\n".join(ended.output))
    if outcome == "error":
        said = "not through in time" if ended.outcome == "killed" else said
        said = said if ended.case is None else f"at {ended.case}: {said}"
    through = next((line for line in ended.output if line.startswith(THROUGH)), "")
    _store(run, tool, outcome, said, through.removeprefix(THROUGH).split())
    return {"passed": "ok", "error": ended.outcome}.get(outcome, outcome)


def _store(run: Run, tool: str, outcome: str, said: str, kernels: Sequence[str]) -> None:
    families = list(run.families or ())
    run.recorder.write("sanitizer", tool=tool, families=families, kernels=kernels, outcome=outcome, said=said)
