"""Counts what Triton kernels really load and store, byte addresses and all, in Triton's interpreter.

Every way into memory is seen: loads and stores with and without a mask, by tensor descriptor, and atomics (each one
counts as a load and a store). In Triton 3.6 to 3.9 all but the atomics pass through the interpreter's masked load and
store, which is where the counting happens.

Caches do not exist here: an element that every program reads counts every time. `assert_traffic` therefore lets the
caller name the small tensors that a GPU reads from memory once and from its cache after that.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bert_fast.testing.tolerances import RELATIVE


class Traffic:
    """Accesses of the kernels run within `traffic()`; masked elements do not count.

    loads, stores: address of an element -> how often it was loaded or stored. No tensor that is made within the
        context is freed before its end, so no two of them have the same address.
    loaded_bytes, stored_bytes: the sums, every access counted.
    """

    def __init__(self) -> None:
        self.loads, self.stores = Counter[int](), Counter[int]()
        self.loaded_bytes = self.stored_bytes = 0
        self._sizes: dict[int, int] = {}

    @property
    def total_bytes(self) -> int:
        """Bytes loaded and stored, every access counted."""
        return self.loaded_bytes + self.stored_bytes

    @property
    def unique_bytes(self) -> int:
        """Bytes loaded plus bytes stored, each address counted once in either direction: what perfect caches leave."""
        return sum(self._sizes[address] for counter in (self.loads, self.stores) for address in counter)

    def times_loaded(self, t: Tensor) -> set[int]:
        """How often the elements of a contiguous tensor were loaded: {1} where each was, once."""
        return _times(self.loads, t)

    def times_stored(self, t: Tensor) -> set[int]:
        """How often the elements of a contiguous tensor were stored."""
        return _times(self.stores, t)

    def unique_loaded_bytes(self, *tensors: Tensor) -> int:
        """Bytes of these contiguous tensors that were loaded at least once."""
        return sum(_touched(self.loads, t) for t in tensors)

    def unique_stored_bytes(self, *tensors: Tensor) -> int:
        """Bytes of these contiguous tensors that were stored at least once."""
        return sum(_touched(self.stores, t) for t in tensors)

    def repeated_loaded_bytes(self, *tensors: Tensor) -> int:
        """Bytes of these contiguous tensors that were loaded a second, third, ... time."""
        return sum(max(0, self.loads[address] - 1) * t.element_size() for t in tensors for address in _addresses(t))

    def _count_load(self, addresses: list[int], size: int) -> None:
        self.loads.update(addresses)
        self.loaded_bytes += len(addresses) * size
        self._sizes.update(dict.fromkeys(addresses, size))

    def _count_store(self, addresses: list[int], size: int) -> None:
        self.stores.update(addresses)
        self.stored_bytes += len(addresses) * size
        self._sizes.update(dict.fromkeys(addresses, size))


def assert_traffic(counts: Traffic, floor_bytes: float, *, cached: Iterable[Tensor] = ()) -> None:
    """Asserts that what was loaded and stored is the floor, or at most 5 % more.

    counts: of one launch.
    floor_bytes: what the docstring of the kernel says must move: loads and stores, all programs. Never more than what
        was counted, otherwise it is no floor.
    cached: contiguous tensors that many programs read and that a GPU keeps in its cache (weights, biases, a seed): only
        their first read counts.

    Raises:
        AssertionError: with both numbers, when too much moved, or less than the floor claims.
    """
    moved = counts.total_bytes - counts.repeated_loaded_bytes(*cached)
    allowed = floor_bytes * (1 + RELATIVE["traffic_above_floor"])
    parts = f"{counts.loaded_bytes} loaded + {counts.stored_bytes} stored, repeated reads of cached tensors left out"
    share = moved / max(floor_bytes, 1)
    assert moved <= allowed, f"{moved} bytes moved ({parts}), {share:.3f} of the floor {floor_bytes}"
    assert moved >= floor_bytes, f"{moved} bytes moved ({parts}) are less than the floor {floor_bytes}: it is none"


def _addresses(t: Tensor) -> range:
    assert t.is_contiguous()
    return range(t.data_ptr(), t.data_ptr() + t.nbytes, t.element_size())


def _times(counter: "Counter[int]", t: Tensor) -> set[int]:
    return {counter[address] for address in _addresses(t)}


def _touched(counter: "Counter[int]", t: Tensor) -> int:
    return sum(address in counter for address in _addresses(t)) * t.element_size()


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Counts accesses of interpreted kernels within the context; TRITON_INTERPRET must be 1."""
    from triton.runtime.interpreter import interpreter_builder as builder

    counts = Traffic()

    def bytes_of(ptrs: Any) -> int:
        return max(8, ptrs.get_element_ty().primitive_bitwidth) // 8  # booleans take a byte in memory

    def accessed(ptrs: Any, mask: Any) -> tuple[list[int], int]:
        # Descriptors hand over a mask whose `data` is a buffer, no array.
        return ptrs.data[np.asarray(mask.data, dtype=bool)].ravel().tolist(), bytes_of(ptrs)

    # Arguments past those used here differ between versions of Triton and come by position or by name.
    load, store = builder.create_masked_load, builder.create_masked_store
    update, exchange = builder.create_atomic_rmw, builder.create_atomic_cas

    def counting_load(ptrs: Any, mask: Any, *arguments: Any, **named: Any) -> Any:
        counts._count_load(*accessed(ptrs, mask))
        return load(ptrs, mask, *arguments, **named)

    def counting_store(ptrs: Any, value: Any, mask: Any, *arguments: Any, **named: Any) -> Any:
        counts._count_store(*accessed(ptrs, mask))
        return store(ptrs, value, mask, *arguments, **named)

    def counting_update(operation: Any, ptrs: Any, value: Any, mask: Any, *arguments: Any, **named: Any) -> Any:
        counts._count_load(*accessed(ptrs, mask))
        counts._count_store(*accessed(ptrs, mask))
        return update(operation, ptrs, value, mask, *arguments, **named)

    def counting_exchange(ptrs: Any, *arguments: Any, **named: Any) -> Any:
        addresses = ptrs.data.ravel().tolist()
        counts._count_load(addresses, bytes_of(ptrs))
        counts._count_store(addresses, bytes_of(ptrs))
        return exchange(ptrs, *arguments, **named)

    counting = mock.patch.multiple(
        builder,
        create_masked_load=counting_load,
        create_masked_store=counting_store,
        create_atomic_rmw=counting_update,
        create_atomic_cas=counting_exchange,
    )
    with counting, _Keeping():
        yield counts


class _Keeping(TorchDispatchMode):
    """Keeps the results of all operators until it is left."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._kept.append(made)
        return made
