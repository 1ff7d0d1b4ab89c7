"""Batches without padding out of single examples, where a data loader makes its batches.

    features = [{"input_ids": [101, 7, 102], "label": 1},      input_ids  = [101, 7, 102, 101, 102]     [T]
                {"input_ids": [101, 102],    "label": 0}]      labels     = [1, 0]                      [B]
                                                               cu_seqlens = [0, 3, 5], max_seqlen = 3

All of it is counted on the host, so that a step on `model(**batch)` waits for no device.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bert_fast.checks import check_tensor
from bert_fast.ops.packing import Packing
from bert_fast.tokenization.pack import PackedBatch

_NAMES = {"label": "labels", "label_ids": "labels"}  # what data sets call what models call labels
_OWN = ("cu_seqlens", "max_seqlen")  # entries that the collator makes


class PackedCollator:
    """A collate function: a list of features (mappings, as a tokenizer returns for one text) to one `PackedBatch`.

    What has an entry per token becomes [T] (input_ids, token_type_ids, position_ids, labels of tokens), a single number
    [B] (labels of sequences, start_positions); integers are int64, other numbers fp32. `label` and `label_ids` come out
    as `labels`; `attention_mask` does not come out: tokens that it marks with 0 are left out. Every batch has
    cu_seqlens (int32 [B + 1]) and max_seqlen (int).

    Args:
        collator: one for padded batches, to do before what it does to its batch, as
            `transformers.DataCollatorForLanguageModeling(tokenizer)` masks tokens; what it returns must hold an
            attention_mask [B, S]. Then its padding is removed: [B, S, ...] to [T, ...], other entries stay.

    Travels to worker processes if the collator does. Raises, when called, TypeError or ValueError with the number of
    the feature: no mapping, without input_ids, other keys than the first, a value that fits neither tokens nor number.

    Example:
        >>> features = [{"input_ids": [5, 6], "label": 1}, {"input_ids": [7], "label": 0}]
        >>> batch = bert_fast.PackedCollator()(features)
        >>> batch["input_ids"].tolist(), batch["cu_seqlens"].tolist(), batch["labels"].tolist()
        ([5, 6, 7], [0, 2, 3], [1, 0])
    """

    def __init__(self, collator: Callable[[list[Any]], Mapping[str, Any]] | None = None) -> None:
        if collator is not None and not callable(collator):
            raise TypeError(f"collator: expected a function of features, got {type(collator).__name__}")
        self.collator = collator

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> PackedBatch:
        """The batch of these features, in their order."""
        features = _checked(features)
        return _joined(features) if self.collator is None else _without_padding(self.collator(list(features)))


def _checked(features: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(features, str | Mapping) or not isinstance(features, Sequence):
        raise TypeError(f"features: expected a list of mappings, got {type(features).__name__}")
    if not features:
        raise ValueError("features: expected at least one, got none")
    for index, feature in enumerate(features):
        if not isinstance(feature, Mapping):
            raise TypeError(f"features[{index}]: expected a mapping, got {type(feature).__name__}")
        if "input_ids" not in feature:
            raise ValueError(f"features[{index}]: expected the key input_ids, got {_names(feature)}")
        if feature.keys() != features[0].keys():
            raise ValueError(f"features[{index}]: expected the keys {_names(features[0])}, got {_names(feature)}")
    _check_keys("features[0]", features[0])
    return features


def _check_keys(name: str, entries: Mapping[Any, Any]) -> None:
    for key in entries:
        if not isinstance(key, str):
            raise TypeError(f"{name}: expected names as keys, got {key!r}")
        if key in _OWN:
            raise ValueError(f"{name}: expected a batch without {' and '.join(_OWN)}, which are made, got {key}")


def _names(entries: Mapping[Any, Any]) -> list[str]:
    return sorted(map(str, entries))


def _joined(features: Sequence[Mapping[str, Any]]) -> PackedBatch:
    """The features' tokens behind one another, their numbers in one row."""
    columns: dict[str, list[Tensor]] = {}
    for index, feature in enumerate(features):
        for key, value in _kept(f"features[{index}]", feature).items():
            columns.setdefault(key, []).append(value)
    entries = {key: _column(key, values) for key, values in columns.items()}
    lengths = [len(sequence) for sequence in columns["input_ids"]]
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return PackedBatch(**entries, cu_seqlens=cu_seqlens, max_seqlen=max(lengths))


