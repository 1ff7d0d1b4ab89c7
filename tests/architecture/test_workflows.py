"""Workflows of a public forge can be read; what they run are targets of the Makefile, on Pythons that we declare."""

import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="reads the workflows")

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
PYTHONS = set(re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8")))


def jobs_of(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_steps_run_targets_that_exist(path: Path) -> None:
    commands = [step["run"] for job in jobs_of(path).values() for step in job["steps"] if "run" in step]
    made = [re.match(r"make ([a-z-]+)", command) for command in commands]
    assert {found[1] for found in made if found} <= TARGETS
    # The forge's own command, which nothing here has.
    others = [command for command, found in zip(commands, made, strict=True) if not found]
    assert all(command.startswith("gh release create ") for command in others)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_wait_for_jobs_of_their_workflow(path: Path) -> None:
    jobs = jobs_of(path)
    for job in jobs.values():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= jobs.keys()


def test_tests_run_on_declared_pythons() -> None:
    rows = jobs_of(ROOT / ".github" / "workflows" / "tests.yml")["test"]["strategy"]["matrix"]["include"]
    assert {row["python"] for row in rows} <= PYTHONS
    assert min(PYTHONS, key=lambda one: int(one.split(".")[1])) in {row["python"] for row in rows}
