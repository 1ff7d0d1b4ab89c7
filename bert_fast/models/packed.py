"""The computation of BertModel: padding removed once, every layer on [T, H]; no parameters, which `BertModel` has."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bert_fast.checks import check_dtype, check_same_device, check_shape
from bert_fast.models.argument_checks import check_beside_hidden, check_flags, check_pruned
from bert_fast.models.masks import read_head_mask
from bert_fast.models.reading import Tokens, read_cache, read_memory, read_tokens, read_view
from bert_fast.modules.cache import KeyValueCache
from bert_fast.modules.call import Call, RowChoice, first_tokens
from bert_fast.modules.fusable import plain_linear
from bert_fast.ops._attention_checks import check_dropout_lengths
from bert_fast.ops.dropout import draw_seed
from bert_fast.ops.packing import Packing


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
    numbers_behind: int | None = None  # the padding id behind which positions are counted; None: by column
    attention_dropout = "attention_probs_dropout_prob"  # what the configuration calls it
    projection: Any = None  # a linear layer between embeddings and encoder
    vector_size: int | None = None  # of embeddings; None: config.hidden_size
    has_position_table = True  # whose rows bound a sequence's length
    # Makes `Call.rotary` of tokens and their positions [T] (None: as the packing has them); None: nothing is turned.
    _rotary: Callable[[Tokens, Tensor | None, Packing], tuple[Tensor, Tensor]] | None = None

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
        texts: tuple[Tensor, int] | None = None,
    ) -> Encoded:
        """As `forward`, but stays packed, for heads.

        rows: which tokens the caller needs: a function of the packing that gives their packed indices (Tensor [M],
            int64, rising). The last layer then computes only these, and so `hidden` is [M, H].
        texts: (cu_seqlens, max_seqlen) of texts that lie one after another in the only row of a padded batch without
            padding; tokens see those of their own text. What is returned has the shape of the row.
        """
        config = self.config
        check_flags(use_cache=use_cache, output_attentions=output_attentions, output_hidden_states=output_hidden_states)
        output_attentions = _flag(output_attentions, getattr(config, "output_attentions", False))
        output_hidden_states = _flag(output_hidden_states, getattr(config, "output_hidden_states", False))
        tokens = read_tokens(
            config, self.dtype, input_ids, inputs_embeds, token_type_ids, position_ids, self.numbers_behind,
            self.vector_size,
        )  # fmt: skip
        cache, num_cached = read_cache(past_key_values, config, tokens, cu_seqlens)
        seed = self._seed(tokens, dropout_seed)
        view = read_view(config, tokens, attention_mask, cu_seqlens, max_seqlen, num_cached, self.has_position_table)
        packing = row = view.packing
        if texts is not None and packing.indices is None:
            tokens = tokens.with_positions()
            packing, row = packing.of_texts(*texts)
        if seed is not None:
            name = tokens.name if cu_seqlens is None else "max_seqlen"
            check_dropout_lengths(name, packing.max_seqlen, getattr(config, self.attention_dropout))
        memory = read_memory(config, encoder_hidden_states, encoder_attention_mask, packing, cache, num_cached)
        keeps_cache = self._keeps_cache(use_cache, packing)
        if cache is None and keeps_cache:
            cache = KeyValueCache()
        given = tokens.packed(packing)
        call = Call(
            packing,
            seed,
            keys=view.keys,
            causal=view.causal,
            rotary=None if self._rotary is None else self._rotary(tokens, given[2], packing),
            bias=view.bias,
            head_mask=self._head_mask(head_mask, packing, num_cached),
            memory_packing=None if memory is None else memory.packing,
            memory_bias=None if memory is None else memory.bias,
            cache=cache,
            hidden_states=[] if output_hidden_states else None,
            attentions=[] if output_attentions else None,
            cross_attentions=[] if output_attentions and memory is not None else None,
            shows_padded=self.shows_padded(),
        )
        hidden = self.embeddings(*given, call=call)
        if self.projection is not None:
            hidden = plain_linear(hidden, self.projection)
        chosen = None if rows is None else rows(row)
        # What is shown, masked or kept of the last layer is all of it.
        is_whole = (
            output_hidden_states
            or output_attentions
            or call.head_mask is not None
            or cache is not None
            or call.shows_padded
            or chosen is None
        )
        if memory is not None:
            check_beside_hidden("encoder_hidden_states", memory.states, hidden)
        if isinstance(cache, KeyValueCache) and num_cached:
            check_beside_hidden("past_key_values", cache[0][0], hidden, may_be_narrower=True)
        hidden = self.encoder(
            hidden, None if memory is None else memory.states, call=call if is_whole else call.with_rows(chosen)
        )
        if is_whole and chosen is not None:
            hidden = hidden.index_select(0, chosen)
        return Encoded(
            hidden, row, seed, _tuple(call.hidden_states), _tuple(call.attentions), _tuple(call.cross_attentions),
            cache if keeps_cache else None, chosen,
        )  # fmt: skip

    def pool(self, encoded: Encoded) -> Tensor:
        """The pooled first tokens, [B, H]; only for a model with a pooling layer."""
        assert self.pooler is not None
        first = first_tokens(encoded.packing, encoded.hidden, encoded.rows)
        return self.pooler(first, call=Call(encoded.packing, encoded.seed))

    def _seed(self, tokens: Tokens, dropout_seed: Tensor | None) -> Tensor | None:
        if dropout_seed is None:
            drops = self.training and (self.embeddings.dropout_p or self._drops())
            return draw_seed(tokens.device) if drops else None
        check_shape("dropout_seed", dropout_seed, (1,))
        check_dtype("dropout_seed", dropout_seed, (torch.int64,))
        check_same_device("dropout_seed", dropout_seed, tokens.name, tokens)
        return dropout_seed if self.training else None

    def shows_padded(self) -> bool:
        """Whether hooks of linear layers are to see tokens padded, as in another implementation of the model."""
        return False

    def _drops(self) -> bool:
        """Whether anything is dropped in training; without, nothing is drawn from PyTorch's generator either."""
        parts: Any = self.modules()  # type: ignore[attr-defined]
        return any(part.training and getattr(part, "dropout_p", 0.0) for part in parts)

    def _head_mask(self, head_mask: Tensor | None, packing: Packing, num_cached: int) -> Tensor | None:
        """head_mask as `Call` wants it: by layer, padded row and column."""
        if head_mask is None:
            return None
        config = self.config
        check_pruned(config, head_mask, None)
        batch_size, length = packing.padded_shape or (packing.num_sequences, packing.max_seqlen)
        heads = config.num_attention_heads
        mask = read_head_mask(head_mask, config.num_hidden_layers, batch_size, heads, length, num_cached + length)
        check_same_device("head_mask", head_mask, "the tokens", packing.coords)
        return mask

    def _keeps_cache(self, use_cache: bool | None, packing: Packing) -> bool:
        """Whether the call returns a cache: only a decoder's, and not where its layers run again in backward."""
        if not getattr(self.config, "is_decoder", False) or (self.training and self.encoder.checkpoint_every):
            return False
        if packing.padded_shape is None:
            if use_cache:
                raise ValueError(
                    "use_cache: expected None or False beside cu_seqlens (a cache has a padded batch's columns)"
                )
            return False
        return _flag(use_cache, self.config.use_cache)


def _flag(argument: bool | None, default: bool) -> bool:
    return default if argument is None else argument


def _tuple(collected: list[Tensor] | None) -> tuple[Tensor, ...] | None:
    return None if collected is None else tuple(collected)
