"""Builds the libraries that stand in for NVIDIA's, once for each state of their source, by the system's C compiler."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).parent
CACHE_DIR = ROOT / "build" / "null_driver"
FLAGS = ("-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread")


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
    assert spec is not None and spec.origin is not None, missing()
    header = Path(spec.origin).parent / "backends" / "nvidia" / "include" / "cuda.h"
    return _built("libcuda", "libcuda.so.1", header)


def cublaslt() -> Path:
    """The folder that holds `libcublasLt.so.13`, built if need be."""
    return _built("libcublaslt", "libcublasLt.so.13")


def _built(folder_name: str, name: str, *headers: Path) -> Path:
    compiler = _compiler()
    assert compiler is not None, missing()
    sources = sorted((SOURCES / folder_name).iterdir())
    units = [str(path) for path in sources if path.suffix == ".c"]
    command = [compiler, *FLAGS, f"-Wl,-soname,{name}", *(f"-I{header.parent}" for header in headers), *units]
    return library(CACHE_DIR, name, command, ["-lm"], [path.read_bytes() for path in (*sources, *headers)]).parent


def library(folder: Path, name: str, command: Sequence[str], linked: Sequence[str], parts: Iterable[bytes]) -> Path:
    """The library that a command makes, built if need be, below a folder: once for each command and these parts."""
    key = hashlib.sha256(b"\0".join((*parts, " ".join([*command, *linked]).encode()))).hexdigest()[:16]
    path = folder / key / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{os.getpid()}.tmp")  # others may build the same
        subprocess.run([*command, "-o", str(unfinished), *linked], check=True)
        unfinished.replace(path)
    return path
