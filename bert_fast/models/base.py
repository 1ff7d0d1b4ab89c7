"""What all models share: construction from a configuration, loading and saving, initial weights, pruning."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bert_fast.models.config import BertConfig
from bert_fast.models.outputs import ModelOutput
from bert_fast.models.pretrained import PretrainedMixin
from bert_fast.models.resizing import padded_size, resize_rows
from bert_fast.models.shapes import check_memory
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
        check_memory(config)
        self.config = config

    def post_init(self) -> None:
        """What the constructor of every model ends with: initial weights, then tying."""
        self.init_weights()
        self.tie_weights()

    def init_weights(self) -> None:
        """Initial values as published, by `_init_weights` for every module."""
        self.apply(self._init_weights)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Normal(0, initializer_range), zero biases, LayerNorm 1 and 0, zero [PAD] row."""
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(0.0, self.config.initializer_range)
        elif isinstance(module, nn.LayerNorm):
            module.weight.fill_(1.0)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx].zero_()
        if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
            module.bias.zero_()

    def tie_weights(self) -> None:
        """Makes parameters that are to be one parameter so; here there are none."""

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

    def set_input_embeddings(self, new_embeddings: nn.Embedding) -> None:
        """Replaces the word embedding table; call `tie_weights` where the vocabulary projection is to follow."""
        self.base_model.embeddings.word_embeddings = new_embeddings

    def get_output_embeddings(self) -> nn.Linear | None:
        """The vocabulary projection of a model that has one."""
        return None

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Gives the word table, and the vocabulary projection with its bias, another number of rows.

        The last rows are cut off or new ones come behind them; config.vocab_size follows. Parameters and modules stay
        the same objects, but optimizers must be made after it.

        Args:
            new_num_tokens: None keeps the number.
            pad_to_multiple_of: the number is rounded up to a multiple of this.
            mean_resizing: new rows are drawn around the mean of the old ones; else from normal(0, initializer_range).

        Returns: the word table.
        """
        table, head, config = self.get_input_embeddings(), self.get_output_embeddings(), self.config
        if new_num_tokens is None and pad_to_multiple_of is None:
            return table
        old_size = config.vocab_size
        size = padded_size("new_num_tokens", old_size if new_num_tokens is None else new_num_tokens, pad_to_multiple_of)
        parameters = [table.weight] if head is None else [table.weight, head.weight, head.bias]
        different = {id(p): p for p in parameters if p is not None}.values()  # tied ones once
        resize_rows(different, size, None if mean_resizing else config.initializer_range)
        table.num_embeddings = config.vocab_size = size
        if head is not None:
            head.out_features = size
        if config.pad_token_id is not None and config.pad_token_id < 0:  # counted from the old end
            config.pad_token_id += old_size
        if table.padding_idx is not None and table.padding_idx >= size:
            table.padding_idx = config.pad_token_id = None
        self.tie_weights()
        return table

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> nn.Embedding:
        """Makes the model take longer, or only shorter, sequences; new positions start at normal(0, initializer_range).

        Returns: the table of positions; config.max_position_embeddings follows.
        Raises: ValueError where positions are relative too.
        """
        table, config = self.base_model.embeddings.position_embeddings, self.config
        if config.position_embedding_type != "absolute":
            raise ValueError(
                "resize_position_embeddings: expected config.position_embedding_type 'absolute', "
                f"got {config.position_embedding_type!r}"
            )
        size = padded_size("new_num_position_embeddings", new_num_position_embeddings, None)
        resize_rows([table.weight], size, config.initializer_range)
        table.num_embeddings = config.max_position_embeddings = size
        return table

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
