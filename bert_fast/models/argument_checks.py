"""Checks of arguments and configurations that need to know BERT: the message names what was expected and what came."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bert_fast.checks import check_floating, check_tensor
from bert_fast.models.config import BertConfig

__all__ = ["check_architecture", "check_head_mask", "check_inputs_embeds", "check_pruned", "refuse_decoder_arguments"]


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


def check_head_mask(head_mask: Tensor, config: BertConfig, shape: Sequence[int]) -> None:
    """Raises unless head_mask is [A], [L, A] or [L, B or 1, A, S or 1, S or 1], for input of shape [B, S]."""
    check_tensor("head_mask", head_mask)
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    length = shape[-1]
    allowed = ((layers,), (1, shape[0]), (heads,), (1, length), (1, length))
    is_full = head_mask.dim() == 5 and all(size in sizes for size, sizes in zip(head_mask.shape, allowed, strict=True))
    if not is_full and head_mask.shape not in ((heads,), (layers, heads)):
        raise ValueError(
            f"head_mask: expected shape [{heads}], [{layers}, {heads}] or "
            f"[{layers}, B or 1, {heads}, S or 1, S or 1], got {list(head_mask.shape)}"
        )


def check_pruned(config: BertConfig, head_mask: Tensor | None, attention_mask: Tensor | None) -> None:
    """Raises ValueError where a model without some of its heads is given factors or masks of each head."""
    if not any(config.pruned_heads.values()):
        return
    if head_mask is not None:
        raise ValueError(
            f"head_mask: expected None, since heads are pruned (config.pruned_heads), got shape {list(head_mask.shape)}"
        )
    if attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[1] != 1:
        raise ValueError(
            "attention_mask: expected the same for all heads (size 1 in dimension 1), since heads are pruned "
            f"(config.pruned_heads), got shape {list(attention_mask.shape)}"
        )


def refuse_decoder_arguments(**arguments: Any) -> None:
    """Raises ValueError for an argument that only a decoder has a use for."""
    for name, argument in arguments.items():
        if argument is not None:
            raise ValueError(
                f"{name}: expected None in an encoder, got {type(argument).__name__}; "
                "bert_fast.reference.model.ReferenceBertModel runs decoders"
            )


def check_architecture(config: BertConfig) -> None:
    """Raises ValueError where the configuration asks for what the fast models do not compute."""
    unsupported = {
        "position_embedding_type": config.position_embedding_type != "absolute",
        "is_decoder": config.is_decoder,
        "add_cross_attention": config.add_cross_attention,
    }
    for name, is_asked_for in unsupported.items():
        if is_asked_for:
            raise ValueError(
                f"config.{name}: expected an encoder with absolute positions, got {getattr(config, name)!r}; "
                "bert_fast.reference.model.ReferenceBertModel runs it"
            )
