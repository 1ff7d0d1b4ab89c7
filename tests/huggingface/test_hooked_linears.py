"""Hooks on linear layers of a fused encoder: called as in an untouched model, and the model stays packed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bert_fast
from bert_fast.huggingface import fuse, why_not
from tests.huggingface.families import checkpoint_layers

transformers = pytest.importorskip("transformers", minversion="5")

KINDS = ("looks", "changes the output", "changes the input", "sees gradients")
Seen = list[tuple[Tensor, ...]]


def names_of(model: nn.Module) -> list[str]:
    """The linear layers of the encoder's layers."""
    return [name for name, one in model.named_modules() if type(one) is nn.Linear and ".layer." in f".{name}"]


def register(module: nn.Module, kind: str) -> Seen:
    """Registers a hook; returns the list to which it appends what it sees."""
    seen: Seen = []

    def forward(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        seen.append((given[0].detach().clone(), output.detach().clone()))
        return output * 1.5 if kind == "changes the output" else None

    def before(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append((given[0].detach().clone(),))
        return (given[0] * 1.5,)

    def backward(module: nn.Module, of_input: tuple[Tensor, ...], of_output: tuple[Tensor, ...]) -> None:
        seen.append((of_input[0].clone(), of_output[0].clone()))

    if kind == "changes the input":
        module.register_forward_pre_hook(before)
    elif kind == "sees gradients":
        module.register_full_backward_hook(backward)
    else:
        module.register_forward_hook(forward)
    return seen


def step(model: Any, batch: dict[str, Tensor], kept: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states of kept tokens, and gradients; what is learned depends on these tokens alone."""
    torch.manual_seed(3)
    model.zero_grad()
    hidden = model(**batch).last_hidden_state[kept]
    hidden.square().sum().backward()
    return hidden.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "DistilBertModel", "MPNetModel", "ElectraModel"])
def test_what_hooks_see_and_do(make: Callable[..., Any], batch: dict[str, Tensor], name: str, kind: str) -> None:
    untouched = make(name).double().train()
    if name in ("DistilBertModel", "MPNetModel", "RobertaModel"):
        batch = {key: one for key, one in batch.items() if key != "token_type_ids"}
    batch["input_ids"] = batch["input_ids"].clamp(min=3)  # none is the padding id, from which positions are counted
    kept = batch["attention_mask"].bool()
    for path in names_of(untouched):
        models = copy.deepcopy(untouched), fuse(copy.deepcopy(untouched))
        seen = [register(model.get_submodule(path), kind) for model in models]
        assert why_not(models[1], **batch) == []
        (theirs, their_gradients), (ours, our_gradients) = (step(model, batch, kept) for model in models)
        torch.testing.assert_close(ours, theirs)
        assert our_gradients.keys() == their_gradients.keys()
        for each, gradient in our_gradients.items():
            torch.testing.assert_close(gradient, their_gradients[each])
        assert len(seen[0]) == len(seen[1]) == 1, path
        for theirs, ours in zip(seen[0][0], seen[1][0], strict=True):
            assert ours.shape == theirs.shape, path
            torch.testing.assert_close(ours[kept], theirs[kept])


def test_padding_is_zero_and_a_hook_that_goes_leaves_nothing(make: Any, batch: dict[str, Tensor]) -> None:
    model = fuse(make())
    linear = model.encoder.layer[1].attention.self.key
    before = model(**batch).last_hidden_state
    seen: list[Tensor] = []
    handle = linear.register_forward_hook(lambda module, given, output: seen.append(given[0]))
    hooked = model(**batch).last_hidden_state
    torch.testing.assert_close(hooked, before)
    assert seen[0].shape == hooked.shape and not seen[0][batch["attention_mask"] == 0].any()
    handle.remove()
    assert torch.equal(model(**batch).last_hidden_state, before) and len(seen) == 1


def test_the_last_layer_is_shown_whole(make: Any, batch: dict[str, Tensor]) -> None:
    """A head that reads first tokens has the last layer compute no others; a hook there sees all."""
    model = fuse(make("BertForSequenceClassification"))
    scores = model(**batch).logits
    shapes: list[torch.Size] = []
    model.bert.encoder.layer[1].output.dense.register_forward_hook(lambda m, given, output: shapes.append(output.shape))
    torch.testing.assert_close(model(**batch).logits, scores)
    assert shapes == [torch.Size([3, 9, 32])]


def test_packed_input_is_shown_packed(make: Any) -> None:
    model = fuse(make())
    shapes: list[torch.Size] = []
    model.encoder.layer[0].intermediate.dense.register_forward_hook(lambda m, given, out: shapes.append(out.shape))
    ids, offsets = torch.randint(1, 61, (7,)), torch.tensor([0, 3, 7], dtype=torch.int32)
    assert model(input_ids=ids, cu_seqlens=offsets, max_seqlen=4).last_hidden_state.shape == (7, 32)
    assert shapes == [torch.Size([7, 48])]


def test_transformers_code_where_layers_run_again_or_decode(make: Any, batch: dict[str, Tensor]) -> None:
    path = "encoder.layer.0.attention.self.query"
    reason = f"{path}: hooks are registered"
    model = fuse(make()).train()
    model.get_submodule(path).register_forward_hook(lambda *_: None)
    assert why_not(model, **batch) == []
    checkpoint_layers(model, {"use_reentrant": False})
    assert why_not(model, **batch) == [reason]
    model.eval()
    assert why_not(model, **batch) == []
    model.encoder.layer[1].train()  # a layer asks for itself
    assert reason in why_not(model, **batch)
    for config in ({"is_decoder": True, "use_cache": False}, {"chunk_size_feed_forward": 3}):
        other = fuse(make(**config))
        other.get_submodule(path).register_forward_hook(lambda *_: None)
        assert why_not(other, **batch) == [reason]


def test_a_hook_may_call_another_model(make: Any, batch: dict[str, Tensor]) -> None:
    """Which is shown its own tokens, in its own way."""
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=20)
    inner: Any = bert_fast.BertModel(bert_fast.BertConfig(**sizes)).eval()
    shapes: list[torch.Size] = []
    inner.encoder.layer[0].output.dense.register_forward_hook(lambda m, given, out: shapes.append(out.shape))
    inner.pooler.dense.register_forward_hook(lambda m, given, out: shapes.append(out.shape))
    model = fuse(make())
    ids = torch.randint(1, 20, (2, 4))
    linear = model.encoder.layer[0].attention.self.value
    linear.register_forward_hook(lambda *_: shapes.append(inner(input_ids=ids).last_hidden_state.shape))
    model(**batch)
    assert [*map(tuple, shapes)] == [(8, 16), (2, 16), (2, 4, 16)]


def test_an_output_of_another_shape_is_named(make: Any, batch: dict[str, Tensor]) -> None:
    model = fuse(make())
    model.encoder.layer[0].output.dense.register_forward_hook(lambda m, given, output: output[:, :2])
    with pytest.raises(ValueError, match=r"a hook of Linear.*expected an output \[3, 9, N\], got \[3, 2, 32\]"):
        model(**batch)
