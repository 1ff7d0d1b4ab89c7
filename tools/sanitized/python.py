"""Python on the extension that `tools/check.py sanitize` builds, under the address and undefined-behaviour sanitizers.

    .venv/bin/python tools/sanitized/python.py -m pytest tests/torch        anything that python takes

The processes that it starts are on that module, too. What the sanitizers find ends the process with a report.
"""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def environment() -> dict[str, str]:
    """What is to be set, beside what is set already."""
    libraries = [_library(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    return {
        # Python itself is not linked with the sanitizers, so they come first by force; libstdc++ beside them, or they
        # would not find the function that throws.
        "LD_PRELOAD": " ".join(libraries),
        # Python and torch keep to the end what they allocate at the start; what does not fit is a MemoryError.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # so that strings and arrays have borders that are watched
        "PYTHONPATH": os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")])),
    }


def _library(name: str) -> str:
    done = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(done.stdout.strip())
    if not path.is_absolute():  # what g++ answers where it has none
        raise SystemExit(f"{name}: g++ has none; the sanitized module needs the libraries of GCC's sanitizers")
    return str(path)


if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], os.environ | environment())
