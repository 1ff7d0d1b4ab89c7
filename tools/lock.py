"""Writes the lock of this Python on this system: all that `make demo`, `make test` and their like install.

    python3 -m tools.lock

Needs a package index that pip knows; installs nothing, and takes a few minutes. pip resolves what pyproject.toml asks
for under tools/constraints.txt, in a fresh environment; what it would take goes to `tools/locks/<python>-<system>/`:

    build.txt    what the extension, and packages without a wheel, are built with
    demo.txt     what `make demo` needs beside these
    test.txt     what `make test` needs beside both
    compat.txt   what goes into `.compat/`
    site.txt, dist.txt   what `make site` and `make dist` need, in environments of their own

To renew it: change tools/constraints.txt, run this, run `make test`, commit. torch is not in it: its one version is
several builds (CPU, CUDA), of which pip's configuration chooses, and each brings packages of its own.
"""

import json
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.setup_environment import (
    APART,
    BUILD_TOOLS,
    COMPAT_REQUIREMENTS,
    CONSTRAINTS,
    EXTRAS,
    LOCK,
    ROOT,
    TORCH,
    WEIGHTS,
)

# torch, what its CUDA builds bring, and the project itself.
NOT_LOCKED = re.compile(r"(torch|nvidia-.*|cuda-.*|bert-fast)==")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder)
        venv.create(environment, with_pip=True)

        def resolve(*arguments: object) -> list[str]:
            return lines_of(report_of(environment, arguments))

        def extras(profile: str) -> str:
            return f"{ROOT}[{','.join(EXTRAS[profile])}]"

        weights = resolve("--no-deps", WEIGHTS)
        everything = resolve("-c", CONSTRAINTS, *BUILD_TOOLS, TORCH, extras("test"))
        versions = environment / "versions.txt"
        versions.write_text("".join(f"{line.split()[0]}\n" for line in everything))
        build = resolve("-c", versions, *BUILD_TOOLS)
        demo = resolve("-c", versions, TORCH, extras("demo"))
        compat = resolve("--no-deps", "-r", COMPAT_REQUIREMENTS)
        apart = {name: resolve("-c", versions, "-r", requirements) for name, requirements in APART.items()}
    LOCK.mkdir(parents=True, exist_ok=True)
    write("build", build)
    write("demo", {*demo, *weights} - {*build})
    write("test", {*everything} - {*build, *demo})
    write("compat", compat)
    for name, lines in apart.items():
        write(name, lines)
    return 0


def report_of(environment: Path, arguments: Iterable[object]) -> dict[str, Any]:
    """What pip would install into an empty environment."""
    report = environment / "report.json"
    command = [environment / "bin" / "pip", "install", "-q", "--dry-run", "--ignore-installed", "--report", report]
    subprocess.run([*map(str, command), *map(str, arguments)], check=True)
    content: dict[str, Any] = json.loads(report.read_text())
    return content


def lines_of(report: dict[str, Any]) -> list[str]:
    """`name==version --hash=sha256:...` of each package that the lock holds, sorted."""
    lines = []
    for package in report["install"]:
        name = re.sub(r"[-_.]+", "-", package["metadata"]["name"]).lower()
        pin = f"{name}=={package['metadata']['version']}"
        if not NOT_LOCKED.match(pin):
            lines.append(f"{pin} --hash=sha256:{package['download_info']['archive_info']['hashes']['sha256']}")
    return sorted(lines)


def write(name: str, lines: Iterable[str]) -> None:
    header = f"# Holds for {LOCK.name} alone. Written by `python3 -m tools.lock`, which says what this is.\n"
    (LOCK / f"{name}.txt").write_text(header + "".join(f"{line}\n" for line in sorted(lines)))


if __name__ == "__main__":
    sys.exit(main())
