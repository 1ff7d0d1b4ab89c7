"""Tensors at fixed addresses that hold one packed batch after another."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from bert_fast.checks import check_count, check_dtype, check_ids, check_shape, check_tensor
from bert_fast.graphs.budgets import Budget, num_tokens
from bert_fast.ops.packing import as_length, check_offsets

_IGNORED = -100  # an integer label that no loss counts
# Places within a sequence; one past the longest is in none, and no loss counts it (a negative one means the first).
_PLACES = ("start_positions", "end_positions")
_MASK = "loss_mask"
_INTEGERS = (torch.int64, torch.int32)
_PER_TOKEN = ("input_ids", "token_type_ids", "position_ids", "inputs_embeds")


class TokenBuffers:
    """Tensors at fixed addresses that hold any batch within a budget, one after another.

    What fills them up counts in no loss. Labels there are -100; as those of sequences may be numbers, they come with an
    entry `loss_mask` (bool [sequences]) that says which count, where neither the example nor `fill` says otherwise.
    start_positions and end_positions lie past every sequence; masked_lm_positions name the last token.

    Args:
        example: a packed batch (input_ids or inputs_embeds, cu_seqlens, max_seqlen, whatever else the model takes),
            which says what entries there are, their dtypes, and by their sizes whether they belong to tokens, to
            sequences, to questions of num_choices sequences, or to masked_lm_positions. Later batches have the same
            entries.
        fill: by entry, what unused places hold instead; other entries hold 0.

    batch (dict): the entries as a model takes them; max_seqlen is the budget's.

    Raises:
        TypeError, ValueError: the message names the entry.
        ValueError: labels of tokens or questions are no integers, which no loss here leaves out, and `fill` does not
            name them.
    """

    def __init__(
        self,
        budget: Budget,
        example: Mapping[str, Any],
        device: torch.device | str,
        fill: Mapping[str, float] | None = None,
    ) -> None:
        check_batch(example)
        self.budget = budget
        self._kinds = {name: _kind(name, value, example) for name, value in example.items() if _is_filled(name)}
        own = fill or {}
        for name, kind in self._kinds.items():
            if "label" in name and kind != "sequence" and name not in own and example[name].dtype not in _INTEGERS:
                raise ValueError(
                    f"batch[{name!r}]: expected integers where labels belong to {kind}s, got "
                    f"{str(example[name].dtype).removeprefix('torch.')}: no loss leaves out what fills the buffers"
                )
        self._fill = {
            "masked_lm_positions": budget.max_tokens - 1,
            **{name: _IGNORED for name in example if "label" in name and example[name].dtype in _INTEGERS},
            **dict.fromkeys(_PLACES, budget.max_seqlen),
            **own,
        }
        # Of sequences they may be numbers, integers too, of which none is left out by its value.
        self._makes_mask = (
            self._kinds.get("labels") == "sequence" and not {_MASK} & example.keys() | {"labels"} & own.keys()
        )
        self._num_choices = example.get("num_choices", 1)
        num_questions = math.ceil(budget.num_slots / self._num_choices)
        num_slots = num_questions * self._num_choices
        rows = {
            "token": budget.max_tokens, "sequence": num_slots, "position": budget.max_labels or 0,
            "question": num_questions,
        }  # fmt: skip
        self.batch: dict[str, Any] = {
            name: torch.empty((rows[kind], *example[name].shape[1:]), dtype=example[name].dtype, device=device)
            for name, kind in self._kinds.items()
        }
        if self._makes_mask:
            self.batch[_MASK] = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self.batch["cu_seqlens"] = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.batch |= {name: example[name] for name in ("num_choices",) if name in example}
        self.batch["max_seqlen"] = budget.max_seqlen
        steps = torch.arange(1, num_slots + 1, dtype=torch.int64, device=device)
        self._ends = (steps * budget.max_seqlen).clamp(max=budget.max_tokens).int()  # of filling sequences, from 0

    def fill(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Copies a batch in, from whatever device; no device sync. Returns `self.batch`."""
        check_batch(batch)
        reasons = self.budget.reasons_against(batch)
        if reasons:
            raise ValueError(f"batch: {'; '.join(reasons)}")
        given = {name for name in batch if _is_filled(name)}
        if given != self._kinds.keys():
            raise ValueError(f"batch: expected the entries {sorted(self._kinds)}, got {sorted(given)}")
        num_choices = batch.get("num_choices", 1)
        if num_choices != self._num_choices:
            raise ValueError(
                f"batch['num_choices']: expected {self._num_choices} (the first batch's), got {num_choices}"
            )
        sizes = _sizes(batch)
        # All of it before anything is written: on the device offsets and positions are not checked again.
        check_offsets(
            "batch['cu_seqlens']", batch["cu_seqlens"], "batch['max_seqlen']", batch["max_seqlen"], sizes["token"]
        )
        if "masked_lm_positions" in batch:
            check_ids("batch['masked_lm_positions']", batch["masked_lm_positions"], sizes["token"])
        for name, kind in self._kinds.items():
            value, buffer = batch[name], self.batch[name]
            check_shape(f"batch[{name!r}]", value, (sizes[kind], *buffer.shape[1:]))
            if value.dtype != buffer.dtype:
                wanted, got = (str(t.dtype).removeprefix("torch.") for t in (buffer, value))
                raise TypeError(f"batch[{name!r}]: expected dtype {wanted} (the first batch's), got {got}")
        for name, kind in self._kinds.items():
            value, buffer = batch[name], self.batch[name]
            buffer[: sizes[kind]].copy_(value, non_blocking=True)
            buffer[sizes[kind] :].fill_(self._fill.get(name, 0))
        if self._makes_mask:
            self.batch[_MASK][: sizes["sequence"]].fill_(True)
            self.batch[_MASK][sizes["sequence"] :].fill_(False)
        used, cu_seqlens = sizes["sequence"] + 1, self.batch["cu_seqlens"]
        cu_seqlens[:used].copy_(batch["cu_seqlens"], non_blocking=True)
        torch.add(self._ends[: len(cu_seqlens) - used], sizes["token"], out=cu_seqlens[used:])
        cu_seqlens[used:].clamp_(max=self.budget.max_tokens)
        return self.batch


