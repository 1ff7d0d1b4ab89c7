"""Checkpoints: reading every format in which BERT was published, loading into a model, and saving without a gap.

Reading never runs code from a file: pickles are loaded by PyTorch's weights-only reader, which refuses anything but
tensors and plain containers. All errors are `CheckpointError`s that name the file and the cause.
"""

import functools
import os
import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from bert_fast.checks import check_flag
from bert_fast.errors import CheckpointError
from bert_fast.files import open_regular, path_string
from bert_fast.hub import fetch_first
from bert_fast.models.config_checks import shown
from bert_fast.models.json_file import read_json
from bert_fast.models.keys import KeyMatch, canonical_key, match_keys, oriented

INDEX_SUFFIX = ".index.json"
# In order of preference, as in transformers.
WEIGHTS_NAMES = (
    "model.safetensors",
    "model.safetensors" + INDEX_SUFFIX,
    "pytorch_model.bin",
    "pytorch_model.bin" + INDEX_SUFFIX,
)
_OTHER_FRAMEWORKS = ("tf_model.h5", "flax_model.msgpack", "bert_model.ckpt.index", "model.onnx")
_INDEX_NAME = re.compile(r"\.index(\.[\w-]+)?\.json$")  # with a variant, or without
_LFS_POINTER = b"version https://git-lfs"
_REFUSED_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_NESTED = ("state_dict", "model")  # where training frameworks put the weights among their other state
_ENCODER = ("embeddings.", "encoder.")
_MAX_NAMES = 20  # in one message


@dataclass(frozen=True)
class Mismatch:
    """A parameter whose value in the file does not fit: its name, and what the model has and the file holds."""

    name: str
    expected: str
    actual: str
    found: torch.Size | None = field(default=None, compare=False)  # the file's shape, where that is another one

    def __str__(self) -> str:
        return f"{self.name}: expected {self.expected}, got {self.actual}"


@dataclass(frozen=True)
class LoadReport:
    """What loading left over.

    missing: parameters of the model that the file does not hold; they keep their values.
    unexpected: keys of the file that the model has no use for.
    mismatched: parameters skipped because of their shape (only with `ignore_mismatched_sizes`).
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Mismatch, ...] = ()


def weights_names(variant: str | None = None, use_safetensors: bool | None = None) -> tuple[str, ...]:
    """Names of weights files and indices, in order of preference.

    variant: "fp16" stands for model.fp16.safetensors and so on. use_safetensors: these only, or without them.

    Raises: TypeError, ValueError for a variant that is no part of a file's name.
    """
    if use_safetensors is not None:
        check_flag("use_safetensors", use_safetensors)
    names = [name for name in WEIGHTS_NAMES if use_safetensors in (None, name.startswith("model."))]
    if variant is None:
        return tuple(names)
    if not isinstance(variant, str):
        raise TypeError(f"variant: expected a str or None, got {type(variant).__name__}")
    if not re.fullmatch(r"[\w-]+", variant):
        raise ValueError(f"variant: expected letters, digits, '-' and '_', got {shown(variant)}")
    return tuple(f".{variant}.".join(name.rsplit(".", 1)) for name in names)


def is_index(name: str) -> bool:
    """Whether a file of this name is an index of shards."""
    return _INDEX_NAME.search(name) is not None


def find_weights(directory: str | os.PathLike[str], names: Sequence[str] = WEIGHTS_NAMES) -> Path:
    """The weights file, or index of shards, of a checkpoint directory: the first of these names.

    Raises:
        CheckpointError: there is none.
    """
    directory = Path(path_string("directory", directory))
    for name in names:
        if (directory / name).is_file():
            return directory / name
    others = [name for name in _OTHER_FRAMEWORKS if (directory / name).exists()]
    hint = f" ({', '.join(others)}: the format of another framework, convert it first)" if others else ""
    if unasked := [name for name in WEIGHTS_NAMES if name not in names and (directory / name).is_file()]:
        hint = f" ({unasked[0]} is there, but variant or use_safetensors ask for another)"
    raise CheckpointError(f"{directory}: the directory holds none of {', '.join(names)}{hint}")


def load_checkpoint(path: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Reads all weights of a checkpoint.

    Args:
        path: a directory, a weights file, or an index of shards (`*.index.json`); nothing is downloaded.
        dtype: floating-point tensors are cast to it; None keeps what is stored.

    Returns: key -> Tensor on the CPU, keys as in the file. Tensors of safetensors files may be read-only maps of the
        file until they are copied: treat them as constants.

    Raises:
        CheckpointError: missing, empty, truncated or corrupt files, pipes and devices in place of files, shards that
            are absent, pickles that hold code, tensors without all values, archives that unpack to more than they are.
    """
    path = Path(path_string("path", path))
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: expected a torch.dtype or None, got {type(dtype).__name__}")
    if os.path.isdir(path):  # unlike Path.is_dir, False for names that no file can have
        path = find_weights(path)
    state = _load_shards(path) if is_index(path.name) else load_state_dict_file(path)
    if dtype is not None:
        state = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in state.items()}
    return state


