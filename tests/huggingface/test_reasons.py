"""What takes a call off the packed path: each reason is named, and the results are those of the untouched model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from bert_fast import native
from bert_fast.huggingface import fuse, unfuse, why_not
from bert_fast.huggingface.reasons import _module_reasons
from tests.huggingface.families import checkpoint_layers

transformers = pytest.importorskip("transformers", minversion="5")


class OwnAttention(transformers.models.bert.modeling_bert.BertSelfAttention):
    pass


class OwnTensor(Tensor):
    pass


class Stuck(nn.Dropout):
    pass


def _replace_attention(model: Any) -> None:
    model.encoder.layer[0].attention.self.__class__ = OwnAttention


def _hook(path: str, kind: str = "forward") -> Callable[[Any], None]:
    def register(model: Any) -> None:
        module = model.get_submodule(path)
        if kind == "forward":
            module.register_forward_hook(lambda *_: None)
        elif kind == "before":
            module.register_forward_pre_hook(lambda *_: None)
        else:
            module.register_full_backward_hook(lambda *_: None)

    return register


def _own_forward(model: Any) -> None:
    linear = model.encoder.layer[1].output.dense
    linear.forward = lambda x: nn.functional.linear(x, linear.weight, linear.bias)


def _drop_in_evaluation(model: Any) -> None:
    model.encoder.layer[0].output.dropout.p = 1e-9
    model.encoder.layer[0].output.dropout.train()


def _replace(path: str, module: nn.Module) -> Callable[[Any], None]:
    def replace(model: Any) -> None:
        model.set_submodule(path, module)

    return replace


def _own_weight(model: Any) -> None:
    linear = model.encoder.layer[0].attention.self.query
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(OwnTensor))


# what is done to the model (before it is fused) -> how the reason begins
MODULES: dict[str, Callable[[Any], None]] = {
    "encoder.layer.0.attention.self: a OwnAttention which is not fused": _replace_attention,
    "encoder.layer.1: hooks are registered": _hook("encoder.layer.1"),
    "encoder: hooks are registered": _hook("encoder", "before"),
    "encoder.layer.0.intermediate: hooks are registered": _hook("encoder.layer.0.intermediate", "backward"),
    "encoder.layer.0.output.dropout: hooks are registered": _hook("encoder.layer.0.output.dropout"),
    "encoder.layer.1.output.dense: its forward is replaced": _own_forward,
    "encoder.layer.0.output.dropout: drops in evaluation": _drop_in_evaluation,
    "encoder.layer.1.output.dropout: a Stuck, not nn.Dropout": _replace("encoder.layer.1.output.dropout", Stuck(0.0)),
    "pooler.activation: a Sigmoid, not nn.Tanh": _replace("pooler.activation", nn.Sigmoid()),
}


def _equal(model: Any, untouched: Any, inputs: dict[str, Any]) -> None:
    """In every bit, save on padding, which is 0."""
    hidden, mask = untouched(**inputs).last_hidden_state, inputs["attention_mask"]
    if mask.dim() == 2:
        hidden = hidden.masked_fill(mask[..., None] == 0, 0.0)
    assert torch.equal(model(**inputs).last_hidden_state, hidden)


@pytest.mark.parametrize("reason", MODULES)
def test_reasons_in_modules(make, batch, reason) -> None:
    models = make(), make()
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        MODULES[reason](model)
    fused = fuse(models[0])
    assert why_not(fused) == [reason] and why_not(fused, **batch) == [reason]
    _equal(fused, models[1], batch)


@pytest.mark.parametrize("by", ["extension", "python"])
def test_reasons_in_modules_that_change_late(make, batch, monkeypatch, by) -> None:
    """What was concluded before is concluded anew: one model, every change in turn, each beside the walk."""
    if by == "python":
        monkeypatch.setattr(native, "load", lambda: None)
    model = fuse(make())
    for reason, change in MODULES.items():
        assert reason not in why_not(model, **batch)
        model(**batch)
        assert why_not(model, **batch) == list(_module_reasons(model, []))
        change(model)
        found = why_not(model, **batch)
        assert reason in found and found == list(_module_reasons(model, [])) == why_not(model, **batch)


def test_tensors_of_another_class(make, batch) -> None:
    model = fuse(make())
    assert why_not(model, **batch) == []
    _own_weight(model)
    assert why_not(model, **batch) == ["encoder.layer.0.attention.self.query: its parameters are of OwnTensor"]
    ids = batch["input_ids"].as_subclass(OwnTensor)
    assert why_not(fuse(make()), input_ids=ids) == ["input_ids: a OwnTensor, not a plain Tensor"]


CALLS: dict[str, dict[str, Any]] = {
    "output_attentions: probabilities are asked for": {"output_attentions": True},
    "attention_mask: not a Tensor [B, S]": {"attention_mask": torch.ones(3, 1, 9, 9, dtype=torch.bool)},
    "is_causal: the packed path has no such argument": {"is_causal": True},
    "encoder_hidden_states: for an encoder, or in transformers 4": {"encoder_hidden_states": torch.ones(3, 2, 32)},
}


@pytest.mark.parametrize("reason", CALLS)
def test_reasons_in_calls(make, batch, reason) -> None:
    model, untouched = make(), make()
    untouched.load_state_dict(model.state_dict())
    inputs = {**batch, **CALLS[reason]}
    assert why_not(fuse(model), **inputs) == [reason]
    _equal(model, untouched, inputs)


def test_head_masks_are_dropped_as_transformers_drops_them(make, batch) -> None:
    model, untouched = fuse(make()), make()
    masked = {**batch, "head_mask": torch.zeros(model.config.num_attention_heads)}
    assert why_not(model, **masked) == []
    for one in (model, untouched):
        assert torch.equal(one(**masked).last_hidden_state, one(**batch).last_hidden_state)


def test_reasons_in_the_configuration(make, batch) -> None:
    decoder = fuse(make(is_decoder=True))
    assert why_not(decoder, **batch) == ["use_cache: a cache is asked for"]
    assert decoder(**batch).past_key_values is not None
    assert why_not(decoder, **batch, use_cache=False) == []
    assert why_not(decoder, **batch, past_key_values=()) == [
        "past_key_values: the packed path has no such argument", "use_cache: a cache is asked for"]  # fmt: skip
    checkpoint_layers(decoder)
    assert why_not(decoder.train(), **batch) == []
    model = fuse(make())
    model.config._attn_implementation = "my_attention"
    assert why_not(model, **batch) == ["config._attn_implementation: 'my_attention' is not one of transformers' own"]


def test_all_reasons_are_listed(make) -> None:
    model = fuse(make())
    _hook("encoder")(model)
    assert len(why_not(model, output_attentions=True)) == 3, "no input is one as well"


def test_attentions_do_not_stay_in_the_way(make, batch) -> None:
    """transformers leaves the hooks that collected them; they sleep where nothing is asked for."""
    model = fuse(make(attn_implementation="eager"))
    expected = model(**batch).last_hidden_state
    assert len(model(**batch, output_attentions=True).attentions) == 2
    assert why_not(model, **batch) == [] and torch.equal(model(**batch).last_hidden_state, expected)


def test_attentions_leave_the_layers_one_routine(make, batch) -> None:
    """Without gradients a stack is one C++ routine, with sums of its own; a layer with hooks is several ops."""
    model = fuse(make(attn_implementation="eager"))
    with torch.inference_mode():
        expected = model(**batch).last_hidden_state
        model(**batch, output_attentions=True)
        assert torch.equal(model(**batch).last_hidden_state, expected)


def test_a_model_further_out_that_collects_states(make, batch) -> None:
    """Hooks that a model around has on the layers want [B, S, H]."""
    from transformers.utils.output_capturing import _active_collector

    model = fuse(make())
    token = _active_collector.set({"hidden_states": []})
    try:
        assert why_not(model, **batch) == ["a model around this one collects the layers' outputs"]
    finally:
        _active_collector.reset(token)


def test_transformations_run_the_untouched_code(make, batch) -> None:
    model, ids = fuse(make()), batch["input_ids"]
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], ids: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (ids,)).last_hidden_state.square().mean()

    gradients = torch.func.grad(loss)(parameters, ids)
    name = "encoder.layer.0.attention.self.value.weight"
    expected = torch.autograd.grad(loss(parameters, ids), parameters[name])[0]
    torch.testing.assert_close(gradients[name], expected)
    per_row = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, ids[:, None])
    assert per_row[name].shape == (3, 32, 32)

    traced = torch.jit.trace(model, (ids, batch["attention_mask"]), strict=False)
    assert "bert_fast::" not in str(traced.inlined_graph)
    output, kept = traced(ids, batch["attention_mask"])["last_hidden_state"], batch["attention_mask"] != 0
    torch.testing.assert_close(output, model(ids, batch["attention_mask"])[0])
    torch.testing.assert_close(output[kept], unfuse(model)(ids, batch["attention_mask"])[0][kept])


@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM", "BertForSequenceClassification"])
def test_forward_mode_derivatives_are_those_of_the_untouched(make, batch, name) -> None:
    """By jvp of torch.func, and by dual numbers in the place of a parameter."""
    model, untouched = (make(name, attn_implementation="eager").double() for _ in range(2))
    untouched.load_state_dict(fuse(model).state_dict())
    kept, key = batch["attention_mask"].bool(), "encoder.layer.1.attention.self.value.weight"
    key = key if name == "BertModel" else f"bert.{key}"
    weight = model.get_parameter(key).detach()
    direction = torch.randn_like(weight)

    def output(of: Any, weight: Tensor) -> Tensor:
        first = torch.func.functional_call(of, {key: weight}, (batch["input_ids"], batch["attention_mask"]))[0]
        return first[kept] if first.dim() == 3 else first

    expected = torch.func.jvp(lambda w: output(untouched, w), (weight,), (direction,))
    assert expected[1].abs().max() > 1e-3
    torch.testing.assert_close(torch.func.jvp(lambda w: output(model, w), (weight,), (direction,)), expected)
    with forward_ad.dual_level():
        assert why_not(model, **batch) == ["derivatives are taken in forward mode"]
        dual = forward_ad.unpack_dual(output(model, forward_ad.make_dual(weight, direction)))
        torch.testing.assert_close((dual.primal, dual.tangent), expected)
    assert why_not(model, **batch) == []


def test_hessian_of_a_head(make, batch) -> None:
    """Forward over reverse, through the loss of answers, which is the one that is trained on."""
    model = fuse(make("BertForQuestionAnswering", num_labels=2, attn_implementation="eager").double())
    labels = {"start_positions": torch.tensor([1, 0, 3]), "end_positions": torch.tensor([8, 4, 3])}
    first = model.qa_outputs.weight.detach()[0, :3]

    def loss(part: Tensor) -> Tensor:
        weight = model.qa_outputs.weight.detach()
        weight = torch.cat((torch.cat((part, weight[0, 3:]))[None], weight[1:]))
        return torch.func.functional_call(model, {"qa_outputs.weight": weight}, (), {**batch, **labels}).loss

    hessian, step = torch.func.hessian(loss)(first), 1e-4
    assert why_not(model, **batch) == []
    for index, offset in enumerate(torch.eye(3).double() * step):
        values = []
        for part in (first + offset, first - offset):
            part = part.clone().requires_grad_()
            values.append(torch.autograd.grad(loss(part), part)[0])  # on the packed path
        difference = (values[0] - values[1]) / (2 * step)
        assert (difference - hessian[index]).abs().max() < 1e-6


def test_wrong_arguments_raise_as_ever(make, batch) -> None:
    model = fuse(make())
    with pytest.raises(TypeError):
        model(batch["input_ids"], input_ids=batch["input_ids"])
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model()


@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states", "return_dict"])
def test_a_setting_that_is_neither_true_nor_false_is_named(make, name: str) -> None:
    model = fuse(make("BertModel"))
    with pytest.raises(TypeError, match=f"{name}: expected a bool, got Tensor"):
        model(torch.ones(1, 3, dtype=torch.long), **{name: torch.zeros(2, 3)})


def test_a_mask_of_another_length_is_named(make) -> None:
    """transformers itself takes it where nothing is masked."""
    model = fuse(make("BertForQuestionAnswering"))
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \[3, 16\]"):
        model(torch.ones(3, 16, dtype=torch.long), torch.ones(3, 17, dtype=torch.bool))
