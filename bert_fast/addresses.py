"""Addresses, sizes and contiguity of many tensors in one call.

The C++ extension reads them through DLPack's C exchange table (`torch.Tensor.__dlpack_c_exchange_api__`). If the
extension or the table is missing, `Reader` calls the tensors' methods. Tensors must be plain and have memory.
"""

import functools
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from bert_fast import native

CONTIGUOUS = 16  # the bit for contiguous tensors in `Reader.lies`; the lower bits are the address modulo 16
_Tensors = Sequence[Tensor]


class Reader:
    """Reads lists and tuples of tensors through the tensors' methods."""

    def addresses(self, *lists: _Tensors) -> bytes:
        """Returns the addresses of all tensors, list after list, as consecutive int64 values."""
        return struct.pack(f"{sum(map(len, lists))}q", *map(Tensor.data_ptr, chain(*lists)))

    def sizes(self, *lists: _Tensors) -> bytes:
        """Returns the numbers of elements in the same form."""
        return struct.pack(f"{sum(map(len, lists))}q", *map(Tensor.numel, chain(*lists)))

    def lies(self, *lists: _Tensors) -> bytes:
        """Returns one byte for each tensor: its address modulo 16, plus 16 if it is contiguous."""
        return bytes([one.data_ptr() % 16 + CONTIGUOUS * one.is_contiguous() for one in chain(*lists)])

    def are_alike(self, *lists: _Tensors) -> bool:
        """Returns whether all tensors are contiguous, have the same dtype and are on the same device."""
        tensors = list(chain(*lists))
        return all(map(Tensor.is_contiguous, tensors)) and len({(one.dtype, one.device) for one in tensors}) <= 1


@functools.cache
def reader() -> Reader:
    """Returns the extension's reader, or a `Reader` if PyTorch or the extension does not support it."""
    capsule = exchange()
    return Reader() if capsule is None else native.load().TensorReader(capsule, Tensor)  # type: ignore[union-attr]


def numbers_of(key: bytes) -> list[int]:
    """Returns the int64 values that `addresses` or `sizes` returned."""
    return memoryview(key).cast("q").tolist()


def lie_of(tensors: list[Tensor]) -> tuple[bytes, tuple[Any, ...] | None]:
    """Returns alignment and contiguity of tensors, and their strides unless all are contiguous."""
    lies = reader().lies(tensors)
    return lies, None if min(lies) >= CONTIGUOUS else tuple([one.stride() for one in tensors])


@functools.cache
def exchange() -> Any | None:
    """Returns PyTorch's DLPack table as a capsule, or None if it is missing or its answers are wrong for a sample."""
    extension, capsule = native.load(), getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if extension is None or capsule is None:
        return None
    try:
        given = extension.TensorReader(capsule, Tensor)
        return capsule if all(_are_read(given, one) for one in _samples()) else None
    except Exception:  # a table of another form may raise anything
        return None


def _samples() -> list[Tensor]:
    """Returns CPU tensors with several dtypes, ranks, strides and storage offsets."""
    whole = torch.arange(24, dtype=torch.float32, device="cpu")
    return [
        whole, whole[5:], whole.view(2, 3, 4), whole.view(4, 6).t(), whole.view(4, 6)[1:, 2:4], whole.new_ones(()),
        whole.new_empty(3, 0), torch.nn.Parameter(whole.to(torch.bfloat16)), whole.to(torch.int64).view(24, 1),
    ]  # fmt: skip


def _are_read(given: Reader, one: Tensor) -> bool:
    """Returns whether a reader agrees with the tensor's own methods."""
    lists, by_methods = ([one], (one,)), Reader()
    return (
        given.addresses(*lists) == by_methods.addresses(*lists)
        and given.sizes(*lists) == by_methods.sizes(*lists)
        and given.lies(*lists) == by_methods.lies(*lists)
        and given.are_alike(*lists) is by_methods.are_alike(*lists)
        and given.are_alike([one, one.new_ones(1, dtype=torch.float64)]) is False
    )