def load_state_dict_file(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Reads one weights file: safetensors by its suffix, else a file written by `torch.save`.

    Raises:
        CheckpointError: as in `load_checkpoint`.
    """
    path = Path(path_string("path", path))
    try:
        with open_regular(path) as file:
            start = file.read(len(_LFS_POINTER))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file or directory") from error
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not start:
        raise CheckpointError(f"{path}: the file is empty")
    if start == _LFS_POINTER:
        raise CheckpointError(f"{path}: a Git LFS pointer, not the weights themselves (run `git lfs pull`)")
    return _load_safetensors(path) if path.suffix == ".safetensors" else _load_torch(path)


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (not iterable)
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:  # the last two: impossible shapes
        raise CheckpointError(f"{path}: not a complete safetensors file (truncated or corrupt): {error}") from error


def _load_torch(path: Path) -> dict[str, Tensor]:
    _check_unpacked_size(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = _REFUSED_GLOBAL.search(str(error))
        if refused:
            raise CheckpointError(
                f"{path}: refused, because it holds Python objects that could run code ({refused[1]}); "
                "only tensors are read"
            ) from error
        raise CheckpointError(f"{path}: not a complete PyTorch file (truncated or corrupt): {error}") from error
    except Exception as error:  # the reader of a damaged pickle raises whatever its bytes lead it to
        raise CheckpointError(
            f"{path}: not a complete PyTorch file (truncated or corrupt): {type(error).__name__}: {error}"
        ) from error
    for name in _NESTED:
        if isinstance(state, Mapping) and isinstance(state.get(name), Mapping):
            state = state[name]
            break
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path}: expected a dictionary of tensors, got {type(state).__name__}")
    strange = [key for key, value in state.items() if not isinstance(key, str) or not isinstance(value, Tensor)]
    if strange:
        raise CheckpointError(f"{path}: expected a dictionary of tensors, but these are none: {list_names(strange)}")
    empty = [f"{key} ({reason})" for key, value in state.items() if (reason := _not_stored(value))]
    if empty:
        raise CheckpointError(f"{path}: expected dense tensors with all values, but these are not: {list_names(empty)}")
    return dict(state)


def _check_unpacked_size(path: Path) -> None:
    # torch.save compresses nothing; what is smaller than its content could fill the memory.
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(record.file_size for record in archive.infolist())
    except Exception:  # no archive, or a damaged one: PyTorch's reader tells what is wrong with it
        return
    if size > path.stat().st_size:
        raise CheckpointError(
            f"{path}: refused, because {path.stat().st_size} bytes unpack to {size}; torch.save compresses nothing"
        )


def _not_stored(value: Tensor) -> str | None:
    if reason := not_dense(value):
        return reason
    return "a few values repeated" if value.numel() * value.element_size() > value.untyped_storage().nbytes() else None


def fetch_weights(name: str, options: Mapping[str, Any], names: Sequence[str] = WEIGHTS_NAMES) -> Path:
    """The local path of the weights file, or index of shards, of a repository of the hub; see `hub.fetch_first`."""
    path = fetch_first(name, names, options)
    if is_index(path.name):
        for shard in sorted(set(_read_index(path).values())):
            fetch_first(name, [shard], options)
    return path


def _load_shards(index_path: Path) -> dict[str, Tensor]:
    weight_map = _read_index(index_path)
    shards = sorted(set(weight_map.values()))
    absent = [name for name in shards if not (index_path.parent / name).is_file()]
    if absent:
        raise CheckpointError(f"{index_path}: lists files that are not there: {list_names(absent)}")
    state: dict[str, Tensor] = {}
    for name in shards:
        for key, tensor in load_state_dict_file(index_path.parent / name).items():
            if weight_map.get(key, name) == name:
                state[key] = tensor
    lost = [f"{key} ({weight_map[key]})" for key in weight_map if key not in state]
    if lost:
        raise CheckpointError(f"{index_path}: lists keys that their files do not hold: {list_names(lost)}")
    return state


def _read_index(path: Path) -> dict[str, str]:
    index = read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: expected an object with a non-empty 'weight_map'")
    for key, name in weight_map.items():
        # A name with a path in it could make us read files outside the checkpoint.
        is_path = not isinstance(name, str) or name in ("", "..") or Path(name).name != name
        if is_path or is_index(name):
            raise CheckpointError(f"{path}: weight_map[{key!r}]: expected a file name, got {name!r}")
    return weight_map


def load_into(
    model: nn.Module,
    state_dict: Mapping[str, Tensor],
    *,
    strict: bool = False,
    ignore_mismatched_sizes: bool = False,
    source: str | os.PathLike[str] = "state_dict",
) -> LoadReport:
    """Copies weights into a model in place, matching names by `keys.canonical_key`.

    Keys with and without the `bert.` prefix, LayerNorm `gamma`/`beta`, stored index buffers and TensorFlow's names are
    understood (its kernels are transposed). Values are cast to the model's dtype and moved to its device. A tied
    parameter counts as loaded when any of its names is.

    Args:
        model: any module with Hugging Face's parameter names.
        state_dict: key -> Tensor, as from `load_checkpoint`.
        strict: raise when anything is missing or unexpected.
        ignore_mismatched_sizes: skip and report parameters of another shape instead of raising.
        source: named in messages.

    Raises:
        CheckpointError: parameters of another shape, or values that cannot be cast (every one is listed), keys that
            contradict each other, weights of another architecture, nothing that fits at all, or leftovers with
            `strict`.
        TypeError: `state_dict` is no mapping from names to tensors, or another argument of a wrong type.
        The model is untouched in all these cases.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    _check_entries(state_dict)
    check_flag("strict", strict)
    check_flag("ignore_mismatched_sizes", ignore_mismatched_sizes)
    targets: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for key, target in targets.items():
        if not isinstance(target, Tensor):  # as of quantised layers
            raise ValueError(f"model: expected a state of tensors alone, got {type(target).__name__} as {key}")
        if reason := not_dense(target):
            raise ValueError(f"model: expected dense tensors to write to, got {reason} as {key}")
    state_dict = {key: oriented(key, value) for key, value in state_dict.items()}
    try:
        match = match_keys(state_dict, targets)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from error
    if _fits_nothing(match):
        raise CheckpointError(
            f"{source}: no key fits {type(model).__name__}, so these are weights of another architecture; "
            f"the file holds {list_names(list(state_dict), 5)}; the model expects {list_names(list(targets), 5)}"
        )
    mismatched = [
        mismatch
        for key, file_key in match.source.items()
        if (mismatch := _compare(key, targets[key], state_dict[file_key]))
    ]
    if mismatched and not ignore_mismatched_sizes:
        lines = "".join(f"\n  {mismatch}" for mismatch in mismatched)
        raise CheckpointError(f"{source}: does not fit {type(model).__name__}:{lines}")
    skipped = {mismatch.name for mismatch in mismatched}
    sources = {key: file_key for key, file_key in match.source.items() if key not in skipped}
    _prefer_decoder_bias(targets, sources)
    _check_tied(targets, sources, state_dict, source)
    known = {_storage(targets[key]) for key in sources}
    missing = []
    for key in match.missing:  # a tied parameter under its first name only, and not at all if another name is loaded
        if (storage := _storage(targets[key])) not in known:
            known.add(storage)
            missing.append(key)
    report = LoadReport(
        missing=tuple(missing),
        unexpected=match.unexpected,
        mismatched=tuple(mismatched),
    )
    if strict and (report.missing or report.unexpected):
        raise CheckpointError(
            f"{source}: does not fit {type(model).__name__} exactly: "
            f"missing {list_names(report.missing)}; unexpected {list_names(report.unexpected)}"
        )
    values = _apart({key: state_dict[file_key] for key, file_key in sources.items()}, targets)
    # Through the modules' own loading, so that one which stores its parameters differently can translate them.
    model.load_state_dict(values, strict=False)
    return report


def _check_entries(state_dict: Any) -> None:
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict: expected a mapping from names to tensors, got {type(state_dict).__name__}")
    for key, value in state_dict.items():
        if not isinstance(key, str):
            raise TypeError(f"state_dict: expected names as keys, got {key!r}")
        if not isinstance(value, Tensor):
            raise TypeError(f"state_dict[{key!r}]: expected a Tensor, got {type(value).__name__}")


def _fits_nothing(match: KeyMatch) -> bool:
    """Whether nothing of the file is the model's. Where the model has an encoder, a fitting head alone is nothing."""
    encoder = [key for key in (*match.source, *match.missing) if canonical_key(key).startswith(_ENCODER)]
    return not any(key in match.source for key in encoder or match.source)


def _compare(name: str, target: Tensor, value: Tensor) -> Mismatch | None:
    if reason := not_dense(value):
        return Mismatch(name, "a dense tensor", reason)
    if target.shape != value.shape:
        return Mismatch(name, str(list(target.shape)), str(list(value.shape)), value.shape)
    if target.is_floating_point() and not value.is_floating_point():  # quantised values mean nothing without scales
        return Mismatch(name, "floating-point values", _dtype_name(value))
    if not _can_cast(value.dtype, target.dtype):
        return Mismatch(name, f"values that become {_dtype_name(target)}", _dtype_name(value))
    return None


def not_dense(value: Tensor) -> str | None:
    """What a tensor is where it does not hold a number for each of its elements; None for one that does."""
    if value.is_meta or getattr(value, "fake_mode", None) is not None:
        return "a tensor without values, of the meta device"
    if hasattr(value, "placements"):
        return "a part of a tensor that several processes hold"
    if value.layout is not torch.strided or value.is_nested:
        return "a nested tensor" if value.is_nested else f"a tensor of layout {_dtype_name(value.layout)}"
    return None


@functools.cache
def _can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=source, device="cpu").to(target)
    except (RuntimeError, NotImplementedError):  # packed numbers of four bits
        return False
    return True


