"""What a new user meets where a package is missing: one line that says what to install."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import error_of

TRAIN = "pip install 'bert_fast[train]'"


@pytest.mark.parametrize(
    ("package", "command", "said"),
    [
        ("transformers", ["finetune", "classify"], f"not installed: transformers; {TRAIN}"),
        ("transformers", ["pretrain"], f"not installed: transformers; {TRAIN}"),
        ("accelerate", ["predict", "run", "file.tsv"], f"not installed: accelerate; {TRAIN}"),
        ("datasets", ["finetune", "classify"], f"not installed: datasets; {TRAIN}"),
        ("yaml", ["finetune", "classify", "--config", "x.yaml"], f"not installed: yaml; {TRAIN}"),
        ("transformers", ["bench"], "not installed: transformers; pip install transformers"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_command_says_what_to_install(
    package: str, command: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    assert error_of(command, capsys) == said


@pytest.mark.parametrize("call", ["fuse(torch.nn.Linear(2, 2))", "patch_transformers()"])
def test_fuse_says_that_transformers_is_missing(call: str) -> None:
    code = f"import sys; sys.modules['transformers'] = None; import bert_fast, torch; bert_fast.{call}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    expected = "ImportError: transformers is not installed, whose models are made fast: pip install transformers"
    assert result.stderr.splitlines()[-1] == expected
