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

from bert_fast.addresses import numbers_of, reader

_ADDRESSES = 448  # of a launch, more than BERT-large has tensors: 3,584 of the 4,096 bytes that arguments may take
_BLOCK = 32  # stored at once: one a thread
_CACHED_TABLES = 256  # a training run needs a handful; each is a few bytes per tensor or per chunk
# An address a is sent as this + 2 a + 1, which has always 64 bits, is odd and not 1: Triton would compile a kernel for
# each way in which some of 448 numbers are otherwise.
_SENT = 1 << 62
_PADDING = (_SENT + 1,) * _ADDRESSES
_BYTES = 8  # of an address in a key


@triton.jit(do_not_specialize=["start", "count"])
def _store_addresses_kernel(table_ptr, start, count, sent, ADDRESSES: tl.constexpr, BLOCK: tl.constexpr):
    """table[start + i] = address i of those that were sent, for i < count, by one program: BLOCK at once."""
    offs = tl.arange(0, BLOCK)
    for first in tl.static_range(0, ADDRESSES, BLOCK):
        if first < count:
            block = tl.zeros([BLOCK], tl.int64)
            for i in tl.static_range(BLOCK):
                block = tl.where(offs == i, sent[first + i], block)
            tl.store(table_ptr + start + first + offs, (block & 0x3FFFFFFFFFFFFFFF) >> 1, mask=first + offs < count)


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
_part_cache: _Cache[tuple[Tensor, int]] = _Cache()
_wholes: dict[tuple[torch.device, torch.dtype], tuple[bytes, Tensor]] = {}
_chunk_cache: _Cache[Chunks] = _Cache()


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def address_table(*lists: Sequence[Tensor], has_parts: bool = False) -> Tensor:
    """int64 [sum of lengths] on the device of the tensors: their addresses, list after list; at least one tensor.

    has_parts: `part_of_table` is to find its tensors here.
    """
    first = next(tensors[0] for tensors in lists if len(tensors))
    return table_of(reader().addresses(*lists), first, has_parts=has_parts)


def table_of(addresses: bytes, first: Tensor, *, has_parts: bool = False) -> Tensor:
    """`address_table` of tensors whose addresses were just read; first: the first of them."""
    device = first.device
    capturing = _capturing(device)
    table = _address_cache.get((device, addresses), lambda: _stored(addresses, device), capturing)
    if has_parts and not capturing:
        _wholes[device, first.dtype] = addresses, table
    return table


def part_of_table(tensors: Sequence[Tensor], addresses: bytes | None = None) -> tuple[Tensor, int]:
    """A table with the addresses of these tensors (at least one), and the place of the first.

    If they stand one behind the other in the last table that has parts, it is that one: nothing is launched.
    addresses: of the tensors, where they were just read.
    """
    if addresses is None:
        addresses = reader().addresses(tensors)
    device = tensors[0].device
    capturing = _capturing(device)

    def found() -> tuple[Tensor, int]:
        if not capturing:  # a graph finds again only what was there before, for good
            whole, table = _wholes.get((device, tensors[0].dtype), (b"", None))
            place = whole.find(addresses)
            while place % _BYTES and place > 0:  # within numbers
                place = whole.find(addresses, place + 1)
            if table is not None and place >= 0:
                return table, place // _BYTES
        return _stored(addresses, device), 0

    return _part_cache.get((device, addresses), found, capturing)


def _stored(key: bytes, device: torch.device) -> Tensor:
    addresses = numbers_of(key)
    table = torch.empty(len(addresses), dtype=torch.int64, device=device)
    with torch.cuda.device_of(table):
        for start in range(0, len(addresses), _ADDRESSES):
            sent = tuple([_SENT + 2 * address + 1 for address in addresses[start : start + _ADDRESSES]])
            _store_addresses_kernel[(1,)](
                table, start, len(sent), sent + _PADDING[len(sent) :],
                ADDRESSES=_ADDRESSES, BLOCK=_BLOCK, num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip  # no floating-point arithmetic: said because the default changes with Triton 3.10
    return table


def chunks_of(tensors: Sequence[Tensor], chunk: int) -> Chunks:
    """The cut of these tensors (at least one) into chunks of `chunk` elements; empty tensors have none.

    Raises:
        RuntimeError: the sizes are new and a CUDA graph is being captured: the table needs a copy from the host.
    """
    sizes = reader().sizes(tensors)
    device = tensors[0].device
    capturing = _capturing(device)

    def cut() -> Chunks:
        if capturing:
            raise RuntimeError("optimizer: this list of parameters is new; run one step before capturing a CUDA graph")
        numels = torch.tensor(numbers_of(sizes), dtype=torch.int64)
        counts = (numels + chunk - 1) // chunk
        first = torch.zeros(len(numels) + 1, dtype=torch.int64)
        first[1:] = counts.cumsum(0)
        total = int(first[-1])
        owner = torch.repeat_interleave(torch.arange(len(numels)), counts)
        entries = (owner << 32) | (torch.arange(total) - first[owner])
        return Chunks(total, entries.to(device), first.int().to(device), numels.to(device))

    return _chunk_cache.get((device, sizes, chunk), cut, capturing)
