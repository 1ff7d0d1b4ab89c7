"""prune_heads: against transformers 4.57, against heads that are masked out, through files, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bert_fast
from bert_fast.storage import are_neighbours
from bert_fast.testing.compare import assert_close_to_truth

ROOT = Path(__file__).resolve().parents[2]
COMPAT = ROOT / ".compat"
SIZES: dict[str, Any] = dict(
    vocab_size=40, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=16, initializer_range=0.3, num_labels=3,
)  # fmt: skip
PRUNED = {0: [3, 1], 2: [0]}
LEFT = [2, 4, 3]
IDS = torch.randint(1, 40, (2, 7), generator=torch.Generator().manual_seed(3))
MASK = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])

# What transformers 4 does with our weights: prunes them, and loads what we pruned and saved.
SCRIPT = """
import sys, torch, transformers
folder = sys.argv[1]
given = torch.load(f"{folder}/given.pt")
model = transformers.BertModel(transformers.BertConfig(**given["sizes"], attn_implementation="eager")).eval()
model.load_state_dict(given["state"])
model.prune_heads(given["first"])
model.prune_heads(given["then"])
model.double()
hidden = model(given["ids"], attention_mask=given["mask"]).last_hidden_state
model.save_pretrained(f"{folder}/theirs")
ours = transformers.BertModel.from_pretrained(f"{folder}/ours", attn_implementation="eager").double().eval()
results = {"hidden": hidden.detach(), "state": model.state_dict(), "pruned": model.config.pruned_heads,
           "of_ours": ours(given["ids"], attention_mask=given["mask"]).last_hidden_state.detach()}
