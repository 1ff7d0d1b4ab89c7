"""One call of the tokenizer, from parsed inputs to the returned dictionary."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bert_fast.tokenization.direct import Specials, direct_rows
from bert_fast.tokenization.encoding import BatchEncoding, Encodings, FoundTokens, ragged
from bert_fast.tokenization.engine import Engine
from bert_fast.tokenization.inputs import Inputs
from bert_fast.tokenization.layout import Layout, PairForm, Rows, arrange, plan_rows
from bert_fast.tokenization.options import Returned, Shape, padded_width
from bert_fast.tokenization.padding import to_tensor


class Segments(NamedTuple):
    """Tokens of all segments, flat."""

    ids: np.ndarray  # int32 [N]
    cu_segments: np.ndarray  # int64 [S + 1]
    offsets: np.ndarray | None  # int32 [N, 2]
    word_ids: np.ndarray | None  # int32 [N]


def tokenize_segments(engine: Engine, inputs: Inputs, origins: bool) -> Segments:
    """Tokenizes everything in one call of the engine; `origins` asks for offsets and word ids too."""
    ids, cu_seqlens, offsets, word_ids = engine.encode(inputs.strings, offsets=bool(origins), word_ids=bool(origins))
    if inputs.words_per_segment is None:
        return Segments(ids, cu_seqlens, offsets, word_ids)
    # The engine saw words: a segment is several of its texts, and the number of a word is its place in the segment.
    words = np.array(inputs.words_per_segment, dtype=np.int64)
    first_word = np.concatenate([[0], np.cumsum(words)]).astype(np.int64)
    if origins:
        place = np.arange(first_word[-1]) - np.repeat(first_word[:-1], words)
        word_ids = np.repeat(place, np.diff(cu_seqlens)).astype(np.int32)
    return Segments(ids, cu_seqlens[first_word], offsets, word_ids)


def encode_batch(
    engine: Engine,
    inputs: Inputs,
    shape: Shape,
    returned: Returned,
    specials: Specials,
    token_of: Callable[[int], str],
) -> BatchEncoding:
    """Tokenizes, truncates, pads and collects what was asked for: by the engine if it can, else by array arithmetic.

    Raises:
        ValueError: see `plan_rows`; rows of different lengths cannot become a torch tensor.
    """
    if inputs.words_per_segment is None:
        entries = direct_rows(engine, inputs.strings, inputs.has_pair, shape, returned, specials)
        if entries is not None:
            return BatchEncoding(entries, later_encodings(engine, lambda: inputs, shape, specials, token_of))
    segments = tokenize_segments(engine, inputs, returned.offsets_mapping)
    if _is_plain(inputs, segments, shape, returned, specials.pairs):
        return _encode_plain(engine, inputs, segments, shape, returned, specials, token_of)
    rows = plan_rows(
        segments.cu_segments,
        inputs.has_pair,
        shape.truncation,
        shape.add_special_tokens,
        returned.overflowing_tokens,
        specials.pairs,
    )
    layout = _lay_out(rows, len(segments.ids), shape, specials.pairs)
    by_code = specials.by_code()

    flat = {"input_ids": layout.fill(segments.ids, by_code)}
    if returned.token_type_ids:
        flat["token_type_ids"] = layout.lookup(specials.types())
    if returned.attention_mask:
        flat["attention_mask"] = layout.lookup((0, 1, 1, 1, 1, 1))
    if returned.special_tokens_mask:
        flat["special_tokens_mask"] = layout.lookup((1, 1, 0, 1, 0, 1))
    if segments.offsets is not None:
        flat["offset_mapping"] = layout.fill(segments.offsets, (0,) * 6)

    is_single = not inputs.is_batched and returned.tensors is None and not returned.overflowing_tokens
    data = {name: _shaped(values, layout, returned.tensors, is_single) for name, values in flat.items()}
    if returned.length:
        data["length"] = _listed(np.diff(layout.row_starts), returned.tensors)
    if returned.overflowing_tokens:
        data["overflow_to_sample_mapping"] = _listed(rows.sample, returned.tensors)

    def find_tokens() -> FoundTokens:
        found = segments if segments.offsets is not None else tokenize_segments(engine, inputs, True)
        return _found(layout, found)

    num_rows = len(rows.sample)
    return BatchEncoding(data, Encodings(num_rows, find_tokens, by_code, specials.types(), token_of))


def later_encodings(
    engine: Engine,
    make_inputs: Callable[[], Inputs],
    shape: Shape,
    specials: Specials,
    token_of: Callable[[int], str],
) -> Callable[[], Encodings]:
    """Makes the rows of a call without overflow when they are first asked for.

    Args:
        engine: the one that the call used.
        make_inputs: the texts of the call.
        shape: what the call asked for.
        specials: ids of special tokens at the time of the call.
        token_of: token string of an id.
    """

    def make() -> Encodings:
        inputs = make_inputs()

        def find_tokens() -> FoundTokens:
            segments = tokenize_segments(engine, inputs, True)
            rows = plan_rows(
                segments.cu_segments, inputs.has_pair, shape.truncation, shape.add_special_tokens, pairs=specials.pairs
            )
            return _found(_lay_out(rows, len(segments.ids), shape, specials.pairs), segments)

        num_rows = len(inputs.has_pair)
        return Encodings(num_rows, find_tokens, specials.by_code(), specials.types(), token_of)

    return make


def _lay_out(rows: Rows, num_tokens: int, shape: Shape, pairs: PairForm) -> Layout:
    # Overflowing rows do not widen the batch: only those of special tokens alone are shorter than their overflow.
    is_main = np.diff(rows.sample, prepend=-1) > 0
    text_lengths = rows.length[is_main].sum(axis=1)
    if shape.add_special_tokens:
        text_lengths = text_lengths + np.where(
            rows.has_pair[is_main], pairs.num_special(True), pairs.num_special(False)
        )
    width = padded_width(int(text_lengths.max(initial=0)), shape.padding, shape.max_length, shape.pad_to_multiple_of)
    return arrange(rows, num_tokens, shape.add_special_tokens, width, shape.padding_side, pairs)


def _is_plain(inputs: Inputs, segments: Segments, shape: Shape, returned: Returned, pairs: PairForm) -> bool:
    """Whether this is one text or pair that is neither cut nor padded, for lists and without extras."""
    if inputs.is_batched or returned.tensors or returned.offsets_mapping or returned.overflowing_tokens:
        return False
    if shape.padding == "max_length" or (shape.padding == "longest" and shape.pad_to_multiple_of):
        return False
    cut = shape.truncation
    return cut is None or (len(segments.ids) + pairs.num_special(True) <= cut.max_length and not cut.stride)


def _encode_plain(
    engine: Engine,
    inputs: Inputs,
    segments: Segments,
    shape: Shape,
    returned: Returned,
    specials: Specials,
    token_of: Callable[[int], str],
) -> BatchEncoding:
    """The common call on one short text: for it, the array arithmetic would cost more than the tokenizer."""
    boundary = int(segments.cu_segments[1])
    ids: list[int] = segments.ids.tolist()
    first, second, around = ids[:boundary], ids[boundary:], int(shape.add_special_tokens)
    cls, sep = ([token_id] * around for token_id in specials.around)
    has_pair = len(segments.cu_segments) == 3
    sep_a, sep_b = (sep * specials.pairs.num_separators, sep) if has_pair else (sep, [])
    data: dict[str, Any] = {"input_ids": cls + first + sep_a + second + sep_b}
    length = len(data["input_ids"])
    if returned.token_type_ids:
        num_second = len(second) + len(sep_b)
        data["token_type_ids"] = [0] * (length - num_second) + [specials.pairs.type_id] * num_second
    if returned.attention_mask:
        data["attention_mask"] = [1] * length
    if returned.special_tokens_mask:
        marks = [1] * len(cls), [1] * len(sep_a), [1] * len(sep_b)
        data["special_tokens_mask"] = marks[0] + [0] * len(first) + marks[1] + [0] * len(second) + marks[2]
    if returned.length:
        data["length"] = [length]

    return BatchEncoding(data, later_encodings(engine, lambda: inputs, shape, specials, token_of))


def _found(layout: Layout, segments: Segments) -> FoundTokens:
    assert segments.offsets is not None and segments.word_ids is not None
    return layout, segments.ids, segments.offsets, segments.word_ids


def _shaped(values: np.ndarray, layout: Layout, tensors: str | None, is_single: bool) -> Any:
    """Flat values as a matrix (tensors) or as lists of rows; the only row itself if `is_single`."""
    num_rows = len(layout.row_starts) - 1
    width = layout.width
    if tensors is not None and width is not None:
        return to_tensor(values.reshape(num_rows, width, *values.shape[1:]), tensors)
    if tensors == "pt":
        to_tensor([[0], [0, 0]], tensors)  # raises with the advice to pad
    bounds = layout.row_starts.tolist()
    if tensors == "np":
        return ragged([values[start:stop] for start, stop in itertools.pairwise(bounds)])
    items: list[Any] = values.tolist()
    if values.ndim == 2:
        items = list(map(tuple, items))
    if is_single:
        return items
    return [items[start:stop] for start, stop in itertools.pairwise(bounds)]


def _listed(values: np.ndarray, tensors: str | None) -> Any:
    """One number per row."""
    return values.tolist() if tensors is None else to_tensor(values, tensors)
