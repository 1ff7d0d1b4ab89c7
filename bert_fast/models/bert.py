"""BertModel: padding removed once, every layer on [T, H], padding put back once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bert_fast.checks import check_dtype, check_shape
from bert_fast.models.argument_checks import check_architecture, check_pruned
from bert_fast.models.base import BertPreTrainedModel
from bert_fast.models.config import BertConfig
from bert_fast.models.masks import behind, read_head_mask
from bert_fast.models.outputs import BaseModelOutputWithPoolingAndCrossAttentions
from bert_fast.models.reading import read_cache, read_memory, read_tokens, read_view
from bert_fast.modules.cache import KeyValueCache
from bert_fast.modules.call import Call, RowChoice, first_tokens
from bert_fast.modules.embeddings import BertEmbeddings
from bert_fast.modules.encoder import BertEncoder
from bert_fast.modules.pooler import BertPooler
from bert_fast.ops.dropout import draw_seed
from bert_fast.ops.packing import Packing

__all__ = ["BertModel", "Encoded", "PackedBertModel"]


@dataclass(frozen=True)
class Encoded:
    """What heads get from the encoder: still packed.

    hidden (Tensor [T, H], or [M, H] where rows were asked for); seed (Tensor [1] or None): of dropout, None in
    evaluation; hidden_states, attentions, cross_attentions, past_key_values as in the output classes, None unless asked
    for; rows (Tensor [M], int64): packed indices of hidden's rows, None where it holds all.
    """

    hidden: Tensor
    packing: Packing
    seed: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    past_key_values: Any = None
    rows: Tensor | None = None


class PackedBertModel:
    """The computation of BertModel, for any module that has its parts under these names."""

    config: Any
    embeddings: Any
    encoder: Any
    pooler: Any
    training: bool
    dtype: Any

    def encode(
        self,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        cache_position: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        dropout_seed: Tensor | None = None,
        rows: RowChoice | None = None,
    ) -> Encoded:
        """As `forward`, but stays packed, for heads.

        rows: which tokens the caller needs: a function of the packing that gives their packed indices (Tensor [M],
            int64, rising). The last layer then computes only these, and so `hidden` is [M, H].
        """
        config = self.config
        output_attentions = _flag(output_attentions, getattr(config, "output_attentions", False))
        output_hidden_states = _flag(output_hidden_states, getattr(config, "output_hidden_states", False))
        tokens = read_tokens(config, self.dtype, input_ids, inputs_embeds, token_type_ids, position_ids)
        cache, num_cached = read_cache(past_key_values, config, tokens, cu_seqlens)
        seed = self._seed(tokens.device, dropout_seed)
        view = read_view(config, tokens, attention_mask, cu_seqlens, max_seqlen, num_cached)
        packing = view.packing
        memory = read_memory(config, encoder_hidden_states, encoder_attention_mask, packing, num_cached)
        keeps_cache = self._keeps_cache(use_cache, packing)
        if cache is None and keeps_cache:
            cache = KeyValueCache()
        call = Call(
            packing,
            seed,
            keys=view.keys,
            causal=view.causal,
            bias=view.bias,
            head_mask=self._head_mask(head_mask, packing, num_cached),
            memory_packing=None if memory is None else memory.packing,
            memory_bias=None if memory is None else memory.bias,
            cache=cache,
            hidden_states=[] if output_hidden_states else None,
            attentions=[] if output_attentions else None,
            cross_attentions=[] if output_attentions and memory is not None else None,
        )
        chosen = None if rows is None else rows(packing)
        # What is shown or kept of the last layer is all of it.
        is_whole = output_hidden_states or output_attentions or cache is not None or chosen is None
        hidden = self.embeddings(*tokens.packed(packing), call=call)
        hidden = self.encoder(
            hidden, None if memory is None else memory.states, call=call if is_whole else call.with_rows(chosen)
        )
        if is_whole and chosen is not None:
            hidden = hidden.index_select(0, chosen)
        return Encoded(
            hidden, packing, seed, _tuple(call.hidden_states), _tuple(call.attentions), _tuple(call.cross_attentions),
            cache if keeps_cache else None, chosen,
        )  # fmt: skip

    def pool(self, encoded: Encoded) -> Tensor:
        """The pooled first tokens, [B, H]; only for a model with a pooling layer."""
        assert self.pooler is not None
        first = first_tokens(encoded.packing, encoded.hidden, encoded.rows)
        return self.pooler(first, call=Call(encoded.packing, encoded.seed))

    def _seed(self, device: torch.device, dropout_seed: Tensor | None) -> Tensor | None:
        if not self.training:
            return None
        if dropout_seed is None:
            return draw_seed(device)
        check_shape("dropout_seed", dropout_seed, (1,))
        check_dtype("dropout_seed", dropout_seed, (torch.int64,))
        return dropout_seed

    def _head_mask(self, head_mask: Tensor | None, packing: Packing, num_cached: int) -> Tensor | None:
        """head_mask as `Call` wants it: by layer, original row and position."""
        if head_mask is None:
            return None
        config = self.config
        check_pruned(config, head_mask, None)
        batch_size, length = packing.padded_shape or (packing.num_sequences, packing.max_seqlen)
        heads = config.num_attention_heads
        mask = read_head_mask(head_mask, config.num_hidden_layers, batch_size, heads, length, num_cached + length)
        return behind(mask, num_cached)

    def _keeps_cache(self, use_cache: bool | None, packing: Packing) -> bool:
        """Whether the call returns a cache: only a decoder's, and not where its layers run again in backward."""
        if not self.config.is_decoder or (self.training and self.encoder.checkpoint_every):
            return False
        if packing.padded_shape is None:
            if use_cache:
                raise ValueError(
                    "use_cache: expected None or False beside cu_seqlens (a cache has a padded batch's columns)"
                )
            return False
        return _flag(use_cache, self.config.use_cache)


