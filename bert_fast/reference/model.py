"""BERT, as the paper has it, with everything Hugging Face's BertModel grew around it.

    x = dropout(LayerNorm(word + type + position))                                      embedding.py
    every layer:
        x = LayerNorm(x + dropout(attention(x) Wo + bo))                                attention.py, qkv_projection.py
        x = LayerNorm(x + dropout(cross_attention(x, memory) Wo + bo))                  decoders with a memory only
        x = LayerNorm(x + dropout(act(x Wi + bi) Wd + bd))                              activations.py
    pooled = tanh(x[first token] Wp + bp)

Padding is removed before the embeddings and put back behind the last layer, so x is [T, H] throughout. The modules hold
the parameters under Hugging Face's names and compose the families' forward functions, which autograd differentiates;
the families' explicit backwards are the same gradients written out.

Where this defines what Hugging Face leaves to chance: hidden states, attention probabilities and logits of padding are
exactly 0; a query that sees no key attends to nothing; the pooler reads the first kept token of a row (Hugging Face:
column 0); distances of relative positions are always those between the tokens (Hugging Face 4, with use_cache, measures
all of them from the last key).

Sources: Devlin et al. 2019 (arXiv:1810.04805), section 3 and appendix A.2; Vaswani et al. 2017 (arXiv:1706.03762).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.reference.layers import Call, Embeddings, Encoder, KeyValue, Pooler, initialize
from bert_fast.reference.packing import Packing, read_attention_mask


@dataclass(frozen=True)
class ReferenceModelOutput:
    """What the model returns; B rows, S columns of this call's input, Sk keys (cached ones included), Sm of memory.

    last_hidden_state (Tensor [B, S, H]); pooler_output (Tensor [B, H] or None).
    hidden_states (L + 1 Tensors [B, S, H]): the embeddings, then the output of every layer.
    attentions (L Tensors [B, A, S, Sk]), cross_attentions (L Tensors [B, A, S, Sm]): after dropout and head mask.
    past_key_values (L pairs of Tensors [B, A, Sk, D]): to be given to the next call.
    Each None unless asked for. packing and seed tell heads which rows are padding and which masks to draw.
    """

    last_hidden_state: Tensor
    pooler_output: Tensor | None
    past_key_values: list[KeyValue] | None
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None
    cross_attentions: tuple[Tensor, ...] | None
    packing: Packing
    seed: Tensor | None


class ReferenceBertModel(nn.Module):
    """Encoder or decoder, with embeddings and (optionally) pooler.

    config: any object with the attributes of Hugging Face's BertConfig; those that some versions lack have defaults.
    """

    def __init__(self, config: Any, add_pooling_layer: bool = True) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.pooler = Pooler(config) if add_pooling_layer else None
        initialize(self, config)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: list[KeyValue] | None = None,
        use_cache: bool | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        dropout_seed: Tensor | None = None,
    ) -> ReferenceModelOutput:
        """Hidden states of a padded batch.

        input_ids (Tensor [B, S], int) or inputs_embeds (Tensor [B, S, H]).
        attention_mask: see `read_attention_mask`; its keys include the cached ones. A decoder adds the causal mask to a
            2-D or missing mask; a 3-D or 4-D one is complete.
        token_type_ids (Tensor [B, S], int): default 0. position_ids (Tensor [B, S], [1, S] or [S], int): default the
            column, cached tokens counted.
        head_mask (Tensor [A], or [L, A], or [L, B or 1, A, Sq or 1, Sk or 1]): factors of the probabilities; they apply
            to cross-attention too.
        encoder_hidden_states (Tensor [B, Sm, H]), encoder_attention_mask: a decoder's memory, and its mask.
        past_key_values: as returned by the call before; use_cache: default config.use_cache in a decoder.
        dropout_seed (Tensor [1], int64): decides all masks; drawn from PyTorch's generator if None. Training only.
        Raises: ValueError for neither or both of input_ids and inputs_embeds, and for masks of other shapes.
        """
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise ValueError(f"input_ids, inputs_embeds: expected exactly one of the two, got {given}")
        words = input_ids if input_ids is not None else inputs_embeds
        assert words is not None
        batch_size, length = words.shape[:2]
        num_cached = past_key_values[0][0].shape[2] if past_key_values else 0

        if use_cache is None:
            use_cache = getattr(self.config, "use_cache", True)
        use_cache = use_cache and self.config.is_decoder
        memory = encoder_hidden_states, encoder_attention_mask
        call = self._call(words, attention_mask, num_cached, *memory, dropout_seed, use_cache)
        tokens = call.tokens
        if token_type_ids is None:
            token_type_ids = torch.zeros(batch_size, length, dtype=torch.long, device=words.device)
        if position_ids is None:
            position_ids = torch.arange(num_cached, num_cached + length, device=words.device)
        position_ids = position_ids.expand(batch_size, length)

        x = self.embeddings(tokens.pack(words), tokens.pack(token_type_ids), tokens.pack(position_ids), call)
        num_heads = self.config.num_attention_heads
        states, attentions, cross_attentions, present = [x], [], [], []
        for index, layer in enumerate(self.encoder.layer):
            past = past_key_values[index] if past_key_values else None
            x, probabilities, memory_probabilities, key_value = layer(x, call, _of_layer(head_mask, index), past)
            states.append(x)
            present.append(key_value)
            if output_attentions:
                attentions.append(_padded_probabilities(probabilities, tokens, call.keys, num_heads))
                if call.memory_tokens is not None:
                    cross_attentions.append(
                        _padded_probabilities(memory_probabilities, tokens, call.memory_tokens, num_heads)
                    )

        output = tokens.pad(x)
        return ReferenceModelOutput(
            last_hidden_state=output,
            pooler_output=None if self.pooler is None else self.pooler(tokens.first_tokens(output)),
            past_key_values=present if use_cache else None,
            hidden_states=tuple(tokens.pad(state) for state in states) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
            cross_attentions=tuple(cross_attentions) if output_attentions and cross_attentions else None,
            packing=tokens,
            seed=call.seed,
        )

    def _call(
        self,
        words: Tensor,
        attention_mask: Tensor | None,
        num_cached: int,
        memory: Tensor | None,
        memory_mask: Tensor | None,
        dropout_seed: Tensor | None,
        use_cache: bool,
    ) -> Call:
        """Reads the masks, removes the memory's padding, draws the dropout seed."""
        batch_size, length = words.shape[:2]
        device = words.device
        keep, bias = read_attention_mask(attention_mask, batch_size, length, num_cached + length, device)
        if bias is not None and bias.shape[2] > 1:
            # Queries are named by their position, which cached tokens come before.
            bias = nn.functional.pad(bias, (0, 0, num_cached, 0))
        memory_tokens, memory_bias = None, None
        if memory is not None:
            if not hasattr(self.encoder.layer[0], "crossattention"):
                raise ValueError("encoder_hidden_states: expected None, as config.add_cross_attention is not set")
            keep_memory, memory_bias = read_attention_mask(memory_mask, batch_size, length, memory.shape[1], device)
            memory_tokens = Packing(keep_memory)
            if memory_bias is not None and memory_bias.shape[2] > 1:
                memory_bias = nn.functional.pad(memory_bias, (0, 0, num_cached, 0))
        seed = None
        if self.training:
            seed = dropout_seed
            if seed is None:
                seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
        return Call(
            tokens=Packing(keep[:, num_cached:], first_position=num_cached),
            keys=Packing(keep),
            bias=bias,
            causal=self.config.is_decoder and (attention_mask is None or attention_mask.dim() == 2),
            memory=None if memory is None or memory_tokens is None else memory_tokens.pack(memory),
            memory_tokens=memory_tokens,
            memory_bias=memory_bias,
            seed=seed,
            use_cache=use_cache,
        )


def _of_layer(head_mask: Tensor | None, layer: int) -> Tensor | None:
    """One layer's head mask, broadcastable to [B, A, Sq, Sk]."""
    if head_mask is None:
        return None
    own = head_mask if head_mask.dim() == 1 else head_mask[layer]
    return own.view(1, -1, 1, 1) if own.dim() == 1 else own


def _padded_probabilities(per_sequence: list[Tensor], queries: Packing, keys: Packing, num_heads: int) -> Tensor:
    """The sequences' [A, Sq, Sk] as one [B, A, S, Sk], exactly 0 on padding; num_heads: where there is no sequence."""
    num_heads = per_sequence[0].shape[0] if per_sequence else num_heads  # some may be pruned
    device, shape = queries.keep.device, (num_heads, queries.keep.shape[1], keys.keep.shape[1])
    heads = torch.arange(num_heads, device=device)[:, None, None]
    rows = []
    for probabilities, keep_q, keep_k in zip(per_sequence, queries.keep, keys.keep, strict=True):
        where = heads, keep_q.nonzero(), keep_k.nonzero().squeeze(1)
        rows.append(probabilities.new_zeros(shape).index_put(where, probabilities))
    return torch.stack(rows) if rows else torch.zeros(0, *shape, device=device)
