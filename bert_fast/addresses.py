"""Where tensors lie: their addresses and sizes, of many of them in one call.

The C++ extension reads them by DLPack's exchange of C functions, which PyTorch has since 2.11. Without either the
tensors' methods are asked. All tensors are to be plain ones with memory.
"""

import functools
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from bert_fast import native

__all__ = ["CONTIGUOUS", "Reader", "exchange", "numbers_of", "reader"]

CONTIGUOUS = 16  # in what `Reader.lies` returns; its other bits are of the address
_Tensors = Sequence[Tensor]


class Reader:
    """What is asked of lists and tuples of tensors; this one asks the tensors' methods."""

    def addresses(self, *lists: _Tensors) -> bytes:
        """Addresses, list after list, as int64 one behind the other: soon hashed, compared and stored."""
        return struct.pack(f"{sum(map(len, lists))}q", *map(Tensor.data_ptr, chain(*lists)))

    def sizes(self, *lists: _Tensors) -> bytes:
        """Numbers of elements, likewise."""
        return struct.pack(f"{sum(map(len, lists))}q", *map(Tensor.numel, chain(*lists)))

    def lies(self, *lists: _Tensors) -> bytes:
        """A byte of each: its address modulo 16, and 16 more where it is contiguous."""
        return bytes([one.data_ptr() % 16 + CONTIGUOUS * one.is_contiguous() for one in chain(*lists)])

    def are_alike(self, *lists: _Tensors) -> bool:
        """Whether all are contiguous, of one dtype and on one device."""
        tensors = list(chain(*lists))
        return all(map(Tensor.is_contiguous, tensors)) and len({(one.dtype, one.device) for one in tensors}) <= 1


@functools.cache
def reader() -> Reader:
    """The quickest one that there is."""
    capsule = exchange()
    return Reader() if capsule is None else native.load().TensorReader(capsule, Tensor)  # type: ignore[union-attr]


def numbers_of(key: bytes) -> list[int]:
    """The addresses, or sizes, that a reader found."""
    return memoryview(key).cast("q").tolist()


@functools.cache
def exchange() -> Any | None:
    """PyTorch's functions for the extension, as a capsule; None where there are none that do what DLPack says."""
    extension, capsule = native.load(), getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if extension is None or capsule is None:
        return None
    try:
        given = extension.TensorReader(capsule, Tensor)
        return capsule if all(_are_read(given, one) for one in _samples()) else None
    except Exception:  # whatever another PyTorch does
        return None


def _samples() -> list[Tensor]:
    """Tensors on the CPU of several dtypes, dimensions, strides and offsets."""
    whole = torch.arange(24, dtype=torch.float32, device="cpu")
    return [
        whole, whole[5:], whole.view(2, 3, 4), whole.view(4, 6).t(), whole.view(4, 6)[1:, 2:4], whole.new_ones(()),
        whole.new_empty(3, 0), torch.nn.Parameter(whole.to(torch.bfloat16)), whole.to(torch.int64).view(24, 1),
    ]  # fmt: skip


def _are_read(given: Reader, one: Tensor) -> bool:
    """Whether a reader says of a tensor what the tensor says."""
    lists, by_methods = ([one], (one,)), Reader()
    return (
        given.addresses(*lists) == by_methods.addresses(*lists)
        and given.sizes(*lists) == by_methods.sizes(*lists)
        and given.lies(*lists) == by_methods.lies(*lists)
        and given.are_alike(*lists) is by_methods.are_alike(*lists)
        and given.are_alike([one, one.new_ones(1, dtype=torch.float64)]) is False
    )
