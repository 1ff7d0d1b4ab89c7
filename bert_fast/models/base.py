"""What all models share: construction from a configuration, loading and saving, initial weights, pruning."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bert_fast.models.config import BertConfig
from bert_fast.models.outputs import ModelOutput
from bert_fast.models.pretrained import PretrainedMixin
from bert_fast.modules.encoder import CHECKPOINT_ARGUMENTS

if TYPE_CHECKING:
    from bert_fast.models.bert import BertModel

__all__ = ["BertPreTrainedModel"]


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
        return getattr(self, "bert", self)  # type: ignore[arg-type]

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
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()

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
        arguments = CHECKPOINT_ARGUMENTS | dict(activation_checkpointing_kwargs or {})
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