def _dtype_name(of: Any) -> str:
    return str(getattr(of, "dtype", of)).removeprefix("torch.")


def _apart(values: dict[str, Tensor], targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values, those copied that lie in the model's own memory: an earlier one's copying would change them."""
    written = {_memory(targets[key]) for key in values}
    return {key: value.clone() if _memory(value) in written else value for key, value in values.items()}


def _memory(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _storage(tensor: Tensor) -> tuple[Any, ...]:
    # Equal for two names of one tied parameter.
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (id(tensor),)


def _prefer_decoder_bias(targets: Mapping[str, Tensor], sources: dict[str, str]) -> None:
    # A file of an untied transformers model holds two biases, of which its forward reads the decoder's only; a model
    # that has one bias under both names takes that one.
    key, decoder_key = "cls.predictions.bias", "cls.predictions.decoder.bias"
    if key in sources and decoder_key in sources and _storage(targets[key]) == _storage(targets[decoder_key]):
        sources[key] = sources[decoder_key]


def _check_tied(
    targets: Mapping[str, Tensor], sources: Mapping[str, str], state_dict: Mapping[str, Tensor], source: object
) -> None:
    # Two different values for one tied parameter: loading either would silently change the model.
    first: dict[tuple[Any, ...], str] = {}
    for key, file_key in sources.items():
        other = sources[first.setdefault(_storage(targets[key]), key)]
        a, b = state_dict[other], state_dict[file_key]
        if other != file_key and _storage(a) != _storage(b) and not torch.equal(a, b):
            raise CheckpointError(
                f"{source}: {other} and {file_key} differ, but the model ties them to one parameter; "
                "load it with tie_word_embeddings=False"
            )


def list_names(names: Sequence[object], limit: int = _MAX_NAMES) -> str:
    """Names for a message: the first `limit` of them and the number of the others."""
    shown = ", ".join(str(name) for name in names[:limit]) or "nothing"
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
