"""Builds the driver that runs nothing, once for each state of its source, with the system's C compiler."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

__all__ = ["CACHE_DIR", "missing", "stub"]

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).with_name("libcuda")
CACHE_DIR = ROOT / "build" / "null_driver"
FLAGS = ("-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1")


def _compiler() -> str | None:
    """As Triton finds its own, which it needs for its driver module."""
    return next(
        (found for name in (os.environ.get("CC"), "gcc", "clang", "cc") if name and (found := shutil.which(name))), None
    )


def missing() -> str | None:
    """What is missing here to run kernels over the null driver, None where nothing is."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if _compiler() is None:
        return "there is no C compiler"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "Triton's driver module cannot be built: there is no Python.h"
    import torch

    if torch.cuda.is_available():
        return "torch sees a GPU: processes have its driver"
    return None


def stub() -> Path:
    """The folder that holds `libcuda.so.1`, built if need be; Triton's package brings the header."""
    spec = importlib.util.find_spec("triton")
    compiler = _compiler()
    assert spec is not None and spec.origin is not None and compiler is not None, missing()
    include = Path(spec.origin).parent / "backends" / "nvidia" / "include"
    sources = sorted(SOURCES.iterdir())
    parts = (
        *(path.read_bytes() for path in sources),
        (include / "cuda.h").read_bytes(),
        " ".join((compiler, *FLAGS)).encode(),
    )
    folder = CACHE_DIR / hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    library = folder / "libcuda.so.1"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        units = [str(path) for path in sources if path.suffix == ".c"]
        unfinished = folder / f"{os.getpid()}.tmp"  # others may build the same
        subprocess.run([compiler, *FLAGS, f"-I{include}", *units, "-o", str(unfinished)], check=True)
        unfinished.replace(library)
    return folder
