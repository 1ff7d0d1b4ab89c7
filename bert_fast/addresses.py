"""Where tensors lie: their addresses and sizes, of many of them in one call.

The C++ extension reads them by DLPack's exchange of C functions, which PyTorch has since 2.11, at about a seventh of
what the tensors' methods take. Without either the methods are asked. All tensors are to be plain ones with memory.
"""

import functools
import struct
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from bert_fast import native

__all__ = ["addresses_of", "are_alike", "exchange", "numbers_of", "sizes_of"]

_Tensors = Sequence[Tensor]


def addresses_of(*lists: _Tensors) -> bytes:
    """Addresses of the tensors in lists and tuples, as int64 one behind the other: soon hashed, compared and stored."""
    return _reading()[0](*lists)


def sizes_of(*lists: _Tensors) -> bytes:
    """Numbers of elements, likewise."""
    return _reading()[1](*lists)


def are_alike(*lists: _Tensors) -> bool:
    """Whether all tensors in lists and tuples are contiguous, of one dtype and on one device."""
    return _reading()[2](*lists)


def numbers_of(key: bytes) -> list[int]:
    """The addresses, or sizes, in what the functions above return."""
    return memoryview(key).cast("q").tolist()


@functools.cache
def exchange() -> Any | None:
    """PyTorch's functions for the extension, as a capsule; None where there are none that do what DLPack says."""
    extension, capsule = native.load(), getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if extension is None or capsule is None:
        return None
    try:
        reader = extension.TensorReader(capsule, Tensor)
        return capsule if all(_are_read(reader, one) for one in _samples()) else None
    except (ValueError, TypeError, RuntimeError, BufferError):
        return None


@functools.cache
def _reading() -> tuple[Callable[..., bytes], Callable[..., bytes], Callable[..., bool]]:
    if exchange() is None:
        return _addresses, _sizes, _are_alike
    reader = native.load().TensorReader(exchange(), Tensor)  # type: ignore[union-attr]
    return reader.addresses, reader.sizes, reader.are_alike


def _samples() -> list[Tensor]:
    """Tensors on the CPU of several dtypes, dimensions, strides and offsets."""
    whole = torch.arange(24, dtype=torch.float32)
    return [
        whole, whole[5:], whole.view(2, 3, 4), whole.view(4, 6).t(), whole.view(4, 6)[1:, 2:4], torch.ones(()),
        torch.empty(3, 0), torch.nn.Parameter(whole.to(torch.bfloat16)), torch.ones(5, 1, dtype=torch.int64),
    ]  # fmt: skip


def _are_read(reader: Any, one: Tensor) -> bool:
    """Whether the reader says of a tensor what the tensor says."""
    given = ([one], (one,))
    return (
        reader.addresses(*given) == _addresses(*given)
        and reader.sizes(*given) == _sizes(*given)
        and reader.are_alike(*given) is _are_alike(*given)
        and reader.are_alike([one, torch.ones(1, dtype=torch.float64)]) is False
    )


def _addresses(*lists: _Tensors) -> bytes:
    return struct.pack(f"{sum(map(len, lists))}q", *map(Tensor.data_ptr, chain(*lists)))


def _sizes(*lists: _Tensors) -> bytes:
    return struct.pack(f"{sum(map(len, lists))}q", *map(Tensor.numel, chain(*lists)))


def _are_alike(*lists: _Tensors) -> bool:
    tensors = list(chain(*lists))
    return all(map(Tensor.is_contiguous, tensors)) and len({(one.dtype, one.device) for one in tensors}) <= 1
