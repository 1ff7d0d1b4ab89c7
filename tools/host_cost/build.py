"""Builds the two small libraries with the system's compilers, once for each state of their sources."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import torch

__all__ = ["missing", "products", "requests"]

_FOLDER = Path(__file__).parent
_CACHE = _FOLDER.parents[1] / "build" / "host_cost"
_HEADER = Path("/usr/include/valgrind/callgrind.h")


def missing() -> str | None:
    """What is not here that the counting needs, None where nothing is."""
    for program in ("valgrind", "gcc", "g++", "setarch"):
        if shutil.which(program) is None:
            return f"there is no {program}"
    return None if _HEADER.is_file() else f"there is no {_HEADER}"


def requests() -> Path:
    """What talks to callgrind."""
    return _built("requests.c", ["gcc", "-O2", "-shared", "-fPIC"], "")


def products() -> Path:
    """Products that compute nothing, for this PyTorch."""
    root = Path(torch.__file__).parent
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    compiler = [
        "g++", "-O1", "-shared", "-fPIC", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-I{root / 'include'}",
        f"-I{root / 'include/torch/csrc/api/include'}",
    ]  # fmt: skip
    libraries = f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"
    return _built("products.cpp", compiler, torch.__version__, libraries)


def _built(name: str, compiler: list[str], version: str, libraries: tuple[str, ...] = ()) -> Path:
    source = _FOLDER / name
    parts = source.read_bytes(), " ".join((*compiler, *libraries)).encode(), version.encode()
    library = _CACHE / f"{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}.so"
    if not library.exists():
        _CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(".tmp")
        subprocess.run([*compiler, str(source), *libraries, "-o", str(unfinished)], check=True)
        unfinished.replace(library)
    return library
