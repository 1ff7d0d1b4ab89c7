"""Checks of arguments and configurations that need to know BERT: the message names what was expected and what came."""

from typing import Any

import torch
from torch import Tensor

from bert_fast.checks import check_floating
from bert_fast.models.config import BertConfig

__all__ = ["check_architecture", "check_inputs_embeds", "check_pruned"]


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


def check_pruned(config: Any, head_mask: Tensor | None, attention_mask: Tensor | None) -> None:
    """Raises ValueError where a model without some of its heads is given factors or masks of each head."""
    if not any((getattr(config, "pruned_heads", None) or {}).values()):  # transformers 5 knows no pruning
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


def check_architecture(config: BertConfig) -> None:
    """Raises ValueError where the configuration asks for cross-attention outside of a decoder."""
    if config.add_cross_attention and not config.is_decoder:
        raise ValueError("config.is_decoder: expected True where add_cross_attention is set, got False")
