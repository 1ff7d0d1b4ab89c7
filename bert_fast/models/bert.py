"""BertModel: padding removed once, every layer on [T, H], padding put back once."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bert_fast.checks import check_dtype, check_shape
from bert_fast.models.config import BertConfig
from bert_fast.models.outputs import BaseModelOutputWithPoolingAndCrossAttentions
from bert_fast.models.pretrained import PretrainedMixin
from bert_fast.modules.embeddings import BertEmbeddings
from bert_fast.modules.layer import BertLayer
from bert_fast.ops.dropout import draw_seed
from bert_fast.ops.packing import Packing

__all__ = ["BertEncoder", "BertModel", "BertPooler", "BertPreTrainedModel"]

_INTEGERS = (torch.int64, torch.int32)


class BertPreTrainedModel(PretrainedMixin, nn.Module):
    """What all models share: construction from a configuration, loading and saving, initial weights."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config

    def init_weights(self) -> None:
        """Initial values as published: normal(0, initializer_range), zero biases, LayerNorm 1 and 0, zero [PAD] row."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, 0.0, self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                with torch.no_grad():
                    module.weight[module.padding_idx].zero_()

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return next(self.parameters()).dtype

    def num_parameters(self) -> int:
        """Number of parameter elements, tied ones once."""
        return sum(p.numel() for p in self.parameters())

    def get_input_embeddings(self) -> nn.Embedding:
        """The word embedding table."""
        return self.base_model.embeddings.word_embeddings

    @property
    def base_model(self) -> "BertModel":
        """The BertModel inside (self for BertModel)."""
        return self if isinstance(self, BertModel) else self.bert

    def gradient_checkpointing_enable(self) -> None:
        """From now on training keeps one [T, H] a layer and runs each layer again in backward, with the same masks."""
        self.base_model.encoder.gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        """Undoes `gradient_checkpointing_enable`."""
        self.base_model.encoder.gradient_checkpointing = False


class BertEncoder(nn.Module):
    """The stack of layers."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config, index) for index in range(config.num_hidden_layers))
        self.gradient_checkpointing = False

    def forward(self, x: Tensor, packing: Packing, seed: Tensor | None, collect: bool) -> tuple[Tensor, list[Tensor]]:
        """x [T, H] to (output [T, H], the states before and after every layer if `collect`)."""
        states = [x] if collect else []
        for layer in self.layer:
            if self.gradient_checkpointing and self.training:
                # Masks follow from the seed, so no generator state needs saving.
                x = checkpoint(layer, x, packing, seed, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, packing, seed)
            if collect:
                states.append(x)
        return x, states


