"""Rows that are encoded already: conversion to tensors, and padding for data collators."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bert_fast.tokenization.arguments import plain, shown
from bert_fast.tokenization.options import padded_width, tensor_kind

_UNPADDABLE = (
    "cannot make tensors of rows of different lengths; pass padding=True and truncation=True, or no return_tensors"
)


def to_tensor(value: Any, return_tensors: Any) -> Any:
    """A rectangular array or nested list as a torch tensor ("pt") or NumPy array ("np"); None leaves it alone.

    Raises:
        ValueError: the rows differ in length, or return_tensors names neither.
    """
    kind = tensor_kind(return_tensors)
    if kind is None:
        return value
    if kind == "pt":
        import torch  # only for those who ask for tensors

        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return torch.stack(list(value))
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(_UNPADDABLE) from None
    if array.size == 0 and not isinstance(value, np.ndarray):
        array = array.astype(np.int64)
    if array.dtype == object:
        raise ValueError(_UNPADDABLE)
    if kind == "np":
        return array
    if array.dtype == np.float64 and isinstance(value, (list, tuple)) and not isinstance(value[0], np.ndarray):
        return torch.tensor(value)  # floats of Python get torch's default type
    return torch.from_numpy(np.ascontiguousarray(array))


def pad_features(
    features: Any,
    fills: Mapping[str, int],
    *,
    strategy: str,
    max_length: int | None,
    pad_to_multiple_of: int | None,
    padding_side: str,
    return_attention_mask: bool,
    return_tensors: Any,
) -> dict[str, Any]:
    """Pads already encoded rows, as data collators ask for it.

    Args:
        features: one row as a mapping, a mapping of lists of rows, or a list of mappings; values are lists, arrays or
            tensors. Entries that are not in `fills` are collected and left as they are.
        fills: what to pad each entry with.
        strategy: "longest", "max_length" or "do_not_pad".
        max_length: length for "max_length".
        pad_to_multiple_of: rounds the length up.
        padding_side: "right" or "left".
        return_attention_mask: make one if there is none.
        return_tensors: "pt", "np" or None; None keeps the kind of the first `input_ids`.

    Raises:
        ValueError: no `input_ids`, or entries of different batch sizes.
    """
    if isinstance(features, (list, tuple)) and features and isinstance(features[0], Mapping):
        try:
            entries: dict[str, Any] = {key: [row[key] for row in features] for key in features[0]}
        except (IndexError, KeyError, TypeError):
            raise ValueError(f"encoded_inputs: expected mappings with the entries {list(features[0])} each") from None
    elif isinstance(features, Mapping):
        entries = dict(features)
    else:
        raise TypeError(f"encoded_inputs: expected a mapping or a list of mappings, got {type(features).__name__}")
    if "input_ids" not in entries:
        raise ValueError(f"encoded_inputs: expected an entry input_ids, got {shown(list(entries))}")
    first = entries["input_ids"]
    if not (isinstance(first, (list, tuple)) or hasattr(first, "tolist")) or getattr(first, "ndim", 1) == 0:
        raise TypeError(f"encoded_inputs: expected a list in input_ids, got {type(first).__name__}")
    if return_tensors is None:
        return_tensors = _kind_of(first)
    entries = {key: _to_lists(key, value) for key, value in entries.items()}
    rows = entries["input_ids"]
    is_single = len(rows) > 0 and not isinstance(rows[0], list)
    if is_single:
        entries = {key: [value] for key, value in entries.items()}
        rows = entries["input_ids"]
    for key, value in entries.items():
        if not hasattr(value, "__len__"):
            raise TypeError(f"encoded_inputs: expected a list in {key}, got {type(value).__name__}")
        if len(value) != len(rows):
            raise ValueError(f"encoded_inputs: {key} has {len(value)} rows, input_ids {len(rows)}")
    try:
        longest = max(map(len, rows), default=0)
    except TypeError:
        raise TypeError("encoded_inputs: expected lists of ints in input_ids") from None
    if return_attention_mask and "attention_mask" not in entries:
        entries["attention_mask"] = [[1] * len(row) for row in rows]
    width = padded_width(longest, strategy, max_length, pad_to_multiple_of)
    for key in entries.keys() & fills.keys():
        entries[key] = [
            _pad_row(row, max(width, len(rows[i])), fills[key], padding_side, key) for i, row in enumerate(entries[key])
        ]
    if is_single:
        entries = {key: value[0] for key, value in entries.items()}
    return {key: _converted(key, value, return_tensors) for key, value in entries.items()}


def _pad_row(row: Sequence[int], width: int, fill: int, side: str, key: str) -> list[int]:
    if not isinstance(row, (list, tuple)):
        raise TypeError(f"encoded_inputs: expected a list of ints in {key}, got {type(row).__name__}")
    padding = [fill] * (width - len(row))
    return [*row, *padding] if side == "right" else [*padding, *row]


def _converted(key: str, value: Any, return_tensors: Any) -> Any:
    try:
        return to_tensor(value, return_tensors)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise (TypeError if isinstance(error, TypeError) else ValueError)(f"encoded_inputs: {key}: {error}") from None


def _kind_of(rows: Any) -> str | None:
    """The tensor kind of `input_ids` as given: of the whole, or of its first row."""
    for value in (rows, rows[0] if len(rows) else None):
        if isinstance(value, np.ndarray):
            return "np"
        if type(value).__module__.startswith("torch"):
            return "pt"
    return None


def _to_lists(key: str, value: Any) -> Any:
    """Arrays and tensors, or lists of them, as nested lists."""
    name = f"encoded_inputs: {key}"
    if isinstance(value, (list, tuple)) and value and hasattr(value[0], "tolist"):
        return [plain(name, item) for item in value]
    return plain(name, value)
