"""Attention of one BERT layer on packed tokens, to themselves or to a memory; parameters named as in Hugging Face.

Nearly every call is `ops.attention_qkv` on one product that holds query, key and value. The queries and the keys part
ways where they are different tokens: attention to a memory, cached keys, a last layer of which few rows are wanted.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.modules.cache import extend_cache, memory_of
from bert_fast.modules.call import Call
from bert_fast.modules.embeddings import is_plain_table
from bert_fast.modules.fusable import product_and_bias
from bert_fast.modules.layer_norm import LayerNorm
from bert_fast.modules.probabilities import padded_probabilities, weighted_values
from bert_fast.modules.projections import JoinedProjections, Projections, keep_features
from bert_fast.modules.residual_norm import residual_norm
from bert_fast.ops.attention import attention, attention_with_probabilities
from bert_fast.ops.attention_qkv import attention_of_packed, attention_qkv
from bert_fast.ops.dropout import DropoutSite, dropout_site
from bert_fast.ops.packing import Packing
from bert_fast.ops.rotary import rotary


class _PackedHeads(JoinedProjections):
    """What attention to the tokens themselves and to a memory share."""

    dropout_p: float
    site: int
    layer_index: int

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Packing, probabilities: list[Tensor] | None, call: Call,
        **extras: Any,
    ) -> Tensor:  # fmt: skip
        """q [M, A, D], k and v [Tk, A, D] of the tokens `keys` to [M, A * D]; appends probabilities if asked for."""
        queries = call.queries
        arguments: dict[str, Any] = dict(
            cu_seqlens_q=queries.cu_seqlens, max_seqlen_q=queries.max_seqlen, cu_seqlens_k=keys.cu_seqlens,
            max_seqlen_k=keys.max_seqlen, dropout_p=call.dropout_p(self), seed=call.seed, coords_q=queries.coords,
            coords_k=keys.coords, site=self.site, **extras,
        )  # fmt: skip
        if probabilities is None and call.head_mask is None:
            return attention(q, k, v, sequence_order=queries.order, **arguments).flatten(1)
        _, per_sequence = attention_with_probabilities(q, k, v, **arguments)
        padded = padded_probabilities(per_sequence, queries, keys, self.num_heads)
        if call.head_mask is not None:
            padded = padded * call.head_mask[self.layer_index].to(padded.dtype)
        if probabilities is not None:
            probabilities.append(padded)
        return weighted_values(padded, v, queries, keys).flatten(1)


class PackedSelfAttention(_PackedHeads):
    """dropout(softmax(q k^T / sqrt(D))) v with q, k, v projected from one input.

    With position_embedding_type "relative_key" or "relative_key_query" the scores also hold products with
    distance_embedding (nn.Embedding [2M - 1, D], or what stands in its place, M being max_position_embeddings).
    """

    position_embedding_type = "absolute"
    rotary_interleaved = False  # which elements of a head are turned together, see `ops.rotary`
    max_position_embeddings: int
    distance_embedding: nn.Embedding

    def forward_packed(self, x: Tensor, *, call: Call) -> Tensor:
        """x [T, H] to the heads' outputs side by side, [T, A * D], or [M, A * D] where the call names rows."""
        is_shown = call.attentions is not None or call.head_mask is not None
        if is_shown or call.rows is not None or call.keys is not None:
            return self._forward_apart(x, call)
        packing = call.packing
        qkv = self._project(x).unflatten(1, (3, self.num_heads, self.head_dim))  # [T, 3, A, D]
        if call.rotary is not None:
            is_free = not torch.is_grad_enabled()
            qkv = rotary(qkv, *call.rotary, interleaved=self.rotary_interleaved, inplace=is_free)
        if call.cache is not None:
            extend_cache(call, self.layer_index, qkv[:, 1], qkv[:, 2])
        scoring = self._scoring(call)
        if not scoring and call.bias is None:
            return attention_of_packed(
                qkv, packing, causal=call.causal, dropout_p=call.dropout_p(self), seed=call.seed, site=self.site
            ).flatten(1)
        out = attention_qkv(
            qkv, cu_seqlens=packing.cu_seqlens, max_seqlen=packing.max_seqlen, causal=call.causal,
            dropout_p=call.dropout_p(self), seed=call.seed, coords=packing.coords, site=self.site, bias=call.bias,
            sequence_order=packing.order, **scoring,
        )  # fmt: skip
        return out.flatten(1)

    def _forward_apart(self, x: Tensor, call: Call) -> Tensor:
        """The same where queries and keys are different tokens, or probabilities are asked for or masked."""
        keys = call.packing
        if call.rows is not None:
            q, (k, v) = self._query(call.of_rows(x)), self._key_and_value(x)
        else:
            q, k, v = self._project(x).unflatten(1, (3, self.num_heads, self.head_dim)).unbind(1)
        if call.rotary is not None:
            q = rotary(q, *map(call.of_rows, call.rotary), interleaved=self.rotary_interleaved)
            k = rotary(k, *call.rotary, interleaved=self.rotary_interleaved)
        if call.rows is None and call.cache is not None:
            k, v, keys = extend_cache(call, self.layer_index, k, v)
        scoring = self._scoring(call)
        return self._attend(q, k, v, keys, call.attentions, call, causal=call.causal, bias=call.bias, **scoring)

    def _scoring(self, call: Call) -> dict[str, Any]:
        """Arguments of `attention` that say how queries and keys make scores, beside the call's own."""
        kind = self.position_embedding_type
        if kind in ("absolute", "rotary"):
            return {}
        if is_plain_table(self.distance_embedding):
            table = self.distance_embedding.weight
        else:
            distances = torch.arange(2 * self.max_position_embeddings - 1, device=call.packing.coords.device)
            table = self.distance_embedding(distances)
        of_heads = table[:, None].expand(-1, self.num_heads, -1)  # the same for all heads
        return {"relative_keys": of_heads, "relative_queries": of_heads if kind == "relative_key_query" else None}


