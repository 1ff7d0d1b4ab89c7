"""The MLP of one BERT layer on packed tokens, and what closes it; parameters named as in Hugging Face."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from bert_fast.modules.call import Call
from bert_fast.modules.fusable import activated_linear, is_plain, product_and_bias, runs_hooks, weight_and_bias
from bert_fast.modules.layer_norm import LayerNorm
from bert_fast.modules.residual_norm import residual_norm
from bert_fast.ops.dropout import DropoutSite, dropout_site
from bert_fast.ops.mlp import mlp


class PackedIntermediate:
    """act(dense(x)): the widening half of the MLP, for any module that has `dense` and `hidden_act`.

    A layer calls it only where code observes it (hooks, FSDP), a linear layer is more than its weight (adapters), or
    hidden_act is a callable; else `PackedOutput` takes its parameters, so that the activation need not be saved.
    """

    dense: nn.Linear
    hidden_act: str | Callable[[Tensor], Tensor]

    def forward_packed(self, x: Tensor, *, call: Call) -> Tensor:
        """[M, H] to [M, I]."""
        return activated_linear(x, self.dense, self.hidden_act)


class PackedOutput:
    """LN(x + dropout(dense(intermediate(x)))): the MLP, and what closes it."""

    dense: nn.Linear
    LayerNorm: nn.LayerNorm
    dropout_p: float
    site: int

    def forward_packed(self, x: Tensor, intermediate: Any, *, call: Call) -> Tensor:
        """x [M, H] and the layer's `PackedIntermediate` to [M, H]; both products are one op where it can be."""
        up, down, hidden_act = intermediate.dense, self.dense, intermediate.hidden_act
        if isinstance(hidden_act, str) and is_plain(up) and is_plain(down) and not runs_hooks(intermediate):
            weight, bias = weight_and_bias(down)  # the bias is added with the residual
            product = mlp(x, *weight_and_bias(up), weight, hidden_act=hidden_act)
        else:
            product, bias = product_and_bias(intermediate(x, call=call), down)
        return residual_norm(product, bias, x, self.LayerNorm, call.dropout_p(self), self.site, call)


class BertIntermediate(PackedIntermediate, nn.Module):
    """act(dense(x)); parameters named as in Hugging Face's BertIntermediate."""

    forward = PackedIntermediate.forward_packed

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.hidden_act = config.hidden_act


class BertOutput(PackedOutput, nn.Module):
    """The MLP and what closes it; parameters named as in Hugging Face's BertOutput."""

    forward = PackedOutput.forward_packed

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.dense = nn.Linear(config.intermediate_size, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout_p = config.hidden_dropout_prob
        self.site = dropout_site(DropoutSite.MLP_OUTPUT, layer)
