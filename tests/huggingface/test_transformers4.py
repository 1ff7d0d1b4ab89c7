"""Fused models of transformers 4.57, which lives in `.compat/` and runs in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # importing transformers 4 in its own process takes most of the time

ROOT = Path(__file__).resolve().parents[2]
COMPAT = ROOT / ".compat"


def test_everything_that_version_4_is_asked(tmp_path: Path) -> None:
    if not (COMPAT / "transformers").is_dir():
        pytest.skip("no transformers 4 in .compat: pip install --no-deps --target .compat -r requirements-compat.txt")
    command = [sys.executable, Path(__file__).with_name("run_transformers4.py"), tmp_path / "results.json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(COMPAT), str(ROOT)]), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results.pop("version").startswith("4.")
    failed = {name: message for name, message in results.items() if message not in ("packed", "slow")}
    assert not failed, "\n\n".join(f"{name}\n{message}" for name, message in failed.items())
    slow = {name for name, path in results.items() if path == "slow"}
    assert {name for name in results if "head mask" in name} <= slow
    assert len(results) - len(slow) > 15, f"few calls are packed: {slow}"
