"""Builds what counting needs, once for each state of its source, with the system's compilers."""

import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path

from tools.null_driver import build as null_driver

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).with_name("native")
CACHE_DIR = ROOT / "build" / "host_cost"
VALGRIND_HEADER = Path("/usr/include/valgrind/callgrind.h")


def missing(needs_valgrind: bool = True) -> str | None:
    """Returns what this machine lacks for counting, None where it lacks nothing."""
    if (reason := null_driver.missing()) is not None:
        return reason
    if shutil.which("g++") is None:
        return "there is no C++ compiler (g++)"
    if importlib.util.find_spec("transformers") is None:
        return "the package transformers is not installed"
    if needs_valgrind and (shutil.which("valgrind") is None or not VALGRIND_HEADER.is_file()):
        return f"valgrind is not installed, or not its header {VALGRIND_HEADER}"
    if needs_valgrind and shutil.which("setarch") is None:
        return "there is no setarch, which fixes addresses"
    return None


def all_libraries() -> None:
    """Builds both, so that processes that run at once find them."""
    callgrind_library()
    no_arithmetic()


def callgrind_library() -> Path:
    """Returns the library that starts and stops callgrind."""
    return _built("callgrind.c", ["gcc", "-O2", "-Wall", "-shared", "-fPIC"])


def no_arithmetic() -> Path:
    """Returns the library of operators that compute nothing, compiled against torch's headers in some 20 seconds."""
    import torch

    root = Path(torch.__file__).parent
    folders = [f"-I{root / 'include'}", f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", abi, *folders]
    return _built("no_arithmetic.cpp", command, torch.__version__, ["-Wl,--no-as-needed", "-ltorch_cpu", "-lc10"])


def _built(source: str, command: Sequence[str], version: str = "", linked: Sequence[str] = ()) -> Path:
    path = SOURCES / source
    parts = (path.read_bytes(), version.encode())
    return null_driver.library(CACHE_DIR, f"{path.stem}.so", [*command, str(path)], linked, parts)
