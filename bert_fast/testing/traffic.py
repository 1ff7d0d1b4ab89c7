"""Counts what Triton kernels really load and store, byte addresses and all, in Triton's interpreter."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

__all__ = ["Traffic", "traffic"]


class Traffic:
    """Accesses of the kernels run within `traffic()`; masked elements do not count.

    loads, stores: address of an element -> how often it was loaded or stored.
    loaded_bytes, stored_bytes: the sums, every access counted.
    """

    def __init__(self) -> None:
        self.loads, self.stores = Counter[int](), Counter[int]()
        self.loaded_bytes = self.stored_bytes = 0

    def times_loaded(self, t: Tensor) -> set[int]:
        """How often the elements of a contiguous tensor were loaded: {1} where each was, once."""
        return _times(self.loads, t)

    def times_stored(self, t: Tensor) -> set[int]:
        """How often the elements of a contiguous tensor were stored."""
        return _times(self.stores, t)

    def unique_loaded_bytes(self, *tensors: Tensor) -> int:
        """Bytes of these contiguous tensors that were loaded at least once."""
        return sum(_touched(self.loads, t) for t in tensors)


def _addresses(t: Tensor) -> range:
    assert t.is_contiguous()
    return range(t.data_ptr(), t.data_ptr() + t.nbytes, t.element_size())


def _times(counter: "Counter[int]", t: Tensor) -> set[int]:
    return {counter[address] for address in _addresses(t)}


def _touched(counter: "Counter[int]", t: Tensor) -> int:
    return sum(address in counter for address in _addresses(t)) * t.element_size()


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Within the context, loads and stores of interpreted kernels are counted; TRITON_INTERPRET must be 1."""
    from triton.runtime.interpreter import interpreter_builder as builder

    counts = Traffic()
    load, store = builder.create_masked_load, builder.create_masked_store

    def counting_load(ptrs: Any, mask: Any, *arguments: Any) -> Any:
        addresses = ptrs.data[mask.data].ravel().tolist()
        counts.loads.update(addresses)
        counts.loaded_bytes += len(addresses) * ptrs.get_element_ty().primitive_bitwidth // 8
        return load(ptrs, mask, *arguments)

    def counting_store(ptrs: Any, value: Any, mask: Any, *arguments: Any) -> Any:
        addresses = ptrs.data[mask.data].ravel().tolist()
        counts.stores.update(addresses)
        counts.stored_bytes += len(addresses) * ptrs.get_element_ty().primitive_bitwidth // 8
        return store(ptrs, value, mask, *arguments)

    with mock.patch.multiple(builder, create_masked_load=counting_load, create_masked_store=counting_store):
        yield counts
