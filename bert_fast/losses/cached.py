"""Losses of large batches with the activations of small ones."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bert_fast.checks import check_floating, check_shape

__all__ = ["cached_loss"]

_Part = TypeVar("_Part")


def cached_loss(
    encode: Callable[[_Part], Tensor],
    parts: Sequence[_Part],
    loss: Callable[[Tensor], Tensor],
    *,
    no_sync: Callable[[], AbstractContextManager[Any]] | None = None,
) -> Tensor:
    """`loss` of the embeddings of all parts, whose backward pass keeps the activations of one part at a time.

    Every part but the last is encoded twice: without a graph, for the loss; and once more in the backward pass, with
    the same dropout and autocast, which takes the gradient of its embeddings through it. The last part goes back first,
    through the graph that it was encoded with. With backward twice as long as forward, a step of k parts costs
    (4k - 1) / 3k of one that keeps everything: 1.25 for 4 parts, 4/3 at most.

        parts = [pairs[i : i + 64] for i in range(0, 4096, 64)]   # encoded to [64, 2, D]
        value = losses.cached_loss(encode, parts, lambda e: losses.in_batch_negatives(e[:, 0], e[:, 1]))
        value.backward()

    encode: a part to its embeddings [n, ...], any n; what it draws, it draws from PyTorch's generators of the CPU and
        of the current GPU: these are set back for the second time. It may not depend on anything else that changes.
    parts: at least one. loss: of the embeddings of all parts, one behind the other [B, ...], a Tensor []. The
        activations of the last part are there while it is made.
    no_sync: of a model whose backward exchanges gradients (`DistributedDataParallel.no_sync`); entered for all parts
        but the one that goes last, which is the first.
    Returns: the loss (Tensor []). Its gradients come by `backward()`, into `grad` of what `encode` uses: functions that
        return gradients (`torch.autograd.grad`) raise RuntimeError. Without gradients: `loss` of all embeddings.
    Raises: ValueError, TypeError naming the argument; in backward RuntimeError if a part comes out with another shape
        the second time.
    Parameters without a gradient get the one that `loss(torch.cat([encode(part) for part in parts])).backward()` gives
    them, to the last bit where `encode` uses a parameter once: parts go back from the last to the first, as autograd
    takes them. (Where it uses one twice, queries apart from documents, say, sums are taken in another order.)
    Source: Gao et al. 2021 (arXiv:2101.06983).
    """
    if not len(parts):
        raise ValueError("parts: expected at least one, got none")
    shapes: dict[int, torch.Size] = {}

    def encoded(index: int, _: Tensor | None = None) -> Tensor:
        with nullcontext() if no_sync is None or index == 0 else no_sync():
            embeddings = encode(parts[index])
        check_floating("encode(part)", embeddings)
        shape = shapes.setdefault(index, embeddings.shape)
        if embeddings.shape != shape:
            raise RuntimeError(f"encode: expected {list(shape)} again from part {index}, got {list(embeddings.shape)}")
        return embeddings

    # `checkpoint` goes back only through what it made of a tensor with a gradient, and sets back the generator and the
    # autocast of that tensor's device.
    asked = torch.empty(0, device="cuda" if torch.cuda.is_initialized() else "cpu", requires_grad=True)
    last = len(parts) - 1
    made = [checkpoint(encoded, index, asked, use_reentrant=True) for index in range(last)]
    value = loss(torch.cat((*made, encoded(last))))
    if torch.is_grad_enabled():
        check_shape("loss(embeddings)", value, ())
        if not value.requires_grad:
            raise ValueError("loss: expected a loss that depends on the embeddings, got one that does not")
    return value
