"""Runs the project's checks and ends with one line that sums them up.

    .venv/bin/python tools/check.py [lint] [cpp] [names] [python] [interpreter] [sanitize] [unigram]
                                      [gpu]

Without arguments all run but the last three.

    lint         ruff, mypy, clang-format, links and plain English of the documentation; nothing is rewritten
    cpp          the C++ tests under the address and undefined-behaviour sanitizers, apart from the extension; those of
                 the tokenizer's threads under the thread sanitizer; over a million texts with the tokens that
                 Hugging Face `tokenizers` makes of them (build/fuzz, written first) under the first, a part of them
                 under the second
    names        `python -m tools.suite_names`: any two processes find tests of the same names, which can be read.
                 Where python is run too, its processes are one of the two
    python       pytest, all but the interpreter tests, on at most two processes
    interpreter  pytest -m interpreter: Triton kernels in Triton's interpreter (a process runs them all there or none)
    sanitize     the Python extension under the address and undefined-behaviour sanitizers, driven by the tests of ops,
                 back-ends and tokenizer: a module of its own in build/sanitized-module, which needs GCC. An hour of one
                 core
    unigram      a million texts, every code point and all real texts with the tokens that Hugging Face `tokenizers`
                 makes of them by Unigram models (build/fuzz, written first): the C++ core under both sanitizers, and
                 the module
    gpu          what needs a GPU, within nine minutes: `python -m benchmarks.gpu`. Installs nothing

After cpp, python and interpreter, `python -m tools.suite_counts compare` fails if fewer tests ran than are on record.
Every check runs even when an earlier one failed; the exit status is 1 if any did. Commands of lint, cpp and names run
two at a time beside the tests in Python, by what these leave of the cores, each with its output in one piece: when it
ends, or when the tests that run then end.
"""

import argparse
import contextlib
import io
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
SANITIZE_DIR = ROOT / "build" / "sanitize"
THREAD_DIR = ROOT / "build" / "thread"
MODULE_DIR = ROOT / "build" / "sanitized-module"  # tools/sanitized/sitecustomize.py looks for it there
FUZZ_FILE = ROOT / "build" / "fuzz" / "wordpiece.bin"  # the Python tests look for it there, too
UNIGRAM_FILE = ROOT / "build" / "fuzz" / "unigram.bin"  # likewise
REPORT_DIR = ROOT / "build" / "test_reports"  # tools/suite_counts.py looks for them there
CPP_TESTS = ("-DBERT_FAST_MODULE=OFF", "-DBERT_FAST_TESTS=ON")
THREAD_TESTS = ("unigram_identity", *(f"wordpiece_{name}" for name in ("identity", "batch", "pool", "rows", "api")))
SANITIZED_TESTS = ("ops", "torch", "tokenization", "null_driver/test_programs.py")
# Blocks of that file which the thread sanitizer leaves out: what threads do to each other shows on the others.
NOT_FOR_THREADS = ("every code point", "real texts")
JOBS = min(2, os.cpu_count() or 1)
OUTPUT = threading.RLock()
STREAMS: list[None] = []  # one for each command that writes its output as it comes
SHOWN_LATER: list[bytes] = []  # of commands that ended while another wrote its output as it came
FINISHED: defaultdict[str, threading.Event] = defaultdict(threading.Event)  # commands by name
CORES = threading.Semaphore(JOBS)  # of commands whose output is shown when they end
AT_ONCE = ("lint", "cpp", "names")  # so that a core that one of them leaves idle goes on with another
AFTER_OTHERS = ["nice", "-n", "10"] if shutil.which("nice") else []
WORKER_VARIABLES = {"OMP_NUM_THREADS": "1"} if JOBS > 1 else {}  # two processes share two cores

