"""What attention masks and head masks say, in the forms that transformers takes."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_fast.checks import check_tensor, is_host_beside


def read_attention_mask(
    name: str, mask: Any, batch_size: int, num_queries: int, num_keys: int, num_heads: int, device: torch.device,
    *, all_columns: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Which keys exist, and what is added to the scores.

    mask (Tensor [B or 1, Sk or 1]): nonzero marks a token, 0 padding, which is taken out of the batch. May be on the
        CPU.
        [B or 1, Sq or 1, Sk]: nonzero where a query sees a key.
        [B or 1, A or 1, Sq or 1, Sk], bool or integer: the same for every head; floating: added to the scores, where
        -inf and the most negative number of its dtype both mean "does not see". Differentiable.
    device: where what it masks is.
    all_columns: a mask of one column is refused, since in a decoder transformers takes the others for padding.
    Returns: keep (Tensor [B, Sk], or None: all); bias (Tensor [B or 1, A or 1, Sq or 1, Sk], or None).

    Raises:
        TypeError, ValueError: no tensor, one of another shape or elsewhere, or one [B, Sk] without values.
    """
    if mask is None:
        return None, None
    check_tensor(name, mask)
    whole = (batch_size, num_keys)
    has_columns = mask.dim() == 2 and (mask.shape[1] == num_keys or not all_columns)
    if mask.shape != whole and has_columns and _broadcasts(mask, whole):
        mask = mask.expand(whole)
    if mask.device != device and not (mask.shape == whole and is_host_beside(mask, device)):
        raise ValueError(f"{name}: expected device {device} (that of what it masks), got {mask.device}")
    if mask.shape == whole:
        if mask.is_meta:
            raise ValueError(f"{name}: expected a Tensor with values, since they are counted, got one on meta")
        return mask, None
    if mask.dim() == 3 and mask.shape[2] == num_keys and _broadcasts(mask, (batch_size, num_queries, num_keys)):
        return None, _bias(mask.unsqueeze(1))
    full = (batch_size, num_heads, num_queries, num_keys)
    if mask.dim() == 4 and mask.shape[3] == num_keys and _broadcasts(mask, full):
        if not mask.is_floating_point():
            return None, _bias(mask)
        return None, mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)
    raise ValueError(
        f"{name}: expected shape [{batch_size}, {num_keys}], [{batch_size}, {num_queries}, {num_keys}] or "
        f"[{batch_size} or 1, {num_heads} or 1, {num_queries} or 1, {num_keys}], got {list(mask.shape)}"
    )


def read_head_mask(
    head_mask: Any, num_layers: int, batch_size: int, num_heads: int, num_queries: int, num_keys: int
) -> Tensor | None:
    """The factors of every layer's probabilities, [L, B or 1, A, Sq or 1, Sk or 1].

    head_mask (Tensor [A], [L, A] or [L, B or 1, A, Sq or 1, Sk or 1], bool or number): 1 keeps a head, 0 takes it out.

    Raises:
        TypeError, ValueError: no tensor, or one of another shape.
    """
    if head_mask is None:
        return None
    check_tensor("head_mask", head_mask)
    if head_mask.is_complex() or head_mask.is_quantized:
        raise TypeError(f"head_mask: expected numbers or bools, got {str(head_mask.dtype).removeprefix('torch.')}")
    if not head_mask.is_floating_point():
        head_mask = head_mask.float()
    if head_mask.shape == (num_heads,):
        return head_mask.view(1, 1, num_heads, 1, 1).expand(num_layers, -1, -1, -1, -1)
    if head_mask.shape == (num_layers, num_heads):
        return head_mask.view(num_layers, 1, num_heads, 1, 1)
    full = (num_layers, batch_size, num_heads, num_queries, num_keys)
    if head_mask.dim() == 5 and head_mask.shape[0] == num_layers and _broadcasts(head_mask, full):
        return head_mask
    raise ValueError(
        f"head_mask: expected shape [{num_heads}], [{num_layers}, {num_heads}] or "
        f"[{num_layers}, {batch_size} or 1, {num_heads}, {num_queries} or 1, {num_keys} or 1], "
        f"got {list(head_mask.shape)}"
    )


def behind(batched: Tensor | None, num_cached: int) -> Tensor | None:
    """[..., Sq, Sk] of this call's queries as one by position, which cached tokens come before; 1 stays 1."""
    if batched is None or num_cached == 0 or batched.shape[-2] == 1:
        return batched
    return F.pad(batched, (0, 0, num_cached, 0))


def _bias(sees: Tensor) -> Tensor:
    return torch.zeros(sees.shape, device=sees.device).masked_fill(sees == 0, -torch.inf)


def _broadcasts(t: Tensor, full: tuple[int, ...]) -> bool:
    return all(size in (1, whole) for size, whole in zip(t.shape, full, strict=True))