class BertModel(PackedBertModel, BertPreTrainedModel):
    """Encoder or decoder with embeddings and pooler; parameters, arguments and outputs of Hugging Face's BertModel.

    Differences: hidden states of padding are exactly 0 (Hugging Face leaves them undefined), and the pooler reads the
    first kept token of each sequence.

    Raises:
        ValueError: the configuration asks for cross-attention in an encoder.
    """

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        check_architecture(config)
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        self.init_weights()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        cache_position: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        dropout_seed: Tensor | None = None,
    ) -> BaseModelOutputWithPoolingAndCrossAttentions | tuple:
        """Padded input ([B, S] and a mask) or packed input ([T] and cu_seqlens).

        input_ids (Tensor [B, S] or [T], int) or inputs_embeds (Tensor [B, S, H] or [T, H]).
        attention_mask (Tensor [B, Sk], bool or number): nonzero = keep; default all kept. One device sync. Also
            [B, S, Sk] and [B or 1, A or 1, S or 1, Sk], see `read_attention_mask`; these take no token out of the
            batch. Sk = S and the cached columns. A decoder adds causal order to a 2-D mask and to none.
        token_type_ids, position_ids (Tensor like input_ids; position_ids also [S] or [1, S]): defaults 0 and the
            column, cached ones counted.
        head_mask (Tensor [A], [L, A] or [L, B or 1, A, S or 1, Sk or 1]): factors of the attention probabilities, also
            of those of cross-attention.
        encoder_hidden_states (Tensor [B, Sm, H]), encoder_attention_mask (as attention_mask, with Sm): a decoder's
            memory.
        past_key_values: keys and values of earlier calls: what a call returned, a cache of transformers, or a tuple of
            (key, value) or (key, value, memory's key, memory's value) for every layer, Tensors [B, A, columns, D]. A
            cache is extended in place.
        use_cache: return the cache; default: config.use_cache in a decoder. Never of packed input, nor in training with
            gradient checkpointing. cache_position: of no effect.
        output_attentions: return the probabilities after dropout and head_mask, L tensors [B, A, S, Sk], zeros on
            padding; slow, and keeps them for backward.
        cu_seqlens (Tensor [B + 1], int32), max_seqlen (int): layout of packed input; no device sync.
        dropout_seed (Tensor [1], int64): decides every mask of this call; default: drawn from PyTorch's generator.
        Returns: last_hidden_state [B, S, H] with zeros on padding ([T, H] for packed input), pooler_output [B, H],
            hidden_states, attentions, cross_attentions and past_key_values if asked for. A tuple where return_dict is
            False.

        Raises:
            TypeError, ValueError: an argument is missing, does not fit another, or holds an id outside its table.
        """
        encoded = self.encode(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids,
            position_ids=position_ids, head_mask=head_mask, inputs_embeds=inputs_embeds,
            encoder_hidden_states=encoder_hidden_states, encoder_attention_mask=encoder_attention_mask,
            past_key_values=past_key_values, use_cache=use_cache, cache_position=cache_position,
            output_attentions=output_attentions, output_hidden_states=output_hidden_states, cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen, dropout_seed=dropout_seed,
        )  # fmt: skip
        output = BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=encoded.packing.unpack(encoded.hidden),
            pooler_output=None if self.pooler is None else self.pool(encoded),
            past_key_values=encoded.past_key_values,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
            cross_attentions=encoded.cross_attentions,
        )
        return self.finish(output, return_dict)

    def _prune_heads(self, heads_to_prune: Mapping[int, Iterable[int]]) -> None:
        for layer, heads in heads_to_prune.items():
            self.encoder.layer[layer].get_submodule("attention").prune_heads(heads)


def _flag(argument: bool | None, default: bool) -> bool:
    return default if argument is None else argument


def _tuple(collected: list[Tensor] | None) -> tuple[Tensor, ...] | None:
    return None if collected is None else tuple(collected)
