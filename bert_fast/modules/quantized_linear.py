"""A linear layer that multiplies in 8 bits, beside the parameters that it had."""

from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.errors import DerivativeError
from bert_fast.ops.linear_int8 import QuantizedWeight, linear_int8, quantize_weight


class QuantizedLinear(nn.Module):
    """y = x W^T + b by `ops.linear_int8`, for an `nn.Linear` whose class this becomes; its parameters stay.

    Not a subclass of `nn.Linear`: what takes one, as PEFT does, takes its weight for what is multiplied.
    """

    in_features: int
    out_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None
    copy_in_8_bits: "WeightIn8Bits"

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N]. Raises DerivativeError where a gradient would be recorded."""
        if torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad):
            raise DerivativeError(
                "a quantized model has no gradients: call it within torch.inference_mode() or torch.no_grad(), or "
                "train it after bert_fast.unquantize(model)"
            )
        rows = x.reshape(-1, self.in_features)
        return linear_int8(rows, self.quantized_weight(), self.bias).view(*x.shape[:-1], self.out_features)

    def quantized_weight(self) -> QuantizedWeight:
        """The weight as it is now, in 8 bits."""
        return self.copy_in_8_bits.of(self.weight)

    def extra_repr(self) -> str:
        """As `nn.Linear`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class WeightIn8Bits:
    """A weight in 8 bits, made when it is first asked for, and again where the weight has changed.

    A change is seen by the counter that PyTorch keeps of writes to a tensor, by address and by identity: copies, steps
    of optimizers, `load_state_dict`, `.to` and other parameters in its place, but not a write through `.data`.
    """

    def __init__(self) -> None:
        self._made: tuple[Tensor, int, int, QuantizedWeight] | None = None

    def of(self, weight: Tensor) -> QuantizedWeight:
        """Of this weight. Raises ValueError for an inference tensor, which has no such counter."""
        if torch.compiler.is_compiling():
            return quantize_weight(weight)  # a graph rounds it at every call
        if weight.is_inference():
            raise ValueError("weight: expected a Tensor whose changes are counted, got one of torch.inference_mode()")
        made = self._made
        if made is not None:
            known, version, address, quantized = made
            if known is weight and version == weight._version and address == weight.data_ptr():
                return quantized
        version, address = weight._version, weight.data_ptr()
        quantized = quantize_weight(weight)
        self._made = weight, version, address, quantized
        return quantized

    def __reduce__(self) -> Any:
        return WeightIn8Bits, ()  # copies and pickles of a model make their own
