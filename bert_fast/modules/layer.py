"""One BERT layer on packed tokens: attention, then the MLP; parameters named as in Hugging Face's BertLayer."""

from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.modules.attention import BertAttention
from bert_fast.modules.call import Call
from bert_fast.modules.mlp import BertIntermediate, BertOutput
from bert_fast.modules.whole_layer import run_whole


class PackedLayer:
    """x -> LN(x + attention(x)) -> LN(. + MLP(.)), and between them attention to a memory, where there is one."""

    attention: Any
    crossattention: Any
    intermediate: Any
    output: Any
    pieces: Any = None  # a method that names them for `whole_layer`, where they lie in other modules than BERT's
    chunk_size_feed_forward = 0  # columns of the batch that go through the MLP at a time; 0: all

    def forward_packed(self, x: Tensor, memory: Tensor | None = None, *, call: Call) -> Tensor:
        """x [T, H], memory [Tm, H] or None, to [T, H], or [M, H] where the call names rows."""
        if memory is None:
            y = run_whole(self, x, call)
            if y is not None:
                return y
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
