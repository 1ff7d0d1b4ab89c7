"""Self-attention of one BERT layer on packed tokens; parameters named as in Hugging Face's BertAttention."""

from typing import Any

from torch import Tensor, nn

from bert_fast.modules.dropout_add_layer_norm import DropoutAddLayerNorm
from bert_fast.ops.attention import attention
from bert_fast.ops.dropout import DropoutSite, dropout_site
from bert_fast.ops.linear import linear
from bert_fast.ops.packing import Packing
from bert_fast.ops.qkv_projection import qkv_projection

__all__ = ["BertAttention", "BertSelfAttention", "BertSelfOutput"]


class BertSelfAttention(nn.Module):
    """dropout(softmax(q k^T / sqrt(D))) v with q, k, v projected from one input."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        width = self.num_heads * self.head_dim
        self.query = nn.Linear(config.hidden_size, width)
        self.key = nn.Linear(config.hidden_size, width)
        self.value = nn.Linear(config.hidden_size, width)
        self.dropout_p = config.attention_probs_dropout_prob
        self.site = dropout_site(DropoutSite.ATTENTION_PROBS, layer)

    def forward(self, x: Tensor, packing: Packing, seed: Tensor | None) -> Tensor:
        """x [T, H] to the heads' outputs side by side, [T, A * D]."""
        qkv = qkv_projection(
            x, self.query.weight, self.query.bias, self.key.weight, self.key.bias, self.value.weight, self.value.bias
        )
        q, k, v = qkv.unflatten(1, (3, self.num_heads, self.head_dim)).unbind(1)  # [T, A, D]
        out = attention(
            q, k, v, cu_seqlens_q=packing.cu_seqlens, max_seqlen_q=packing.max_seqlen,
            dropout_p=self.dropout_p if self.training else 0.0, seed=seed, coords_q=packing.coords, site=self.site,
            sequence_order=packing.order,
        )  # fmt: skip
        return out.flatten(1)


class BertSelfOutput(nn.Module):
    """LN(residual + dropout(dense(x))): what closes both halves of a layer (also Hugging Face's BertOutput)."""

    def __init__(self, in_features: int, config: Any, kind: DropoutSite, layer: int) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = DropoutAddLayerNorm(config.hidden_size, config.layer_norm_eps, config.hidden_dropout_prob)
        self.site = dropout_site(kind, layer)

    def forward(self, x: Tensor, residual: Tensor, coords: Tensor, seed: Tensor | None) -> Tensor:
        """x [T, in_features], residual [T, H] to [T, H]; the dense layer's bias is added by the fused op."""
        product = linear(x, self.dense.weight)
        return self.LayerNorm(product, residual, x_bias=self.dense.bias, seed=seed, coords=coords, site=self.site)


class BertAttention(nn.Module):
    """Self-attention and the sub-layer that closes it."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.self = BertSelfAttention(config, layer)
        self.output = BertSelfOutput(config.hidden_size, config, DropoutSite.ATTENTION_OUTPUT, layer)

    def forward(self, x: Tensor, packing: Packing, seed: Tensor | None) -> Tensor:
        """[T, H] to [T, H]."""
        return self.output(self.self(x, packing, seed), x, packing.coords, seed)
