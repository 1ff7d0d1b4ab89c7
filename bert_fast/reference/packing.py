"""Padding removed and put back, and what an attention mask says.

A padded batch [B, S, ...] whose kept tokens are

    keep = [[1, 1, 0],
            [0, 1, 1]]

becomes [T, ...] = the tokens (0, 0), (0, 1), (1, 1), (1, 2), with cu_seqlens = [0, 2, 4]. These pairs, row and column
in the padded batch, are the tokens' `coords`: their names in dropout masks, biases and distances.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Which tokens of a padded batch are kept.

    keep (Tensor [B, S], bool); first_position (int): the position of column 0, above 0 where a cache comes before.
    """

    keep: Tensor
    first_position: int = 0

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32 [B + 1]: the first token of every sequence, and T."""
        lengths = self.keep.sum(1)
        return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()

    @cached_property
    def coords(self) -> Tensor:
        """int32 [T, 2]: (row, position) of every kept token."""
        rows, columns = self.keep.nonzero(as_tuple=True)
        return torch.stack([rows, columns + self.first_position], dim=1).int()

    def pack(self, padded: Tensor) -> Tensor:
        """[B, S, ...] to [T, ...]."""
        return padded[self.keep]

    def pad(self, packed: Tensor) -> Tensor:
        """[T, ...] to [B, S, ...], exactly 0 on padding."""
        padded = packed.new_zeros(*self.keep.shape, *packed.shape[1:])
        return padded.index_put(self.keep.nonzero(as_tuple=True), packed)

    def first_tokens(self, padded: Tensor) -> Tensor:
        """[B, H] of [B, S, H]: every row's first kept token ([CLS]); 0 where nothing is kept."""
        rows = torch.arange(len(self.keep), device=self.keep.device)
        # argmax finds the first True; in a row without any it finds column 0, which is 0 like all padding.
        return padded[rows, self.keep.int().argmax(1)] if self.keep.shape[1] else padded.sum(1)


def read_attention_mask(
    mask: Tensor | None, batch_size: int, num_queries: int, num_keys: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """What Hugging Face's attention masks mean: which keys exist, and what is added to the scores.

    mask: None: all keys exist.
        [B, Sk]: nonzero = a token, 0 = padding, which is taken out of the batch.
        [B, Sq, Sk]: nonzero = this query sees this key.
        [B or 1, A or 1, Sq or 1, Sk], bool or integer: the same, per head; floating: added to the scores, where -inf
        and the most negative number of its dtype both mean "does not see".
    Returns: keep (Tensor [B, Sk], bool); bias (Tensor broadcastable to [B, A, Sq, Sk], or None).
    Raises: ValueError for any other shape.
    """
    everything = torch.ones(batch_size, num_keys, dtype=torch.bool, device=device)
    if mask is None:
        return everything, None
    if mask.shape == (batch_size, num_keys):
        return mask != 0, None
    if mask.shape == (batch_size, num_queries, num_keys):
        return everything, _bias(mask[:, None] != 0)
    if mask.dim() == 4 and all(
        size in (1, full)
        for size, full in zip(mask.shape, (batch_size, mask.shape[1], num_queries, num_keys), strict=True)
    ):
        if not mask.is_floating_point():
            return everything, _bias(mask != 0)
        return everything, mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)
    raise ValueError(
        f"attention mask: expected [B, Sk], [B, Sq, Sk] or [B, A, Sq, Sk] with B = {batch_size}, Sq = {num_queries}, "
        f"Sk = {num_keys}, got {list(mask.shape)}"
    )


def _bias(sees: Tensor) -> Tensor:
    return torch.zeros(sees.shape, device=sees.device).masked_fill(~sees, -torch.inf)
