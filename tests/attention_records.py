"""Arguments of attention for tests that call its implementations: what they name, the rest plain."""

import math
from typing import Any

from torch import Tensor

from bert_fast.reference.attention import Attention


def plain_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, **others: Any) -> Attention:
    """Self-attention scaled by 1 / sqrt(D), without names of tokens; `others` are fields that differ, by name."""
    plain = Attention(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, softmax_scale=1 / math.sqrt(q.shape[2]), dropout_p=0.0,
        seed=None, coords_q=None, coords_k=None, site=0, causal=False, bias=None, relative_keys=None,
        relative_queries=None, sequence_order=None,
    )  # fmt: skip
    return plain._replace(**others)
