"""One BERT layer on packed tokens: attention, then the MLP; parameters named as in Hugging Face's BertLayer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.modules.attention import BertAttention
from bert_fast.modules.call import Call
from bert_fast.modules.fusable import activated_linear, is_plain, is_watched, product_and_bias, weight_and_bias
from bert_fast.modules.layer_norm import LayerNorm
from bert_fast.modules.residual_norm import residual_norm
from bert_fast.ops.dropout import DropoutSite, dropout_site
from bert_fast.ops.mlp import mlp

__all__ = ["BertIntermediate", "BertLayer", "BertOutput", "PackedIntermediate", "PackedLayer", "PackedOutput"]


class PackedIntermediate:
    """act(dense(x)): the widening half of the MLP, for any module that has `dense` and `hidden_act`.

    A layer calls it only where somebody looks (hooks, FSDP), a linear layer is more than its weight (adapters), or
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
        if isinstance(hidden_act, str) and is_plain(up) and is_plain(down) and not is_watched(intermediate):
            weight, bias = weight_and_bias(down)  # the bias is added with the residual
            product = mlp(x, *weight_and_bias(up), weight, hidden_act=hidden_act)
        else:
            product, bias = product_and_bias(intermediate(x, call=call), down)
        return residual_norm(product, bias, x, self.LayerNorm, call.dropout_p(self), self.site, call)


class PackedLayer:
    """x -> LN(x + attention(x)) -> LN(. + MLP(.)), and between them attention to a memory, where there is one."""

    attention: Any
    crossattention: Any
    intermediate: Any
    output: Any
    chunk_size_feed_forward = 0  # columns of the batch that go through the MLP at a time; 0: all

    def forward_packed(self, x: Tensor, memory: Tensor | None = None, *, call: Call) -> Tensor:
        """x [T, H], memory [Tm, H] or None, to [T, H], or [M, H] where the call names rows."""
        x = self.attention(x, call=call)
        if memory is not None:
            x = self.crossattention(x, memory, call=call)
        if self.chunk_size_feed_forward and not torch.compiler.is_compiling():  # a graph would fix the number of chunks
            return self._in_chunks(x, call)
        return self.output(x, self.intermediate, call=call)

    def _in_chunks(self, x: Tensor, call: Call) -> Tensor:
        """The MLP on as many tokens at a time as so many columns of a padded batch hold."""
        step = self.chunk_size_feed_forward * max(call.queries.num_sequences, 1)
        parts = [
            self.output(part, self.intermediate, call=call.of_tokens(index * step, (index + 1) * step))
            for index, part in enumerate(x.split(step))
        ]
        return torch.cat(parts)


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


class BertLayer(PackedLayer, nn.Module):
    """A layer, post-LayerNorm as published (Devlin et al. 2019)."""

    forward = PackedLayer.forward_packed

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.attention = BertAttention(config, layer)
        if getattr(config, "add_cross_attention", False):
            self.crossattention = BertAttention(config, layer, is_cross=True)
        self.chunk_size_feed_forward = getattr(config, "chunk_size_feed_forward", 0)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config, layer)
