"""The module form of `ops.layer_norm`."""

from torch import Tensor, nn

from bert_fast.checks import check_same_device, check_size, check_tensor
from bert_fast.ops.layer_norm import layer_norm


class LayerNorm(nn.LayerNorm):
    """LayerNorm over the last dimension, by the fused op; to every tool that asks it is an `nn.LayerNorm`.

    eps defaults to BERT's 1e-12, not to PyTorch's 1e-5. Half-precision inputs may meet fp32 parameters.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-12) -> None:
        check_size("hidden_size", hidden_size)
        super().__init__(hidden_size, eps=eps)

    def forward(self, input: Tensor) -> Tensor:
        """y (shape and dtype of input) from input [..., hidden_size]."""
        check_tensor("input", input)
        if input.shape[-1:] != self.weight.shape:
            raise ValueError(
                f"input: expected a last dimension of {self.weight.shape[0]} (hidden_size), "
                f"got shape {list(input.shape)}"
            )
        check_same_device("input", input, "weight", self.weight)
        return layer_norm(input, self.weight, self.bias, eps=self.eps)
