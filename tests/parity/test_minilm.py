"""Real weights of MiniLM in reference, fast and fused model, against stored outputs and gradients of Hugging Face."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import bert_fast
from bert_fast.reference.linear_cross_entropy import LinearCrossEntropy, linear_cross_entropy_fwd
from bert_fast.reference.model import ReferenceBertModel
from bert_fast.testing.tolerances import ABSOLUTE, RELATIVE


@pytest.fixture(scope="module", params=["reference", "fast", "fast, saved and loaded", "fused"])
def model(
    request: pytest.FixtureRequest, minilm_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> ReferenceBertModel | bert_fast.BertModel:
    if request.param == "fused":
        transformers = pytest.importorskip("transformers")
        return bert_fast.fuse(transformers.BertModel.from_pretrained(minilm_dir))
    if request.param != "reference":
        fast = bert_fast.BertModel.from_pretrained(minilm_dir)
        if request.param == "fast":
            return fast
        folder = tmp_path_factory.mktemp("saved")
        fast.save_pretrained(folder)
        return bert_fast.BertModel.from_pretrained(folder)
    config = SimpleNamespace(is_decoder=False, **json.loads((minilm_dir / "config.json").read_text()))
    model = ReferenceBertModel(config)
    keys = model.load_state_dict(load_file(minilm_dir / "model.safetensors"), strict=False)
    assert not keys.missing_keys and set(keys.unexpected_keys) <= {"embeddings.position_ids"}
    return model.eval()


def _stored(shared_data: Path, name: str) -> dict[str, Tensor]:
    path = shared_data / "fixtures" / "minilm" / name
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    with np.load(path) as arrays:
        return {key: torch.from_numpy(np.array(arrays[key])) for key in arrays.files}


def _inputs(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: stored[name].long() for name in ("input_ids", "token_type_ids", "attention_mask")}


def test_embeddings(model: ReferenceBertModel | bert_fast.BertModel, shared_data: Path) -> None:
    stored = _stored(shared_data, "embeddings.npz")
    with torch.inference_mode():
        output = model(**_inputs(stored), output_hidden_states=True)
    keep = stored["attention_mask"].bool()
    assert not output.last_hidden_state[~keep].any()
    weights = keep.unsqueeze(-1).float()
    mean = (output.last_hidden_state * weights).sum(1) / weights.sum(1)
    row3 = torch.stack([state[3, : stored["all_hidden_states_of_row3"].shape[1]] for state in output.hidden_states])
    for name, ours in {
        "last_hidden_state_packed": output.last_hidden_state[keep],
        "pooler_output": output.pooler_output,
        "mean_pooled_normalized": torch.nn.functional.normalize(mean, dim=1),
        "all_hidden_states_of_row3": row3,
    }.items():
        error = (ours - stored[name]).abs().max().item()
        assert error <= ABSOLUTE["minilm_embeddings"], f"{name}: {error:.2e}"


def test_gradients(model: ReferenceBertModel | bert_fast.BertModel, shared_data: Path) -> None:
    stored = _stored(shared_data, "mlm_grads.npz")
    labels = stored["labels"].long()
    rows = labels != -100
    hidden = model(**_inputs(stored)).last_hidden_state
    words = model.embeddings.word_embeddings.weight
    loss, _ = linear_cross_entropy_fwd(LinearCrossEntropy(hidden[rows], words, None, labels[rows], -100, 0.0), set())
    loss.backward()
    bound = RELATIVE["minilm_gradients"]
    assert abs(loss.item() / stored["loss_float64"].item() - 1.0) <= bound
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    norms = {key.partition("/")[2]: stored[key].item() for key in stored if key.startswith("gradnorm_f64/")}
    assert norms.keys() == {name for name in gradients if not name.endswith("key.bias")}
    for name, norm in norms.items():
        assert abs(gradients[name].double().norm().item() / norm - 1.0) <= bound, name
    compared = 0
    for key, wanted in stored.items():
        kind, _, name = key.partition("/")
        if kind == "grad":
            got = gradients[name]
        elif kind == "grad_block":
            got = gradients[name.partition("[")[0]][: wanted.shape[0], : wanted.shape[1]]
        elif kind == "grad_rows" and name.endswith("/cols0_63"):
            name = name.removesuffix("/cols0_63")
            got = gradients[name][stored[f"grad_rows/{name}/ids"].long(), :64]
        else:
            continue
        compared += 1
        error = (got - wanted).abs().max().item()
        assert error <= bound * wanted.abs().max().item(), f"{key}: {error:.2e}"
    assert compared >= 20
