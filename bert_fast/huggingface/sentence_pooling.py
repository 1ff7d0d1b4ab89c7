"""What sentence-transformers' Pooling makes of tokens, from packed ones; features of a batch that stay packed."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bert_fast.models.pooling import pooled
from bert_fast.ops.packing import Packing

_TOKENS = "token_embeddings"


def pool(hidden: Tensor, packing: Packing, modes: str | tuple[str, ...]) -> Tensor:
    """The vectors [B, H of every mode] that `Pooling` makes, in the dtype of hidden (Tensor [T, H]).

    A sequence without tokens gets zeros.
    """
    names = (modes,) if isinstance(modes, str) else modes
    return torch.cat([_pool(hidden, packing, name) for name in names], dim=1).to(hidden.dtype)


def _pool(hidden: Tensor, packing: Packing, mode: str) -> Tensor:
    cu_seqlens = packing.cu_seqlens
    if mode == "cls":
        return packing.first_tokens(hidden)
    if not len(hidden):
        return hidden.new_zeros(packing.num_sequences, hidden.shape[1])
    lengths = cu_seqlens.diff()
    if mode == "lasttoken":
        return pooled(hidden, cu_seqlens, "last").masked_fill((lengths == 0).unsqueeze(1), 0.0)
    if mode == "max":
        return pooled(hidden, cu_seqlens, "max")
    if mode == "weightedmean":  # by columns since the first token: a mask may have holes
        columns = packing.coords[:, 1]
        first = columns.index_select(0, cu_seqlens[:-1].long().clamp(max=len(hidden) - 1))
        wide = hidden if hidden.dtype == torch.float64 else hidden.float()
        weights = (columns - first.repeat_interleave(lengths, output_size=len(hidden)) + 1).to(wide.dtype).unsqueeze(1)
        # A quotient of means is that of the sums.
        return pooled(wide * weights, cu_seqlens, "mean") / pooled(weights, cu_seqlens, "mean").clamp(min=1e-9)
    mean = pooled(hidden, cu_seqlens, "mean")
    return mean if mode == "mean" else mean * lengths.unsqueeze(1).to(mean.dtype).sqrt()


class TokenFeatures(dict[str, Any]):
    """Features of a batch whose `token_embeddings` [B, S, H], of packed input [T, H], are made when they are read."""

    _make: Callable[[], Tensor] | None = None

    def __init__(self, values: Mapping[str, Any] = {}, make: Callable[[], Tensor] | None = None) -> None:
        super().__init__(values)
        super().pop(_TOKENS, None)
        self._make = make
        if make is None and _TOKENS in values:
            super().__setitem__(_TOKENS, values[_TOKENS])

    def _complete(self) -> None:
        make, self._make = self._make, None
        if make is not None:
            super().__setitem__(_TOKENS, make())

    def __getitem__(self, key: Any) -> Any:
        if key == _TOKENS:
            self._complete()
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if key == _TOKENS:
            self._make = None
        super().__setitem__(key, value)

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(key) or (key == _TOKENS and self._make is not None)

    def get(self, key: Any, default: Any = None) -> Any:
        """As of any dictionary."""
        if key == _TOKENS:
            self._complete()
        return super().get(key, default)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


def _completing(name: str) -> Callable[..., Any]:
    original = getattr(dict, name)

    def method(self: TokenFeatures, *args: Any, **kwargs: Any) -> Any:
        self._complete()
        return original(self, *args, **kwargs)

    method.__name__, method.__doc__ = name, original.__doc__
    return method


# All others that show what is in a dictionary, or change it.
for _name in (
    "__delitem__", "__eq__", "__ior__", "__iter__", "__len__", "__ne__", "__or__", "__repr__", "__reversed__",
    "__ror__", "clear", "copy", "items", "keys", "pop", "popitem", "setdefault", "update", "values",
):  # fmt: skip
    setattr(TokenFeatures, _name, _completing(_name))
