"""The lock: it holds all that is asked for, by version and hash, and what it holds needs nothing else."""

import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import lock, setup_environment

LOCKS = sorted(path for path in setup_environment.LOCK.parent.iterdir() if path.is_dir())
LINE = re.compile(r"([a-z0-9-]+)==([\w.]+) --hash=sha256:[0-9a-f]{64}")
WEIGHTS = Requirement(setup_environment.WEIGHTS)


def read(folder: Path, name: str) -> dict[str, str]:
    """Versions by name."""
    lines = (folder / f"{name}.txt").read_text().splitlines()
    assert lines[0].startswith(f"# Holds for {folder.name} alone.")
    found = [LINE.fullmatch(line) for line in lines[1:]]
    assert all(found), f"{name}.txt: expected a version and a hash, nothing else, in every line"
    return {match[1]: match[2] for match in found if match}


def asked_for(profile: str) -> Iterator[Requirement]:
    tomllib = pytest.importorskip("tomllib", reason="part of Python from 3.11 on")
    project = tomllib.loads((setup_environment.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], setup_environment.WEIGHTS]
    for extra in setup_environment.EXTRAS[profile]:
        texts += project["optional-dependencies"][extra]
    return (Requirement(text) for text in texts if not text.startswith("torch"))


def assert_holds(versions: dict[str, str], wanted: Requirement) -> None:
    version = versions.get(canonicalize_name(wanted.name))
    assert version is not None and wanted.specifier.contains(version), f"{wanted}: the lock has {version}; {RENEW}"


def python_version(folder: Path) -> str:
    """The version of a folder such as cpython-311-linux-x86_64: "3.11" of that."""
    digits = folder.name.split("-")[1]
    return f"{digits[0]}.{digits[1:]}"


RENEW = "renew it with `python3 -m tools.lock`"


@pytest.mark.parametrize("folder", LOCKS, ids=lambda folder: folder.name)
def test_what_is_asked_for_is_locked(folder: Path) -> None:
    build = read(folder, "build")
    demo = build | read(folder, "demo")
    test = demo | read(folder, "test")
    for text in setup_environment.BUILD_TOOLS:
        assert_holds(build, Requirement(text))
    for profile, versions in (("demo", demo), ("test", test)):
        for wanted in asked_for(profile):
            assert_holds(versions, wanted)
    constraints = setup_environment.CONSTRAINTS.read_text().splitlines()
    compat = setup_environment.COMPAT_REQUIREMENTS.read_text().splitlines()
    apart = [(path.read_text().splitlines(), read(folder, name)) for name, path in setup_environment.APART.items()]
    for lines, versions in ((constraints, test), (compat, read(folder, "compat")), *apart):
        for line in lines:
            if line and not line.startswith("#"):
                wanted = Requirement(line)
                if wanted.marker is None or wanted.marker.evaluate({"python_version": python_version(folder)}):
                    assert_holds(versions, wanted)


def test_every_constraint_names_one_version_for_a_python() -> None:
    """Packages that no longer have one for the oldest Python have another there."""
    lines = [line for line in setup_environment.CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    for version in ("3.10", "3.11", "3.12", "3.13", "3.14"):
        wanted = [Requirement(line) for line in lines]
        held = [one.name for one in wanted if one.marker is None or one.marker.evaluate({"python_version": version})]
        assert sorted(held) == sorted({one.name for one in wanted}), version


@pytest.mark.skipif(not setup_environment.LOCK.is_dir(), reason="no lock for this Python on this system")
def test_what_is_locked_needs_nothing_else() -> None:
    """As far as what is installed here is what the lock names, which it is where `make test` set it up."""
    folder = setup_environment.LOCK
    locked = read(folder, "build") | read(folder, "demo") | read(folder, "test")
    torch = Requirement(setup_environment.TORCH)
    for name, version in locked.items():
        if name == WEIGHTS.name or not list(metadata.distributions(name=name)) or metadata.version(name) != version:
            continue
        for text in metadata.requires(name) or ():
            wanted = Requirement(text)
            if (wanted.marker is None or wanted.marker.evaluate({"extra": ""})) and wanted.name != torch.name:
                assert_holds(locked, wanted)


def test_lines_of_a_report() -> None:
    origin = {"archive_info": {"hashes": {"sha256": "0f"}}}
    names = ["Typing_Extensions", "torch", "nvidia-cublas", "bert_fast", "absl.py"]
    packages = [{"metadata": {"name": name, "version": "1.0"}, "download_info": origin} for name in names]
    expected = ["absl-py==1.0 --hash=sha256:0f", "typing-extensions==1.0 --hash=sha256:0f"]
    assert lock.lines_of({"install": packages}) == expected
