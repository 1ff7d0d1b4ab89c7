"""One BERT layer on packed tokens: attention, then the MLP; parameters named as in Hugging Face's BertLayer."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from bert_fast.modules.activated_linear import activated_linear
from bert_fast.modules.attention import BertAttention
from bert_fast.modules.dropout_add_layer_norm import DropoutAddLayerNorm
from bert_fast.modules.plain_linear import is_plain, product_and_bias
from bert_fast.ops.dropout import DropoutSite, dropout_site
from bert_fast.ops.mlp import mlp
from bert_fast.ops.packing import Packing

__all__ = ["BertIntermediate", "BertLayer", "BertOutput"]


class BertIntermediate(nn.Module):
    """act(dense(x)): the widening half of the MLP.

    A layer calls it only where somebody looks (hooks, FSDP), a linear layer is more than its weight (adapters), or
    hidden_act is a callable; else `BertOutput` takes its parameters, so that the activation need not be saved.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.hidden_act: str | Callable[[Tensor], Tensor] = config.hidden_act

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] to [T, I]."""
        return activated_linear(x, self.dense, self.hidden_act)

    @property
    def is_watched(self) -> bool:
        """Whether hooks are registered that a call would run."""
        return bool(self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks)


class BertOutput(nn.Module):
    """LN(x + dropout(dense(intermediate(x)))): the MLP, and what closes it."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.dense = nn.Linear(config.intermediate_size, config.hidden_size)
        self.LayerNorm = DropoutAddLayerNorm(config.hidden_size, config.layer_norm_eps, config.hidden_dropout_prob)
        self.site = dropout_site(DropoutSite.MLP_OUTPUT, layer)

    def forward(self, x: Tensor, intermediate: BertIntermediate, coords: Tensor, seed: Tensor | None) -> Tensor:
        """[T, H] to [T, H]; both products are one op where it can be."""
        up, hidden_act = intermediate.dense, intermediate.hidden_act
        are_plain = is_plain(up) and is_plain(self.dense) and not intermediate.is_watched
        bias: Tensor | None = self.dense.bias  # added with the residual
        if isinstance(hidden_act, str) and are_plain:
            product = mlp(x, up.weight, up.bias, self.dense.weight, hidden_act=hidden_act)
        else:
            product, bias = product_and_bias(intermediate(x), self.dense)
        return self.LayerNorm(product, x, x_bias=bias, seed=seed, coords=coords, site=self.site)


class BertLayer(nn.Module):
    """x -> LN(x + attention(x)) -> LN(. + MLP(.)): post-LayerNorm, as published (Devlin et al. 2019)."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.attention = BertAttention(config, layer)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config, layer)

    def forward(self, x: Tensor, packing: Packing, seed: Tensor | None) -> Tensor:
        """[T, H] to [T, H]."""
        x = self.attention(x, packing, seed)
        return self.output(x, self.intermediate, packing.coords, seed)
