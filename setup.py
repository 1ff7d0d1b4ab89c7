"""Builds `bert_fast._native` with CMake and ninja; everything else about the package is in `pyproject.toml`.

Where no C++17 compiler works the package is built in pure Python: tagged so, with a note that `bert-fast doctor` shows.

Environment:
    BERT_FAST_NATIVE=0   builds a package without the extension.
    BERT_FAST_NATIVE=1   fails where the extension cannot be built.
    BERT_FAST_CUDA=1     passed on to CMake as -DBERT_FAST_CUDA=ON.
    CMAKE_ARGS           further arguments of CMake's configure step, split as a shell would.
    CMAKE_BUILD_PARALLEL_LEVEL   number of compile jobs (CMake's own variable).
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent

# Older ones stop at pyproject.toml with a page about its licence field.
if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(f"bert_fast: setuptools {setuptools.__version__} is too old; `pip install 'setuptools>=77'`")


class CMakeExtension(Extension):
    """An extension whose sources only CMake knows."""

    def __init__(self, name: str) -> None:
        super().__init__(name, sources=[])


class CMakeBuild(build_ext):
    """Configures and builds with CMake into the place where setuptools wants the module."""

    def build_extension(self, ext: CMakeExtension) -> None:
        target = (ROOT / self.get_ext_fullpath(ext.name)).resolve()
        build_dir = (ROOT / self.build_temp / ext.name).resolve()
        build_dir.mkdir(parents=True, exist_ok=True)
        cmake = _find_tool("cmake")
        configure = [
            cmake,
            "--log-level=NOTICE",
            f"-S{ROOT}",
            f"-B{build_dir}",
            "-GNinja",
            f"-DCMAKE_MAKE_PROGRAM={_find_tool('ninja')}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={_pybind11_cmake_dir()}",
            f"-DBERT_FAST_MODULE_DIR={target.parent}",
            f"-DBERT_FAST_MODULE_FILE={target.name.removesuffix(sysconfig.get_config_var('EXT_SUFFIX'))}",
            f"-DBERT_FAST_CUDA={'ON' if os.environ.get('BERT_FAST_CUDA') == '1' else 'OFF'}",
            "-DBERT_FAST_WERROR=OFF",  # of a compiler that nobody has tried, a warning is none of its user's business
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        _run(configure)
        _run([cmake, "--build", str(build_dir), "--target", "_native"])


def _find_tool(name: str) -> str:
    """The tool beside this interpreter first (an environment that is not activated), then on PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    found = shutil.which(name, path=path)
    if found is None:
        raise SystemExit(f"bert_fast: {name} is not on PATH; `pip install {name}`, or build with BERT_FAST_NATIVE=0")
    return found


def _pybind11_cmake_dir() -> str:
    try:
        import pybind11
    except ImportError:
        raise SystemExit("bert_fast: `pip install pybind11` first, or build with BERT_FAST_NATIVE=0") from None
    return pybind11.get_cmake_dir()


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True)
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"bert_fast: the C++ extension did not build (exit {error.returncode}; the compiler's message is above). "
            "BERT_FAST_NATIVE=0 installs the package without it: same ids and dropout masks, slower."
        ) from None


# What the extension is written in: C++17 with the builtins of GCC and Clang, threads, and Python's headers.
_PROBE = """
#include <Python.h>
#include <optional>
#include <thread>
typedef float Four __attribute__((vector_size(16)));
std::optional<int> one(__builtin_popcount(1));
int main() { std::thread([] {}).join(); return sizeof(Four) - 16 * *one; }
"""


def why_no_extension() -> str | None:
    """What keeps the extension from being built here; None if nothing does. Runs the compiler on a few lines."""
    if os.name == "nt":
        return "it is written for GCC and Clang, which do not build Python extensions on Windows"
    given = os.environ.get("CXX")
    names = [given] if given else ["c++", "g++", "clang++"]
    compilers = [name for name in names if shutil.which(shlex.split(name)[0])]
    if not compilers:
        return f"no C++ compiler found (looked for {', '.join(names)})"
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").is_file():
        return f"Python's headers are not installed (no {headers}/Python.h)"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(_PROBE)
        options = ["-std=c++17", "-pthread", f"-I{headers}", "-c", str(source), "-o", f"{source}.o"]
        command = [*shlex.split(compilers[0]), *options]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if "error" in line] or ["no message"]
        return f"{compilers[0]} compiles no C++17 here ({lines[0].replace(folder, '').lstrip('/')})"
    return None


class BuildWithNote(build_py):
    """Leaves a note in the package that says why it has no extension."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, "bert_fast", "_no_native.txt").write_text(f"{missing}\n", encoding="utf-8")


def _note(why: str) -> str:
    return (
        f"\nbert_fast: built WITHOUT its C++ extension: {why}.\n"
        "  What you get: everything, in pure Python and PyTorch; same token ids, dropout masks and results.\n"
        "  What is slower: the tokenizer, and attention and dropout on a CPU.\n"
        "  To have it: install a C++17 compiler (Debian: apt-get install g++ python3-dev) and install again.\n"
    )


wanted = os.environ.get("BERT_FAST_NATIVE", "auto")
missing = "switched off by BERT_FAST_NATIVE=0" if wanted == "0" else why_no_extension()
if missing is None:
    setup(ext_modules=[CMakeExtension("bert_fast._native")], cmdclass={"build_ext": CMakeBuild})
elif wanted == "1":
    raise SystemExit(f"bert_fast: BERT_FAST_NATIVE=1, but {missing}")
else:
    print(_note(missing), file=sys.stderr)
    setup(cmdclass={"build_py": BuildWithNote})
