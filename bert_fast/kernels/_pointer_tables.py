"""Lists of tensors as kernels see them: a device table of addresses, and a table of chunks of equal size.

A kernel over a list runs one program per chunk. Chunk c of the whole list is `entries[c]` = (tensor << 32) | (chunk of
that tensor): the program looks up which tensor it works on, and its addresses in tables of int64.

Both tables are functions of numbers alone (addresses; sizes), which are the keys of the cache, so a hit is right
whatever became of the tensors that made it. Addresses travel to the device as arguments of a kernel: no copy from the
host, and a CUDA graph may be captured while addresses change (gradients that are allocated in the graph's own pool).
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Chunks", "address_table", "chunks_of"]

_ADDRESSES_PER_LAUNCH = 32  # arguments of `_store_addresses_kernel`
_CACHED_TABLES = 256  # a training run needs a handful; each is a few bytes per tensor or per chunk


@triton.jit(do_not_specialize=["start", "count", *(f"a{i}" for i in range(_ADDRESSES_PER_LAUNCH))])
def _store_addresses_kernel(
    table_ptr, start, count,
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15,
    a16, a17, a18, a19, a20, a21, a22, a23, a24, a25, a26, a27, a28, a29, a30, a31,
):  # fmt: skip
    """table[start + i] = a_i for i < count."""
    addresses = (
        a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15,
        a16, a17, a18, a19, a20, a21, a22, a23, a24, a25, a26, a27, a28, a29, a30, a31,
    )  # fmt: skip
    for i in tl.static_range(32):
        tl.store(table_ptr + start + i, addresses[i].to(tl.int64), mask=i < count)


Table = TypeVar("Table")


class _Cache(Generic[Table]):
    """The most recently used tables; those that a CUDA graph was captured with are kept for good."""

    def __init__(self) -> None:
        self._recent: OrderedDict[Hashable, Table] = OrderedDict()
        self._captured: dict[Hashable, Table] = {}

    def get(self, key: Hashable, make: Callable[[], Table], capturing: bool) -> Table:
        table = self._captured.get(key)
        if table is None:
            table = self._recent.get(key)
            if table is None:
                table = make()
                if capturing:  # lives in the graph's memory and is filled by its replay: of no use to others
                    return table
                self._recent[key] = table
                if len(self._recent) > _CACHED_TABLES:
                    self._recent.popitem(last=False)
            self._recent.move_to_end(key)
            if capturing:
                self._captured[key] = table
        return table


@dataclass(frozen=True)
class Chunks:
    """How a list of tensors is cut.

    count: number of chunks; entries (int64 [count]): tensor << 32 | chunk of that tensor; first (int32 [n + 1]): number
    of chunks before each tensor; sizes (int64 [n]): elements of each tensor.
    """

    count: int
    entries: Tensor
    first: Tensor
    sizes: Tensor


_address_cache: _Cache[Tensor] = _Cache()
_chunk_cache: _Cache[Chunks] = _Cache()


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def address_table(*lists: Sequence[Tensor]) -> Tensor:
    """int64 [sum of lengths] on the device of the tensors: their addresses, list after list; at least one tensor."""
    addresses = tuple([t.data_ptr() for tensors in lists for t in tensors])
    device = next(tensors[0].device for tensors in lists if len(tensors))

    def upload() -> Tensor:
        table = torch.empty(len(addresses), dtype=torch.int64, device=device)
        with torch.cuda.device_of(table):
            for start in range(0, len(addresses), _ADDRESSES_PER_LAUNCH):
                part = addresses[start : start + _ADDRESSES_PER_LAUNCH]
                padding = (addresses[0],) * (_ADDRESSES_PER_LAUNCH - len(part))
                _store_addresses_kernel[(1,)](
                    table, start, len(part), *part, *padding, num_warps=1, enable_fp_fusion=False
                )  # no floating-point arithmetic: said because the default changes with Triton 3.10
        return table

    return _address_cache.get((device, addresses), upload, _capturing(device))


def chunks_of(tensors: Sequence[Tensor], chunk: int) -> Chunks:
    """The cut of these tensors (at least one) into chunks of `chunk` elements; empty tensors have none.

    Raises:
        RuntimeError: the sizes are new and a CUDA graph is being captured: the table needs a copy from the host.
    """
    sizes = tuple([t.numel() for t in tensors])
    device = tensors[0].device
    capturing = _capturing(device)

    def cut() -> Chunks:
        if capturing:
            raise RuntimeError("optimizer: this list of parameters is new; run one step before capturing a CUDA graph")
        numels = torch.tensor(sizes, dtype=torch.int64)
        counts = (numels + chunk - 1) // chunk
        first = torch.zeros(len(sizes) + 1, dtype=torch.int64)
        first[1:] = counts.cumsum(0)
        total = int(first[-1])
        owner = torch.repeat_interleave(torch.arange(len(sizes)), counts)
        entries = (owner << 32) | (torch.arange(total) - first[owner])
        return Chunks(total, entries.to(device), first.int().to(device), numels.to(device))

    return _chunk_cache.get((device, sizes, chunk), cut, capturing)
