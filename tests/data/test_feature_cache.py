"""The cache of features: the same arrays again, never a damaged file, another key for other texts or settings."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bert_fast.data.feature_cache import cached_arrays, feature_key
from bert_fast.tokenization import BertTokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ARRAYS = {"ids": np.arange(5000, dtype=np.int32), "names": np.array(["a", "é"]), "empty": np.empty(0)}


class Maker:
    """Makes ARRAYS and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.calls += 1
        return ARRAYS


def same(arrays: dict[str, np.ndarray]) -> bool:
    return arrays.keys() == ARRAYS.keys() and all(
        np.array_equal(arrays[name], ARRAYS[name]) and arrays[name].dtype == ARRAYS[name].dtype for name in ARRAYS
    )


def test_what_was_made_is_read_again(tmp_path: Path) -> None:
    make = Maker()
    folder = tmp_path / "new" / "folder"
    assert same(cached_arrays(folder, "k", make))
    assert same(cached_arrays(folder, "k", make))
    assert make.calls == 1
    assert [path.name for path in folder.iterdir()] == ["k.features"]
    assert same(cached_arrays(folder, "other", make))
    assert make.calls == 2


def test_without_a_directory_nothing_is_kept() -> None:
    make = Maker()
    assert same(cached_arrays(None, "k", make))
    assert same(cached_arrays(None, "k", make))
    assert make.calls == 2


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[2000] ^= 1  # within the numbers of the first array
    path.write_bytes(bytes(data))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def other(path: Path) -> None:
    path.write_text("not an archive")


def pickled(path: Path) -> None:
    with open(path, "wb") as file:
        np.savez(file, ids=np.array([{"a": 1}], dtype=object))


@pytest.mark.parametrize("damage", [cut, half, flip, empty, other, pickled])
def test_damaged_files_are_made_anew(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    make = Maker()
    cached_arrays(tmp_path, "k", make)
    damage(tmp_path / "k.features")
    assert same(cached_arrays(tmp_path, "k", make))
    assert make.calls == 2
    assert same(cached_arrays(tmp_path, "k", make))
    assert make.calls == 2


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    calls = []

    def make() -> dict[str, np.ndarray]:
        calls.append(1)
        return {"ids": np.arange(20, dtype=np.int32)}

    cached_arrays(tmp_path, "k", make)
    path = tmp_path / "k.features"
    whole = path.read_bytes()
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 0x10
        path.write_bytes(bytes(data))
        assert cached_arrays(tmp_path, "k", make)["ids"].tolist() == list(range(20))
        assert len(calls) == place + 2


def test_a_maker_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> dict[str, np.ndarray]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cached_arrays(tmp_path, "k", fail)
    with pytest.raises(ValueError, match="allow_pickle"):
        cached_arrays(tmp_path, "k", lambda: {"objects": np.array([{}], dtype=object)})
    assert list(tmp_path.iterdir()) == []


def test_keys_differ_where_features_may() -> None:
    tokenizer = BertTokenizer([*SPECIAL, "a"])
    keys = [
        feature_key(tokenizer, ["ab", "c"]),
        feature_key(tokenizer, ["a", "bc"]),
        feature_key(tokenizer, ["abc"]),
        feature_key(tokenizer, ["ab", "c"], max_length=3),
        feature_key(tokenizer, ["ab", "c"], max_length=None),
        feature_key(tokenizer, ["ab"], ["c"]),
        feature_key(tokenizer, ["ab"], None),
        feature_key(tokenizer, ["ab"], []),
        feature_key(tokenizer, []),
        feature_key(tokenizer),
        feature_key(BertTokenizer([*SPECIAL, "b"]), ["ab", "c"]),
        feature_key(BertTokenizer([*SPECIAL, "a"], do_lower_case=False), ["ab", "c"]),
        feature_key(BertTokenizer([*SPECIAL, "a"], truncation_side="left"), ["ab", "c"]),
        feature_key(BertTokenizer([*SPECIAL, "a"], sep_token="a"), ["ab", "c"]),
    ]
    assert len(set(keys)) == len(keys)
    assert feature_key(BertTokenizer([*SPECIAL, "a"]), ("ab", "c")) == keys[0]
