"""quantize: what it changes, that weights are followed, the same bits on every way through a layer, and refusals."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bert_fast
from bert_fast.errors import DerivativeError
from bert_fast.modules import encoder
from bert_fast.modules.quantized_linear import QuantizedLinear
from bert_fast.testing.parity import randomize

IDS = torch.randint(1, 61, (4, 9), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(9) < torch.tensor([9, 5, 7, 1])[:, None]).long()


@pytest.fixture
def model() -> Any:
    config = bert_fast.BertConfig(
        vocab_size=61, hidden_size=36, num_hidden_layers=2, num_attention_heads=3, intermediate_size=72,
        max_position_embeddings=16,
    )  # fmt: skip
    model = bert_fast.BertModel(config).eval()
    randomize(model)
    return model


@torch.inference_mode()
def states(model: Any, ids: Tensor = IDS, mask: Tensor = MASK) -> Tensor:
    output: Tensor = model(input_ids=ids, attention_mask=mask).last_hidden_state
    return output


def with_relu(model: Any) -> Any:
    """The model with an activation that rounds nothing: PyTorch's GELU and the routine's differ in the last place."""
    for layer in model.encoder.layer:
        layer.intermediate.hidden_act = "relu"
    return model


def classes(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


def test_linear_layers_of_layers_change_and_change_back(model: Any) -> None:
    before, fp32 = classes(model), states(model)
    parameters = {name: (one, one.clone()) for name, one in model.named_parameters()}
    assert bert_fast.quantize(model) is model
    quantized = states(model)
    assert not torch.equal(quantized, fp32)
    changed = {name for name, kind in classes(model).items() if kind is not before[name]}
    assert len(changed) == 12 and all(name.startswith("encoder.layer.") for name in changed)
    assert changed == {name for name, kind in before.items() if kind is nn.Linear and name.startswith("encoder.layer.")}
    state = model.state_dict()
    assert state.keys() == parameters.keys()
    for name, one in model.named_parameters():
        assert one is parameters[name][0] and torch.equal(one, parameters[name][1])
    assert torch.equal(states(bert_fast.quantize(model)), quantized)
    assert bert_fast.unquantize(model) is model
    assert classes(model) == before and torch.equal(states(model), fp32)
    assert torch.equal(states(bert_fast.unquantize(model)), fp32)


def test_states_are_near_those_of_fp32(model: Any) -> None:
    kept, fp32 = MASK.bool(), states(model)
    quantized = states(bert_fast.quantize(model))
    assert not quantized[~kept].any()
    errors = (quantized - fp32)[kept].square().mean(1).sqrt() / fp32[kept].square().mean(1).sqrt()
    assert errors.min() > 0.0 and errors.max() < 0.1


def test_one_routine_has_the_bits_of_single_ops(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bert_fast.quantize(with_relu(model))
    ran = []

    def stack(*given: Any) -> Any:
        ran.append(original(*given) is not None)
        return original(*given) if is_whole else None

    original, is_whole = encoder.run_whole_stack, True
    monkeypatch.setattr(encoder, "run_whole_stack", stack)
    together = states(model)
    is_whole = False
    assert torch.equal(states(model), together) and ran == [True, True]


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_text_has_the_same_bits_alone_and_by_any_number_of_threads(model: Any, backend: str) -> None:
    bert_fast.quantize(model)
    num_threads = torch.get_num_threads()
    with bert_fast.use_backend(backend):
        together = states(model)
        for row in range(len(IDS)):
            assert torch.equal(states(model, IDS[row : row + 1], MASK[row : row + 1])[0], together[row])
        try:
            torch.set_num_threads(2)
            assert torch.equal(states(model), together)
        finally:
            torch.set_num_threads(num_threads)


def test_an_empty_batch(model: Any) -> None:
    assert states(bert_fast.quantize(model), IDS[:0], MASK[:0]).shape == (0, 9, 36)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_token_that_is_not_finite_makes_its_text_nan_and_no_other(model: Any, value: float) -> None:
    expected = states(bert_fast.quantize(model))
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[IDS[1, 0]] = value
    hit = IDS.eq(int(IDS[1, 0])) & MASK.bool()
    made = states(model)
    for row in range(len(IDS)):
        kept = MASK[row].bool()
        if hit[row].any():
            assert made[row, kept].isnan().all()
        else:
            assert torch.equal(made[row], expected[row])


def _add(model: Any) -> None:
    with torch.no_grad():
        model.encoder.layer[1].output.dense.weight.add_(0.1)


def _load(model: Any) -> None:
    model.load_state_dict({name: value * 0.7 for name, value in model.state_dict().items()})


def _assign(model: Any) -> None:
    model.load_state_dict({name: value * 0.7 for name, value in model.state_dict().items()}, assign=True)


def _replace(model: Any) -> None:
    model.encoder.layer[0].attention.self.key.weight = nn.Parameter(torch.randn(36, 36))


def _share(model: Any) -> None:
    """Another parameter of the same memory, with as many writes to it."""
    layer = model.encoder.layer[0].output.dense
    count, layer.weight = layer.weight._version, nn.Parameter(layer.weight.data)
    with torch.no_grad():
        while layer.weight._version < count:
            layer.weight.mul_(1.3)
    assert layer.weight._version == count


def _move(model: Any) -> None:
    weight = model.encoder.layer[0].intermediate.dense.weight
    weight.data = torch.randn(72, 36)


def _step(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.05).step()


@pytest.mark.parametrize("change", [_add, _load, _assign, _replace, _share, _move, _step], ids=lambda one: one.__name__)
def test_weights_that_change_are_rounded_again(model: Any, change: Callable[[Any], None]) -> None:
    before = states(bert_fast.quantize(model))
    change(model)
    after = states(model)
    assert not torch.equal(before, after)
    assert torch.equal(after, states(bert_fast.quantize(bert_fast.unquantize(model))))


def test_weights_that_do_not_change_are_rounded_once(model: Any) -> None:
    states(bert_fast.quantize(model))
    linears = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    made = [linear.quantized_weight() for linear in linears]
    states(model)
    assert all(one is linear.quantized_weight() for one, linear in zip(made, linears, strict=True))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_quantized_and_follow_their_own_weights(model: Any, copied: Callable[[Any], Any]) -> None:
    size = len(pickle.dumps(bert_fast.quantize(model)))
    expected = states(model)
    assert len(pickle.dumps(model)) == size
    other = copied(model)
    assert torch.equal(states(other), expected)
    _add(other)
    assert not torch.equal(states(other), expected) and torch.equal(states(model), expected)


def test_compiled_calls_see_the_weights_as_they_are(model: Any) -> None:
    bert_fast.quantize(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for change in (lambda _: None, _add):
        change(model)
        with torch.no_grad():
            made = compiled(input_ids=IDS, attention_mask=MASK).last_hidden_state
        # Other roundings before a layer lead to other levels of 256: as far apart as levels are.
        assert (made - states(model)).abs().max() < 0.1 * made.abs().max()
    torch._dynamo.reset()


def test_calls_that_record_a_gradient_are_refused(model: Any) -> None:
    bert_fast.quantize(with_relu(model))
    message = r"a quantized model has no gradients: call it within torch.inference_mode\(\).*bert_fast.unquantize"
    for is_training in (False, True):
        with pytest.raises(DerivativeError, match=message):
            model.train(is_training)(input_ids=IDS, attention_mask=MASK)
    model.eval().requires_grad_(False)
    with pytest.raises(DerivativeError, match=message):
        model(inputs_embeds=torch.randn(2, 5, 36, requires_grad=True))
    expected = states(model)
    assert torch.equal(model(input_ids=IDS, attention_mask=MASK).last_hidden_state, expected)


def test_a_model_that_does_not_fit_is_refused_and_left_as_it_is(model: Any) -> None:
    class Adapted(nn.Linear):
        pass

    dense = model.encoder.layer[1].output.dense
    refused = [
        (lambda: model.train(), "query: expected a model in evaluation, got one in training", lambda: model.eval()),
        (lambda: model.half(), "query: expected weights in float32 on the CPU, got torch.float16 on cpu", model.float),
        (lambda: setattr(dense, "__class__", Adapted), r"layer.1.output.dense: expected an nn.Linear alone, got .*Ada",
         lambda: setattr(dense, "__class__", nn.Linear)),
    ]  # fmt: skip
    for damage, message, repair in refused:
        damage()
        before = classes(model)
        with pytest.raises(ValueError, match=message):
            bert_fast.quantize(model)
        assert classes(model) == before
        repair()
    bert_fast.quantize(model)
    with torch.inference_mode():
        model.encoder.layer[0].output.dense.weight = nn.Parameter(torch.randn(36, 72))
    with pytest.raises(ValueError, match="weight: expected a Tensor whose changes are counted"):
        states(model)
    with pytest.raises(ValueError, match=r"dense: expected weights whose changes are counted"):
        bert_fast.quantize(model)


def test_what_is_no_encoder_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got builtins.int"):
        bert_fast.quantize(3)
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got builtins.int"):
        bert_fast.unquantize(3)
    with pytest.raises(ValueError, match=r"expected one that was fused, .* got a Linear without"):
        bert_fast.quantize(nn.Linear(3, 4).eval())