class PackedCrossAttention(_PackedHeads):
    """The same, with k and v projected from a memory."""

    def forward_packed(self, x: Tensor, memory: Tensor, *, call: Call) -> Tensor:
        """x [M, H], memory [Tm, H] to the heads' outputs side by side, [M, A * D]."""
        keys = call.memory_packing
        assert keys is not None
        if call.cache is None:
            k, v = self._key_and_value(memory)
        else:
            padded = memory_of(call.cache, self.layer_index, lambda: self._padded(memory, keys))
            k, v = (keys.pack(t.transpose(1, 2)) for t in padded)
        return self._attend(self._query(x), k, v, keys, call.cross_attentions, call, bias=call.memory_bias)

    def _padded(self, memory: Tensor, keys: Packing) -> tuple[Tensor, Tensor]:
        k, v = self._key_and_value(memory)
        return keys.unpack(k).transpose(1, 2), keys.unpack(v).transpose(1, 2)  # [B, A, Sm, D]


class PackedSelfOutput:
    """LN(residual + dropout(dense(x))): what closes either attention."""

    dense: nn.Linear
    LayerNorm: nn.LayerNorm
    dropout_p: float
    site: int

    def forward_packed(self, x: Tensor, residual: Tensor, *, call: Call) -> Tensor:
        """x [M, A * D], residual [M, H] to [M, H]; the dense layer's bias is added by the fused op."""
        product, bias = product_and_bias(x, self.dense)
        return residual_norm(product, bias, residual, self.LayerNorm, call.dropout_p(self), self.site, call)


class PackedAttention:
    """Attention, to the tokens themselves or to a memory, and the sub-layer that closes it."""

    self: Any
    output: Any

    def forward_packed(self, x: Tensor, memory: Tensor | None = None, *, call: Call) -> Tensor:
        """x [T, H] to [T, H], or [M, H] where the call names rows; with a memory [Tm, H], x [M, H] to [M, H]."""
        if memory is None:
            return self.output(self.self(x, call=call), call.of_rows(x), call=call)
        return self.output(self.self(x, memory, call=call), x, call=call)


class BertSelfAttention(PackedSelfAttention, Projections):
    """Attention of tokens to each other, without the heads that the configuration says were pruned."""

    forward = PackedSelfAttention.forward_packed

    def __init__(self, config: Any, layer: int) -> None:
        pruned_heads = (getattr(config, "pruned_heads", None) or {}).get(layer, ())
        if len(set(pruned_heads)) == config.num_attention_heads:
            raise ValueError(
                f"config.pruned_heads: expected at least one head of layer {layer} to stay, "
                f"got all {config.num_attention_heads}"
            )
        super().__init__(config, pruned_heads)
        self.layer_index, self.site = layer, dropout_site(DropoutSite.ATTENTION_PROBS, layer)
        self.position_embedding_type = getattr(config, "position_embedding_type", "absolute")
        if self.position_embedding_type != "absolute":
            self.max_position_embeddings = config.max_position_embeddings
            self.distance_embedding = nn.Embedding(2 * config.max_position_embeddings - 1, self.head_dim)


class BertCrossAttention(PackedCrossAttention, Projections):
    """Attention to a memory; no head of it is ever pruned, and a memory's tokens have no place relative to ours."""

    forward = PackedCrossAttention.forward_packed

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config)
        self.layer_index, self.site = layer, dropout_site(DropoutSite.CROSS_ATTENTION_PROBS, layer)


class BertSelfOutput(PackedSelfOutput, nn.Module):
    """What closes either attention; parameters named as in Hugging Face's BertSelfOutput."""

    forward = PackedSelfOutput.forward_packed

    def __init__(self, in_features: int, config: Any, site: int) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout_p, self.site = config.hidden_dropout_prob, site


class BertAttention(PackedAttention, nn.Module):
    """Attention and the sub-layer that closes it; parameters named as in Hugging Face's BertAttention."""

    forward = PackedAttention.forward_packed

    def __init__(self, config: Any, layer: int, is_cross: bool = False) -> None:
        super().__init__()
        self.self = BertCrossAttention(config, layer) if is_cross else BertSelfAttention(config, layer)
        kind = DropoutSite.CROSS_ATTENTION_OUTPUT if is_cross else DropoutSite.ATTENTION_OUTPUT
        self.output = BertSelfOutput(self.self.query.out_features, config, dropout_site(kind, layer))

    def prune_heads(self, heads: Iterable[int]) -> None:
        """Removes heads, see `Projections.prune_heads`, and the columns of the output's weight that read them."""
        keep_features(self.output.dense, self.self.prune_heads(heads), 1)
