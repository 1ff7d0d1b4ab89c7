"""Tables of addresses and chunks: what they hold, when they are made again, and what CUDA graphs demand of them."""

from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.interpreter


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with empty caches."""
    from bert_fast.triton import _pointer_tables as module

    monkeypatch.setattr(module, "_address_cache", module._Cache())
    monkeypatch.setattr(module, "_part_cache", module._Cache())
    monkeypatch.setattr(module, "_chunk_cache", module._Cache())
    monkeypatch.setattr(module, "_wholes", {})
    return module


def addresses(*lists: list[torch.Tensor]) -> list[int]:
    return [t.data_ptr() for tensors in lists for t in tensors]


@pytest.mark.parametrize("count", [1, 31, 32, 33, 70, 446, 447, 1000])
def test_addresses_of_any_number_of_tensors(tables: Any, count: int) -> None:
    tensors = [torch.zeros(1) for _ in range(count)]
    table = tables.address_table(tensors, [], tensors[:2])
    assert table.dtype == torch.int64
    assert table.tolist() == addresses(tensors, tensors[:2])


def test_any_address_is_sent(tables: Any) -> None:
    """Those of empty tensors, of views, of all that a processor may have."""
    given = (0, 1, 2, 16, 2**31 - 1, 2**31, 2**32, 2**47 + 24, 2**57 - 1)
    key = np.array(given, np.int64).tobytes()
    assert tables._stored(key, torch.device("cpu")).tolist() == list(given)


@pytest.fixture
def stored(tables: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the tables that were filled."""
    lengths: list[int] = []
    store = tables._stored
    monkeypatch.setattr(tables, "_stored", lambda key, device: lengths.append(len(key) // 8) or store(key, device))
    return lengths


def values(part: tuple[torch.Tensor, int], count: int) -> list[int]:
    table, first = part
    return table[first : first + count].tolist()


def test_parts_are_found_in_the_last_whole(tables: Any, stored: list[int]) -> None:
    tensors = [torch.zeros(size) for size in (3, 5, 0, 2, 0, 4)]
    whole = tables.address_table(tensors, has_parts=True)
    for first, last in ((0, 6), (0, 2), (1, 4), (5, 6)):
        table, place = tables.part_of_table(tensors[first:last])
        assert table is whole and place == first
    assert stored == [6]


def test_other_lists_are_no_parts(tables: Any, stored: list[int]) -> None:
    tensors = [torch.zeros(3) for _ in range(4)]
    tables.address_table(tensors, has_parts=True)
    tables.address_table(tensors[:3])  # has none, and is not the last one that has
    halves = [torch.zeros(3, dtype=torch.float16)]
    lists = (tensors[::-1], tensors[::2], [*tensors[2:], torch.zeros(3)], [tensors[3], tensors[0]], halves)
    for one in lists:
        assert values(tables.part_of_table(one), len(one)) == addresses(one)
    assert stored == [4, 3, 4, 2, 3, 2, 1]
    moved = [torch.zeros(3) for _ in range(4)]
    tables.address_table(moved, has_parts=True)
    for one in (tensors[1:3], moved[1:3], tensors[1:3]):
        assert values(tables.part_of_table(one), 2) == addresses(one)
    assert stored[7:] == [4, 2], "of a list that was, once; of the last one never"


def test_a_table_is_made_once_per_set_of_addresses(tables: Any) -> None:
    first, second = [torch.zeros(3), torch.ones(2)], [torch.zeros(3), torch.ones(2)]
    table = tables.address_table(first)
    assert tables.address_table(list(first)) is table
    assert tables.address_table(second) is not table
    assert tables.address_table(second[:1], second[1:]).tolist() == addresses(second)


def test_chunks(tables: Any) -> None:
    sizes = [5, 0, 8, 9, 1]
    chunks = tables.chunks_of([torch.zeros(size) for size in sizes], 4)
    pairs = [(entry >> 32, entry & 0xFFFFFFFF) for entry in chunks.entries.tolist()]
    assert pairs == [(0, 0), (0, 1), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 0)]
    assert chunks.first.tolist() == [0, 2, 2, 4, 7, 8] and chunks.count == 8
    assert chunks.sizes.tolist() == sizes
    assert tables.chunks_of([torch.ones(size) for size in sizes], 4) is chunks, "sizes decide, not tensors"
    assert tables.chunks_of([torch.zeros(0)], 4).count == 0


def test_old_tables_are_dropped(tables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_CACHED_TABLES", 2)
    lists = [[torch.zeros(1)] for _ in range(3)]
    made = [tables.address_table(tensors) for tensors in lists]
    assert tables.address_table(lists[2]) is made[2] and tables.address_table(lists[1]) is made[1]
    assert tables.address_table(lists[0]) is not made[0]


def test_while_a_graph_is_captured(tables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that the graph uses stays for good; one that the graph itself fills is nobody else's."""
    monkeypatch.setattr(tables, "_CACHED_TABLES", 1)
    known, moved, other = ([torch.zeros(4)] for _ in range(3))
    table, chunks = tables.address_table(known), tables.chunks_of(known, 4)
    monkeypatch.setattr(tables, "_capturing", lambda device: True)
    assert tables.address_table(known) is table
    inside = tables.address_table(moved)
    assert tables.address_table(moved) is not inside and inside.tolist() == addresses(moved)
    assert tables.chunks_of(moved, 4) is chunks
    with pytest.raises(RuntimeError, match="run one step before capturing a CUDA graph"):
        tables.chunks_of([torch.zeros(5)], 4)
    monkeypatch.setattr(tables, "_capturing", lambda device: False)
    tables.address_table(other)
    tables.address_table(moved)
    assert tables.address_table(known) is table


def test_parts_while_a_graph_is_captured(tables: Any, stored: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What one graph fills is no table of another, nor of calls outside; what was there before may be used."""
    monkeypatch.setattr(tables, "_CACHED_TABLES", 1)
    known, moved = ([torch.zeros(4) for _ in range(3)] for _ in range(2))
    whole = tables.address_table(known, has_parts=True)
    assert tables.part_of_table(known[1:])[0] is whole
    monkeypatch.setattr(tables, "_capturing", lambda device: True)
    assert tables.part_of_table(known[1:])[0] is whole
    inside = tables.address_table(moved, has_parts=True)
    for _ in range(2):
        table, first = tables.part_of_table(moved[1:])
        assert table is not inside and first == 0 and table.tolist() == addresses(moved[1:])
    assert stored == [3, 3, 2, 2]
    monkeypatch.setattr(tables, "_capturing", lambda device: False)
    table, first = tables.part_of_table(moved[1:])
    assert table is not inside and values((table, first), 2) == addresses(moved[1:])
    tables.part_of_table(moved[:1])
    assert tables.part_of_table(known[1:]) == (whole, 1), "kept for the graph"
