"""bert_fast's attention under transformers' interface: `attn_implementation="bert_fast"`.

For those who want no more than that, and for models other than BERT. The model around it stays padded, so each layer
packs and unpacks; `fuse` does so once.
"""

from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.huggingface.flattened import Texts, offsets_problem, texts_of_row
from bert_fast.ops.attention import attention, attention_padded
from bert_fast.ops.dropout import draw_seed
from bert_fast.ops.packing import Packing

NAME = "bert_fast"


def register_attention() -> None:
    """Makes `attn_implementation="bert_fast"` known to transformers; more than once is fine.

    It runs dropout and padding without a [S, S] mask; causal and other masks, position biases, grouped keys and cross
    attention work too, on the same op. In transformers 4 BERT itself does not ask this registry.

    Example:
        >>> import transformers
        >>> config = transformers.BertConfig(
        ...     vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20
        ... )
        >>> bert_fast.register_attention()
        >>> model = transformers.AutoModel.from_config(config, attn_implementation="bert_fast")
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import bidirectional_mask_function, eager_mask

    def mask(*args: Any, mask_function: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        if mask_function is bidirectional_mask_function:
            return attention_mask  # [B, Sk], or None where nothing is padded
        return eager_mask(*args, mask_function=mask_function, attention_mask=attention_mask, **kwargs)

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    head_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in a layer.

    query (Tensor [B, A, Sq, D]), key and value (Tensor [B, A or a divisor of A, Sk, D]).
    attention_mask (Tensor [B or 1, Sk or 1], nonzero = keep; or [B or 1, A or 1, Sq, Sk], bool with True = keep, or
        added).
    kwargs: where a batch of one row comes without a mask, or with one that keeps all of it, the texts that lie in it
        are found as transformers' flash attention finds them: by `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and
        `max_length_k`, or by `position_ids` that begin anew.
    is_causal: default: what the module says; only where there is no mask.
    position_bias (Tensor broadcastable to [B, A, Sq, Sk]): added to the scores.
    head_mask (Tensor of A elements): a factor of each head's probabilities, which is one of its values.
    Returns: (Tensor [B, Sq, A, D], None): no probabilities.

    Raises:
        ValueError: scores are to be capped, or attention is to flow into sinks; offsets that do not fit the row; a
            head_mask of another size.
    """
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: expected None with attn_implementation={NAME!r}, got {kwargs[name]!r}")
    q, k, v = (heads.transpose(1, 2) for heads in (query, key, value))  # [B, S, A, D]
    if k.shape[2] < q.shape[2]:
        k, v = (heads.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for heads in (k, v))
    if head_mask is not None:
        if head_mask.numel() != q.shape[2]:
            raise ValueError(f"head_mask: expected {q.shape[2]} factors, one a head, got shape {list(head_mask.shape)}")
        v = v * head_mask.reshape(-1, 1).to(v.dtype)
    num_queries, num_keys = q.shape[1], k.shape[1]
    keep_mask = keep_mask_k = None
    bias, causal = position_bias, False
    is_row = len(q) == 1 and num_queries == num_keys and (attention_mask is None or attention_mask.dim() == 2)
    texts = texts_of_row(kwargs, num_keys) if is_row else None
    if texts is not None and (problem := offsets_problem(kwargs)) is not None:
        raise ValueError(problem)
    if texts is not None and attention_mask is not None and bool((attention_mask != 0).all()):
        attention_mask = None  # as transformers makes it for flash attention
    if attention_mask is None:
        causal = num_queries > 1 and bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
        if texts is not None:
            if position_bias is not None:
                raise ValueError(
                    f"position_bias: expected None beside flattened texts, got a {type(position_bias).__name__}"
                )
            return _attend_texts(q[0], k[0], v[0], texts, scaling, dropout, causal).unsqueeze(0), None
    elif attention_mask.dim() == 2:
        keep_mask_k = attention_mask
        if attention_mask.shape != (whole := (q.shape[0], num_keys)):
            sizes = zip(attention_mask.shape, whole, strict=True)
            keep_mask_k = attention_mask.expand([size if given == 1 else -1 for given, size in sizes])
        keep_mask = keep_mask_k if num_queries == num_keys else None
    else:
        added = _added(attention_mask, q.dtype)
        bias = added if bias is None else bias + added
    out = attention_padded(
        q, k, v, keep_mask=keep_mask, keep_mask_k=keep_mask_k, causal=causal,
        first_position=num_keys - num_queries if causal else 0, softmax_scale=scaling, dropout_p=dropout,
        seed=draw_seed(q.device) if dropout > 0.0 else None, bias=bias,
    )  # fmt: skip
    return out, None


def _attend_texts(
    q: Tensor, k: Tensor, v: Tensor, texts: Texts, scaling: float | None, dropout: float, causal: bool
) -> Tensor:
    """Attention of texts that lie one after another: q, k, v (Tensor [T, A, D]) to [T, A, D]."""
    packing = Packing.from_cu_seqlens(*texts, len(q), q.device)
    return attention(
        q, k, v, cu_seqlens_q=packing.cu_seqlens, max_seqlen_q=packing.max_seqlen, softmax_scale=scaling,
        causal=causal, dropout_p=dropout, seed=draw_seed(q.device) if dropout > 0.0 else None,
        coords_q=packing.coords, sequence_order=packing.order,
    )  # fmt: skip


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask [B or 1, A or 1, Sq, Sk] as what is added to scores."""
    if mask.is_floating_point():
        return mask
    return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(mask == 0, torch.finfo(dtype).min)
