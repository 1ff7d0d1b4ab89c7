"""BertModel: padding removed once, every layer on [T, H], padding put back once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bert_fast.checks import check_dtype, check_shape, check_tensor
from bert_fast.models.argument_checks import (
    check_architecture,
    check_head_mask,
    check_inputs_embeds,
    check_pruned,
    refuse_decoder_arguments,
)
from bert_fast.models.config import BertConfig
from bert_fast.models.outputs import BaseModelOutputWithPoolingAndCrossAttentions, ModelOutput
from bert_fast.models.pretrained import PretrainedMixin
from bert_fast.models.textbook import textbook
from bert_fast.modules.activated_linear import activated_linear
from bert_fast.modules.embeddings import BertEmbeddings
from bert_fast.modules.layer import BertLayer
from bert_fast.ops.dropout import draw_seed
from bert_fast.ops.packing import Packing

__all__ = ["BertEncoder", "BertModel", "BertPooler", "BertPreTrainedModel", "Encoded"]

_INTEGERS = (torch.int64, torch.int32)
# Masks follow from the seed, so no generator state needs saving.
_CHECKPOINT_ARGUMENTS: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}


class BertPreTrainedModel(PretrainedMixin, nn.Module):
    """What all models share: construction from a configuration, loading and saving, initial weights."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        if not isinstance(config, BertConfig):
            raise TypeError(
                f"config: expected a bert_fast.BertConfig, got {type(config).__module__}.{type(config).__name__}; "
                "BertConfig.from_hf(config) makes one of transformers' configurations"
            )
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

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Number of parameter elements, tied ones once."""
        tables = {id(m.weight) for m in self.modules() if isinstance(m, nn.Embedding)} if exclude_embeddings else ()
        return sum(
            p.numel() for p in self.parameters() if id(p) not in tables and (p.requires_grad or not only_trainable)
        )

    def get_input_embeddings(self) -> nn.Embedding:
        """The word embedding table."""
        return self.base_model.embeddings.word_embeddings

    @property
    def base_model(self) -> "BertModel":
        """The BertModel inside (self for BertModel)."""
        return self if isinstance(self, BertModel) else self.get_submodule("bert")  # type: ignore[return-value]

    def prune_heads(self, heads_to_prune: Mapping[int, Iterable[int]]) -> None:
        """Removes attention heads: layer -> heads, both counted as in the whole model; those gone already may be named.

        config.pruned_heads (shared by a model and its encoder) notes them, so that a saved model loads with these heads
        missing. Layers get new, smaller parameters: optimizers must be made after it. As in transformers 4.

        Raises:
            ValueError: a layer or head that does not exist, or a layer that would have no head left; the model is
                unchanged then.
        """
        config, num_heads = self.config, self.config.num_attention_heads
        asked = {layer: set(heads) for layer, heads in heads_to_prune.items()}
        pruned = {layer: set(heads) for layer, heads in config.pruned_heads.items()}
        for layer, heads in asked.items():
            if layer not in range(config.num_hidden_layers):
                raise ValueError(f"heads_to_prune: expected layers in [0, {config.num_hidden_layers}), got {layer!r}")
            removed = heads | pruned.get(layer, set())
            if not removed <= set(range(num_heads)) or len(removed) == num_heads:
                raise ValueError(
                    f"heads_to_prune: expected heads in [0, {num_heads}) for layer {layer}, at least one of which "
                    f"stays, got {sorted(removed)}"
                )
            pruned[layer] = removed
        config.pruned_heads = {layer: sorted(removed) for layer, removed in pruned.items()}
        self.base_model._prune_heads(asked)

    def finish(self, output: ModelOutput, return_dict: bool | None) -> Any:
        """The output as the caller wants it: itself, or a tuple where return_dict (default: the config's) is False."""
        return output if _flag(return_dict, self.config.return_dict) else output.to_tuple()

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """From now on training keeps one [T, H] a layer and runs each layer again in backward, with the same masks.

        activation_checkpointing_kwargs: of `torch.utils.checkpoint.checkpoint`; use_reentrant is False unless given.
        every_n_layers: only layers 0, n, 2n, ... are run again. offload: only False (nothing is moved to the host).
        """
        if every_n_layers < 1:
            raise ValueError(f"every_n_layers: expected at least 1, got {every_n_layers}")
        if offload:
            raise ValueError(f"offload: expected False (activations stay on their device), got {offload}")
        arguments = _CHECKPOINT_ARGUMENTS | dict(activation_checkpointing_kwargs or {})
        self.base_model.encoder.checkpoint_arguments = arguments
        self.base_model.encoder.checkpoint_every = every_n_layers

    def activation_checkpointing_disable(self) -> None:
        """Undoes `activation_checkpointing_enable`."""
        self.base_model.encoder.checkpoint_every = 0

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """The older name of `activation_checkpointing_enable`."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    def gradient_checkpointing_disable(self) -> None:
        """The older name of `activation_checkpointing_disable`."""
        self.activation_checkpointing_disable()

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether layers run again in backward."""
        return self.base_model.encoder.checkpoint_every > 0


class BertEncoder(nn.Module):
    """The stack of layers."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config, index) for index in range(config.num_hidden_layers))
        self.checkpoint_every = 0  # layers 0, n, 2n, ... keep their input only; 0: none does
        self.checkpoint_arguments = _CHECKPOINT_ARGUMENTS

    def forward(self, x: Tensor, packing: Packing, seed: Tensor | None, collect: bool) -> tuple[Tensor, list[Tensor]]:
        """x [T, H] to (output [T, H], the states before and after every layer if `collect`)."""
        states = [x] if collect else []
        for index, layer in enumerate(self.layer):
            if self.training and self.checkpoint_every and index % self.checkpoint_every == 0:
                x = checkpoint(layer, x, packing, seed, **self.checkpoint_arguments)
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
        return activated_linear(first_tokens, self.dense, "tanh")


@dataclass(frozen=True)
class Encoded:
    """What heads get from the encoder: still packed.

    hidden (Tensor [T, H]); seed (Tensor [1] or None): of dropout, None in evaluation; hidden_states and attentions as
    in the output classes, None unless asked for.
    """

    hidden: Tensor
    packing: Packing
    seed: Tensor | None
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None


class BertModel(BertPreTrainedModel):
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
        refuse_decoder_arguments(
            encoder_hidden_states=encoder_hidden_states, encoder_attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
        )  # fmt: skip
        encoded = self.encode(
            input_ids, attention_mask, token_type_ids, position_ids, head_mask, inputs_embeds,
            output_attentions, output_hidden_states, cu_seqlens, max_seqlen, dropout_seed,
        )  # fmt: skip
        output = BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=encoded.packing.unpack(encoded.hidden),
            pooler_output=None if self.pooler is None else self.pool(encoded),
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )
        return self.finish(output, return_dict)

    def encode(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        head_mask: Tensor | None,
        inputs_embeds: Tensor | None,
        output_attentions: bool | None,
        output_hidden_states: bool | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        dropout_seed: Tensor | None,
    ) -> Encoded:
        """As `forward`, but stays packed, for heads."""
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
            slow = textbook(self)(
                input_ids, attention_mask, token_type_ids, position_ids, head_mask, inputs_embeds,
                output_attentions=output_attentions, output_hidden_states=output_hidden_states, dropout_seed=seed,
            )  # fmt: skip
            hidden = packing.pack(slow.last_hidden_state)
            return Encoded(hidden, packing, seed, slow.hidden_states, slow.attentions)

        packed = (
            None if ids is None else packing.pack(ids)
            for ids in (input_ids, token_type_ids, position_ids, inputs_embeds)
        )
        hidden, states = self.encoder(self.embeddings(*packed, packing, seed), packing, seed, output_hidden_states)
        return Encoded(hidden, packing, seed, tuple(packing.unpack(state) for state in states) or None, None)

    def _prune_heads(self, heads_to_prune: Mapping[int, Iterable[int]]) -> None:
        for layer, heads in heads_to_prune.items():
            self.encoder.layer[layer].get_submodule("attention").prune_heads(heads)  # type: ignore[operator]

    def pool(self, encoded: Encoded) -> Tensor:
        """The pooled first tokens, [B, H]; only for a model with a pooling layer."""
        assert self.pooler is not None
        return self.pooler(encoded.packing.first_tokens(encoded.hidden))

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


def _flag(argument: bool | None, default: bool) -> bool:
    return default if argument is None else argument


def _input(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[str, Tensor]:
    for name, given, other in (("input_ids", input_ids, inputs_embeds), ("inputs_embeds", inputs_embeds, input_ids)):
        if given is not None and other is None:
            check_tensor(name, given)
            return name, given
    got = "neither" if input_ids is None else "both"
    raise ValueError(f"input_ids, inputs_embeds: expected exactly one of the two, got {got}")
