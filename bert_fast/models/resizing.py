"""Tables with more or fewer rows: new tokens in the vocabulary, longer sequences."""

from collections.abc import Iterable

import torch
from torch import Tensor

from bert_fast.models.config_checks import at_least

_SPREAD = 1e-9  # share of the old rows' covariance that new rows have, as in transformers
_BLOCK = 1024  # new rows at a time: each takes a number for every old one


def padded_size(name: str, size: int, multiple: int | None) -> int:
    """The smallest multiple that is at least `size`; `size` itself where multiple is None.

    Raises: TypeError, ValueError unless both are positive ints, and the size one that a configuration takes.
    """
    for argument, value in ((name, size), ("pad_to_multiple_of", 1 if multiple is None else multiple)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{argument}: expected an int, got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"{argument}: expected at least 1, got {value}")
    return at_least(1)(name, size if multiple is None else -(-size // multiple) * multiple)


@torch.no_grad()
def resize_rows(parameters: Iterable[Tensor], num_rows: int, std: float | None) -> None:
    """Gives each parameter num_rows rows: the last ones are cut off, or new ones come behind them.

    std: of new rows, drawn from normal(0, std), those of a vector being 0; None: they are drawn around the mean of the
    old ones, so that a softmax over old and new ones hardly changes (Hewitt 2021, "Initializing new word embeddings for
    pretrained language models"). The parameters stay the same objects, without gradients: optimizers must be made anew.
    Where there is no memory for all of them, none is changed.
    """
    parameters = list(parameters)
    for parameter, resized in zip(parameters, [_resized(p.detach(), num_rows, std) for p in parameters], strict=True):
        parameter.data = resized
        parameter.grad = None


def _resized(old: Tensor, num_rows: int, std: float | None) -> Tensor:
    added = num_rows - len(old)
    if added <= 0:
        return old[:num_rows].clone() if added else old
    new = _around_mean(old, added) if std is None else _fresh(old, added, std)
    return torch.cat((old, new.to(old.dtype)))


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
    spread, scale = old - mean, (_SPREAD / len(old)) ** 0.5
    blocks = []
    for start in range(0, count, _BLOCK):
        weights = torch.randn(min(_BLOCK, count - start), len(old), device=old.device) * scale
        blocks.append(mean + torch.tensordot(weights, spread, dims=1))
    return torch.cat(blocks)
