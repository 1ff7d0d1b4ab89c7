"""An interpreter that is too old is told so, and not by an error of its own about what it cannot read."""

import ast
import re
import subprocess
import sys
from pathlib import Path

from tools.require_python import oldest, problem

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "require_python.py"


def test_old_ones_are_named_with_what_to_do() -> None:
    assert oldest() == (3, 10)
    for version in ((2, 7, 18), (3, 6, 0), (3, 9, 18, "final", 0)):
        message = problem(version, "/usr/bin/python3")
        assert message is not None
        assert f"/usr/bin/python3 is Python {version[0]}.{version[1]}" in message
        assert "Python 3.10 or newer" in message and "PYTHON=python3.10" in message
    assert problem((3, 10, 0), "") is None and problem((3, 14, 0), "") is None and problem((4, 0), "") is None


def test_old_ones_can_read_it() -> None:
    """No annotations, f-strings or anything else that came after Python 2."""
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 4))
    for node in ast.walk(tree):
        assert not isinstance(node, ast.JoinedStr | ast.AnnAssign | ast.NamedExpr)
        if isinstance(node, ast.FunctionDef):
            assert node.returns is None and not any(one.annotation for one in node.args.args)


def test_this_one_passes_in_silence() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_target_that_starts_an_interpreter_asks_first() -> None:
    rules = re.findall(r"^([a-z-]+):(.*)\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    checked = {"python", "gpu-python"}
    for target, needs, _ in rules:  # a target comes behind what it needs
        if checked & set(needs.split()):
            checked.add(target)
    starting = {target for target, _, commands in rules if re.search(r"\$\((GPU_|VENV_)?PYTHON\)|/bin/", commands)}
    assert len(starting) > 10
    assert starting <= checked