class BertPooler(nn.Module):
    """tanh(dense(first token))."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, first_tokens: Tensor) -> Tensor:
        """[B, H] to [B, H]."""
        return torch.tanh(self.dense(first_tokens))


class BertModel(BertPreTrainedModel):
    """The encoder with embeddings and pooler; parameters, arguments and outputs of Hugging Face's BertModel.

    Differences: hidden states of padding are exactly 0 (Hugging Face leaves them undefined), and the pooler reads the
    first kept token of each sequence.
    """

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
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
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        dropout_seed: Tensor | None = None,
    ) -> BaseModelOutputWithPoolingAndCrossAttentions | tuple:
        """Padded input ([B, S] and a mask) or packed input ([T] and cu_seqlens).

        input_ids (Tensor [B, S] or [T], int) or inputs_embeds (Tensor [B, S, H] or [T, H]).
        attention_mask (Tensor [B, S], bool or number): nonzero = keep; default all kept. One device sync.
        token_type_ids, position_ids (Tensor like input_ids; position_ids also [S] or [1, S]): defaults 0 and 0 .. S-1.
        cu_seqlens (Tensor [B + 1], int32), max_seqlen (int): layout of packed input; no device sync.
        dropout_seed (Tensor [1], int64): decides every mask of this call; default: drawn from PyTorch's generator.
        Returns: last_hidden_state [B, S, H] with zeros on padding ([T, H] for packed input), pooler_output [B, H],
            hidden_states if asked for. A tuple where return_dict is False.

        Raises:
            TypeError, ValueError: an argument is missing, does not fit another, or holds an id outside its table.
        """
        hidden, packing, states = self.encode(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds,
            _flag(output_hidden_states, self.config.output_hidden_states), cu_seqlens, max_seqlen, dropout_seed,
        )[:3]  # fmt: skip
        output = BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=packing.unpack(hidden),
            pooler_output=None if self.pooler is None else self.pooler(packing.first_tokens(hidden)),
            hidden_states=tuple(packing.unpack(state) for state in states) or None,
        )
        return output if _flag(return_dict, self.config.return_dict) else output.to_tuple()

    def encode(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        collect: bool,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        dropout_seed: Tensor | None,
    ) -> tuple[Tensor, Packing, list[Tensor], Tensor | None]:
        """As `forward`, but stays packed, for heads: (hidden [T, H], packing, states, dropout seed or None)."""
        packing = self._packing(input_ids, attention_mask, inputs_embeds, cu_seqlens, max_seqlen)
        shape = inputs_embeds.shape[:-1] if input_ids is None else input_ids.shape  # type: ignore[union-attr]
        if input_ids is not None:
            check_dtype("input_ids", input_ids, _INTEGERS)
        token_type_ids = _pack_ids("token_type_ids", token_type_ids, shape, packing)
        if position_ids is not None and len(shape) == 2:
            if position_ids.dim() == 1:
                position_ids = position_ids.unsqueeze(0)
            if position_ids.shape[0] == 1:
                position_ids = position_ids.expand(shape[0], -1)
        position_ids = _pack_ids("position_ids", position_ids, shape, packing)
        seed = None
        if self.training:
            seed = draw_seed(packing.coords.device) if dropout_seed is None else dropout_seed
            check_shape("dropout_seed", seed, (1,))
            check_dtype("dropout_seed", seed, (torch.int64,))
        x = self.embeddings(
            None if input_ids is None else packing.pack(input_ids), token_type_ids, position_ids,
            None if inputs_embeds is None else packing.pack(inputs_embeds), packing, seed,
        )  # fmt: skip
        hidden, states = self.encoder(x, packing, seed, collect)
        return hidden, packing, states, seed

    def _packing(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
    ) -> Packing:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                "input_ids, inputs_embeds: expected exactly one of the two, got "
                + ("neither" if input_ids is None else "both")
            )
        given, name = (inputs_embeds, "inputs_embeds") if input_ids is None else (input_ids, "input_ids")
        assert given is not None
        lead = given.shape[:-1] if input_ids is None else given.shape
        if cu_seqlens is not None:
            if attention_mask is not None:
                raise ValueError("attention_mask: expected None beside cu_seqlens (packed input has no padding)")
            if len(lead) != 1:
                raise ValueError(f"{name}: expected packed tokens [T] beside cu_seqlens, got shape {list(given.shape)}")
            if max_seqlen is None:
                raise ValueError("max_seqlen: expected an int beside cu_seqlens, got None")
            longest, packing = max_seqlen, Packing.from_cu_seqlens(cu_seqlens, max_seqlen, lead[0])
        else:
            if len(lead) != 2:
                raise ValueError(f"{name}: expected a padded batch [B, S], got shape {list(given.shape)}")
            longest = lead[1]
            if attention_mask is None:
                packing = Packing.full(lead[0], lead[1], given.device)
            else:
                check_shape("attention_mask", attention_mask, tuple(lead))
                packing = Packing.from_keep_mask(attention_mask)
        if longest > self.config.max_position_embeddings:
            raise ValueError(
                f"{name}: expected at most {self.config.max_position_embeddings} tokens a sequence "
                f"(max_position_embeddings), got {longest}"
            )
        return packing


def _flag(argument: bool | None, default: bool) -> bool:
    return default if argument is None else argument


def _pack_ids(name: str, ids: Tensor | None, shape: torch.Size, packing: Packing) -> Tensor | None:
    if ids is None:
        return None
    check_shape(name, ids, tuple(shape))
    check_dtype(name, ids, _INTEGERS)
    return packing.pack(ids)
