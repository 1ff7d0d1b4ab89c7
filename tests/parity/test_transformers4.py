"""Reference and models against Hugging Face transformers 4.57: what version 5 removed, every output and gradient.

Version 4 lives in `.compat/` (requirements-compat.txt) and runs in a process of its own, once for all cases.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock  # a requirement of torch
from torch import Tensor, nn

from bert_fast.testing.parity import Case, randomize

from .cases import KEY, KEY_QUERY, TRANSFORMERS_4
from .comparing import DTYPES, Results, check, every_run, in_fp64, our_model

pytestmark = pytest.mark.slow  # importing transformers 4 in its own process takes most of the time

ROOT = Path(__file__).resolve().parents[2]
COMPAT = ROOT / ".compat"


def _reference(case: Case) -> nn.Module:
    model = our_model(case, "reference")
    randomize(model)
    return model


def _jobs() -> Iterator[tuple[Case, dict[str, Tensor], dict[str, Tensor]]]:
    """(case, parameters, tensors) of every run of theirs: in each dtype, then in fp64 on the same numbers."""
    for case in TRANSFORMERS_4:
        for dtype in DTYPES:
            state, tensors = _reference(case).to(dtype).state_dict(), case.tensors(dtype)
            yield case, state, tensors
            yield case, in_fp64(state), in_fp64(tensors)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, torch.dtype], list[Results | str]]:
    """What version 4 computes, by case and dtype: in that dtype, and in fp64."""
    if not (COMPAT / "transformers").is_dir():
        pytest.skip("no transformers 4 in .compat: pip install --no-deps --target .compat -r requirements-compat.txt")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the processes of a distributed run share one answer
    cases, results = folder / "transformers4_cases.pt", folder / "transformers4_results.pt"
    with FileLock(folder / "transformers4.lock"):
        if not results.exists():
            torch.save(list(_jobs()), cases)
            command = [sys.executable, Path(__file__).with_name("run_transformers4.py"), cases, results]
            path = os.pathsep.join([str(COMPAT), str(ROOT)])
            environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
    answer = torch.load(results)
    assert answer["version"].startswith("4."), answer["version"]
    in_order = iter(answer["results"])
    return {(case.name, dtype): [next(in_order), next(in_order)] for case in TRANSFORMERS_4 for dtype in DTYPES}


@every_run(TRANSFORMERS_4)
def test_outputs_and_gradients(case: Case, form: str, dtype: torch.dtype, theirs: Any) -> None:
    rounded, truth = theirs[case.name, dtype]
    assert isinstance(rounded, dict) and isinstance(truth, dict), rounded
    ours = our_model(case, form)
    ours.load_state_dict(_reference(case).to(dtype).state_dict())
    check(case, form, dtype, ours, rounded, truth)


def test_features_change_something() -> None:
    """Guards the comparison above: each feature it names must reach the output."""
    plain = _reference(Case("plain")).double()
    case = Case("plain", inputs=("head_mask",))
    tensors = case.tensors(torch.float64)
    masked = plain(**tensors).last_hidden_state
    tensors.pop("head_mask")
    assert (plain(**tensors).last_hidden_state - masked).abs().max() > 1e-3
    outputs = []
    for config in (KEY, KEY_QUERY):
        ours = _reference(Case("plain", config=config)).double()
        outputs.append(ours(**tensors).last_hidden_state)
        assert ours.encoder.layer[0].attention.self.distance_embedding.weight.shape == (2 * 48 - 1, 12)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3
