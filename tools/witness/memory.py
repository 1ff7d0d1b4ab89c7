"""Memory of a program: that of tensors, whose bounds are kept, and shared memory, whose races are found."""

import gc
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]
_BY_GROUP = -10  # less the number of the group of four warps
_DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


_ADDRESS_BITS = 48  # of an address of this machine


class Fault(Exception):
    """What a device would not forgive, or might not show: an address out of bounds, a race, a wait that is missing."""


class Global:
    """The memory of tensors. What lies in no tensor's storage cannot be read or written.

    Kernels get addresses of their own, each storage far from every other, so that what leaves a tensor meets no
    neighbour. An address that the library itself has written to a table is one of this machine's, and is found as such.
    """

    def __init__(self) -> None:
        self._regions: list[tuple[int, Array]] = []  # (address of this machine, bytes); kept alive by their arrays
        self._numbers: dict[int, int] = {}  # place in that list, by address

    def address_of(self, tensor: torch.Tensor) -> int:
        """Of the first element, for a kernel; 0 for a tensor without memory."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return 0
        self._admit(storage)
        return _address(self._numbers[storage.data_ptr()], tensor.data_ptr())

    def _admit(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() and storage.data_ptr() not in self._numbers:
            self._numbers[storage.data_ptr()] = len(self._regions)
            self._regions.append((storage.data_ptr(), torch.empty(0, dtype=torch.uint8).set_(storage).numpy()))

    def _find(self, address: int, nbytes: int) -> tuple[Array, int]:
        """The region that holds these bytes, and its address, of the same kind as the one given."""
        number = (address >> _ADDRESS_BITS) - 1
        if 0 <= number < len(self._regions):
            base, region = self._regions[number]
            start = _address(number, base)
            if start <= address and address + nbytes <= start + len(region):
                return region, start
            raise Fault(f"{nbytes} bytes at byte {address - start} of a tensor's {len(region)}")
        for _ in range(2):
            for base, region in self._regions if number < 0 else ():
                if base <= address and address + nbytes <= base + len(region):
                    return region, base
            for one in gc.get_objects():
                if issubclass(type(one), torch.Tensor) and _has_memory(one):
                    self._admit(one.untyped_storage())
        raise Fault(f"{nbytes} bytes at {address:#x} are in no tensor's memory")

    def _places(self, addresses: Array, nbytes: int) -> list[tuple[Array, Array, Any]]:
        """[(region, offsets, which of the addresses)]; which: a slice or numbers."""
        if np.any(addresses % nbytes):
            raise Fault(f"address {int(addresses[addresses % nbytes != 0][0]):#x} is no multiple of {nbytes}")
        lowest = int(addresses.min())
        region, base = self._find(lowest, nbytes)
        if int(addresses.max()) + nbytes <= base + len(region):
            return [(region, (addresses - np.uint64(base)).astype(np.int64), slice(None))]
        found = []
        left = np.arange(len(addresses))
        while len(left):
            region, base = self._find(int(addresses[left[0]]), nbytes)
            inside = (addresses[left] >= base) & (addresses[left] + np.uint64(nbytes) <= base + len(region))
            which = left[inside]
            found.append((region, (addresses[which] - np.uint64(base)).astype(np.int64), which))
            left = left[~inside]
        return found

    def load(self, addresses: Array, nbytes: int, count: int) -> Array:
        """[n, count] values of nbytes each, neighbours; the address is a multiple of all of them together."""
        values = np.empty((len(addresses), count), _DTYPES[nbytes])
        for region, offsets, which in self._places(addresses, nbytes * count):
            picked = region[offsets[:, None] + np.arange(nbytes * count)]
            values[which] = np.ascontiguousarray(picked).view(_DTYPES[nbytes])
        return values

    def store(self, addresses: Array, values: Array) -> None:
        """values [n, count]; of several for one address, the last stays."""
        nbytes = values.shape[1] * values.itemsize
        as_bytes = np.ascontiguousarray(values).view(np.uint8)
        for region, offsets, which in self._places(addresses, nbytes):
            region[offsets[:, None] + np.arange(nbytes)] = as_bytes[which]


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether there is memory of this machine behind a tensor, which may be anybody's: fake, traced, half made."""
    try:
        storage = tensor.untyped_storage()
        return storage.device.type == "cpu" and storage.data_ptr() != 0
    except RuntimeError:  # no storage, or none with an address
        return False


def _address(number: int, address: int) -> int:
    """For kernels, of a byte of the storage of this number; the lower bits stay, and with them every alignment."""
    return (number + 1) << _ADDRESS_BITS | address


