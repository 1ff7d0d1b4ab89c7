"""The machine and the versions that a run was made with."""

import os
import platform
from importlib import metadata
from pathlib import Path

from bert_fast._version import __version__

__all__ = ["available_cores", "processor_name", "versions"]


def processor_name() -> str:
    """Of the first processor, as the system calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def available_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions(packages: tuple[str, ...] = ("torch", "triton", "numpy", "accelerate")) -> dict[str, str]:
    """Of bert_fast, Python and those of the packages that are installed."""
    found = {"bert_fast": __version__, "Python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
