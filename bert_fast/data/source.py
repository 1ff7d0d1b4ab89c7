"""What batches are made of: numbered sequences of known lengths."""

from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from bert_fast.data.digests import data_digest
from bert_fast.tokenization.pack import PackedBatch

__all__ = ["Source", "check_source", "source_digest"]

_SAMPLE = 1000  # examples that stand for all of a source that has no digest of its own


@runtime_checkable
class Source(Protocol):
    """Examples 0 to n - 1 of every epoch, of known lengths; a batch of them is a pure function of its arguments.

    So any process, worker or thread may make any batch, in any order, and a run can go on in the middle of an epoch.
    An example is one sequence, but where a task joins several to one (the choices of a question): then all of them.

    A source may have `digest() -> str`, too, which differs where its examples do: see `source_digest`.
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


def check_source(name: str, source: Any) -> Source:
    """The source itself; raises TypeError if it is none."""
    if isinstance(source, type) or not isinstance(source, Source):
        raise TypeError(f"{name}: expected a source of examples (lengths, batch), got {type(source).__name__}")
    return source


def source_digest(source: Source) -> str:
    """What tells the examples of a source from others: two sources of other tokens, labels or order have another one.

    That is what its `digest` says. Of a source without one it is made of the lengths in epoch 0, and of up to 1,000
    examples, evenly distributed: changes to others are not seen.
    """
    own = getattr(check_source("source", source), "digest", None)
    if own is not None:
        return str(own())
    lengths = source.lengths(0)
    indices = np.unique(np.linspace(0, len(lengths) - 1, min(len(lengths), _SAMPLE)).astype(np.int64))
    return data_digest(lengths, *(part for item in source.batch(0, indices).items() for part in _parts(*item)))


def _parts(name: str, value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        return [name, str(plain.dtype), list(plain.shape), plain.reshape(-1).view(torch.uint8).numpy()]
    return [name, value] if isinstance(value, int | float | str | np.ndarray) else [name]
