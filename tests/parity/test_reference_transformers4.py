"""The reference against Hugging Face transformers 4.57: what version 5 removed, every output and every gradient.

Version 4 lives in `.compat/` (requirements-compat.txt) and runs in a process of its own, once for all cases.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock  # a requirement of torch
from torch import Tensor

from bert_fast.reference import heads, model
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.parity import Case, evaluate, randomize
from bert_fast.testing.tolerances import RELATIVE

pytestmark = pytest.mark.slow  # importing transformers 4 in its own process takes most of the time

ROOT = Path(__file__).resolve().parents[2]
COMPAT = ROOT / ".compat"
EVERYTHING = {"output_attentions": True, "output_hidden_states": True}
KEY, KEY_QUERY = {"position_embedding_type": "relative_key"}, {"position_embedding_type": "relative_key_query"}
DECODER = {"is_decoder": True}
CROSS = {"is_decoder": True, "add_cross_attention": True}
MEMORY = ("encoder_hidden_states", "encoder_attention_mask")

CASES = [
    Case("plain", flags=EVERYTHING),
    Case("mask 3d", mask="3d", flags=EVERYTHING),
    Case("mask 3d, decoder", mask="3d", config=DECODER),
    Case("head mask", inputs=("head_mask",), flags=EVERYTHING),
    Case("head mask of every layer", inputs=("layer_head_mask",), flags=EVERYTHING, mask="left"),
    Case("head mask, memory", config=CROSS, inputs=("head_mask", *MEMORY), flags=EVERYTHING),
    Case("head mask, masked lm", model="BertForMaskedLM", inputs=("head_mask",), labels=("words",)),
    *(Case(f"relative_key, {mask}", config=KEY, mask=mask, flags=EVERYTHING) for mask in ("right", "left", "holes")),
    *(Case(f"relative_key_query, {mask}", config=KEY_QUERY, mask=mask) for mask in ("none", "right", "left", "holes")),
    Case("relative_key_query, head mask", config=KEY_QUERY, inputs=("layer_head_mask",), flags=EVERYTHING),
    Case("relative_key_query, mask 3d", config=KEY_QUERY, mask="3d"),
    Case("relative_key, longest", config={**KEY, "max_position_embeddings": 11}, length=11),
    Case("relative_key, decoder", config={**KEY, **DECODER}, flags={"use_cache": False}),
    Case("relative_key_query, memory", config={**KEY_QUERY, **CROSS}, inputs=MEMORY, flags={"use_cache": False}),
    Case("relative_key, classes", model="BertForSequenceClassification", config=KEY, labels=("class",)),
    Case("relative_key_query, masked lm", model="BertForMaskedLM", config=KEY_QUERY, labels=("words",)),
    Case("legacy cache", config=DECODER, first_step=4, flags={"legacy_cache": True}),
    Case("legacy cache, one step, left", config=DECODER, first_step=10, mask="left", flags={"legacy_cache": True}),
    Case("legacy cache, memory", config=CROSS, inputs=MEMORY, first_step=5, flags={"legacy_cache": True}),
    Case("untied", model="BertForMaskedLM", config={"tie_word_embeddings": False}, labels=("words",)),
    Case("language model", model="BertLMHeadModel", config=DECODER, labels=("words",)),
]  # fmt: skip
DTYPES = (torch.float64, torch.float32)


def _ours(case: Case, dtype: torch.dtype) -> torch.nn.Module:
    defaults = {
        "is_decoder": False, "add_cross_attention": False, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "initializer_range": 0.02, "num_labels": 2,
    }  # fmt: skip
    config = SimpleNamespace(**{**defaults, **case.full_config()})
    name = f"Reference{case.model}"
    made = getattr(heads if hasattr(heads, name) else model, name)(config)
    randomize(made)
    return made.to(dtype).eval()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, torch.dtype], dict[str, Tensor] | str]:
    """What version 4 computes, by case and dtype."""
    if not (COMPAT / "transformers").is_dir():
        pytest.skip("no transformers 4 in .compat: pip install --no-deps --target .compat -r requirements-compat.txt")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the processes of a distributed run share one answer
    keys = [(case, dtype) for case in CASES for dtype in DTYPES]
    cases, results = folder / "transformers4_cases.pt", folder / "transformers4_results.pt"
    with FileLock(folder / "transformers4.lock"):
        if not results.exists():
            torch.save([(case, _ours(case, t).state_dict(), case.tensors(t)) for case, t in keys], cases)
            command = [sys.executable, Path(__file__).with_name("run_transformers4.py"), cases, results]
            path = os.pathsep.join([str(COMPAT), str(ROOT)])
            environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
    answer = torch.load(results)
    assert answer["version"].startswith("4."), answer["version"]
    return {(case.name, dtype): result for (case, dtype), result in zip(keys, answer["results"], strict=True)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs_and_gradients(case: Case, theirs: dict[tuple[str, torch.dtype], dict[str, Tensor] | str]) -> None:
    truth, ours32 = (evaluate(_ours(case, dtype), case, case.tensors(dtype)) for dtype in DTYPES)
    wanted, theirs32 = (theirs[case.name, dtype] for dtype in DTYPES)
    assert isinstance(wanted, dict) and isinstance(theirs32, dict), wanted
    assert truth.keys() == wanted.keys()
    bound = RELATIVE["reference_vs_transformers_fp64"]
    if case.model == "BertLMHeadModel":
        bound = RELATIVE["reference_vs_transformers_causal_loss"]
    for name, value in truth.items():
        scale = max(1.0, value.abs().max().item())
        error = (value - wanted[name]).abs().max().item()
        assert error <= bound * scale, f"{name}: differs by {error:.2e} at scale {scale:.2e}"
        kind = "gradient" if name.startswith("grad ") else "output"
        assert_close_to_truth("reference_model", kind, ours32[name] / scale, theirs32[name] / scale, value / scale)


def test_features_change_something() -> None:
    """Guards the comparison above: each feature it names must reach the output."""
    plain = _ours(Case("plain"), torch.float64)
    case = Case("plain", inputs=("head_mask",))
    tensors = case.tensors(torch.float64)
    masked = plain(**tensors).last_hidden_state
    tensors.pop("head_mask")
    assert (plain(**tensors).last_hidden_state - masked).abs().max() > 1e-3
    outputs = []
    for config in (KEY, KEY_QUERY):
        ours = _ours(Case("plain", config=config), torch.float64)
        outputs.append(ours(**tensors).last_hidden_state)
        assert ours.encoder.layer[0].attention.self.distance_embedding.weight.shape == (2 * 48 - 1, 12)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3
