"""PyTorch's own tools on fused models: quantisation, pruning, averaged weights, calls with other parameters."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from bert_fast.huggingface import fuse, unfuse, why_not
from bert_fast.huggingface.fused import Fused

transformers = pytest.importorskip("transformers", minversion="5")

NAMES = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification", "BertForQuestionAnswering")


@pytest.fixture(params=NAMES)
def pair(make, request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A fused model and an untouched one with the same weights."""
    untouched = make(request.param, num_labels=2)
    return fuse(copy.deepcopy(untouched)), untouched


def _first(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of the outputs, without padding."""
    first, kept = model(**batch)[0], batch["attention_mask"].bool()
    return first[kept] if first.shape[:2] == kept.shape else first


@pytest.mark.filterwarnings("ignore:.*(torch.ao.quantization is deprecated|quant_min|reduce_range)")
def test_quantize_dynamic(pair, batch) -> None:
    """Products in 8 bits: layers that are called, whose `weight` is a method."""
    results = []
    for model in pair:
        quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
        assert type(quantised.base_model.encoder.layer[0].output.dense) is torch.ao.nn.quantized.dynamic.Linear
        whole = {name: value[:1] for name, value in batch.items()}  # the scale is that of all rows of a call
        results.append(_first(quantised, whole))
        error = (_first(quantised, batch) - _first(model, batch)).abs().max()
        assert 0 < error < 0.5 * _first(model, batch).abs().max()
    if (
        type(pair[1]) is not transformers.BertForSequenceClassification
    ):  # whose last layer has one row where it is fused
        torch.testing.assert_close(*results)


def test_pruning(pair, batch) -> None:
    """While a mask is a hook, it runs: the layer is called. Made permanent, it is part of the weight."""
    model, untouched = pair
    for each in pair:
        layers = [layer for layer in each.modules() if isinstance(layer, nn.Linear)]
        for layer in layers:
            prune.random_unstructured(layer, "weight", amount=0.3)
        torch.manual_seed(0)
    masks = {name: value for name, value in untouched.state_dict().items() if name.endswith("_mask")}
    assert len(masks) >= 12 and all(value.eq(0).any() for value in masks.values())
    model.load_state_dict(untouched.state_dict())
    torch.testing.assert_close(_first(model, batch), _first(untouched, batch))
    _first(model, batch).sin().sum().backward()
    for each in pair:
        for layer in each.modules():
            if isinstance(layer, nn.Linear):
                prune.remove(layer, "weight")
    assert why_not(model, **batch) == []
    torch.testing.assert_close(_first(model, batch), _first(untouched, batch))
    assert (model.base_model.encoder.layer[0].output.dense.weight == 0).float().mean() > 0.2


def test_averaged_weights(pair, batch) -> None:
    """An exponential mean of three steps, beside that of the untouched model."""
    averages = []
    for model in (each.double() for each in pair):
        decayed = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decayed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            _first(model, batch).square().mean().backward()
            optimizer.step()
            averaged.update_parameters(model)
        averages.append(averaged)
    assert isinstance(averages[0].module, Fused) and why_not(averages[0], **batch) == []
    torch.testing.assert_close(_first(averages[0], batch), _first(averages[1], batch))
    assert not torch.equal(_first(averages[0], batch), _first(pair[0], batch))
    torch.testing.assert_close(dict(averages[0].named_parameters()), dict(averages[1].named_parameters()))
    assert not any(isinstance(module, Fused) for module in unfuse(averages[0]).modules())


def test_functional_call(pair, batch) -> None:
    """With other parameters for one call: they count, get the gradients, and leave the model as it was."""
    model = pair[0].double()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    others = [{name: (1.5 * value).requires_grad_() for name, value in before.items()} for _ in pair]
    pair[1].double()
    results = []
    for each, parameters in zip(pair, others, strict=True):
        first = torch.func.functional_call(each, parameters, (), batch)[0]
        kept = batch["attention_mask"].bool()
        results.append(first[kept] if first.shape[:2] == kept.shape else first)
        results[-1].sin().sum().backward()
    torch.testing.assert_close(*results)
    assert not torch.equal(results[0], _first(model, batch))
    for name, parameter in others[1].items():
        torch.testing.assert_close(others[0][name].grad, parameter.grad, msg=lambda text, name=name: f"{name}: {text}")
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in model.named_parameters())
