"""A post-LayerNorm layer whose queries and keys are turned by position, with or without a gate in its MLP.

Jina v3 (Sturua et al. 2024, arXiv:2409.10173), Nomic (Nussbaum et al. 2024, arXiv:2402.01613) and GTE (Zhang et al.
2024, arXiv:2407.19669) are built of it. Its parts lie in fewer modules than BERT's.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from bert_fast.modules.call import Call
from bert_fast.modules.fusable import activated_linear, called, is_plain, product_and_bias, weight_and_bias
from bert_fast.modules.residual_norm import residual_norm
from bert_fast.ops.bias_gelu import bias_activation
from bert_fast.ops.dropout import DropoutSite, dropout, dropout_site
from bert_fast.ops.gated_mlp import gated_mlp
from bert_fast.ops.mlp import mlp


class PackedFeedForward:
    """down(act(up(x))), or with a gate down(dropout(act(gate(x)) * up(x))), for any module that has these layers."""

    up: nn.Linear
    down: nn.Linear
    gate: nn.Linear | None = None
    hidden_act: str | Callable[[Tensor], Tensor]
    dropout_p: float
    site: int

    def product(self, x: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
        """x [M, H] to the product with `down` [M, H], and its bias, if it is yet to be added."""
        up, down, gate, hidden_act = self.up, self.down, self.gate, self.hidden_act
        dropping: dict[str, Any] = dict(seed=call.seed, coords=call.queries.coords, site=self.site)
        layers = (up, down) if gate is None else (gate, up, down)
        if isinstance(hidden_act, str) and all(map(is_plain, layers)):
            weight, bias = weight_and_bias(down)  # the bias is added with the residual
            if gate is None:
                return mlp(x, *weight_and_bias(up), weight, hidden_act=hidden_act), bias
            widened = *weight_and_bias(gate), *weight_and_bias(up)
            p = call.dropout_p(self)
            return gated_mlp(x, *widened, weight, hidden_act=hidden_act, dropout_p=p, **dropping), bias
        if gate is None:
            return product_and_bias(activated_linear(x, up, hidden_act), down)
        gated = called(gate, x)
        gated = bias_activation(gated, hidden_act=hidden_act) if isinstance(hidden_act, str) else hidden_act(gated)
        return product_and_bias(dropout(gated * called(up, x), call.dropout_p(self), **dropping), down)


class PackedRotaryLayer:
    """x -> LN(x + dropout(attention(x))) -> LN(. + dropout(MLP(.))).

    heads: a `PackedSelfAttention`, which `attention_dense` follows; feed_forward: a `PackedFeedForward`.
    attention_dropout, output_dropout: what drops before either LayerNorm.
    """

    heads: Any
    attention_dense: nn.Linear
    attention_dropout: nn.Dropout
    attention_norm: nn.LayerNorm
    feed_forward: Any
    output_dropout: nn.Dropout
    norm: nn.LayerNorm
    layer_index: int

    def forward_packed(self, x: Tensor, memory: Tensor | None = None, *, call: Call) -> Tensor:
        """x [T, H] to [T, H], or [M, H] where the call names rows; there is no attention to a memory."""
        product, bias = product_and_bias(self.heads(x, call=call), self.attention_dense)
        site = dropout_site(DropoutSite.ATTENTION_OUTPUT, self.layer_index)
        p = _probability(self.attention_dropout, call)
        x = residual_norm(product, bias, call.of_rows(x), self.attention_norm, p, site, call)
        product, bias = self.feed_forward.product(x, call)
        site, p = dropout_site(DropoutSite.MLP_OUTPUT, self.layer_index), _probability(self.output_dropout, call)
        return residual_norm(product, bias, x, self.norm, p, site, call)


def _probability(dropout: nn.Dropout, call: Call) -> float:
    return dropout.p if dropout.training and call.seed is not None else 0.0