# Set by a user for other runs; here they would change what is tested, the last one how long it takes: every process
# would compile the sources anew, pytest's assertions included.
CLEARED_VARIABLES = (
    "BERT_FAST_BACKEND", "BERT_FAST_DEBUG", "BERT_FAST_NATIVE", "BERT_FAST_SIMD", "TRITON_INTERPRET", "PYTEST_ADDOPTS",
    "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip


@dataclass
class Outcome:
    """One command of one check: what it is called, its exit status, how long it took, the last line it wrote."""

    name: str
    status: int
    seconds: float
    last_line: str


def lint() -> list[Outcome]:
    folders = (ROOT / "csrc", ROOT / "tools")
    cpp_files = sorted(str(p) for one in folders for p in one.rglob("*") if p.suffix in {".c", ".cpp", ".h"})
    commands = {
        "mypy": [sys.executable, "-m", "mypy"],
        "ruff check": [_tool("ruff"), "check"],
        "ruff format": [_tool("ruff"), "format", "--check"],
        "clang-format": [_tool("clang-format"), "--dry-run", "-Werror", *cpp_files],
        "links": [sys.executable, "tools/check_links.py"],
        "English": [sys.executable, "tools/check_english.py"],
    }
    return _run_together(*({name: command} for name, command in commands.items()))


def cpp() -> list[Outcome]:
    REPORT_DIR.mkdir(parents=True, exist_ok=True)
    outcomes = _run_together(
        {
            "C++ configure": _configure(SANITIZE_DIR, "address", *CPP_TESTS),
            "C++ build": [_tool("cmake"), "--build", str(SANITIZE_DIR), "-j", str(JOBS)],
            "C++ tests": [*_ctest(SANITIZE_DIR), "--output-junit", str(REPORT_DIR / "cpp.xml")],
            "C++ counts": _counts("cpp"),
        },
        {"texts write": [sys.executable, "-m", "tests.tokenization.fuzz_file", "write", str(FUZZ_FILE)]},
        {
            "threads configure": _configure(THREAD_DIR, "thread", *CPP_TESTS),
            "threads build": [_tool("cmake"), "--build", str(THREAD_DIR), "-j", str(JOBS), "-t", *THREAD_TESTS],
            "threads tests": [*_ctest(THREAD_DIR), "-R", f"^({'|'.join(THREAD_TESTS)})$"],
        },
    )
    succeeded = {outcome.name for outcome in outcomes if outcome.status == 0}
    identity = "wordpiece_identity"
    texts = {
        "C++ build": {"texts address": [str(SANITIZE_DIR / identity), str(FUZZ_FILE)]},
        "threads build": {"texts threads": [str(THREAD_DIR / identity), str(FUZZ_FILE), *NOT_FOR_THREADS]},
    }
    return outcomes + _run_together(*(row for build, row in texts.items() if {"texts write", build} <= succeeded))


def _configure(folder: Path, sanitizer: str, *options: str) -> list[str]:
    gcc = shutil.which("g++")
    return [
        _tool("cmake"),
        f"-S{ROOT}",
        f"-B{folder}",
        "-GNinja",
        f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}",
        "-DCMAKE_BUILD_TYPE=Debug",
        f"-DBERT_FAST_SANITIZE={sanitizer}",
        *options,
        *([f"-DCMAKE_CXX_COMPILER={gcc}"] if gcc else []),
    ]


def _ctest(folder: Path) -> list[str]:
    # No test at all is a failure: it would mean that none was found.
    return [_tool("ctest"), "--test-dir", str(folder), "--output-on-failure", "--no-tests=error", "-j", str(JOBS)]


def _run_together(*rows: dict[str, list[str]]) -> list[Outcome]:
    """Rows of commands side by side, as many as there are cores, each until one fails; outcomes in the order given."""
    with ThreadPoolExecutor(JOBS) as cores:
        return [outcome for done in cores.map(lambda row: run_until_failure(row, whole=True), rows) for outcome in done]


def run_until_failure(
    commands: dict[str, list[str]], environment: dict[str, str] | None = None, *, whole: bool = False
) -> list[Outcome]:
    outcomes = []
    for name, command in commands.items():
        outcomes.append(_run(name, command, environment, whole=whole))
        if outcomes[-1].status != 0:
            break
    return outcomes


