"""What batches are made of: numbered sequences of known lengths."""

from typing import Protocol, runtime_checkable

import numpy as np

from bert_fast.tokenization.pack import PackedBatch

__all__ = ["Source"]


@runtime_checkable
class Source(Protocol):
    """Examples 0 to n - 1 of every epoch, of known lengths; a batch of them is a pure function of its arguments.

    So any process, worker or thread may make any batch, in any order, and a run can go on in the middle of an epoch.
    An example is one sequence, but where a task joins several to one (the choices of a question): then all of them.
    """

    def lengths(self, epoch: int) -> np.ndarray:
        """Tokens of every example of this epoch, special tokens counted: int32 [n]."""
        ...

    def batch(self, epoch: int, indices: np.ndarray) -> PackedBatch:
        """The examples `indices` (int64 [B], each from 0 to n - 1) as what a model takes: CPU tensors, with labels.

        Entries: input_ids, token_type_ids, position_ids (int64 [T]), cu_seqlens (int32), max_seqlen (int), and the
        labels under the names of the model's arguments.
        """
        ...
