"""Families whose queries and keys are turned by position: scaling, far and jumping positions, packed texts, twins."""

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_fast.huggingface import fuse, unfuse, why_not
from bert_fast.storage import are_neighbours
from bert_fast.testing.parity import randomize
from tests.huggingface.families import CONFIG, ROTARY, configuration

transformers = pytest.importorskip("transformers", minversion="5")
FAMILIES = [prefix for prefix in ROTARY if prefix in CONFIG]
if not FAMILIES:
    pytest.skip("this transformers has no family with rotary positions", allow_module_level=True)
each_family = pytest.mark.parametrize("prefix", FAMILIES)

LIMIT = 24  # max_position_embeddings
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0},
    "another base": {"rope_type": "default", "rope_theta": 50.0},
}


def _pair(prefix: str, head: str = "Model", dropout_p: float = 0.0, **config: Any) -> tuple[Any, Any]:
    """An untouched model in fp64, and the same one fused."""
    cls = getattr(transformers, f"{prefix}{head}")
    sizes = dict(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=LIMIT, hidden_dropout_prob=dropout_p, attention_probs_dropout_prob=dropout_p,
    )  # fmt: skip
    untouched = cls(configuration(cls, **{**sizes, **CONFIG[prefix], **config})).double().eval()
    randomize(untouched)
    return untouched, fuse(copy.deepcopy(untouched))


def _batch(length: int = 9) -> dict[str, Tensor]:
    mask = torch.ones(3, length, dtype=torch.long)
    mask[1, 5:] = 0
    mask[2, 6] = 0
    return {"input_ids": torch.randint(2, 61, (3, length)), "attention_mask": mask}


def _check(untouched: nn.Module, fused: nn.Module, batch: dict[str, Tensor]) -> None:
    assert why_not(fused, **batch) == []
    kept = batch["attention_mask"].bool()
    for model in (untouched, fused):
        model.zero_grad()
        model(**batch).last_hidden_state[kept].sin().sum().backward()
    with torch.no_grad():  # where rotation is in place
        torch.testing.assert_close(fused(**batch).last_hidden_state[kept], untouched(**batch).last_hidden_state[kept])
    wanted = {name: p.grad for name, p in untouched.named_parameters()}
    for name, p in fused.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], msg=lambda text, name=name: f"{name}: {text}")


@each_family
@pytest.mark.parametrize("scaling", SCALED)
def test_scaled_positions(prefix: str, scaling: str) -> None:
    """Dynamic scaling depends on the columns of a batch, padding's too, and stays for later calls."""
    untouched, fused = _pair(prefix, rope_parameters=SCALED[scaling])
    for length in (9, 2 * LIMIT, LIMIT + 3, 9):
        batch = _batch(length)
        batch["attention_mask"][:, -1] = 0
        _check(untouched, fused, batch)
    assert torch.equal(fused.rotary_emb.inv_freq, untouched.rotary_emb.inv_freq)


@each_family
def test_longer_than_the_configuration_says(prefix: str) -> None:
    _check(*_pair(prefix), _batch(3 * LIMIT))


@each_family
def test_positions_that_jump(prefix: str) -> None:
    batch = _batch()
    batch["position_ids"] = torch.randint(0, 5000, (3, 9))
    untouched, fused = _pair(prefix)
    _check(untouched, fused, batch)
    other = fused(**{**batch, "position_ids": batch["position_ids"] * 2}).last_hidden_state
    assert not torch.allclose(other, fused(**batch).last_hidden_state)


@each_family
def test_packed_texts_are_padded_ones(prefix: str) -> None:
    """With dropout, whose masks are named by text and position."""
    _, fused = _pair(prefix, dropout_p=0.3)
    fused.train()
    batch = _batch()
    batch["attention_mask"][2, 6] = 1
    kept, seed = batch["attention_mask"].bool(), torch.tensor([7])
    lengths = batch["attention_mask"].sum(1)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    padded = fused(**batch, dropout_seed=seed).last_hidden_state[kept]
    packed = fused(batch["input_ids"][kept], cu_seqlens=cu_seqlens, max_seqlen=9, dropout_seed=seed).last_hidden_state
    torch.testing.assert_close(packed, padded)
    assert not torch.allclose(fused(**batch, dropout_seed=torch.tensor([8])).last_hidden_state[kept], padded)


