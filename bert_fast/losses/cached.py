"""Losses of large batches with the activations of small ones."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from bert_fast.checks import check_floating, check_shape

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

    Args:
        encode: a part to its embeddings [n, ...], any n; what it draws, it draws from PyTorch's generators of the CPU
            and of the current GPU: these are set back for the second time. It may not depend on anything else that
            changes.
        parts: at least one.
        loss: of the embeddings of all parts, one behind the other [B, ...], a Tensor []. The activations of the last
            part are there while it is made.
        no_sync: of a model whose backward exchanges gradients (`DistributedDataParallel.no_sync`); entered for all
            parts but the one that goes last, which is the first.

    Returns:
        the loss (Tensor []). Its gradients come by `backward()`, into `grad` of what `encode` uses: functions that
        return gradients (`torch.autograd.grad`) do not see through it. Without gradients: `loss` of all embeddings.

    Raises:
        ValueError, TypeError: the message names the argument.
        RuntimeError: in backward, a part comes out with another shape the second time.

    Parameters without a gradient get the one that `loss(torch.cat([encode(part) for part in parts])).backward()` gives
    them, to the last bit where `encode` uses a parameter once: parts go back from the last to the first, as autograd
    takes them. (Where it uses one twice, queries apart from documents, say, sums are taken in another order.)
    Source: Gao et al. 2021 (arXiv:2101.06983).

    Example:
        >>> encoder = torch.nn.Linear(4, 8)
        >>> parts = list(torch.randn(6, 2, 4).split(2))  # three parts of two pairs
        >>> loss = losses.cached_loss(encoder, parts, lambda e: losses.in_batch_negatives(e[:, 0], e[:, 1]))
        >>> loss.backward()
        >>> encoder.weight.grad.shape
        torch.Size([8, 4])
    """
    if not len(parts):
        raise ValueError("parts: expected at least one, got none")
    last = len(parts) - 1

    def exchange(index: int) -> AbstractContextManager[Any]:
        return nullcontext() if no_sync is None or index == 0 else no_sync()

    states, made = [], []
    with torch.no_grad():
        for index in range(last):
            states.append(_generators())
            made.append(encode(parts[index]))
            check_floating("encode(part)", made[-1])
    with exchange(last):
        kept = encode(parts[last])
    check_floating("encode(part)", kept)
    sizes, shapes = [len(t) for t in (*made, kept)], [t.shape for t in made]
    device = kept.device.type
    # Backward usually runs outside the forward pass's autocast.
    autocast = functools.partial(
        torch.autocast, device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device),
        torch.is_autocast_cache_enabled(),
    )  # fmt: skip
    embeddings = torch.cat((*made, kept.detach()))
    del made
    if not torch.is_grad_enabled():
        return loss(embeddings)

    def go_back(gradient: Tensor) -> None:
        pieces, now = gradient.split(sizes), _generators()
        with torch.enable_grad():
            with exchange(last):
                kept.backward(pieces[last])
            for index in reversed(range(last)):
                _set_generators(states[index])
                with exchange(index):
                    with autocast():
                        again = encode(parts[index])
                    if again.shape != shapes[index]:
                        raise RuntimeError(
                            f"encode: expected {list(shapes[index])} again from part {index}, got {list(again.shape)}"
                        )
                    again.backward(pieces[index])
        _set_generators(now)

    embeddings.requires_grad_().register_hook(go_back)
    value = loss(embeddings)
    check_shape("loss(embeddings)", value, ())
    if not value.requires_grad:
        raise ValueError("loss: expected a loss that depends on the embeddings, got one that does not")
    return value


def _generators() -> tuple[Tensor, Tensor | None]:
    """States of the generators of the CPU and, where there is one in use, of the current GPU."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def _set_generators(states: tuple[Tensor, Tensor | None]) -> None:
    cpu, gpu = states
    torch.set_rng_state(cpu)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu)
