"""The parts of BERT as modules: parameters under Hugging Face's names, each forward a composition of the families'.

Everything works on kept tokens [T, H]; what one forward pass shares (where the tokens come from, masks, memory, dropout
seed) travels in a `Call`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.reference import attention
from bert_fast.reference.activations import activation_fwd
from bert_fast.reference.dropout import DropoutSite, dropout_site
from bert_fast.reference.dropout_add_layer_norm import DropoutAddLayerNorm, dropout_add_layer_norm_fwd
from bert_fast.reference.embedding import Embedding, embedding_fwd
from bert_fast.reference.linear import Linear, linear_fwd
from bert_fast.reference.packing import Packing
from bert_fast.reference.qkv_projection import QkvProjection, qkv_projection_fwd
from bert_fast.reference.relative_positions import POSITION_EMBEDDING_TYPES

KeyValue = tuple[Tensor, Tensor]  # one layer's cached keys and values, [B, A, S, D] each


@dataclass(frozen=True)
class Call:
    """What all layers of one forward share."""

    tokens: Packing  # the queries
    keys: Packing  # cached tokens, then the queries'
    bias: Tensor | None  # added to the scores of self-attention
    causal: bool
    memory: Tensor | None  # [Tm, H], the encoder's states that a decoder looks at
    memory_tokens: Packing | None
    memory_bias: Tensor | None
    seed: Tensor | None  # None: no dropout
    use_cache: bool


class SelfOutput(nn.Module):
    """LayerNorm(residual + dropout(x W + b)): the end of either half of a layer."""

    def __init__(self, in_features: int, config: Any, site: int) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout_p, self.site = config.hidden_dropout_prob, site

    def forward(self, x: Tensor, residual: Tensor, call: Call) -> Tensor:
        """x [T, in_features], residual [T, H] to [T, H]."""
        norm, dropout_p = self.LayerNorm, 0.0 if call.seed is None else self.dropout_p
        product = linear_fwd(Linear(x, self.dense.weight, None))
        a = DropoutAddLayerNorm(
            product, residual, self.dense.bias, norm.weight, norm.bias, norm.eps, dropout_p, call.seed,
            call.tokens.coords, self.site, "input",
        )  # fmt: skip
        return dropout_add_layer_norm_fwd(a)[0]


class SelfAttention(nn.Module):
    """The heads: projections and attention, for self-attention and for attention to a memory."""

    def __init__(self, config: Any, site: int, position_embedding_type: str) -> None:
        super().__init__()
        if config.hidden_size % config.num_attention_heads:
            raise ValueError(
                f"hidden_size: expected a multiple of num_attention_heads ({config.num_attention_heads}), "
                f"got {config.hidden_size}"
            )
        if position_embedding_type not in POSITION_EMBEDDING_TYPES:
            raise ValueError(
                f"position_embedding_type: expected one of {POSITION_EMBEDDING_TYPES}, got {position_embedding_type!r}"
            )
        self.num_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.position_embedding_type = position_embedding_type
        if position_embedding_type != "absolute":
            self.distance_embedding = nn.Embedding(2 * config.max_position_embeddings - 1, self.head_dim)
        self.dropout_p, self.site = config.attention_probs_dropout_prob, site

    def project(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, A, D] from x; k, v [Tk, A, D] from x too, or from the memory."""
        query, key, value = self.query, self.key, self.value
        if memory is None:
            qkv = qkv_projection_fwd(
                QkvProjection(x, query.weight, query.bias, key.weight, key.bias, value.weight, value.bias)
            )
            projected = qkv.chunk(3, dim=1)
        else:
            projected = (
                linear_fwd(Linear(x, query.weight, query.bias)),
                linear_fwd(Linear(memory, key.weight, key.bias)),
                linear_fwd(Linear(memory, value.weight, value.bias)),
            )
        q, k, v = (t.unflatten(1, (self.num_heads, self.head_dim)) for t in projected)
        return q, k, v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, keys: Packing, bias: Tensor | None, causal: bool,
        head_mask: Tensor | None,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Context [T, H] and the probabilities of every sequence; head_mask: [B or 1, A, Sq or 1, Sk or 1], or None."""
        relative_keys = relative_queries = None
        if self.position_embedding_type != "absolute":
            relative_keys = self.distance_embedding.weight[:, None].expand(-1, self.num_heads, -1)
            relative_queries = relative_keys if self.position_embedding_type == "relative_key_query" else None
        tokens, dropout_p = call.tokens, 0.0 if call.seed is None else self.dropout_p
        arguments = attention.Attention(
            q, k, v, tokens.cu_seqlens, keys.cu_seqlens, tokens.keep.shape[1], keys.keep.shape[1], self.head_dim**-0.5,
            dropout_p, call.seed, tokens.coords, keys.coords, self.site, causal, bias,
            relative_keys, relative_queries, None,
        )  # fmt: skip
        out, _, probabilities = attention.attention_with_probabilities(arguments)
        if head_mask is not None and probabilities:
            factors = head_mask.to(out.dtype).expand(*head_mask.shape[:2], tokens.keep.shape[1], keys.keep.shape[1])
            of_rows = zip(factors.expand(len(probabilities), -1, -1, -1), tokens.keep, keys.keep, strict=True)
            of_pairs = [of_row[:, keep_q][:, :, keep_k] for of_row, keep_q, keep_k in of_rows]
            probabilities = [w * factor for w, factor in zip(probabilities, of_pairs, strict=True)]
            values = v.split(keys.cu_seqlens.diff().tolist())
            out = torch.cat([torch.einsum("aqk,kad->qad", *pair) for pair in zip(probabilities, values, strict=True)])
        return out.flatten(1), probabilities


class Attention(nn.Module):
    """Attention and the end of its half of the layer."""

    def __init__(self, config: Any, layer: int, cross: bool) -> None:
        super().__init__()
        probs, output = DropoutSite.ATTENTION_PROBS, DropoutSite.ATTENTION_OUTPUT
        if cross:
            probs, output = DropoutSite.CROSS_ATTENTION_PROBS, DropoutSite.CROSS_ATTENTION_OUTPUT
        # A memory's tokens have no place relative to the decoder's.
        kind = "absolute" if cross else getattr(config, "position_embedding_type", "absolute")
        self.self = SelfAttention(config, dropout_site(probs, layer), kind)
        self.output = SelfOutput(config.hidden_size, config, dropout_site(output, layer))

    def forward(
        self, x: Tensor, call: Call, head_mask: Tensor | None, past: KeyValue | None
    ) -> tuple[Tensor, list[Tensor], KeyValue | None]:
        """Self-attention: x [T, H] to x [T, H], the probabilities, and, if cached, all keys and values so far."""
        q, k, v = self.self.project(x, None)
        present = None
        if call.use_cache or past is not None:
            all_k, all_v = (call.tokens.pad(t).transpose(1, 2) for t in (k, v))  # [B, A, S, D]
            if past is not None:
                all_k, all_v = torch.cat([past[0], all_k], dim=2), torch.cat([past[1], all_v], dim=2)
                k, v = (call.keys.pack(t.transpose(1, 2)) for t in (all_k, all_v))
            present = all_k, all_v
        context, probabilities = self.self.attend(q, k, v, call, call.keys, call.bias, call.causal, head_mask)
        return self.output(context, x, call), probabilities, present

    def forward_memory(self, x: Tensor, call: Call, head_mask: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Attention to the memory: x [T, H] to x [T, H] and the probabilities."""
        assert call.memory is not None and call.memory_tokens is not None
        q, k, v = self.self.project(x, call.memory)
        context, probabilities = self.self.attend(q, k, v, call, call.memory_tokens, call.memory_bias, False, head_mask)
        return self.output(context, x, call), probabilities


