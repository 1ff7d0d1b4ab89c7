"""The set-up behind `make`: what is done is not done again, what failed is, and pip gets a second try."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import setup_environment


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A miniature project whose steps only write their names to a list."""
    for name in ("pyproject.toml", "setup.py", "CMakeLists.txt", "bert_fast/_version.py", "csrc/cpu/a.cpp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "constraints.txt").write_text("")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").write_text("")
    monkeypatch.setattr(setup_environment, "ROOT", tmp_path)
    monkeypatch.setattr(setup_environment, "CONSTRAINTS", tmp_path / "constraints.txt")
    monkeypatch.setattr(setup_environment, "COMPAT_REQUIREMENTS", tmp_path / "requirements-compat.txt")
    monkeypatch.setattr(setup_environment, "COMPAT_DIR", tmp_path / ".compat")
    monkeypatch.setattr(setup_environment, "LOCK", tmp_path / "locks" / "this")
    monkeypatch.delenv("BERT_FAST_NATIVE", raising=False)
    return tmp_path


@pytest.fixture
def steps(project: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []

    def build(python: Path) -> None:
        done.append("extension")
        (project / "bert_fast" / "_native.so").write_text("")

    def compat(python: Path) -> None:
        done.append("compat")
        (project / ".compat").mkdir(exist_ok=True)

    monkeypatch.setattr(setup_environment, "_install_packages", lambda python, profile: done.append(profile))
    monkeypatch.setattr(setup_environment, "_build_extension", build)
    monkeypatch.setattr(setup_environment, "_install_compat", compat)
    return done


def set_up(project: Path, steps: list[str], profile: str = "test") -> list[str]:
    """The steps that one call runs."""
    steps.clear()
    setup_environment._set_up(profile, project / "venv")
    return list(steps)


def test_a_second_call_does_nothing(project: Path, steps: list[str]) -> None:
    assert set_up(project, steps) == ["test", "extension"]
    assert set_up(project, steps) == []


def test_only_what_changed_is_done_again(project: Path, steps: list[str]) -> None:
    set_up(project, steps)
    (project / "csrc" / "cpu" / "a.cpp").write_text("changed")
    assert set_up(project, steps) == ["extension"]
    (project / "csrc" / "cpu" / "new.h").write_text("")
    assert set_up(project, steps) == ["extension"]
    (project / "pyproject.toml").write_text("changed")
    assert set_up(project, steps) == ["test"]
    (project / "bert_fast" / "_native.so").unlink()
    assert set_up(project, steps) == ["extension"]


def test_compat_is_installed_for_tests_where_it_is_asked_for(project: Path, steps: list[str]) -> None:
    set_up(project, steps)
    (project / "requirements-compat.txt").write_text("transformers==4.57.6\n")
    assert set_up(project, steps, "demo") == []
    assert set_up(project, steps) == ["compat"]
    assert set_up(project, steps) == []


def test_packages_for_tests_contain_those_for_the_demo(project: Path, steps: list[str]) -> None:
    assert set_up(project, steps, "demo") == ["demo", "extension"]
    assert set_up(project, steps, "test") == ["test"]
    assert set_up(project, steps, "demo") == []


def test_a_new_lock_is_installed(project: Path, steps: list[str]) -> None:
    set_up(project, steps)
    (project / "requirements-compat.txt").write_text("")
    set_up(project, steps)
    setup_environment.LOCK.mkdir(parents=True)
    (setup_environment.LOCK / "compat.txt").write_text("a==1 --hash=sha256:0\n")
    assert sorted(set_up(project, steps)) == ["compat", "test"], "side by side"


@pytest.mark.parametrize("locked", [True, False])
def test_packages_come_by_hash_where_there_is_a_lock(
    locked: bool, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(setup_environment, "_pip", lambda python, arguments, *_: calls.append([*map(str, arguments)]))
    if locked:
        setup_environment.LOCK.mkdir(parents=True)
    setup_environment._install_packages(Path(sys.executable), "test")
    setup_environment._install_compat(Path(sys.executable))
    by_hash = [call for call in calls if "--require-hashes" in call]
    assert [Path(call[-1]).stem for call in by_hash] == (["build", "demo", "test", "compat"] if locked else [])
    assert all("--no-deps" in call for call in by_hash)
    rest = [call for call in calls if call not in by_hash]
    assert len(rest) == (1 if locked else 4), "the project itself; build tools, weights and compat without a lock"
    assert ("no locks/this: versions by constraints.txt and ranges, no hashes" in capsys.readouterr().out) != locked


def test_a_failed_step_is_tried_again_by_the_next_call(
    project: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(python: Path) -> None:
        raise subprocess.CalledProcessError(1, ["compiler"])

    with monkeypatch.context() as patch:
        patch.setattr(setup_environment, "_build_extension", fail)
        with pytest.raises(subprocess.CalledProcessError):
            set_up(project, steps)
    assert set_up(project, steps) == ["extension"]


@pytest.mark.parametrize(("failures", "succeeds"), [(0, True), (1, True), (2, False)])
def test_pip_gets_one_second_try(
    failures: int, succeeds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    calls.write_text("")
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nfrom pathlib import Path\ncalls = Path({str(calls)!r})\n"
        f"calls.write_text(calls.read_text() + 'x')\nraise SystemExit(len(calls.read_text()) <= {failures})\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(setup_environment, "RETRY_AFTER_S", 0)
    if succeeds:
        setup_environment._pip(python, ["x"])
    else:
        with pytest.raises(subprocess.CalledProcessError):
            setup_environment._pip(python, ["x"])
    assert len(calls.read_text()) == min(failures + 1, 2)


def test_the_site_needs_its_packages_alone(project: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[list[object]] = []
    monkeypatch.setattr(setup_environment, "_pip", lambda python, arguments: installed.append(arguments))
    requirements = project / "site.txt"
    requirements.write_text("a\n")
    monkeypatch.setattr(setup_environment, "APART", {"site": requirements})
    assert set_up(project, steps, "site") == [] and installed == [["-r", requirements]]
    set_up(project, steps, "site")
    assert len(installed) == 1
    requirements.write_text("b\n")
    set_up(project, steps, "site")
    assert len(installed) == 2
