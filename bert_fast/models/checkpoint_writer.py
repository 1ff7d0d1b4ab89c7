"""Saving a checkpoint directory so that a reader finds the old one or the new one, never a mixture.

Everything is first written under temporary names; a full disk or a killed process therefore leaves the old files as
they were. Then names change: a single model.safetensors by one atomic rename; shards under names the old index does
not use, and after them the index, by one atomic rename. config.json follows; old shards are removed last.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from bert_fast.errors import CheckpointError
from bert_fast.files import TEMPORARY_SUFFIX, create_temporary, only_writer, path_name, replace_file
from bert_fast.models.checkpoint import not_dense, weights_names
from bert_fast.models.config import CONFIG_NAMES, BertConfig
from bert_fast.models.config_checks import shown

_METADATA = {"format": "pt"}  # transformers refuses files without it
# Of a tied pair transformers stores the other one.
_STORED_LAST = re.compile(r"^cls\.predictions\.decoder\.(weight|bias)$")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_ABANDONED_AFTER_S = 3600  # a temporary file this old belongs to a killed process


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    config: BertConfig | Any,
    *,
    max_shard_size: int | str = "50GB",
    variant: str | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes config.json and model.safetensors (or shards with an index) for bert_fast and transformers alike.

    Args:
        directory: made if missing; other files in it are left alone. Threads and processes that save to it at the same
            time wait for each other (see `files.only_writer`).
        model: its `state_dict()` is saved, tied parameters once; wrappers of DDP and torch.compile are taken off.
        config: a BertConfig (ours or transformers'); saved with the model's class name and dtype filled in.
        max_shard_size: bytes per file, as an int or as "5GB"; a single larger tensor gets a file of its own.
        variant: "fp16" writes model.fp16.safetensors, and leaves files of other variants alone.
        state_dict: saved in place of the model's own.

    Returns: the directory.

    Raises:
        CheckpointError: a file could not be written; the old files are unchanged.
        ValueError: `max_shard_size` or the configuration is wrong, or not all of the model's state is dense tensors.
    """
    directory, limit = Path(path_name("directory", directory)), _bytes(max_shard_size)
    single, index = weights_names(variant, use_safetensors=True)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    while isinstance(inner := getattr(model, "_orig_mod", getattr(model, "module", None)), nn.Module):
        model = inner
    config = BertConfig.from_hf(config)  # a copy
    if state_dict is None:
        state_dict = model.state_dict()
    elif not isinstance(state_dict, Mapping) or not all(isinstance(key, str) for key in state_dict):
        raise TypeError(f"state_dict: expected a mapping from names to tensors, got {type(state_dict).__name__}")
    tensors = _tensors_to_store(state_dict, tied_once=config.tie_word_embeddings)
    config.architectures = [type(model).__name__]
    config.dtype = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), None)
    config.validate()
    config_text = config.to_json_string()

    try:
        directory.mkdir(parents=True, exist_ok=True)
        with only_writer(directory):
            _remove_abandoned(directory)
            _write(directory, _split(tensors, limit), config_text, single, index)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: the checkpoint could not be written: {error}") from error
    return directory


def _write(directory: Path, shards: list[dict[str, Tensor]], config_text: str, single: str, index: str) -> None:
    stem = single.removesuffix(".safetensors")
    if len(shards) == 1:
        names, weights_name = [single], single
    else:
        names, weights_name = _shard_names(directory, stem, len(shards)), index
    staged: list[tuple[Path, Path]] = []  # (temporary, final), in the order of renaming
    unnamed = {directory / name for name in names} if weights_name == index else set()  # by any index yet

    def stage(name: str) -> Path:
        staged.append((create_temporary(directory / name), directory / name))
        return staged[-1][0]

    try:
        for name, shard in zip(names, shards, strict=True):
            save_file(shard, stage(name), metadata=_METADATA)
        if weights_name == index:
            stage(index).write_text(_index_text(names, shards), encoding="utf-8")
        stage(CONFIG_NAMES[0]).write_text(config_text, encoding="utf-8")
        for temporary, path in staged:
            replace_file(temporary, path)
            if path.name == index:
                unnamed.clear()
    finally:
        for path in (*(temporary for temporary, _ in staged), *unnamed):
            path.unlink(missing_ok=True)
    # Readers prefer the single file to the index, so the one not written now must go.
    (directory / (index if weights_name == single else single)).unlink(missing_ok=True)
    is_shard = re.compile(re.escape(stem) + r"(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.safetensors")
    for path in directory.iterdir():
        if is_shard.fullmatch(path.name) and path.name not in names:
            path.unlink()


def _tensors_to_store(state_dict: Mapping[str, Tensor], tied_once: bool) -> dict[str, Tensor]:
    # Every tensor with a contiguous storage of its own, as safetensors demands. A tied parameter once, unless the
    # configuration says that nothing is tied: transformers would then miss its second name.
    owners: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()  # all of them stay alive in `kept`, so that no address is used again
    kept: dict[str, Tensor] = {}
    for key in sorted(state_dict, key=lambda key: _STORED_LAST.match(key) is not None):  # stable: else in model order
        tensor = state_dict[key]
        if not isinstance(tensor, Tensor) or (reason := not_dense(tensor)):
            got = reason if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"model: expected dense tensors in its state, got {got} as {key}")
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        is_repeated = tensor.numel() > 0 and owners.setdefault(place, key) != key
        if is_repeated and tied_once:
            continue
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        kept[key] = tensor
    return kept


def _split(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += tensor.nbytes
    return shards


def _shard_names(directory: Path, stem: str, count: int) -> list[str]:
    # The usual names, unless a shard of the old checkpoint has one: it must stay readable until the index changes.
    ends = [f"-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    if any((directory / f"{stem}{end}").exists() for end in ends):
        stem = f"{stem}-{os.urandom(4).hex()}"
    return [stem + end for end in ends]


def _index_text(names: list[str], shards: list[dict[str, Tensor]]) -> str:
    tensors = [tensor for shard in shards for tensor in shard.values()]
    index = {
        "metadata": {
            "total_parameters": sum(tensor.numel() for tensor in tensors),
            "total_size": sum(tensor.nbytes for tensor in tensors),
        },
        "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard},
    }
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _bytes(size: int | str) -> int:
    if isinstance(size, str):
        match = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?)\s*([KMG]I?B)?", size.strip().upper())
        value = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    else:
        value = size
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"max_shard_size: expected a positive number of bytes or a size like '5GB', got {shown(size)}")
    return value


def _remove_abandoned(directory: Path) -> None:
    for path in directory.glob(f".*{TEMPORARY_SUFFIX}"):
        if re.fullmatch(r"\.(model.*|config)\.(safetensors|json)(\.index\.json)?\.[0-9a-f]{8}\.tmp", path.name):
            with contextlib.suppress(OSError):  # another process's, or gone meanwhile
                if time.time() - path.lstat().st_mtime > _ABANDONED_AFTER_S:
                    path.unlink()