class Intermediate(nn.Module):
    """act(x W + b): the widening half of the MLP."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.hidden_act = config.hidden_act

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] to [T, I]."""
        return activation_fwd(linear_fwd(Linear(x, self.dense.weight, self.dense.bias)), self.hidden_act)


class Layer(nn.Module):
    """Self-attention, attention to the memory if there is one, MLP."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.attention = Attention(config, layer, cross=False)
        if getattr(config, "add_cross_attention", False):
            if not config.is_decoder:
                raise ValueError("add_cross_attention: expected is_decoder=True with it, got False")
            self.crossattention = Attention(config, layer, cross=True)
        self.intermediate = Intermediate(config)
        self.output = SelfOutput(config.intermediate_size, config, dropout_site(DropoutSite.MLP_OUTPUT, layer))

    def forward(
        self, x: Tensor, call: Call, head_mask: Tensor | None, past: KeyValue | None
    ) -> tuple[Tensor, list[Tensor], list[Tensor], KeyValue | None]:
        """x [T, H] to x [T, H], both kinds of probabilities, keys and values for the cache."""
        x, probabilities, present = self.attention(x, call, head_mask, past)
        memory_probabilities: list[Tensor] = []
        if call.memory is not None:
            x, memory_probabilities = self.crossattention.forward_memory(x, call, head_mask)
        return self.output(self.intermediate(x), x, call), probabilities, memory_probabilities, present


class Embeddings(nn.Module):
    """The three tables and their LayerNorm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout_p = config.hidden_dropout_prob
        self.absolute = getattr(config, "position_embedding_type", "absolute") == "absolute"

    def forward(self, words: Tensor, token_type_ids: Tensor, position_ids: Tensor, call: Call) -> Tensor:
        """words: ids [T] or vectors [T, H]; all others [T]; to [T, H]."""
        types, norm = self.token_type_embeddings.weight, self.LayerNorm
        a = Embedding(
            words, token_type_ids, position_ids, self.word_embeddings.weight,
            self.position_embeddings.weight if self.absolute else None, types, self.word_embeddings.padding_idx,
            norm.weight, norm.bias, norm.eps, 0.0 if call.seed is None else self.dropout_p, call.seed,
            call.tokens.coords, dropout_site(DropoutSite.EMBEDDING), types.dtype,
        )  # fmt: skip
        return embedding_fwd(a)[0]


class Encoder(nn.Module):
    """The stack of layers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))


class Pooler(nn.Module):
    """tanh(x W + b) of first tokens [B, H]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, first_tokens: Tensor) -> Tensor:
        """[B, H] to [B, H]."""
        return activation_fwd(linear_fwd(Linear(first_tokens, self.dense.weight, self.dense.bias)), "tanh")


def initialize(module: nn.Module, config: Any) -> None:
    """BERT's initial values: normal(0, initializer_range) weights, 0 biases, and a 0 row for padding."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, 0.0, config.initializer_range)
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            with torch.no_grad():
                part.weight[part.padding_idx].zero_()
