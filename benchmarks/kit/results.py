"""Results as JSON lines: what every line says about the machine, and how lines are appended and read.

Importing this module imports no torch.
"""

import datetime
import json
import os
import platform
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kit.folding import unfolded

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"  # real texts, beside the project
NO_DATA = f"{DATA} is not there: docs/data.md says what to put there"
RESULTS = ROOT / "benchmarks" / "results"


@dataclass
class Recorder:
    """Appends lines to one file; `shared` stands in every line.

    A line is one `write` to a file opened for appending: processes that write at once do not mix their lines, and what
    was written stays when the process is killed.
    """

    path: Path
    shared: dict[str, Any] = field(default_factory=dict)

    def write(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Stores one result and returns it whole."""
        line = {**self.shared, "kind": kind, "time": _now(), **fields}
        # Messages name files: by where they are in the project, not on this machine.
        data = (json.dumps(line).replace(f"{ROOT}{os.sep}", "") + "\n").encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, data)
        finally:
            os.close(file)
        return line

    def of_this_run(self, kind: str) -> list[dict[str, Any]]:
        """What this run has stored so far."""
        run = self.shared.get("run")
        lines = read_lines(self.path) if self.path.exists() else ()
        return [line for line in lines if line.get("kind") == kind and line.get("run") == run]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The results of one file, also of one that says once what many lines share.

    SystemExit names the file and the line where there is no JSON.
    """
    return unfolded(_parsed(path))


def read_folder(folder: Path) -> Iterator[dict[str, Any]]:
    """The results of all files of a folder."""
    for path in sorted(folder.glob("*.jsonl")):
        yield from read_lines(path)


def _parsed(path: Path) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if text.strip():
            try:
                yield json.loads(text)
            except json.JSONDecodeError as error:
                raise SystemExit(f"{path.name}, line {number}: no JSON ({error})") from None


def reason(failure: Exception, limit: int = 500) -> str:
    """What stopped something, as results have it."""
    return f"{type(failure).__name__}: {str(failure)[:limit]}"


def cpu_environment() -> dict[str, Any]:
    """What a figure taken on the CPU depends on."""
    import torch
    import transformers

    return host_environment() | {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def host_environment() -> dict[str, Any]:
    """What every figure taken on a CPU depends on."""
    commit, _ = _commit()
    return {
        "time": _now(),
        "commit": commit and commit[:7],
        "processor": _processor(),
        "python": platform.python_version(),
    }


def gpu_environment(device: str = "cuda", commit: str | None = None) -> dict[str, Any]:
    """What a figure taken on a GPU depends on. With device "cpu" (for tests) `gpu` is None, and nothing counts as paid.

    commit: for a copy of the project without its history; asked of git where it is None. `dirty` is None where git
        cannot say. `run` names this run in all its lines.
    """
    import torch

    found, dirty = _commit()
    is_gpu = device == "cuda"
    return {
        "run": f"{_now()}-{uuid.uuid4().hex[:6]}",
        **(_gpu() if is_gpu else {"gpu": None}),
        "driver": _driver() if is_gpu else None,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "processor": _processor(),
        "commit": commit or found,
        "dirty": dirty,
    }


def _gpu() -> dict[str, Any]:
    import torch

    from bert_fast.devices import chip

    found = chip(torch.cuda.current_device())
    return {"gpu": found.product, "architecture": found.name, "multiprocessors": found.multiprocessors}


def slug(name: str) -> str:
    """A file name from a GPU's name."""
    return "".join(c if c.isalnum() else "-" for c in name.lower())


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _commit() -> tuple[str | None, bool | None]:
    """(commit, whether tracked files differ from it); (None, None) without git or without the history."""
    # The owner of the files may be another than who runs this, as in a container: git would then refuse.
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        status = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None, None
    # Results that grow while the benchmarks run change nothing that is measured.
    changed = [line for line in status.stdout.splitlines() if not line[3:].startswith("benchmarks/results/")]
    return head, bool(changed)


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
