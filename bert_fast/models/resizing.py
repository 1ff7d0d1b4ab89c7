"""Tables with more or fewer rows: new tokens in the vocabulary, longer sequences."""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["padded_size", "resize_rows"]

_SPREAD = 1e-9  # share of the old rows' covariance that new rows have, as in transformers


def padded_size(size: int, multiple: int | None) -> int:
    """The smallest multiple that is at least `size`; `size` itself where multiple is None.

    Raises: TypeError, ValueError unless both are positive ints.
    """
    for name, value in (("new_num_tokens", size), ("pad_to_multiple_of", 1 if multiple is None else multiple)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    return size if multiple is None else -(-size // multiple) * multiple


@torch.no_grad()
def resize_rows(parameters: Iterable[Tensor], num_rows: int, std: float | None) -> None:
    """Gives each parameter num_rows rows: the last ones are cut off, or new ones come behind them.

    std: of new rows, drawn from normal(0, std), those of a vector being 0; None: they are drawn around the mean of the
    old ones, so that a softmax over old and new ones hardly changes (Hewitt 2021, "Initializing new word embeddings for
    pretrained language models"). The parameters stay the same objects, without gradients: optimizers must be made anew.
    """
    for parameter in parameters:
        old = parameter.detach()
        added = num_rows - len(old)
        if added > 0:
            new = _around_mean(old, added) if std is None else _fresh(old, added, std)
            parameter.data = torch.cat((old, new.to(old.dtype)))
        elif added < 0:
            parameter.data = old[:num_rows].clone()
        parameter.grad = None


def _fresh(old: Tensor, count: int, std: float) -> Tensor:
    new = old.new_zeros((count, *old.shape[1:]))
    return new.normal_(0.0, std) if old.dim() > 1 else new


def _around_mean(old: Tensor, count: int) -> Tensor:
    """`count` rows with the mean of the rows of `old` [N, ...] and _SPREAD times their covariance.

    With rows d_i of `old` less their mean, sum_i z_i d_i / sqrt(N) has their covariance for independent z_i of variance
    1; no matrix needs to be positive definite.
    """
    old = old.float()
    mean = old.mean(0, keepdim=True)
    weights = torch.randn(count, len(old), device=old.device) * (_SPREAD / len(old)) ** 0.5
    return mean + torch.tensordot(weights, old - mean, dims=1)
