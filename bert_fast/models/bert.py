"""BertModel: padding removed once, every layer on [T, H], padding put back once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bert_fast.checks import check_dtype, check_shape, check_tensor
from bert_fast.models.argument_checks import (
    check_architecture,
    check_head_mask,
    check_inputs_embeds,
    check_pruned,
    refuse_decoder_arguments,
)
from bert_fast.models.base import BertPreTrainedModel
from bert_fast.models.config import BertConfig
from bert_fast.models.outputs import BaseModelOutputWithPoolingAndCrossAttentions
from bert_fast.models.textbook import textbook
from bert_fast.modules.call import Call, RowChoice
from bert_fast.modules.embeddings import BertEmbeddings
from bert_fast.modules.encoder import BertEncoder
from bert_fast.modules.pooler import BertPooler
from bert_fast.ops.dropout import draw_seed
from bert_fast.ops.packing import Packing

__all__ = ["BertModel", "Encoded", "PackedBertModel"]

_INTEGERS = (torch.int64, torch.int32)


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
        refuse_decoder_arguments(
            encoder_hidden_states=encoder_hidden_states, encoder_attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
        )  # fmt: skip
        output_attentions = _flag(output_attentions, self.config.output_attentions)
        output_hidden_states = _flag(output_hidden_states, self.config.output_hidden_states)
        name, given = _input(input_ids, inputs_embeds)
        shape = given.shape if inputs_embeds is None else given.shape[:-1]
        if input_ids is not None:
            check_dtype("input_ids", input_ids, _INTEGERS)
        else:
            check_inputs_embeds(given, self.config.hidden_size, self.dtype)
        for ids_name, ids in (("token_type_ids", token_type_ids), ("position_ids", position_ids)):
            if ids is not None:
                check_dtype(ids_name, ids, _INTEGERS)
        if attention_mask is not None:
            check_tensor("attention_mask", attention_mask)
        if head_mask is not None:
            check_head_mask(head_mask, self.config, shape)
        if position_ids is not None and len(shape) == 2 and position_ids.shape in ((shape[1],), (1, shape[1])):
            position_ids = position_ids.expand(shape)
        for ids_name, ids in (("token_type_ids", token_type_ids), ("position_ids", position_ids)):
            if ids is not None:
                check_shape(ids_name, ids, tuple(shape))
        seed = self._seed(given.device, dropout_seed)

        is_dense = attention_mask is not None and attention_mask.dim() > 2
        packing = self._packing(name, given, shape, None if is_dense else attention_mask, cu_seqlens, max_seqlen)
        if is_dense or head_mask is not None or output_attentions:
            if packing.padded_shape is None:
                raise ValueError(
                    "head_mask, output_attentions: expected None and False beside cu_seqlens (they need padded input)"
                )
            check_pruned(self.config, head_mask, attention_mask)
            slow = textbook(self)(  # type: ignore[arg-type]
                input_ids, attention_mask, token_type_ids, position_ids, head_mask, inputs_embeds,
                output_attentions=output_attentions, output_hidden_states=output_hidden_states, dropout_seed=seed,
            )  # fmt: skip
            hidden, chosen = packing.pack(slow.last_hidden_state), None if rows is None else rows(packing)
            hidden = hidden if chosen is None else hidden.index_select(0, chosen)
            return Encoded(hidden, packing, seed, slow.hidden_states, slow.attentions, rows=chosen)

        call = Call(packing, seed, hidden_states=[] if output_hidden_states else None)
        chosen = None if rows is None else rows(packing)
        packed = (
            None if ids is None else packing.pack(ids)
            for ids in (input_ids, token_type_ids, position_ids, inputs_embeds)
        )
        hidden = self.encoder(
            self.embeddings(*packed, call=call), call=call if output_hidden_states else call.with_rows(chosen)
        )
        if output_hidden_states and chosen is not None:
            hidden = hidden.index_select(0, chosen)
        states = None if call.hidden_states is None else tuple(packing.unpack(state) for state in call.hidden_states)
        return Encoded(hidden, packing, seed, states, rows=chosen)

    def pool(self, encoded: Encoded) -> Tensor:
        """The pooled first tokens, [B, H]; only for a model with a pooling layer."""
        assert self.pooler is not None
        packing, hidden = encoded.packing, encoded.hidden
        if encoded.rows is None:
            first = packing.first_tokens(hidden)
        else:
            starts, ends = packing.cu_seqlens[:-1].long(), packing.cu_seqlens[1:]
            places = torch.searchsorted(encoded.rows, starts).clamp(max=len(hidden) - 1)
            first = hidden.index_select(0, places).masked_fill((ends <= starts).unsqueeze(1), 0.0)
        return self.pooler(first, call=Call(packing, encoded.seed))

    def _seed(self, device: torch.device, dropout_seed: Tensor | None) -> Tensor | None:
        if not self.training:
            return None
        if dropout_seed is None:
            return draw_seed(device)
        check_shape("dropout_seed", dropout_seed, (1,))
        check_dtype("dropout_seed", dropout_seed, (torch.int64,))
        return dropout_seed

    def _packing(
        self,
        name: str,
        given: Tensor,
        shape: torch.Size,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
    ) -> Packing:
        if cu_seqlens is not None:
            if attention_mask is not None:
                raise ValueError("attention_mask: expected None beside cu_seqlens (packed input has no padding)")
            if len(shape) != 1:
                raise ValueError(f"{name}: expected packed tokens [T] beside cu_seqlens, got shape {list(given.shape)}")
            if max_seqlen is None:
                raise ValueError("max_seqlen: expected an int beside cu_seqlens, got None")
            packing = Packing.from_cu_seqlens(cu_seqlens, max_seqlen, shape[0])
            name, longest = "max_seqlen", packing.max_seqlen
        else:
            if len(shape) != 2:
                raise ValueError(f"{name}: expected a padded batch [B, S], got shape {list(given.shape)}")
            longest = shape[1]
            if attention_mask is None:
                packing = Packing.full(*shape, given.device)
            else:
                check_shape("attention_mask", attention_mask, tuple(shape))
                packing = Packing.from_keep_mask(attention_mask)
        if longest > self.config.max_position_embeddings:
            raise ValueError(
                f"{name}: expected at most {self.config.max_position_embeddings} tokens a sequence "
                f"(max_position_embeddings), got {longest}"
            )
        return packing


class BertModel(PackedBertModel, BertPreTrainedModel):
    """The encoder with embeddings and pooler; parameters, arguments and outputs of Hugging Face's BertModel.

    Differences: hidden states of padding are exactly 0 (Hugging Face leaves them undefined), and the pooler reads the
    first kept token of each sequence.

    Raises:
        ValueError: the configuration asks for a decoder, cross-attention or relative positions.
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
        encoder_hidden_states: None = None,
        encoder_attention_mask: None = None,
        past_key_values: None = None,
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
        attention_mask (Tensor [B, S], bool or number): nonzero = keep; default all kept. One device sync. Also
            [B, S, S] and [B or 1, A or 1, S or 1, S]: slow path.
        token_type_ids, position_ids (Tensor like input_ids; position_ids also [S] or [1, S]): defaults 0 and 0 .. S-1.
        head_mask (Tensor [A] or [L, A]): factors of the attention probabilities; slow path.
        encoder_hidden_states, encoder_attention_mask, past_key_values: None, they are for decoders; use_cache,
            cache_position: of no effect, as in Hugging Face's encoder.
        output_attentions: return the probabilities, L tensors [B, A, S, S]; slow path.
        cu_seqlens (Tensor [B + 1], int32), max_seqlen (int): layout of packed input; no device sync.
        dropout_seed (Tensor [1], int64): decides every mask of this call; default: drawn from PyTorch's generator.
        Returns: last_hidden_state [B, S, H] with zeros on padding ([T, H] for packed input), pooler_output [B, H],
            hidden_states and attentions if asked for. A tuple where return_dict is False.

        Raises:
            TypeError, ValueError: an argument is missing, does not fit another, or holds an id outside its table.

        The slow path is the reference model on the same parameters (`models/textbook.py`); padded input only.
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
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )
        return self.finish(output, return_dict)

    def _prune_heads(self, heads_to_prune: Mapping[int, Iterable[int]]) -> None:
        for layer, heads in heads_to_prune.items():
            self.encoder.layer[layer].get_submodule("attention").prune_heads(heads)


def _flag(argument: bool | None, default: bool) -> bool:
    return default if argument is None else argument


def _input(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[str, Tensor]:
    for name, given, other in (("input_ids", input_ids, inputs_embeds), ("inputs_embeds", inputs_embeds, input_ids)):
        if given is not None and other is None:
            check_tensor(name, given)
            return name, given
    got = "neither" if input_ids is None else "both"
    raise ValueError(f"input_ids, inputs_embeds: expected exactly one of the two, got {got}")