def _kept(name: str, feature: Mapping[str, Any]) -> dict[str, Tensor]:
    """One feature's values by the names of a model's arguments: numbers [], and [S, ...] of the tokens kept."""
    values = {_NAMES.get(key, key): _tensor(f"{name}[{key!r}]", value) for key, value in feature.items()}
    if len(values) < len(feature):
        raise ValueError(f"{name}: expected one of labels, label and label_ids, got {_names(feature)}")
    ids = values["input_ids"]
    if ids.dim() != 1 or ids.dtype != torch.int64:
        got = f"{str(ids.dtype).removeprefix('torch.')} {list(ids.shape)}"
        raise ValueError(f"{name}['input_ids']: expected one sequence of integers, got {got}")
    for key, value in values.items():
        if value.dim() and len(value) != len(ids):
            raise ValueError(f"{name}[{key!r}]: expected a number or {len(ids)} entries (the tokens), got {len(value)}")
    keep = values.pop("attention_mask", None)
    if keep is not None and keep.dim() != 1:
        raise ValueError(f"{name}['attention_mask']: expected {len(ids)} entries, got shape {list(keep.shape)}")
    if keep is None or keep.all():
        return values
    return {key: value[keep != 0] if value.dim() else value for key, value in values.items()}


def _column(key: str, values: list[Tensor]) -> Tensor:
    are_numbers = {value.dim() == 0 for value in values}
    if len(are_numbers) > 1:
        raise ValueError(
            f"features: {key}: expected a number in every feature or entries per token in every one, got both"
        )
    if are_numbers == {True}:
        return torch.stack(values)
    for index, value in enumerate(values):
        if value.shape[1:] != values[0].shape[1:]:
            wanted, got = (list(v.shape[1:]) for v in (values[0], value))
            raise ValueError(f"features[{index}][{key!r}]: expected entries of shape {wanted} as before, got {got}")
    return torch.cat(values)


def _tensor(name: str, value: Any) -> Tensor:
    """A value as a tensor of int64 or fp32."""
    if isinstance(value, Tensor):
        check_tensor(name, value)
        if value.is_meta:
            raise TypeError(f"{name}: expected numbers, got a Tensor on meta, which has none")
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # words, None, lists of unequal lengths
        raise TypeError(f"{name}: expected numbers, got {type(value).__name__} ({error})") from None
    if tensor.is_complex():
        raise TypeError(f"{name}: expected real numbers, got complex ones")
    return tensor.float() if tensor.is_floating_point() else tensor.long()


def _without_padding(batch: Mapping[str, Any]) -> PackedBatch:
    """What a collator of padded batches returned, packed."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        got = _names(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(f"collator: expected a batch with an attention_mask (Tensor [B, S]), got {got}")
    _check_keys("collator", batch)
    for key, value in batch.items():
        if isinstance(value, Tensor):
            check_tensor(f"collator: {key}", value)
    if mask.is_meta:
        raise TypeError("collator: attention_mask: expected numbers, got a Tensor on meta, which has none")
    packing = Packing.from_keep_mask(mask)
    entries = {
        key: packing.pack(value) if isinstance(value, Tensor) and value.shape[:2] == mask.shape else value
        for key, value in batch.items()
        if key != "attention_mask"
    }
    return PackedBatch(**entries, cu_seqlens=packing.cu_seqlens, max_seqlen=packing.max_seqlen)
