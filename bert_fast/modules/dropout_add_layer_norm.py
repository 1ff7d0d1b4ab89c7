"""The module form of `ops.dropout_add_layer_norm`: a LayerNorm that also adds the branch before it."""

import torch
from torch import Tensor, nn

from bert_fast.checks import check_dropout_p, check_shape, check_size
from bert_fast.ops.dropout import draw_seed
from bert_fast.ops.dropout_add_layer_norm import dropout_add_layer_norm


class DropoutAddLayerNorm(nn.Module):
    """LayerNorm(residual + dropout(x + x_bias)) in place of `nn.Dropout`, the addition and `nn.LayerNorm`.

    Parameters are those of `nn.LayerNorm(hidden_size, eps)`: `weight` and `bias`, so its state_dict loads. Dropout
    follows `self.training`.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-12, dropout_p: float = 0.0) -> None:
        super().__init__()
        check_size("hidden_size", hidden_size)
        check_dropout_p("dropout_p", dropout_p)
        self.hidden_size = hidden_size
        self.eps = eps
        self.dropout_p = dropout_p
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        *,
        x_bias: Tensor | None = None,
        seed: Tensor | None = None,
        coords: Tensor | None = None,
        site: int = 0,
    ) -> Tensor:
        """y [T, hidden_size] from x and residual [T, hidden_size].

        seed, coords, site: as for the op. Without a seed one is drawn from PyTorch's generator of x's device; without
        coords the rows of x count as the tokens of one sequence. Both only where something is dropped.
        """
        dropout_p = self.dropout_p if self.training else 0.0
        if dropout_p > 0.0:
            check_shape("x", x, ("T", self.hidden_size))
            if seed is None:
                seed = draw_seed(x.device)
            if coords is None:
                positions = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
                coords = torch.stack([torch.zeros_like(positions), positions], dim=1)
        return dropout_add_layer_norm(
            x,
            residual,
            self.weight,
            self.bias,
            x_bias=x_bias,
            eps=self.eps,
            dropout_p=dropout_p,
            seed=seed,
            coords=coords,
            site=site,
        )

    def extra_repr(self) -> str:
        """The constructor's arguments, for printing."""
        return f"{self.hidden_size}, eps={self.eps}, dropout_p={self.dropout_p}"
