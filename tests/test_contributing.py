"""What CONTRIBUTING.md says of adding an op, and an argument to it, done as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (bert_fast/\S+)\n(.*?)```", TEXT, re.DOTALL))
CHANGES = re.findall(r"```diff\n(.*?)```", TEXT, re.DOTALL)

# Runs in a process of its own: an op is registered once.
SCRIPT = """
import sys, types
import torch
from bert_fast import backend
from bert_fast.backend import *

files = {files!r}
for name in ("reference", "ops"):
    module = types.ModuleType(f"bert_fast.{{name}}.scale")
    sys.modules[module.__name__] = module
    exec(files[f"bert_fast/{{name}}/scale.py"], module.__dict__)
exec(files["bert_fast/backend.py"], backend.__dict__)

scale, options = sys.modules["bert_fast.ops.scale"].scale, {options!r}
x, factor = torch.randn(3, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
torch.testing.assert_close(scale(x, factor, **options), x * factor + options.get("offset", 0.0))
leaves = x.requires_grad_(), factor.requires_grad_()
assert torch.autograd.gradcheck(lambda *given: scale(*given, **options), leaves)
torch.library.opcheck(torch.ops.bert_fast.scale_fwd, (*leaves, *options.values(), "auto"))
try:
    scale(x, factor[:2])
except ValueError as error:
    print(error)
print(torch.ops.bert_fast.scale_fwd.default._schema)
"""


def changed(files: dict[str, str]) -> dict[str, str]:
    """The files after the changes, each of which fits one place."""
    for change in CHANGES:
        lines = change.splitlines()
        before, after = ("\n".join(line[1:] for line in lines if line[0] in f" {sign}") for sign in "-+")
        places = [name for name, text in files.items() if text.count(before) == 1]
        assert len(places) == 1, before
        files = files | {places[0]: files[places[0]].replace(before, after)}
    return files


@pytest.mark.parametrize("has_offset", [False, True], ids=["op", "argument-more"])
def test_example(has_offset: bool) -> None:
    files, options = (changed(FILES), {"offset": 0.5}) if has_offset else (FILES, {})
    script = SCRIPT.format(files=files, options=options)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    offset = ", float offset" if has_offset else ""
    assert done.stdout.splitlines() == [
        "factor: expected shape [5], got [2]",
        f"bert_fast::scale_fwd(Tensor x, Tensor factor{offset}, str backend) -> Tensor",
    ]


def test_files_of_the_example() -> None:
    assert list(FILES) == ["bert_fast/reference/scale.py", "bert_fast/ops/scale.py", "bert_fast/backend.py"]
    assert len(CHANGES) == 4
