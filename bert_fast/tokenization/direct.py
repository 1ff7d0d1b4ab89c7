"""Calls that the engine answers in one step: plain lists, and padded matrices."""

from typing import Any, NamedTuple

import numpy as np

from bert_fast.tokenization.engine import Engine
from bert_fast.tokenization.layout import Truncation
from bert_fast.tokenization.options import Returned, Shape, padded_width
from bert_fast.tokenization.padding import to_tensor

__all__ = ["Specials", "direct_lists", "direct_rows", "list_entries"]


class Specials(NamedTuple):
    """Ids of the tokens that are put around the text, and the type id of padding."""

    pad_id: int
    around: tuple[int, int]  # [CLS], [SEP]
    pad_token_type_id: int

    def by_code(self) -> tuple[int, ...]:
        """Ids by `Code`; the entries of A and B are never used."""
        cls_id, sep_id = self.around
        return self.pad_id, cls_id, 0, sep_id, 0, sep_id


def direct_lists(
    engine: Engine, texts: Any, shape: Shape, returned: Returned, around: tuple[int, int]
) -> dict[str, Any] | None:
    """The entries of a call on a list or column of single texts, as lists; None if the engine does not make them so.

    Texts that are cut on the right are read no further than they are kept.
    """
    if returned.tensors is not None or returned.has_extras or shape.padding != "do_not_pad":
        return None
    max_tokens = None
    if shape.truncation is not None:
        if not _keeps_the_start(shape.truncation):
            return None
        max_tokens = shape.truncation.max_length - 2 * shape.add_special_tokens
        if max_tokens < 0:
            return None
    try:
        rows = engine.encode_lists(texts, around if shape.add_special_tokens else None, max_tokens)
    except (TypeError, ValueError):  # not all are single texts, or one is none: whoever takes them apart says which
        return None
    return list_entries(rows, returned.token_type_ids, returned.attention_mask)


def list_entries(rows: list[list[int]], token_type_ids: bool, attention_mask: bool) -> dict[str, Any]:
    """The entries of single texts: their ids, and lists of zeros and ones."""
    entries: dict[str, Any] = {"input_ids": rows}
    if token_type_ids:
        entries["token_type_ids"] = [[0] * len(row) for row in rows]
    if attention_mask:
        entries["attention_mask"] = [[1] * len(row) for row in rows]
    return entries


def direct_rows(
    engine: Engine, texts: Any, has_pair: np.ndarray | None, shape: Shape, returned: Returned, specials: Specials
) -> dict[str, Any] | None:
    """The entries of a call as matrices; None if the engine does not make them.

    Args:
        engine: makes them.
        texts: list or column of all texts, those of a pair side by side.
        has_pair (bool [rows]): which rows have two texts; None: none has, and a row needs padding.
        shape: what the call asks for.
        returned: likewise.
        specials: ids of special tokens.
    """
    if returned.tensors is None or returned.has_extras or (has_pair is not None and len(has_pair) == 0):
        return None
    is_padded = shape.padding != "do_not_pad"
    if not is_padded and (has_pair is None or len(has_pair) > 1):
        return None
    if shape.padding == "max_length" and not shape.max_length:
        return None
    cut = shape.truncation
    if cut is not None and (cut.stride or cut.max_length < (2 if has_pair is None else 3) * shape.add_special_tokens):
        return None
    if cut is not None and cut.max_length == 0:
        return None
    try:
        rows = engine.encode_rows(
            texts,
            specials.around if shape.add_special_tokens else None,
            specials.pad_id,
            has_pair=has_pair,
            pad_type=specials.pad_token_type_id,
            max_length=0 if cut is None else cut.max_length,
            truncation="longest_first" if cut is None else cut.strategy,
            truncate_left=cut is not None and cut.side == "left",
            width=padded_width(0, shape.padding, shape.max_length, shape.pad_to_multiple_of),
            multiple_of=shape.pad_to_multiple_of or 0 if is_padded else 0,
            pad_left=shape.padding_side == "left",
            types=returned.token_type_ids,
            mask=returned.attention_mask,
        )
    except (TypeError, ValueError):  # as above
        return None
    if rows is None or len(rows[0]) == 0:
        return None
    names = ("input_ids", "token_type_ids", "attention_mask")
    return {
        name: to_tensor(values, returned.tensors)
        for name, values in zip(names, rows, strict=True)
        if values is not None
    }


def _keeps_the_start(cut: Truncation) -> bool:
    """Whether a single text that is too long just loses its end."""
    return cut.side == "right" and not cut.stride and cut.strategy != "only_second"
