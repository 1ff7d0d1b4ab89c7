"""DeBERTa: choices of its configurations, distances beyond the embeddings' bounds, dropout, and what is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_fast.huggingface import fuse, unfuse, why_not
from bert_fast.testing.parity import randomize
from tests.huggingface.families import CONFIG

transformers = pytest.importorskip("transformers")
if "DebertaV2" not in CONFIG:
    pytest.skip("this transformers has no DeBERTa", allow_module_level=True)

SIZES = dict(
    vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
    max_position_embeddings=24,
)  # fmt: skip
CHOICES: dict[str, dict[str, Any]] = {
    "version 3": {},
    "projections of their own": {"share_att_key": False},
    "content to position": {"pos_att_type": "c2p"},
    "position to content": {"pos_att_type": "p2c", "share_att_key": False},
    "no term": {"pos_att_type": []},
    "no distances": {"relative_attention": False},
    "no buckets": {"position_buckets": -1, "max_relative_positions": 5},
    "many buckets": {"position_buckets": 64},
    "no norm": {"norm_rel_ebd": "none"},
    "positions and types": {"position_biased_input": True, "type_vocab_size": 2},
    "narrow embeddings": {"embedding_size": 20},
    "narrow embeddings of positions and types": {
        "embedding_size": 20, "position_biased_input": True, "type_vocab_size": 2,
    },
}  # fmt: skip


def _pair(head: str = "Model", dropout_p: float = 0.0, **config: Any) -> tuple[Any, Any]:
    """An untouched model in fp64, and the same one fused."""
    cls = getattr(transformers, f"DebertaV2{head}")
    dropout = dict(hidden_dropout_prob=dropout_p, attention_probs_dropout_prob=dropout_p)
    untouched = cls(cls.config_class(**{**SIZES, **dropout, **CONFIG["DebertaV2"], **config})).double().eval()
    randomize(untouched)
    return untouched, fuse(copy.deepcopy(untouched))


def _batch(length: int = 17) -> dict[str, Tensor]:
    """A full text, a short one, one with a hole, and one padded on the left."""
    mask = torch.ones(4, length, dtype=torch.long)
    mask[1, 5:] = 0
    mask[2, 6] = 0
    mask[3, :3] = 0
    tokens = torch.randint(2, 61, (4, length))
    return {"input_ids": tokens, "attention_mask": mask, "token_type_ids": torch.randint(0, 2, (4, length))}


def _check(untouched: nn.Module, fused: nn.Module, batch: dict[str, Tensor]) -> None:
    """Outputs and all gradients."""
    assert why_not(fused, **batch) == []
    kept = batch["attention_mask"].bool()
    for model in (untouched, fused):
        model.zero_grad()
        model(**batch)[0][kept].sin().sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(fused(**batch)[0][kept], untouched(**batch)[0][kept])
    wanted = {name: p.grad for name, p in untouched.named_parameters()}
    for name, p in fused.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("choice", CHOICES)
def test_choices_of_the_configuration(choice: str) -> None:
    _check(*_pair(**CHOICES[choice]), _batch())


def test_texts_longer_than_the_configuration_says() -> None:
    """Without a table of positions, all large distances share an embedding."""
    _check(*_pair(), _batch(61))


def test_inference_leaves_nothing_that_training_cannot_use() -> None:
    untouched, fused = _pair()
    batch = _batch(43)
    with torch.inference_mode():
        fused(**batch)
    _check(untouched, fused, batch)


@pytest.mark.parametrize("legacy", [False, True])
def test_heads_of_words(legacy: bool) -> None:
    untouched, fused = _pair("ForMaskedLM", legacy=legacy)
    batch = _batch()
    _check(untouched, fused, batch)
    kept = batch["attention_mask"].bool()
    batch["labels"] = torch.where((torch.rand(4, 17) < 0.5) & kept, batch["input_ids"], -100)
    losses = []
    for model in (untouched, fused.train()):
        model.zero_grad()
        losses.append(model(**batch).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0])
    for (name, p), other in zip(fused.named_parameters(), untouched.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(p.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")
    short = fused(**batch, output_logits=False)
    torch.testing.assert_close(short.loss, losses[1])
    assert short.logits is None


@pytest.mark.parametrize("shared", [False, True])
def test_hooks_see_the_projections_of_distances_as_transformers_calls_them(shared: bool) -> None:
    untouched, fused = _pair(share_att_key=shared)
    batch, seen = _batch(), {}
    for which, model in enumerate((untouched, fused)):
        attention = model.encoder.layer[1].attention.self
        for name in ("key_proj", "query_proj") if shared else ("pos_key_proj", "pos_query_proj"):
            calls = seen.setdefault((which, name), [])
            getattr(attention, name).register_forward_hook(
                lambda layer, inputs, output, calls=calls: calls.append((inputs[0].shape, output.detach()))
            )
        model(**batch)
    for (which, name), calls in seen.items():
        others = seen[1 - which, name]
        assert [shape for shape, _ in calls] == [shape for shape, _ in others]
        torch.testing.assert_close(calls[-1][1], others[-1][1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    _, fused = _pair(dropout_p=0.1)
    batch, gradients = _batch(), []
    fused.train()
    for checkpoints in (False, True):
        if checkpoints:
            fused.gradient_checkpointing_enable({"use_reentrant": reentrant})
            fused.enable_input_require_grads()
        fused.zero_grad()
        fused(**batch, dropout_seed=torch.tensor([3])).last_hidden_state.sin().sum().backward()
        gradients.append([p.grad.clone() for p in fused.parameters()])
    torch.testing.assert_close(*gradients)


def test_every_place_drops() -> None:
    """With one of them off, the same seed gives something else."""
    _, fused = _pair(dropout_p=0.2)
    fused.train()
    batch, seed = _batch(), torch.tensor([7])
    dropped = fused(**batch, dropout_seed=seed).last_hidden_state
    places = [
        module
        for name, module in fused.named_modules()
        if name == "embeddings.dropout" or (name.startswith("encoder.layer.0.") and isinstance(module, nn.Dropout))
    ]
    assert len(places) == 5
    for place in places:
        p, place.p = place.p, 0.0
        assert not torch.allclose(fused(**batch, dropout_seed=seed).last_hidden_state, dropped)
        place.p = p
    assert torch.equal(fused(**batch, dropout_seed=seed).last_hidden_state, dropped)


def test_embeddings_of_distances_drop_alike_whatever_the_length() -> None:
    """The elements that drop follow from the seed, the layer and the distance, not from the longest text."""
    _, fused = _pair(dropout_p=0.0)
    fused.train()
    for layer in fused.encoder.layer:
        layer.attention.self.pos_dropout.p = 0.4
    batch, seed = _batch(9), torch.tensor([7])
    wider = {name: nn.functional.pad(value, (0, 8)) for name, value in batch.items()}
    kept = batch["attention_mask"].bool()
    short = fused(**batch, dropout_seed=seed).last_hidden_state[kept]
    torch.testing.assert_close(fused(**wider, dropout_seed=seed).last_hidden_state[:, :9][kept], short)
    assert not torch.allclose(fused(**batch, dropout_seed=torch.tensor([8])).last_hidden_state[kept], short)


def test_embeddings_of_distances_drop_as_often_as_transformers_drops_them() -> None:
    """Mean and spread of the outputs over many seeds, with no dropout elsewhere."""
    pair, batch = _pair(num_hidden_layers=1), _batch(9)
    kept = batch["attention_mask"].bool()
    means, deviations = [], []
    with torch.no_grad():
        for model in pair:
            model.train().encoder.layer[0].attention.self.pos_dropout.p = 0.3
            made = torch.stack([model(**batch)[0][kept] for _ in range(300)])
            means.append(made.mean(0))
            deviations.append(made.std(0))
    assert ((means[1] - means[0]).abs() < 6 * deviations[0] / 300**0.5 + 1e-9).all()
    spread = deviations[1].mean() / deviations[0].mean()
    assert 0.9 < spread < 1.1 and deviations[0].mean() > 0.05


def test_packed_texts_are_padded_ones() -> None:
    _, fused = _pair(dropout_p=0.3)
    fused.train()
    batch = _batch()
    batch["attention_mask"][2, 6] = 1
    batch["attention_mask"][3] = 1
    del batch["token_type_ids"]
    kept, seed = batch["attention_mask"].bool(), torch.tensor([7])
    cu_seqlens = nn.functional.pad(batch["attention_mask"].sum(1).cumsum(0), (1, 0)).int()
    padded = fused(**batch, dropout_seed=seed).last_hidden_state[kept]
    for longest in (17, 1000):
        packed = fused(
            batch["input_ids"][kept], cu_seqlens=cu_seqlens, max_seqlen=longest, dropout_seed=seed
        ).last_hidden_state
        torch.testing.assert_close(packed, padded)


def test_what_runs_transformers_code_and_why() -> None:
    batch = _batch()
    untouched, fused = _pair(conv_kernel_size=3)
    assert why_not(fused, **batch) == ["encoder.conv: a ConvLayer which is not fused"]
    kept = batch["attention_mask"].bool()
    torch.testing.assert_close(fused(**batch)[0][kept], untouched(**batch)[0][kept])
    untouched, fused = _pair()
    untouched.z_steps = fused.z_steps = 2
    assert why_not(fused, **batch) == ["z_steps: 2, which run the last layer again"]


@pytest.mark.parametrize("sizes", [(0, 5), (2, 0), (1, 1)])
def test_batches_of_nothing_and_of_one_token(sizes: tuple[int, int]) -> None:
    _, fused = _pair()
    fused.train()
    hidden = fused(torch.ones(sizes, dtype=torch.long), attention_mask=torch.ones(sizes)).last_hidden_state
    assert hidden.shape == (*sizes, 32) and hidden.isfinite().all()
    hidden.sum().backward()
    empty = fused(torch.ones(2, 4, dtype=torch.long), attention_mask=torch.zeros(2, 4)).last_hidden_state
    assert torch.equal(empty, torch.zeros_like(empty))


def test_no_tensor_of_all_pairs_is_saved() -> None:
    """Memory for backward grows with the tokens, not with their square."""
    _, fused = _pair(num_hidden_layers=1)
    fused.float().train()
    saved = {}
    for length in (128, 512):
        sizes: list[int] = []
        tokens = torch.randint(2, 61, (1, length))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: (sizes.append(x.nbytes), x)[1], lambda x: x
        ):
            fused(tokens)
        saved[length] = sum(sizes)
    assert saved[512] < 4.5 * saved[128]


def test_back_to_transformers() -> None:
    untouched, fused = _pair()
    modules = [type(module) for module in untouched.modules()]
    unfuse(fused)
    assert [type(module) for module in fused.modules()] == modules
    batch = _batch()
    assert torch.equal(fused(**batch)[0], untouched(**batch)[0])
