"""quantize and unquantize: the linear layers of an encoder's layers multiply in 8 bits, and nothing else changes."""

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from bert_fast.modules.flat_layer import PackedFlatLayer
from bert_fast.modules.layer import PackedLayer
from bert_fast.modules.quantized_linear import QuantizedLinear, WeightIn8Bits
from bert_fast.modules.rotary_layer import PackedRotaryLayer
from bert_fast.reference.linear_int8 import MAX_FEATURES

_M = TypeVar("_M", bound=nn.Module)
_LAYERS = (PackedLayer, PackedFlatLayer, PackedRotaryLayer)


def quantize(model: _M) -> _M:
    """Makes the linear layers of every encoder inside a model multiply in 8 bits, in place, for inference on a CPU.

    These are query, key, value, the attention's output and the MLP of every layer; embeddings, attention, LayerNorms,
    poolers and heads stay in fp32. Weights are rounded with a scale per row, at the first call and again after they
    have changed (by anything but a write through `.data`); inputs with a scale and a zero point per token, so that
    there is nothing to calibrate (`ops.linear_int8`). Parameters and `state_dict()` stay as they are, in memory too;
    copies and pickles of the model are quantized as well. A text has the same bits alone, in any batch and for any
    number of threads. Calls that would record a gradient raise `DerivativeError`. Quantizing again changes nothing.

    Args:
        model: one that was fused, or has an encoder of bert_fast inside; in evaluation, in fp32, on the CPU, without
            adapters (merge them first).

    Returns:
        model.

    Raises:
        TypeError: model is no module.
        ValueError: there is no such encoder inside, or a layer of it is something else than above; nothing is changed
            then.

    Example:
        >>> config = bert_fast.BertConfig(vocab_size=30, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> model = bert_fast.quantize(bert_fast.BertModel(config).eval())
        >>> with torch.inference_mode():
        ...     model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        torch.Size([1, 3, 32])
    """
    _check_module(model)
    found = [one for path, layer in _layers(model) for one in _linears(path, layer)]
    if not found:
        raise ValueError(
            f"model: expected one that was fused, or an encoder of bert_fast, got a {type(model).__name__} without "
            "(bert_fast.fuse(model) first)"
        )
    for path, linear in found:
        _check(path, linear)
    for _, linear in found:
        if type(linear) is nn.Linear:
            linear.__class__ = QuantizedLinear  # type: ignore[assignment]
            linear.copy_in_8_bits = WeightIn8Bits()  # type: ignore[assignment]
    return model


def unquantize(model: _M) -> _M:
    """Undoes `quantize`, in place: linear layers multiply their parameters again, which never changed.

    Args:
        model: any module; one that is not quantized is left as it is.

    Returns:
        model.

    Raises:
        TypeError: model is no module.

    Example:
        >>> config = bert_fast.BertConfig(vocab_size=30, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> model = bert_fast.quantize(bert_fast.BertModel(config).eval())
        >>> type(bert_fast.unquantize(model).encoder.layer[0].output.dense).__name__
        'Linear'
    """
    _check_module(model)
    for module in model.modules():
        if type(module) is QuantizedLinear:
            del module.copy_in_8_bits
            module.__class__ = nn.Linear  # type: ignore[assignment]
    return model


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((path, module) for path, module in model.named_modules() if isinstance(module, _LAYERS))


def _linears(path: str, layer: Any) -> list[tuple[str, nn.Module]]:
    """The linear layers of a layer by their names, and what may stand in the place of one."""
    kinds = (nn.Linear, QuantizedLinear)
    return [
        (f"{path}.{name}", module)
        for name, module in layer.named_modules()
        if isinstance(module, kinds) or hasattr(module, "base_layer")  # PEFT's adapters hold the layer by this name
    ]


def _check(path: str, linear: Any) -> None:
    if type(linear) not in (nn.Linear, QuantizedLinear):
        raise ValueError(
            f"{path}: expected an nn.Linear alone, got {type(linear).__module__}.{type(linear).__name__}: merge "
            "adapters into the weights, or remove them, before bert_fast.quantize"
        )
    weight = linear.weight
    if linear.training:
        raise ValueError(f"{path}: expected a model in evaluation, got one in training: call model.eval() first")
    if not isinstance(weight, nn.Parameter) or type(weight.data) is not torch.Tensor:
        raise ValueError(f"{path}: expected a parameter that is a plain tensor, got {type(weight.data).__name__}")
    if weight.dtype is not torch.float32 or weight.device.type != "cpu":
        raise ValueError(f"{path}: expected weights in float32 on the CPU, got {weight.dtype} on {weight.device}")
    if weight.is_inference():
        raise ValueError(f"{path}: expected weights whose changes are counted, got some made in torch.inference_mode()")
    if weight.shape[1] > MAX_FEATURES:
        raise ValueError(f"{path}: expected at most {MAX_FEATURES} features, got {weight.shape[1]}")


def _check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__module__}.{type(model).__name__}")