def pytest_arguments(marker: str, *arguments: str) -> list[str]:
    """Arguments of Python: the tests of this marker, shared out among processes."""
    shared = ["-n", str(JOBS), "--dist", "worksteal"] if JOBS > 1 else []
    return ["-m", "pytest", "-q", "-m", marker, *arguments, *shared]


def _counts(report: str) -> list[str]:
    return [sys.executable, "-m", "tools.suite_counts", "compare", report]


def names(*parts: str) -> list[Outcome]:
    return [_run("names of tests", [sys.executable, "-m", "tools.suite_names", *parts], whole=True)]


def python(*options: str) -> list[Outcome]:
    tests = pytest_arguments("not interpreter", "--durations=10", f"--junitxml={REPORT_DIR / 'python.xml'}", *options)
    return run_until_failure({"pytest": [sys.executable, *tests], "pytest counts": _counts("python")}, WORKER_VARIABLES)


def python_and_names() -> list[Outcome]:
    """pytest writes down the names that it finds, beside those of `suite_names elsewhere`, which runs meanwhile."""
    outcomes = python("-p", "tools.suite_names")
    FINISHED["names of tests"].wait()
    return outcomes + names("compare")


def interpreter() -> list[Outcome]:
    folders = [f"tests/{name}" for name in ("kernels", "ops", "optim")]
    tests = pytest_arguments("interpreter", *folders, f"--junitxml={REPORT_DIR / 'interpreter.xml'}")
    return run_until_failure(
        {"interpreter tests": [sys.executable, *tests], "interpreter counts": _counts("interpreter")},
        WORKER_VARIABLES | {"TRITON_INTERPRET": "1"},
    )


def unigram() -> list[Outcome]:
    module = [sys.executable, "-m", "tests.tokenization.unigram_fuzz_file"]
    test = "unigram_identity"
    build = {
        f"{name} {step}": command
        for name, folder, sanitizer in (("C++", SANITIZE_DIR, "address"), ("threads", THREAD_DIR, "thread"))
        for step, command in (
            ("configure", _configure(folder, sanitizer, *CPP_TESTS)),
            ("build", [_tool("cmake"), "--build", str(folder), "-j", str(JOBS), "-t", test]),
        )
    }
    return run_until_failure(
        {
            **build,
            "texts write": [*module, "write", str(UNIGRAM_FILE)],
            "texts module": [*module, "check", str(UNIGRAM_FILE)],
            "texts address": [str(SANITIZE_DIR / test), str(UNIGRAM_FILE)],
            "texts threads": [str(THREAD_DIR / test), str(UNIGRAM_FILE), *NOT_FOR_THREADS],
        }
    )


def gpu() -> list[Outcome]:
    return [_run("GPU", [sys.executable, "-m", "benchmarks.gpu"])]


def sanitize() -> list[Outcome]:
    import pybind11  # not needed by the other checks

    module_options = (
        "-DBERT_FAST_MODULE=ON",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
    )
    folders = [f"tests/{name}" for name in SANITIZED_TESTS]
    sanitized_python = [sys.executable, "tools/sanitized/python.py"]
    return run_until_failure(
        {
            "module configure": _configure(MODULE_DIR, "address", *module_options),
            "module build": [_tool("cmake"), "--build", str(MODULE_DIR), "-j", str(JOBS), "-t", "_native"],
            "module probe": [*sanitized_python, "tools/sanitized/probe.py"],
            "module tests": [*sanitized_python, *pytest_arguments("not interpreter", *folders)],
        },
        WORKER_VARIABLES,
    )


CHECKS = {
    "lint": lint, "cpp": cpp, "names": names, "python": python, "interpreter": interpreter, "sanitize": sanitize,
    "unigram": unigram, "gpu": gpu,
}  # fmt: skip
# Where both run, the tests are collected once for both.
TOGETHER = {"names": lambda: names("elsewhere"), "python": python_and_names}
NOT_BY_DEFAULT = {"sanitize", "unigram", "gpu"}


def _tool(name: str) -> str:
    """The tool of this environment, else the one on PATH."""
    found = shutil.which(name, path=os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)]))
    if found is None:
        raise SystemExit(f"{name} is not installed; `make test` sets it up")
    return found


