"""BertModel, and what it shares with the models around it: construction, loading and saving, sizes, pruning."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.checks import check_flag, check_integer
from bert_fast.models.argument_checks import (
    check_architecture,
    check_flags,
    check_layer,
    checkpoint_arguments,
    read_heads,
)
from bert_fast.models.config import BertConfig
from bert_fast.models.initial_values import is_undrawn, undrawn
from bert_fast.models.outputs import BaseModelOutputWithPoolingAndCrossAttentions, ModelOutput
from bert_fast.models.packed import PackedBertModel
from bert_fast.models.pretrained import PretrainedMixin
from bert_fast.models.resizing import padded_size, resize_rows
from bert_fast.models.shapes import check_memory
from bert_fast.modules.embeddings import BertEmbeddings
from bert_fast.modules.encoder import CHECKPOINT_ARGUMENTS, BertEncoder
from bert_fast.modules.pooler import BertPooler


class BertPreTrainedModel(PretrainedMixin, nn.Module):
    """The base of all models: construction from a configuration, loading and saving, initial weights.

    Args:
        config (BertConfig): sizes, dropout probabilities, labels.

    Raises:
        TypeError: config is no `BertConfig`.

    Example:
        >>> config = BertConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = bert_fast.BertModel(config).save_pretrained(folder)
        ...     model = bert_fast.BertModel.from_pretrained(path)
        >>> isinstance(model, bert_fast.BertPreTrainedModel)
        True
    """

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
        self.apply(lambda module: None if is_undrawn(module) else self._init_weights(module))

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
        check_flag("only_trainable", only_trainable)
        check_flag("exclude_embeddings", exclude_embeddings)
        tables = {id(m.weight) for m in self.modules() if isinstance(m, nn.Embedding)} if exclude_embeddings else ()
        return sum(
            p.numel() for p in self.parameters() if id(p) not in tables and (p.requires_grad or not only_trainable)
        )

    def get_input_embeddings(self) -> nn.Embedding:
        """The word embedding table."""
        return self.base_model.embeddings.word_embeddings

    def set_input_embeddings(self, new_embeddings: nn.Embedding) -> None:
        """Replaces the word embedding table; call `tie_weights` where the vocabulary projection is to follow.

        Raises: TypeError where it is no module, ValueError for an `nn.Embedding` of vectors of another size.
        """
        check_layer("new_embeddings", new_embeddings, self.config.hidden_size)
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
        Raises: TypeError, ValueError for sizes that are no positive ints, and where the module that looks words up has
            no weight to resize.
        """
        check_flag("mean_resizing", mean_resizing)
        table, head, config = self.get_input_embeddings(), self.get_output_embeddings(), self.config
        if new_num_tokens is None and pad_to_multiple_of is None:
            return table
        old_size = config.vocab_size
        size = padded_size("new_num_tokens", old_size if new_num_tokens is None else new_num_tokens, pad_to_multiple_of)
        if not isinstance(getattr(table, "weight", None), Tensor):
            raise ValueError(f"new_num_tokens: expected None for words from a {type(table).__name__}, got {size}")
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
            TypeError: no mapping from numbers to numbers. ValueError: a layer or head that does not exist, or a layer
                that would have no head left. The model is unchanged then.
        """
        config, num_heads = self.config, self.config.num_attention_heads
        asked = read_heads("heads_to_prune", heads_to_prune, config.num_hidden_layers)
        pruned = {layer: set(heads) for layer, heads in config.pruned_heads.items()}
        for layer, heads in asked.items():
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
        kwargs = activation_checkpointing_kwargs
        self._run_layers_again("activation_checkpointing_kwargs", kwargs, every_n_layers, offload)

    def _run_layers_again(
        self, name: str, kwargs: Mapping[str, Any] | None, every_n_layers: int, offload: bool
    ) -> None:
        arguments = CHECKPOINT_ARGUMENTS | checkpoint_arguments(name, kwargs)
        every_n_layers = check_integer("every_n_layers", every_n_layers)
        if every_n_layers < 1:
            raise ValueError(f"every_n_layers: expected at least 1, got {every_n_layers}")
        check_flag("offload", offload)
        if offload:
            raise ValueError(f"offload: expected False (activations stay on their device), got {offload}")
        self.base_model.encoder.checkpoint_arguments = arguments
        self.base_model.encoder.checkpoint_every = every_n_layers

    def activation_checkpointing_disable(self) -> None:
        """Undoes `activation_checkpointing_enable`."""
        self.base_model.encoder.checkpoint_every = 0

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """The older name of `activation_checkpointing_enable`."""
        self._run_layers_again("gradient_checkpointing_kwargs", gradient_checkpointing_kwargs, every_n_layers, offload)

    def gradient_checkpointing_disable(self) -> None:
        """The older name of `activation_checkpointing_disable`."""
        self.activation_checkpointing_disable()

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether forward takes `num_items_in_batch`: transformers' Trainer asks, and passes it then."""
        return "num_items_in_batch" in inspect.signature(self.forward).parameters

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether layers run again in backward."""
        return self.base_model.encoder.checkpoint_every > 0


class BertModel(PackedBertModel, BertPreTrainedModel):
    """Encoder or decoder with embeddings and pooler; parameters, arguments and outputs of Hugging Face's BertModel.

    Differences: hidden states of padding are exactly 0 (Hugging Face leaves them undefined), and the pooler reads the
    first kept token of each sequence.

    Args:
        config (BertConfig): sizes, dropout probabilities, labels.
        add_pooling_layer: whether there is a pooler, which makes `pooler_output`.

    Raises:
        ValueError: the configuration asks for cross-attention in an encoder.

    Example:
        >>> config = BertConfig(
        ...     vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20
        ... )
        >>> model = bert_fast.BertModel(config).eval()
        >>> model(torch.tensor([[1, 2, 3]])).pooler_output.shape
        torch.Size([1, 16])
    """

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        check_architecture(config)
        check_flag("add_pooling_layer", add_pooling_layer)
        with undrawn(self):
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
        attention_mask (Tensor [B or 1, Sk], bool or number): nonzero = keep; default all kept. One device sync, and
            none where it is on the CPU beside tokens on a GPU. Of an encoder also [B or 1, 1]. Also [B, S, Sk] and
            [B or 1, A or 1, S or 1, Sk], see `read_attention_mask`; these take no token out of the batch. Sk = S and
            the cached columns. A decoder adds causal order to a 2-D mask and to none.
        token_type_ids, position_ids (Tensor like input_ids, or one that broadcasts to [B, S]): defaults 0 and the
            column, cached ones counted.
        head_mask (Tensor [A], [L, A] or [L, B or 1, A, S or 1, Sk or 1]): factors of the attention probabilities, also
            of those of cross-attention; slow, keeps them for backward, and breaks graphs of `torch.compile`.
        encoder_hidden_states (Tensor [B, Sm, H]), encoder_attention_mask (as attention_mask, with Sm): a decoder's
            memory.
        past_key_values: keys and values of earlier calls: what a call returned, a cache of transformers, or a tuple of
            (key, value) or (key, value, memory's key, memory's value) for every layer, Tensors [B, A, columns, D]. A
            cache is extended in place.
        use_cache: return the cache; default: config.use_cache in a decoder. Never of packed input, nor in training with
            gradient checkpointing. cache_position: of no effect.
        output_attentions: return the probabilities after dropout and head_mask, L tensors [B, A, S, Sk], zeros on
            padding; slow, and keeps them for backward.
        cu_seqlens (Tensor [B + 1], int32, here or on the CPU), max_seqlen (int): layout of packed input; no device
            sync.
        dropout_seed (Tensor [1], int64): decides every mask of this call; default: drawn from PyTorch's generator.
        Returns: last_hidden_state [B, S, H] with zeros on padding ([T, H] for packed input), pooler_output [B, H],
            hidden_states, attentions, cross_attentions and past_key_values if asked for. A tuple where return_dict is
            False.

        Raises:
            TypeError, ValueError: an argument is missing, does not fit another, or holds an id outside its table.
        """
        check_flags(return_dict=return_dict)
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
