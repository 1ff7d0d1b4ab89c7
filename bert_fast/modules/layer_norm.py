"""The module form of `ops.layer_norm`."""

import torch
from torch import Tensor, nn

from bert_fast.ops.layer_norm import layer_norm

__all__ = ["LayerNorm"]


class LayerNorm(nn.Module):
    """LayerNorm over the last dimension; parameters and state_dict are those of `nn.LayerNorm(hidden_size, eps)`.

    eps defaults to BERT's 1e-12, not to PyTorch's 1e-5. Half-precision inputs may meet fp32 parameters.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-12) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """y (shape and dtype of x) from x [..., hidden_size]."""
        return layer_norm(x, self.weight, self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        """The constructor's arguments, for printing."""
        return f"{self.hidden_size}, eps={self.eps}"