def _run(name: str, command: list[str], environment: dict[str, str] | None = None, *, whole: bool = False) -> Outcome:
    """Runs a command at the project's root; whole: beside others, when a core is free, its output shown at its end."""
    try:
        with CORES if whole else contextlib.nullcontext():
            return _run_now(name, command, environment, whole)
    finally:
        FINISHED[name].set()


def _run_now(name: str, command: list[str], environment: dict[str, str] | None, whole: bool) -> Outcome:
    shown = command if len(command) <= 12 else [*command[:12], "..."]
    env = {key: value for key, value in os.environ.items() if key not in CLEARED_VARIABLES} | (environment or {})
    output = io.BytesIO() if whole else sys.stdout.buffer
    output.write(f"\n== {name}: {' '.join(shown)}\n".encode())
    output.flush()
    start = time.monotonic()
    last_line = b""
    command = [*AFTER_OTHERS, *command] if whole else command
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        with contextlib.nullcontext() if whole else _alone_on_stdout():
            while chunk := process.stdout.read1():  # by what is there, not by line: pytest's dots appear at once
                output.write(chunk)
                output.flush()
                last_line = (last_line + chunk)[-4096:]
    if isinstance(output, io.BytesIO):
        _show(output.getvalue())
    lines = last_line.decode(errors="replace").strip().splitlines()
    return Outcome(name, process.returncode, time.monotonic() - start, lines[-1].strip("= ") if lines else "")


def _show(text: bytes) -> None:
    """Writes it now or, while another command writes as its output comes, behind that command's."""
    with OUTPUT:
        if STREAMS:
            SHOWN_LATER.append(text)
        else:
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()


@contextlib.contextmanager
def _alone_on_stdout() -> Iterator[None]:
    with OUTPUT:
        STREAMS.append(None)
    try:
        yield
    finally:
        with OUTPUT:
            STREAMS.pop()
            later, SHOWN_LATER[:] = b"".join(SHOWN_LATER), []
            _show(later)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "checks", nargs="*", metavar="check", help=f"{', '.join(CHECKS)}; default: all but the last three"
    )
    arguments = parser.parse_args()
    unknown = [name for name in arguments.checks if name not in CHECKS]
    if unknown:
        parser.error(f"no check {', '.join(unknown)}; there are: {', '.join(CHECKS)}")
    start = time.monotonic()
    chosen = arguments.checks or [name for name in CHECKS if name not in NOT_BY_DEFAULT]
    checks = CHECKS | (TOGETHER if TOGETHER.keys() <= {*chosen} else {})
    with ThreadPoolExecutor(len(AT_ONCE)) as threads:
        beside = {name: threads.submit(checks[name]) for name in chosen if name in AT_ONCE}
        if "cpp" in beside:
            _wait_for_texts(beside["cpp"])
        alone = [outcome for name in chosen if name not in AT_ONCE for outcome in checks[name]()]
        first = [outcome for one in beside.values() for outcome in one.result()]
    return report(first + alone, start)


def _wait_for_texts(cpp: "Future[list[Outcome]]") -> None:
    """The Python tests read what this check writes first."""
    while not FINISHED["texts write"].wait(0.1) and not cpp.done():
        pass


def report(outcomes: list[Outcome], start: float) -> int:
    """Prints a line for each command and one for all; 1 if one failed. start: `time.monotonic` of the first."""
    print("\n" + "-" * 78)
    for outcome in outcomes:
        state = "ok" if outcome.status == 0 else f"FAILED (exit {outcome.status})"
        print(f"{outcome.name:<18} {state:<18} {outcome.seconds:7.1f} s   {outcome.last_line[:100]}")
    failed = [outcome.name for outcome in outcomes if outcome.status != 0]
    verdict = f"FAILED: {', '.join(failed)}" if failed else "PASSED"
    print(f"{verdict} ({len(outcomes) - len(failed)} of {len(outcomes)} checks, {time.monotonic() - start:.0f} s)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
