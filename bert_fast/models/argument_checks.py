"""Checks of arguments and configurations that need to know BERT: the message names what was expected and what came."""

import inspect
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bert_fast.checks import check_flag, check_floating, check_integer, check_tensor
from bert_fast.models.config import BertConfig
from bert_fast.ops._autocast import autocast_dtype


def check_flags(**flags: bool | None) -> None:
    """Raises TypeError unless each is a bool or None."""
    for name, flag in flags.items():
        if flag is not None:
            check_flag(name, flag)


def check_inputs_embeds(inputs_embeds: Tensor, hidden_size: int, dtype: torch.dtype) -> None:
    """Raises unless inputs_embeds is floating [..., hidden_size] and adds up with parameters of dtype to dtype."""
    check_floating("inputs_embeds", inputs_embeds)
    if inputs_embeds.shape[-1:] != (hidden_size,):
        raise ValueError(
            f"inputs_embeds: expected a last dimension of {hidden_size} (hidden_size), "
            f"got shape {list(inputs_embeds.shape)}"
        )
    if torch.promote_types(inputs_embeds.dtype, dtype) != dtype:
        want, got = (str(d).removeprefix("torch.") for d in (dtype, inputs_embeds.dtype))
        raise TypeError(f"inputs_embeds: expected dtype {want} (that of the parameters), got {got}")


def check_beside_hidden(name: str, given: Tensor, hidden: Tensor, may_be_narrower: bool = False) -> None:
    """Raises TypeError unless vectors are of the dtype of the hidden states that look at them, or autocast casts them.

    may_be_narrower: where they are joined with others of that dtype.
    """
    dtype = torch.promote_types(given.dtype, hidden.dtype) if may_be_narrower else given.dtype
    is_cast = autocast_dtype(given) is not None and hidden.dtype != torch.float64 and given.is_floating_point()
    if dtype != hidden.dtype and not is_cast:
        want, got = (str(t.dtype).removeprefix("torch.") for t in (hidden, given))
        raise TypeError(f"{name}: expected dtype {want} (that of the hidden states), got {got}")


def check_layer(name: str, layer: nn.Module, hidden_size: int) -> None:
    """Raises unless layer is a module that can stand for a table of words, or for the projection to them.

    Raises:
        TypeError: no module. ValueError: an `nn.Embedding` or `nn.Linear` for vectors of another size.
    """
    if not isinstance(layer, nn.Module):
        raise TypeError(f"{name}: expected a torch.nn.Module, got {type(layer).__name__}")
    sizes = {nn.Embedding: "embedding_dim", nn.Linear: "in_features"}
    for kind, size in sizes.items():
        if isinstance(layer, kind) and getattr(layer, size) != hidden_size:
            raise ValueError(f"{name}: expected {size} {hidden_size} (hidden_size), got {getattr(layer, size)}")


def check_pruned(config: Any, head_mask: Tensor | None, attention_mask: Tensor | None) -> None:
    """Raises ValueError where a model without some of its heads is given factors or masks of each head."""
    if not any((getattr(config, "pruned_heads", None) or {}).values()):  # transformers 5 knows no pruning
        return
    if head_mask is not None:
        check_tensor("head_mask", head_mask)
        raise ValueError(
            f"head_mask: expected None, since heads are pruned (config.pruned_heads), got shape {list(head_mask.shape)}"
        )
    if attention_mask is None:
        return
    check_tensor("attention_mask", attention_mask)
    if attention_mask.dim() == 4 and attention_mask.shape[1] != 1:
        raise ValueError(
            "attention_mask: expected the same for all heads (size 1 in dimension 1), since heads are pruned "
            f"(config.pruned_heads), got shape {list(attention_mask.shape)}"
        )


def check_architecture(config: BertConfig) -> None:
    """Raises ValueError where the configuration asks for cross-attention outside of a decoder."""
    if config.add_cross_attention and not config.is_decoder:
        raise ValueError("config.is_decoder: expected True where add_cross_attention is set, got False")


def read_heads(name: str, heads_to_prune: Mapping[int, Iterable[int]], num_layers: int) -> dict[int, set[int]]:
    """Layers and their heads; raises TypeError, ValueError unless they are layers that exist, and integers."""
    if not isinstance(heads_to_prune, Mapping):
        raise TypeError(f"{name}: expected a mapping from layers to heads, got {type(heads_to_prune).__name__}")
    asked = {}
    for layer, heads in heads_to_prune.items():
        if not isinstance(layer, int | numbers.Integral) or not 0 <= layer < num_layers:
            raise ValueError(f"{name}: expected layers in [0, {num_layers}), got {layer!r}")
        try:
            each = tuple(heads)
        except TypeError:
            raise TypeError(f"{name}[{layer}]: expected a list of heads, got {type(heads).__name__}") from None
        asked[layer] = {check_integer(f"{name}[{layer}]", head) for head in each}
    return asked


def checkpoint_arguments(name: str, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """What `torch.utils.checkpoint.checkpoint` is to be called with; it would pass names of others on to the layers."""
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise TypeError(f"{name}: expected a mapping or None, got {type(arguments).__name__}")
    keywords = {p.name for p in inspect.signature(checkpoint).parameters.values() if p.kind is p.KEYWORD_ONLY}
    known = sorted(keywords | {"preserve_rng_state"})
    for key in arguments:
        if key not in known:
            raise TypeError(f"{name}: expected arguments of torch.utils.checkpoint ({', '.join(known)}), got {key!r}")
    return dict(arguments)