torch.save(results, f"{folder}/results.pt")
"""


def make(name: str = "BertModel", **changes: Any) -> Any:
    torch.manual_seed(5)
    model = getattr(bert_fast, name)(bert_fast.BertConfig(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_()
    return model


def hidden(model: nn.Module, **arguments: Any) -> Tensor:
    return model(input_ids=IDS, attention_mask=MASK, **arguments).last_hidden_state


def heads_of(model: nn.Module) -> list[int]:
    return [layer.attention.self.num_heads for layer in model.base_model.encoder.layer]


@pytest.mark.slow
def test_as_transformers_prunes(tmp_path: Path) -> None:
    if not (COMPAT / "transformers").is_dir():
        pytest.skip("no transformers 4 in .compat (requirements-compat.txt)")
    first, then = {0: [3], 2: [0]}, {0: [1, 3]}  # the second time a head that is gone already
    model = make().double()
    sizes = {key: value for key, value in SIZES.items() if key != "num_labels"}
    given = {"sizes": sizes, "state": model.state_dict(), "first": first, "then": then, "ids": IDS, "mask": MASK}
    torch.save(given, tmp_path / "given.pt")
    model.prune_heads(first)
    model.prune_heads(then)
    model.save_pretrained(tmp_path / "ours")
    environment = os.environ | {"PYTHONPATH": str(COMPAT), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, cwd=ROOT, check=True)
    theirs = torch.load(tmp_path / "results.pt")
    assert model.config.pruned_heads == {k: sorted(v) for k, v in theirs["pruned"].items()} == {0: [1, 3], 2: [0]}
    assert model.state_dict().keys() == theirs["state"].keys()
    assert all(torch.equal(value, theirs["state"][key]) for key, value in model.state_dict().items())
    kept = MASK.bool()
    for wanted in (theirs["hidden"], theirs["of_ours"]):
        torch.testing.assert_close(hidden(model)[kept], wanted[kept])
    loaded = bert_fast.BertModel.from_pretrained(tmp_path / "theirs")
    assert heads_of(loaded) == LEFT and torch.equal(hidden(loaded), hidden(model))


def test_a_pruned_head_is_one_whose_output_is_nothing() -> None:
    model, whole = make().double(), make().double()
    model.prune_heads(PRUNED)
    assert heads_of(model) == LEFT
    mask = torch.ones(3, 4, dtype=torch.float64)
    for layer, heads in PRUNED.items():
        mask[layer, heads] = 0.0
    torch.testing.assert_close(hidden(model), hidden(whole, head_mask=mask))
    one = model.encoder.layer[0].attention
    assert one.self.query.weight.shape == (16, 32) and one.output.dense.weight.shape == (32, 16)
    assert (one.self.query.out_features, one.output.dense.in_features) == (16, 16)
    assert are_neighbours(*(getattr(one.self, name).weight for name in ("query", "key", "value")))


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "BertForMaskedLM", "BertForPreTraining"])
def test_models_with_heads(name: str) -> None:
    model, base = make(name), make(name)
    model.prune_heads(PRUNED)
    base.base_model.prune_heads(PRUNED)
    assert heads_of(model) == heads_of(base) == LEFT
    assert model.config.pruned_heads == base.config.pruned_heads == {0: [1, 3], 2: [0]}
    assert torch.equal(model(input_ids=IDS)[0], base(input_ids=IDS)[0])


def test_saved_and_loaded(tmp_path: Path) -> None:
    model = make()
    model.prune_heads(PRUNED)
    model.save_pretrained(tmp_path)
    loaded = bert_fast.BertModel.from_pretrained(tmp_path)
    assert loaded.config.pruned_heads == model.config.pruned_heads and heads_of(loaded) == LEFT
    assert torch.equal(hidden(loaded), hidden(model))
    loaded.prune_heads({2: [0, 1]})
    assert heads_of(loaded) == [2, 4, 2] and loaded.config.pruned_heads[2] == [0, 1]


def test_order_and_steps_do_not_matter() -> None:
    one, other = make(), make()
    one.prune_heads({0: [0, 1, 2]})
    for heads in ([1], [2, 1], [0], []):
        other.prune_heads({0: heads})
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert one.config.pruned_heads == other.config.pruned_heads


def test_it_trains_with_frozen_parameters_staying_frozen() -> None:
    model = make().train()
    model.encoder.layer[0].attention.self.key.requires_grad_(False)
    model.prune_heads(PRUNED)
    one = model.encoder.layer[0].attention.self
    assert not one.key.weight.requires_grad and one.query.weight.requires_grad
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = one.query.weight.detach().clone()
    hidden(model).square().sum().backward()
    optimizer.step()
    assert not torch.equal(one.query.weight, before)


def test_a_pruned_model_shows_its_attentions() -> None:
    model = make()
    model.prune_heads(PRUNED)
    fast, slow, truth = hidden(model), hidden(model, output_attentions=True), hidden(model.double())
    assert_close_to_truth("fast_model", "output", fast, slow, truth)
    attentions = model(input_ids=IDS, attention_mask=MASK, output_attentions=True).attentions
    assert [tuple(a.shape) for a in attentions] == [(2, heads, 7, 7) for heads in LEFT]
    dense = MASK[:, None, None, :] * MASK[:, None, :, None]
    kept = MASK.bool()
    torch.testing.assert_close(model(input_ids=IDS, attention_mask=dense)[0][kept], truth[kept])


def test_what_a_pruned_model_refuses() -> None:
    model = make()
    model.prune_heads(PRUNED)
    with pytest.raises(ValueError, match="head_mask: expected None, since heads are pruned"):
        hidden(model, head_mask=torch.ones(4))
    with pytest.raises(ValueError, match="attention_mask: expected the same for all heads"):
        model(input_ids=IDS, attention_mask=torch.ones(2, 4, 7, 7))


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({3: [0]}, r"heads_to_prune: expected layers in \[0, 3\), got 3"),
        ({"0": [0]}, r"heads_to_prune: expected layers in \[0, 3\), got '0'"),
        ({0: [4]}, r"heads_to_prune: expected heads in \[0, 4\) for layer 0, at least one of which stays, got \[4\]"),
        ({0: [-1]}, r"expected heads in \[0, 4\) for layer 0.*got \[-1\]"),
        ({1: [1], 0: [0, 1, 2, 3]}, r"expected heads in \[0, 4\) for layer 0.*got \[0, 1, 2, 3\]"),
    ],
)
def test_wrong_heads_are_named_and_change_nothing(heads: Any, message: str) -> None:
    model = make()
    before = hidden(model)
    with pytest.raises(ValueError, match=message):
        model.prune_heads(heads)
    assert model.config.pruned_heads == {} and torch.equal(hidden(model), before)
    with pytest.raises(ValueError, match="heads: expected "):
        model.encoder.layer[0].attention.prune_heads([0, 1, 2, 3, 4])


def test_a_configuration_without_any_head_left_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pruned_heads: expected at least one head of layer 1 to stay, got all 4"):
        make(pruned_heads={1: [0, 1, 2, 3]})
