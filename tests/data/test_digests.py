"""Digests: the same for the same bytes, however they come; others for any small change."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_fast.data.digests import (
    ChunkDigests,
    Digest,
    check_seal,
    chunk_digests,
    data_digest,
    file_digest,
    seal,
)

TILE = 1 << 20
DATA = np.random.default_rng(0).integers(0, 256, 2 * TILE + 12_345, dtype=np.uint8)


def digest(*pieces: Any) -> str:
    made = Digest()
    for piece in pieces:
        made.update(piece)
    return made.hexdigest()


@pytest.mark.parametrize("ends", [[1], [TILE - 1], [TILE], [TILE + 1], [0, 0, 7, TILE, 2 * TILE], [*range(0, 99, 9)]])
def test_pieces_do_not_matter(ends: list[int], tmp_path: Path) -> None:
    whole = digest(DATA)
    assert digest(*np.split(DATA, ends)) == digest(*(piece.tobytes() for piece in np.split(DATA, ends))) == whole
    (tmp_path / "x").write_bytes(DATA.tobytes())
    assert file_digest(tmp_path / "x") == whole
    assert file_digest(tmp_path / "x", ends[0], 5000) == digest(DATA[ends[0] : ends[0] + 5000])


def test_asking_changes_nothing() -> None:
    made = Digest()
    for piece in np.split(DATA, 7 * np.arange(1, 50)):
        assert made.hexdigest() == digest(DATA[: made.num_bytes])
        made.update(piece)
    assert made.hexdigest() == digest(DATA)


def changed(*words: tuple[int, int]) -> np.ndarray:
    """DATA with numbers added to some of its words, modulo 2**64."""
    copy = DATA.copy()
    view = copy[: len(copy) // 8 * 8].view("<u8")
    for place, value in words:
        view[place : place + 1] += np.uint64(value)
    return copy


HIGH = 1 << 63


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(changed((0, 1)), id="first bit"),
        pytest.param(changed((5, HIGH)), id="highest bit"),
        pytest.param(changed((5, HIGH), (5 + 1024, HIGH)), id="highest bits of a column"),
        pytest.param(changed((5, HIGH), (6, HIGH)), id="highest bits of a row"),
        pytest.param(changed((5, HIGH), (6, HIGH), (5 + 1024, HIGH)), id="three corners"),
        pytest.param(changed((5, 1), (TILE // 8 + 5, (1 << 64) - 1)), id="in two tiles"),
        pytest.param(DATA[:-1], id="one byte less"),
        pytest.param(np.append(DATA, np.uint8(0)), id="a zero more"),
        pytest.param(np.concatenate([DATA[8192:16384], DATA[:8192], DATA[16384:]]), id="rows exchanged"),
        pytest.param(np.concatenate([DATA[TILE : 2 * TILE], DATA[:TILE], DATA[2 * TILE :]]), id="tiles exchanged"),
        pytest.param(np.concatenate([DATA[8:16], DATA[:8], DATA[16:]]), id="words exchanged"),
    ],
)
def test_changes_are_seen(other: np.ndarray) -> None:
    assert digest(other) != digest(DATA)


def test_every_single_bit_of_a_small_file() -> None:
    small = DATA[:100]
    found = {digest(small)}
    for bit in range(800):
        other = small.copy()
        other[bit // 8] ^= 1 << bit % 8
        found.add(digest(other))
    assert len(found) == 801


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 3500])
def test_chunks_go_on_where_they_were(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bert_fast.data.digests.CHUNK_BYTES", 1000)
    data = DATA[:size].tobytes()
    (tmp_path / "x").write_bytes(data)
    chunks = [digest(data[start : start + 1000]) for start in range(0, size, 1000)]
    assert chunk_digests(tmp_path / "x", 1000) == chunks
    whole = size // 1000
    made = ChunkDigests(chunks[:whole])
    made.update(memoryview(data)[whole * 1000 :])
    assert made.digests() == chunks
    assert made.num_bytes == size


def test_data_of_other_types_and_shapes_is_other_data() -> None:
    numbers = np.arange(6, dtype=np.int32)
    others = [numbers, numbers.astype(np.int64), numbers.astype(np.uint32), numbers.reshape(2, 3), numbers[::-1], None]
    others += [numbers.reshape(2, 3).T, numbers[:0], numbers[:0].astype(np.int64), ["0"], "0", 0, {"0": 0}]
    found = {data_digest(other) for other in others} | {data_digest(numbers, None), data_digest(None, numbers)}
    assert len(found) == len(others) + 2
    assert data_digest(numbers) == data_digest(np.arange(12, dtype=np.int32)[:6].copy())


def test_seals() -> None:
    content = {"a": [1, 2.5, None, "é\udcff", math.nan], "b": {"c": 1e-300}, "digests": {}}
    sealed = json.loads(json.dumps(seal(content), indent=1))
    check_seal(sealed)
    check_seal({"a": 1})  # from before there were any
    for other in ({**sealed, "a": 1}, content, {**sealed, "digest": None}, {**sealed, "x": 1}):
        with pytest.raises(ValueError, match="its content has changed: expected digest "):
            check_seal(other)
    with pytest.raises(ValueError, match="expected an object, got list"):
        check_seal([])
