"""Calls that the engine answers in one step: plain lists, and padded matrices."""

from typing import Any, NamedTuple

import numpy as np

from bert_fast.tokenization.engine import Engine
from bert_fast.tokenization.layout import BERT_PAIRS, PairForm, Truncation
from bert_fast.tokenization.options import Returned, Shape, padded_width


class Specials(NamedTuple):
    """Ids of the tokens that are put around the text, the type id of padding, and the form of pairs."""

    pad_id: int
    around: tuple[int, int]  # [CLS], [SEP]
    pad_token_type_id: int
    pairs: PairForm = BERT_PAIRS

    def types(self) -> tuple[int, ...]:
        """Type ids by `Code`."""
        return self.pairs.types(self.pad_token_type_id)

    def by_code(self) -> tuple[int, ...]:
        """Ids by `Code`; the entries of A and B are never used."""
        cls_id, sep_id = self.around
        return self.pad_id, cls_id, 0, sep_id, 0, sep_id


def direct_lists(
    engine: Engine, texts: Any, shape: Shape, returned: Returned, around: tuple[int, int]
) -> dict[str, Any] | None:
    """The entries of a call on a str, or a list or column of single texts, as lists; None if the engine makes no such.

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
    wanted_around = around if shape.add_special_tokens else None
    if isinstance(texts, str):
        return list_entries(engine.encode_one(texts, wanted_around, max_tokens), returned)
    try:
        rows = engine.encode_lists(texts, wanted_around, max_tokens)
    except (TypeError, ValueError):  # not all are single texts, or one is none; which, is said where they are split
        return None
    entries: dict[str, Any] = {"input_ids": rows}
    if returned.token_type_ids:
        entries["token_type_ids"] = [[0] * len(row) for row in rows]
    if returned.attention_mask:
        entries["attention_mask"] = [[1] * len(row) for row in rows]
    return entries


def list_entries(ids: list[int], returned: Returned) -> dict[str, Any]:
    """The entries of one text: its ids, and lists of zeros and ones."""
    entries = {"input_ids": ids}
    if returned.token_type_ids:
        entries["token_type_ids"] = [0] * len(ids)
    if returned.attention_mask:
        entries["attention_mask"] = [1] * len(ids)
    return entries


def direct_rows(
    engine: Engine, texts: Any, has_pair: np.ndarray | None, shape: Shape, returned: Returned, specials: Specials
) -> dict[str, Any] | None:
    """The entries of a call as matrices; None if the engine does not make them.

    Args:
        engine: makes them.
        texts: list or column of all texts, those of a pair side by side; or one str.
        has_pair (bool [rows]): which rows have two texts; None: none has.
        shape: what the call asks for.
        returned: likewise.
        specials: ids of special tokens.
    """
    if returned.tensors is None or returned.has_extras or (has_pair is not None and len(has_pair) == 0):
        return None
    is_padded = shape.padding != "do_not_pad"
    is_one = isinstance(texts, str) or (has_pair is not None and len(has_pair) == 1)
    if not is_padded and not is_one:
        return None
    if shape.padding == "max_length" and not shape.max_length:
        return None
    cut = shape.truncation
    num_special = specials.pairs.num_special(has_pair is not None) * shape.add_special_tokens
    if cut is not None and (cut.stride or cut.max_length < num_special):
        return None
    if cut is not None and cut.max_length == 0:
        return None
    try:
        rows = engine.encode_rows(
            [texts] if isinstance(texts, str) else texts,
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
            **_pair_options(specials.pairs),
        )
    except (TypeError, ValueError):  # as above
        return None
    if rows is None or len(rows[0]) == 0:
        return None
    names = ("input_ids", "token_type_ids", "attention_mask")
    entries: dict[str, Any] = {name: values for name, values in zip(names, rows, strict=True) if values is not None}
    if returned.tensors == "pt":
        import torch  # only for those who ask for tensors

        for name, values in entries.items():
            entries[name] = torch.from_numpy(values)
    return entries


def _keeps_the_start(cut: Truncation) -> bool:
    """Whether a single text that is too long just loses its end."""
    return cut.side == "right" and not cut.stride and cut.strategy != "only_second"


def _pair_options(pairs: PairForm) -> dict[str, int]:
    """Arguments of the engine; none where it is BERT's form, which all engines have."""
    return {} if pairs == BERT_PAIRS else {"pair_separators": pairs.num_separators, "pair_type": pairs.type_id}
