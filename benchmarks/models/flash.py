"""transformers' BERT on flattened inputs, with the FlashAttention-2 that PyTorch itself carries: no package is needed.

The texts of a batch stand in one row, [1, T]: `position_ids` restart, and `cu_seq_lens` say where texts begin, as
transformers' flash attention takes them. Poolers get the first token of each text; transformers' would take that of the
row, which is why heads are called here.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

FLASH = "flash"
ATTENTION = "varlen_on_flattened_inputs"  # in the registry of transformers, which takes "flash_..." for packages


def flattened(packed: Mapping[str, Any], labels: Tensor) -> dict[str, Any]:
    """What transformers' model is given, from `input_ids` [T], `cu_seqlens` and `max_seqlen`; labels as they are."""
    cu_seqlens, longest = packed["cu_seqlens"], packed["max_seqlen"]
    begins = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff())
    positions = torch.arange(len(begins), device=begins.device) - begins
    return {
        "input_ids": packed["input_ids"][None], "position_ids": positions[None], "labels": labels,
        "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


def register() -> None:
    """Makes the attention known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attend)


def flash_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, p: float, scale: float) -> Tensor:
    """PyTorch's FlashAttention-2 for texts one after the other: q, k, v and the result [T, A, D]; dropout p."""
    found: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, p, False, False, scale=scale
    )
    return found[0]


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **given: Any
) -> tuple[Tensor, None]:
    """As transformers calls an attention of its registry: q, k, v [1, A, T, D]; the result [1, T, A, D]."""
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    longest, p, scale = given["max_length_q"], given.get("dropout", 0.0), given["scaling"]
    return flash_varlen(q, k, v, given["cu_seq_lens_q"], longest, p, scale)[None], None


def encoded(model: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Hidden states [T, H] and what the pooler makes of each text [B, H]."""
    given = {name: value for name, value in inputs.items() if name not in ("labels", "next_sentence_label")}
    hidden = model.bert(**given).last_hidden_state[0]
    return hidden, model.bert.pooler(hidden[given["cu_seq_lens_q"][:-1].long()][:, None])


def classified(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    """Logits of a BertForSequenceClassification, [B, classes]."""
    _, pooled = encoded(model, inputs)
    return cast(Tensor, model.classifier(model.dropout(pooled)))


def pretraining_loss(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    """Of a BertForPreTraining: labels [T], next_sentence_label [B]."""
    words, sentences = model.cls(*encoded(model, inputs))
    return cross_entropy(words, inputs["labels"]) + cross_entropy(sentences, inputs["next_sentence_label"])
