"""What CONTRIBUTING.md says of adding an op, and an argument to it, done as it stands there."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch

from bert_fast import backend
from tests.process_server import run

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (bert_fast/\S+)\n(.*?)```", TEXT, re.DOTALL))
CHANGES = re.findall(r"```diff\n(.*?)```", TEXT, re.DOTALL)


def run_example(files: dict[str, str], options: dict[str, float]) -> None:
    """In a process of its own: an op is registered once."""
    for name in ("reference", "ops"):
        module = types.ModuleType(f"bert_fast.{name}.scale")
        sys.modules[module.__name__] = module
        exec(files[f"bert_fast/{name}/scale.py"], module.__dict__)
    exec(files["bert_fast/backend.py"], backend.__dict__)

    scale = sys.modules["bert_fast.ops.scale"].scale
    x, factor = torch.randn(3, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    torch.testing.assert_close(scale(x, factor, **options), x * factor + options.get("offset", 0.0))
    leaves = x.requires_grad_(), factor.requires_grad_()
    assert torch.autograd.gradcheck(lambda *given: scale(*given, **options), leaves)
    torch.library.opcheck(torch.ops.bert_fast.scale_fwd, (*leaves, *options.values(), "auto"))
    with pytest.raises(ValueError) as refusal:
        scale(x, factor[:2])
    print(refusal.value)
    print(torch.ops.bert_fast.scale_fwd.default._schema)


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
def test_example(has_offset: bool, tmp_path: Path) -> None:
    files, options = (changed(FILES), {"offset": 0.5}) if has_offset else (FILES, {})
    done = run(run_example, files, options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    offset = ", float offset" if has_offset else ""
    assert done.stdout.splitlines() == [
        "factor: expected shape [5], got [2]",
        f"bert_fast::scale_fwd(Tensor x, Tensor factor{offset}, str backend) -> Tensor",
    ]


def test_files_of_the_example() -> None:
    assert list(FILES) == ["bert_fast/reference/scale.py", "bert_fast/ops/scale.py", "bert_fast/backend.py"]
    assert len(CHANGES) == 4