class Shared:
    """Shared memory. Between two barriers what one warp writes no other may read or write.

    _writer, _reader: of every two bytes, the warp that did so last (-2: several; from _BY_GROUP down: a product's
    four); _written, _was_read: in which interval.
    """

    def __init__(self, nbytes: int) -> None:
        self._bytes = np.full(nbytes, 0xFF, np.uint8)  # NaN, so that nothing passes for zeros
        half = nbytes // 2 + 1
        self._writer, self._reader = np.full(half, -1, np.int32), np.full(half, -1, np.int32)
        self._written, self._was_read = np.full(half, -1, np.int64), np.full(half, -1, np.int64)
        self.interval = 0

    def _indices(self, addresses: Array, nbytes: int) -> Array:
        addresses = addresses.astype(np.int64)
        if np.any(addresses % nbytes):
            raise Fault(f"shared address {int(addresses[addresses % nbytes != 0][0]):#x} is no multiple of {nbytes}")
        if addresses.max() + nbytes > len(self._bytes):
            raise Fault(f"{nbytes} bytes at {int(addresses.max()):#x} of {len(self._bytes)} bytes of shared memory")
        return addresses[:, None] + np.arange(nbytes)

    def load(self, addresses: Array, warps: Array, nbytes: int, count: int) -> Array:
        """[n, count] values of nbytes each, by these warps."""
        indices = self._indices(addresses, nbytes * count)
        self.note_read(indices[:, ::2] // 2, warps)
        return self._bytes[indices].view(_DTYPES[nbytes])

    def store(self, addresses: Array, warps: Array, values: Array) -> None:
        """values [n, count], by these warps."""
        as_bytes = np.ascontiguousarray(values).view(np.uint8)
        indices = self._indices(addresses, as_bytes.shape[1])
        # Lanes of one warp may have rounded one sum differently and all write theirs: one of them stays.
        self._bytes[indices] = as_bytes
        differ = np.any(self._bytes[indices] != as_bytes, 1)
        if differ.any():
            last = np.zeros(len(self._bytes), np.int32)
            last[indices] = warps[:, None]
            if np.any(last[indices[differ]] != warps[differ, None]):
                raise Fault("warps write different values to one address of shared memory")
        self.note_write(indices[:, ::2] // 2, warps)

    def matrix(self, addresses: Array, nbytes: int) -> Array:
        """Values of nbytes each at these addresses, of any shape; by whom they are read, is noted otherwise."""
        places = self._indices(addresses.reshape(-1), nbytes)
        return self._bytes[places].view(_DTYPES[nbytes]).reshape(addresses.shape)

    def arrive(self, addresses: Array, values: Array) -> None:
        """values [n, 1] that a copy of its own brings, whose end everybody waits for who reads them."""
        indices = self._indices(addresses, values.itemsize)
        self._bytes[indices] = np.ascontiguousarray(values).view(np.uint8)
        self._written[indices[:, ::2] // 2] = -1

    def note_read(self, places: Array, warps: Array) -> None:
        """places [n, ...]: of two bytes each; warps [n]."""
        warps = np.broadcast_to(warps.reshape(-1, *[1] * (places.ndim - 1)), places.shape)
        if np.any((self._written[places] == self.interval) & (self._writer[places] != warps)):
            raise Fault("a warp reads shared memory that another has written since the last barrier")
        known = self._was_read[places] == self.interval
        reader = np.where(known & (self._reader[places] != warps), -2, warps)
        self._reader[places] = reader
        self._was_read[places] = self.interval
        several = self._reader[places] != reader
        self._reader[places[several]] = -2

    def note_read_by_group(self, places: Array, group: int) -> None:
        """By a product of the four warps of a group: it is over for all of them when one has waited for it."""
        if np.any((self._written[places] == self.interval) & (self._writer[places] // 4 != group)):
            raise Fault("a product reads shared memory that another group has written since the last barrier")
        known = (self._was_read[places] == self.interval) & (self._reader[places] != _BY_GROUP - group)
        self._reader[places] = np.where(known, -2, _BY_GROUP - group)
        self._was_read[places] = self.interval

    def note_write(self, places: Array, warps: Array) -> None:
        """As `note_read`."""
        warps = np.broadcast_to(warps.reshape(-1, *[1] * (places.ndim - 1)), places.shape)
        if np.any((self._written[places] == self.interval) & (self._writer[places] != warps)):
            raise Fault("two warps write to the same shared memory between two barriers")
        reader = self._reader[places]
        by_others = (reader != warps) & (reader != _BY_GROUP - warps // 4)
        if np.any((self._was_read[places] == self.interval) & by_others):
            raise Fault("a warp writes to shared memory that another has read since the last barrier")
        self._writer[places] = warps
        self._written[places] = self.interval