def _is_filled(name: str) -> bool:
    return name not in ("cu_seqlens", "max_seqlen", "num_choices")


def _sizes(batch: Mapping[str, Any]) -> dict[str, int]:
    """How many entries a batch has of each kind."""
    positions = batch.get("masked_lm_positions")
    return {
        "token": num_tokens(batch),
        "sequence": len(batch["cu_seqlens"]) - 1,
        "position": 0 if positions is None else len(positions),
        "question": (len(batch["cu_seqlens"]) - 1) // batch.get("num_choices", 1),
    }


def _kind(name: str, value: Any, batch: Mapping[str, Any]) -> str:
    """Whether an entry belongs to tokens, sequences or positions."""
    if name in _PER_TOKEN:
        return "token"
    if "masked_lm_positions" in batch and name in ("masked_lm_positions", "labels"):
        return "position"
    sizes = _sizes(batch)
    if "num_choices" in batch and "label" in name:
        return "question"
    kinds = [kind for kind in ("token", "sequence") if value.dim() and len(value) == sizes[kind]]
    if len(kinds) != 1:
        raise ValueError(
            f"batch[{name!r}]: expected an entry for each of {sizes['token']} tokens or {sizes['sequence']} sequences "
            f"(not equally many in the first batch), got shape {list(value.shape)}"
        )
    return kinds[0]


def check_batch(batch: Any) -> None:
    """Raises TypeError, ValueError unless it is a packed batch."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch: expected a mapping, got {type(batch).__name__}")
    if not {"cu_seqlens", "max_seqlen"} <= batch.keys() or not {"input_ids", "inputs_embeds"} & batch.keys():
        raise ValueError(f"batch: expected input_ids or inputs_embeds, cu_seqlens and max_seqlen, got {sorted(batch)}")
    for name, value in batch.items():
        if name not in ("max_seqlen", "num_choices"):
            check_tensor(f"batch[{name!r}]", value)
    if "num_choices" in batch:
        check_count("batch['num_choices']", batch["num_choices"], 1)
    as_length("batch['max_seqlen']", batch["max_seqlen"])
    check_shape("batch['cu_seqlens']", batch["cu_seqlens"], ("B + 1",))
    check_dtype("batch['cu_seqlens']", batch["cu_seqlens"], (torch.int32,))
    if len(batch["cu_seqlens"]) == 0:
        raise ValueError("batch['cu_seqlens']: expected at least one entry (the leading 0), got none")
