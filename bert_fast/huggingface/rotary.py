"""transformers' models whose queries and keys are turned by position."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.huggingface.containers import (
    FusedBetween,
    FusedContainer,
    FusedEmbeddings,
    FusedEncoder,
    FusedJoined,
    FusedSelfAttention,
    fused_name,
)
from bert_fast.huggingface.fused import FusedUncalled
from bert_fast.huggingface.models import FusedModel
from bert_fast.models.reading import Tokens
from bert_fast.modules.call import Call
from bert_fast.modules.encoder import PackedEncoder
from bert_fast.modules.rotary_layer import PackedFeedForward, PackedRotaryLayer
from bert_fast.ops.packing import Packing

_GROWING = ("dynamic", "longrope")  # whose frequencies depend on the greatest position of a call


class FusedRotaryEmbeddings(FusedBetween, FusedEmbeddings):
    """Embeddings without positions; the first layer's input."""

    position_embedding_type = "rotary"


class FusedRotaryAttention(FusedSelfAttention):
    """Attention of tokens to each other, as far as `o_proj`."""

    position_embedding_type = "rotary"
    attention_dropout: float
    head_dim = property(lambda self: self.__dict__["head_dim"])
    dropout_p = property(lambda self: self.attention_dropout)


class FusedRotaryMLP(FusedJoined, PackedFeedForward, FusedContainer, FusedUncalled):
    """The linear layers of an MLP; gate and up lie side by side in memory."""

    _modules: dict[str, Any]
    hidden_act: Any = property(lambda self: fused_name(self.activation))

    def _joined(self) -> tuple[nn.Linear, ...]:
        return () if self.gate is None else (self.gate, self.up)

    @property
    def dropout_p(self) -> float:  # type: ignore[override]
        """0 where nothing drops inside."""
        dropout = self._modules.get("dropout")
        return dropout.p if dropout is not None and dropout.training else 0.0


class FusedRotaryLayer(FusedBetween, PackedRotaryLayer):
    """A layer."""

    dropout_p = property(lambda self: max(self.attention_dropout.p, self.output_dropout.p))


class _Layers(PackedEncoder):
    """The layers of a model, which has no module for them."""

    def __init__(self, model: Any) -> None:
        self._model = model

    layer = property(lambda self: self._model.layers[: self._model.config.num_hidden_layers])
    training = property(lambda self: self._model.training)
    fused_family = property(lambda self: self._model.fused_family)

    def __call__(self, x: Tensor, memory: Tensor | None = None, *, call: Call) -> Tensor:
        """x [T, H] to [T, H], or [M, H] where the call names rows."""
        return self.forward_packed(x, memory, call=call)


class FusedRotaryModel(FusedModel):
    """A model without a head."""

    layers: nn.ModuleList
    rotary_emb: Any
    has_position_table = False
    encoder = property(_Layers)

    def _rotary(self, tokens: Tokens, positions: Tensor | None, packing: Packing) -> tuple[Tensor, Tensor]:
        """By the model's own module: cosine and sine [T, D / 2], in fp32 (fp64 for fp64)."""
        turned = packing.coords[:, 1] if positions is None else positions
        num_tokens = len(turned)
        if self.rotary_emb.rope_type in _GROWING:  # transformers counts columns of padding, too
            longest = packing.max_seqlen if packing.padded_shape is None else packing.padded_shape[1]
            last = turned.new_tensor(longest - 1) if tokens.position_ids is None else tokens.position_ids.max()
            turned = torch.cat((turned, last.to(turned.dtype)[None]))
        like = torch.empty(0, dtype=torch.promote_types(self.dtype, torch.float32), device=turned.device)
        with torch.autocast(turned.device.type, enabled=False):
            cos, sin = self.rotary_emb(like, turned[None])  # [1, T, D], both halves alike
        half = cos.shape[2] // 2  # contiguous here, once, and not in every layer
        return cos[0, :num_tokens, :half].contiguous(), sin[0, :num_tokens, :half].contiguous()


class FusedRoFormerAttention(FusedSelfAttention):
    """Attention of tokens to each other, in BERT's module."""

    position_embedding_type = "rotary"
    rotary_interleaved = True


class FusedRoFormerEncoder(FusedEncoder):
    """A stack of layers, with a table of sines and cosines."""

    embed_positions: nn.Embedding

    def forward_packed(self, x: Tensor, memory: Tensor | None = None, *, call: Call) -> Tensor:
        """As `PackedEncoder`, with the angles in the call."""
        table = self.embed_positions.weight.detach()  # [S, D]: sines, then cosines
        sin, cos = table.to(torch.promote_types(table.dtype, torch.float32)).chunk(2, dim=1)
        positions = call.packing.coords[:, 1]
        call = replace(call, rotary=(cos.index_select(0, positions), sin.index_select(0, positions)))
        return super().forward_packed(x, memory, call=call)


class FusedRoFormerModel(FusedModel):
    """A model without a head."""

    reads_positions = False

    def reasons_of_model(self) -> Iterator[str]:
        """Why this model needs transformers' code."""
        if self.config.rotary_value:
            yield "config.rotary_value: values are turned too"
