"""Reading checkpoint files: every format loads exactly, every broken file is named, no code from a file runs."""

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bert_fast.errors import CheckpointError
from bert_fast.models.checkpoint import find_weights, load_checkpoint, load_state_dict_file

Make = Callable[..., nn.Module]


def _save_bin(state: dict[str, Tensor], directory: Path) -> None:
    torch.save(state, directory / "pytorch_model.bin")


def _save_old_bin(state: dict[str, Tensor], directory: Path) -> None:
    torch.save(state, directory / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def _save_nested_bin(state: dict[str, Tensor], directory: Path) -> None:
    torch.save({"model": state, "epoch": 3, "optimizer": {"lr": 0.1}}, directory / "pytorch_model.bin")


def _save_parameters_bin(state: dict[str, Tensor], directory: Path) -> None:
    torch.save({key: nn.Parameter(value) for key, value in state.items()}, directory / "pytorch_model.bin")


def _save_safetensors(state: dict[str, Tensor], directory: Path) -> None:
    save_file(state, directory / "model.safetensors")


def _save_sharded(state: dict[str, Tensor], directory: Path, name: str, save: Callable[[Any, Path], Any]) -> None:
    keys = sorted(state)
    stem, suffix = name.split(".")
    weight_map = {}
    for i in range(3):
        file_name = f"{stem}-{i + 1:05}-of-00003.{suffix}"
        save({key: state[key] for key in keys[i::3]}, directory / file_name)
        weight_map |= dict.fromkeys(keys[i::3], file_name)
    (directory / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _save_sharded_safetensors(state: dict[str, Tensor], directory: Path) -> None:
    _save_sharded(state, directory, "model.safetensors", save_file)


def _save_sharded_bin(state: dict[str, Tensor], directory: Path) -> None:
    _save_sharded(state, directory, "pytorch_model.bin", torch.save)


WRITERS = [
    _save_safetensors,
    _save_sharded_safetensors,
    _save_bin,
    _save_old_bin,
    _save_nested_bin,
    _save_parameters_bin,
    _save_sharded_bin,
]


def _entry(**changes: Any) -> dict[str, Any]:
    """What the header of a safetensors file says of a tensor of four numbers."""
    return {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}


@pytest.mark.parametrize("save", WRITERS)
def test_formats(make_hf: Make, tmp_path: Path, save: Callable[[dict[str, Tensor], Path], None]) -> None:
    state = make_hf("BertModel").state_dict()
    save(state, tmp_path)
    weights = find_weights(tmp_path)
    for loaded in (load_checkpoint(tmp_path), load_checkpoint(weights)):
        assert loaded.keys() == state.keys()
        assert all(torch.equal(loaded[key], value) and loaded[key].dtype == value.dtype for key, value in state.items())
    half = load_checkpoint(tmp_path, dtype=torch.float16)
    assert all(torch.equal(half[key], value.half()) for key, value in state.items())


def test_dtype_leaves_integers_alone(tmp_path: Path) -> None:
    save_file({"embeddings.position_ids": torch.arange(3), "x": torch.ones(1)}, tmp_path / "model.safetensors")
    loaded = load_checkpoint(tmp_path, dtype=torch.bfloat16)
    assert loaded["embeddings.position_ids"].dtype is torch.int64 and loaded["x"].dtype is torch.bfloat16


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    _save_bin({"x": torch.zeros(1)}, tmp_path)
    _save_safetensors({"x": torch.ones(1)}, tmp_path)
    assert load_checkpoint(tmp_path)["x"] == 1


class _Bomb:
    """A pickle that would make a directory if its code ran."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("plain_pickle", [False, True])
def test_pickles_with_code_are_refused(tmp_path: Path, plain_pickle: bool) -> None:
    path, crater = tmp_path / "pytorch_model.bin", tmp_path / "crater"
    content = {"x": 1.0, "y": _Bomb(crater)}
    if plain_pickle:
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: refused, because .*mkdir"):
        load_checkpoint(tmp_path)
    assert not crater.exists()


@pytest.mark.parametrize("save", [_save_safetensors, _save_bin, _save_old_bin])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_truncated_files(
    make_hf: Make, tmp_path: Path, save: Callable[[dict[str, Tensor], Path], None], share: float
) -> None:
    save(make_hf("BertModel").state_dict(), tmp_path)
    path = find_weights(tmp_path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(
        CheckpointError, match="the file is empty" if share == 0.0 else "truncated or corrupt"
    ) as caught:
        load_checkpoint(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0" * 100, "truncated or corrupt"),
        (b"\xff" * 100, "truncated or corrupt"),
        (b"<html>404: not found</html>" * 10, "truncated or corrupt"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3\n", "Git LFS pointer"),
    ],
)
def test_files_that_hold_something_else(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(1)], "expected a dictionary of tensors, got list"),
        (torch.ones(1), "expected a dictionary of tensors, got Tensor"),
        ({"a": torch.ones(1), "lr": 0.1}, "these are none: lr"),
        ({3: torch.ones(1)}, "these are none: 3"),
    ],
)
def test_torch_files_without_weights(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds none of model\.safetensors, .*pytorch_model\.bin\.index\.json$"):
        load_checkpoint(tmp_path)
    (tmp_path / "tf_model.h5").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"tf_model\.h5: the format of another framework"):
        load_checkpoint(tmp_path)
    for load in (load_checkpoint, load_state_dict_file):
        with pytest.raises(CheckpointError, match="no such file or directory"):
            load(tmp_path / "absent")
    for path in (tmp_path, "x" * 5000, "a\0b"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_state_dict_file(path)
    with pytest.raises(CheckpointError, match="no such file"):
        load_checkpoint(tmp_path / "model.safetensors.index.json")


@pytest.mark.parametrize("save", [_save_sharded_safetensors, _save_sharded_bin])
def test_broken_shards(make_hf: Make, tmp_path: Path, save: Callable[[dict[str, Tensor], Path], None]) -> None:
    save(make_hf("BertModel").state_dict(), tmp_path)
    index_path = find_weights(tmp_path)
    shard = next(tmp_path.glob("*-00002-of-*"))
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"lists files that are not there: {shard.name}"):
        load_checkpoint(tmp_path)
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=f"{shard.name}: not a complete"):
        load_checkpoint(tmp_path)
    shutil.copy(next(tmp_path.glob("*-00001-of-*")), shard)
    with pytest.raises(CheckpointError, match=r"lists keys that their files do not hold: .*-00002-of-") as caught:
        load_checkpoint(tmp_path)
    assert str(index_path) in str(caught.value)


def test_index_decides_between_shards_that_hold_one_key(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1), "b": torch.ones(1)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(1), "c": torch.ones(1)}, tmp_path / "2.safetensors")
    weight_map = {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert {key: int(value) for key, value in load_checkpoint(tmp_path).items()} == {"a": 0, "b": 1, "c": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read as JSON"),
        ('{"weight_map": {', "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[]", "expected an object with a non-empty 'weight_map'"),
        ("{}", "expected an object with a non-empty 'weight_map'"),
        ('{"weight_map": ["a"]}', "expected an object with a non-empty 'weight_map'"),
        ('{"weight_map": {"a": 3}}', r"weight_map\['a'\]: expected a file name, got 3"),
        ('{"weight_map": {"a": "../x.bin"}}', r"expected a file name, got '\.\./x\.bin'"),
        pytest.param(
            '{"weight_map": {"a": "/etc/passwd"}}', "expected a file name, got '/etc/passwd'", id="from the root"
        ),
        ('{"weight_map": {"a": ""}}', "expected a file name, got ''"),
        ('{"weight_map": {"a": ".."}}', r"expected a file name, got '\.\.'"),
        ('{"weight_map": {"a": ["x.bin"]}}', r"weight_map\['a'\]: expected a file name, got \['x\.bin'\]"),
        ('{"weight_map": {"a": "1.bin", "a": "2.bin"}}', "cannot be read as JSON: a has two values"),
    ],
)
def test_broken_index(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(tmp_path)
    assert str(path) in str(caught.value)


# Headers of safetensors files before 16 bytes of values, and what is said of them.
LIES: dict[str, tuple[Any, str]] = {
    "beyond the file": ({"a": _entry(shape=[40], data_offsets=[0, 160])}, "not fully covered"),
    "overlap": ({"a": _entry(), "b": _entry()}, "invalid offset"),
    "gap": ({"a": _entry(shape=[2], data_offsets=[8, 16])}, "invalid offset"),
    "negative offset": ({"a": _entry(data_offsets=[-8, 16])}, "expected usize"),
    "dtype": ({"a": _entry(dtype="F99")}, "unknown variant"),
    "shape of text": ({"a": _entry(shape="4")}, "invalid type"),
    "overflow": ({"a": _entry(shape=[2**62, 2**62])}, "overflow"),
    "endless dimension": ({"a": _entry(shape=[0, 2**64 - 1], data_offsets=[0, 0]), "b": _entry()}, "verflow"),
    "metadata": ({"__metadata__": {"a": 3}, "a": _entry()}, "expected a string"),
    "not UTF-8": (b'{"\xff": 3}', "UTF-8"),
    "deep": (b'{"a":' * 100_000, "recursion"),
    "list": (b"[" * 100_000, "invalid type"),
}


@pytest.mark.parametrize("name", LIES)
def test_headers_that_lie(tmp_path: Path, name: str) -> None:
    header, message = LIES[name]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("length", [2**62, 99_999_999, 0])
def test_header_lengths_that_lie(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + json.dumps({"a": _entry()}).encode() + bytes(16))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a complete safetensors file"):
        load_checkpoint(path)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        pytest.param(torch.eye(3).to_sparse(), "a tensor of layout sparse_coo", id="sparse"),
        pytest.param(torch.empty(10**6, 10**6, device="meta"), "a tensor without values", id="meta"),
        pytest.param(torch.ones(1).expand(10**6, 10**6), "a few values repeated", id="expanded"),
    ],
)
def test_tensors_without_all_their_values(tmp_path: Path, value: Tensor, reason: str) -> None:
    for content in ({"x": torch.ones(1), "y": value}, {"state_dict": {"y": value}}):
        torch.save(content, tmp_path / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=rf"pytorch_model\.bin: .* these are not: y \({reason}"):
            load_checkpoint(tmp_path)


def test_archives_that_unpack_to_more_than_they_are(tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain.bin", tmp_path / "packed.bin"
    torch.save({"x": torch.zeros(10**6)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for record in source.infolist():
            target.writestr(record.filename.replace("plain", "packed"), source.read(record))
    with pytest.raises(CheckpointError, match=r"packed\.bin: refused, because \d{4} bytes unpack to \d{7}"):
        load_checkpoint(packed)
    assert load_checkpoint(plain)["x"].numel() == 10**6


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"])
def test_pipes_directories_and_devices_in_place_of_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    for make in (lambda: None, path.mkdir, lambda: path.symlink_to("/dev/zero"), lambda: path.symlink_to(tmp_path)):
        make()
        with pytest.raises(CheckpointError, match="holds none of"):
            load_checkpoint(tmp_path)  # by its directory
        if not path.is_dir():
            with pytest.raises(CheckpointError, match=f"{name}: cannot be read.*: .*not a regular file"):
                load_checkpoint(path)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_every_single_byte_flip_of_a_header_is_an_error_or_readable(tmp_path: Path) -> None:
    """Damage is never anything but a CheckpointError (or goes unnoticed where it hits a value)."""
    state = {"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.int64)}
    for name, save in (("model.safetensors", save_file), ("pytorch_model.bin", torch.save)):
        path = tmp_path / name
        save(state, path)
        content = path.read_bytes()
        errors = 0
        for position in range(0, len(content), 1 if len(content) < 500 else 7):
            path.write_bytes(content[:position] + bytes([content[position] ^ 0x55]) + content[position + 1 :])
            try:
                load_state_dict_file(path)
            except CheckpointError:
                errors += 1
        assert errors > 20
        path.write_bytes(content)


def test_files_stay_as_they_were(make_hf: Make, tmp_path: Path) -> None:
    _save_safetensors(make_hf("BertModel").state_dict(), tmp_path)
    path = tmp_path / "model.safetensors"
    before = path.read_bytes()
    state = load_checkpoint(tmp_path)
    for value in state.values():
        value.fill_(7)
    assert path.read_bytes() == before
    assert load_file(path)["pooler.dense.bias"][0] != 7