@each_family
def test_every_place_drops(prefix: str) -> None:
    """With one of them off, the same seed gives something else."""
    _, fused = _pair(prefix, dropout_p=0.2)
    fused.train()
    batch, seed = _batch(), torch.tensor([7])
    dropped = fused(**batch, dropout_seed=seed).last_hidden_state
    places = [
        module
        for name, module in fused.named_modules()
        if name == "embeddings.dropout" or (name.startswith("layers.0.") and isinstance(module, nn.Dropout))
    ]
    assert len(places) == 3 + (prefix == "Gte")
    for place in places:
        p, place.p = place.p, 0.0
        assert not torch.allclose(fused(**batch, dropout_seed=seed).last_hidden_state, dropped)
        place.p = p
    attention = fused.layers[0].self_attn
    attention.attention_dropout = 0.0
    assert not torch.allclose(fused(**batch, dropout_seed=seed).last_hidden_state, dropped)
    attention.attention_dropout = 0.2
    assert torch.equal(fused(**batch, dropout_seed=seed).last_hidden_state, dropped)


@each_family
def test_what_stands_inside_is_a_reason(prefix: str) -> None:
    _, fused = _pair(prefix)
    fused.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert why_not(fused, **_batch()) == ["layers.1.mlp: hooks are registered"]
    _, fused = _pair(prefix)
    fused.layers[0].self_attn = nn.Identity()
    assert why_not(fused, **_batch()) == ["layers.0.self_attn: a Identity which is not fused"]
    _, fused = _pair(prefix)
    fused.layers[0].post_mlp_dropout.train()
    fused.layers[0].post_mlp_dropout.p = 0.1
    assert why_not(fused, **_batch()) == ["layers.0.post_mlp_dropout: drops in evaluation"]
    _, fused = _pair(prefix)
    fused.rotary_emb.register_forward_hook(lambda *_: None)
    assert why_not(fused, **_batch()) == ["rotary_emb: hooks are registered"]


@each_family
@pytest.mark.parametrize("path", ["apply_rotary_pos_emb", "rotate_half", "MLP.forward", "RotaryEmbedding.forward"])
def test_what_was_replaced_for_the_process_counts(prefix: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    untouched, fused = _pair(prefix)
    batch = _batch()
    plain = untouched(**batch).last_hidden_state
    owner: Any = sys.modules[type(untouched).__module__]
    name = path
    if "." in path:
        kind, name = path.split(".")
        owner = getattr(owner, f"{prefix}{kind}")
    own = getattr(owner, name)

    def other(*args: Any, **kwargs: Any) -> Any:
        made = own(*args, **kwargs)
        return tuple(one * 0.5 for one in made) if isinstance(made, tuple) else made * 0.5

    monkeypatch.setattr(owner, name, other)
    assert bool(why_not(fused)) == (path != "RotaryEmbedding.forward"), "which is called"
    kept = batch["attention_mask"].bool()
    changed = untouched(**batch).last_hidden_state[kept]
    torch.testing.assert_close(fused(**batch).last_hidden_state[kept], changed)
    assert not torch.allclose(changed, plain[kept])


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("NomicBertModel", "NomicBertModel"), ("NewModel", "GteModel"), ("XLMRobertaLoRA", "JinaEmbeddingsV3Model")],
)
def test_code_of_the_hub_is_named_with_the_class_to_load(name: str, wanted: str) -> None:
    twin = type(name, (nn.Module,), {"__module__": "transformers_modules.some.modeling_some"})()
    with pytest.raises(
        ValueError, match=rf"without one, but a {name} of transformers_modules.*: load it as {wanted}, without trust"
    ):
        fuse(nn.Sequential(twin))


@pytest.mark.parametrize("prefix", [prefix for prefix in FAMILIES if prefix != "JinaEmbeddingsV3"])
def test_gate_and_up_lie_side_by_side(prefix: str) -> None:
    untouched, fused = _pair(prefix)

    def are_joined(model: Any) -> bool:
        mlp = model.layers[0].mlp
        return are_neighbours(mlp.gate_proj.weight, mlp.up_proj.weight)

    assert are_joined(fused) and are_joined(copy.deepcopy(fused)) and are_joined(fused.float())
    fused.layers[0].mlp.up_proj.weight.data = fused.layers[0].mlp.up_proj.weight.clone()
    assert not are_joined(fused)
    assert are_joined(fused.train()), "as Trainer finds them"
    assert not are_joined(unfuse(fused)) and not are_joined(untouched)
