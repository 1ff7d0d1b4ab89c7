"""Texts in arrays, Arrow columns and buffers: the same ids as from a list, and an error for each kind of bad column."""

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_fast.tokenization import BertTokenizer

from . import arrow_columns as arrow
from .native_core import SMALL_VOCAB, make_native, needs_native

TEXTS = ["ab", "", "a ab é中!", "a b\U0001f600 x" * 9, "ß", "aba \u0301 [MASK]", "x" * 13, "b" * 12]


def array_forms() -> Iterator[tuple[str, Any]]:
    """TEXTS in every form of NumPy's and as a buffer."""
    data, boundaries = arrow.encoded(TEXTS)
    yield "U", np.array(TEXTS)
    yield "U, other byte order", np.array(TEXTS).astype(np.array(TEXTS).dtype.newbyteorder())
    yield "U, every second", np.repeat(np.array(TEXTS), 2)[::2]
    yield "U, backwards", np.array(TEXTS[::-1])[::-1]
    packed = np.zeros(len(TEXTS), dtype=[("flag", "u1"), ("text", "U99")])
    packed["text"] = TEXTS
    yield "U, not aligned", packed["text"]
    yield "S", np.array([text.encode() for text in TEXTS])
    yield "object", np.array(TEXTS, dtype=object)
    if hasattr(np.dtypes, "StringDType"):
        yield "T", np.array(TEXTS, dtype=np.dtypes.StringDType())
        yield "T, every second", np.repeat(np.array(TEXTS, dtype=np.dtypes.StringDType(na_object=None)), 2)[::2]
    yield "bytes", (data.tobytes(), boundaries)
    yield "array", (data, boundaries)
    yield "boundaries of another array", (memoryview(data), np.repeat(boundaries, 2)[::2])
    yield "inside a buffer", (b"zz" + data.tobytes(), boundaries + 2)


def arrow_forms() -> Iterator[tuple[str, Any]]:
    """TEXTS as Arrow columns."""
    for layout in ("u", "U", "z", "Z"):
        yield f"arrow {layout}", arrow.utf8(TEXTS, layout)
    all_there = np.array([255, 255], dtype=np.uint8)
    yield "with a bitmap, from the third on", arrow.utf8(["zz", "zz", *TEXTS], validity=all_there, offset=2)
    for layout in ("vu", "vz"):
        yield f"arrow {layout}", arrow.views(TEXTS, layout)
    for layout in "cCsSiIlL":
        yield f"dictionary {layout}", arrow.dictionary(TEXTS, layout)
    yield "dictionary of views", arrow.dictionary(TEXTS, make=arrow.views)
    yield "chunks", arrow.Chunked([arrow.utf8(TEXTS[:3]), arrow.utf8([]), arrow.utf8(["zz", *TEXTS[3:]], offset=1)])


ALL_FORMS = dict([*array_forms(), *arrow_forms()])


@needs_native
@pytest.mark.parametrize("name", ALL_FORMS)
def test_the_engine_reads_every_form(name: str) -> None:
    engine, texts = make_native(SMALL_VOCAB), ALL_FORMS[name]
    got, want = (engine.encode(form, offsets=True, word_ids=True, num_threads=2) for form in (texts, TEXTS))
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    assert engine.encode_lists(texts, (7, 8), 3) == engine.encode_lists(TEXTS, (7, 8), 3)
    got, want = (engine.encode_rows(form, None, 9, max_length=4) for form in (texts, TEXTS))
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", dict(array_forms()))
def test_calls_take_arrays(name: str, ours: Callable[..., BertTokenizer]) -> None:
    """Whatever is asked for, from ids alone to what makes the texts strings again."""
    tokenizer, texts = ours(), ALL_FORMS[name]
    for options in (
        {},
        {"padding": True, "return_tensors": "np"},
        {"truncation": True, "max_length": 4},
        {"padding": True, "return_offsets_mapping": True},
    ):
        got, want = tokenizer(texts, **options), tokenizer(TEXTS, **options)
        assert got.keys() == want.keys()
        assert all(np.array_equal(np.array(got[k], object), np.array(want[k], object)) for k in want)
        assert [row.tokens for row in got.encodings] == [row.tokens for row in want.encodings]
        assert [row.offsets for row in got.encodings] == [row.offsets for row in want.encodings]
    assert dict(tokenizer(texts, TEXTS)) == dict(tokenizer(TEXTS, TEXTS))
    assert np.array_equal(tokenizer.encode_ragged(texts).ids, tokenizer.encode_ragged(TEXTS).ids)
    assert tokenizer.pack(texts)["input_ids"].tolist() == tokenizer.pack(TEXTS)["input_ids"].tolist()


def test_libraries_of_arrow(ours: Callable[..., BertTokenizer]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    tokenizer = ours()
    column = pyarrow.array(TEXTS)
    for texts in (column, pyarrow.chunked_array([column[:3], column[3:]]), column.dictionary_encode()):
        assert dict(tokenizer(texts)) == dict(tokenizer(TEXTS))
        assert tokenizer(texts).tokens(2) == tokenizer(TEXTS).tokens(2)
        assert np.array_equal(tokenizer.encode_ragged(texts).ids, tokenizer.encode_ragged(TEXTS).ids)
    with pytest.raises(TypeError, match=r"text\[1\]: expected a str .* got None"):
        tokenizer(pyarrow.array(["a", None]))


@needs_native
def test_what_a_call_read_it_can_be_asked_about() -> None:
    """Tokens and words of columns that Python has no other way to."""
    tokenizer = BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##b", "x"])
    plain = tokenizer(TEXTS, max_length=6)
    for texts in (arrow.utf8(TEXTS), arrow.encoded(TEXTS), np.array(TEXTS)):
        encoding = tokenizer(texts, max_length=6)
        for row in range(len(TEXTS)):
            assert encoding.tokens(row) == plain.tokens(row)
            assert encoding[row].offsets == plain[row].offsets and encoding.word_ids(row) == plain.word_ids(row)


@needs_native
def test_columns_are_released(ours: Callable[..., BertTokenizer]) -> None:
    columns = [
        arrow.utf8(TEXTS),
        arrow.views(TEXTS),
        arrow.dictionary(TEXTS),
        arrow.utf8(["a"], validity=np.zeros(1, "u1")),
    ]
    engine = make_native(SMALL_VOCAB)
    for column in columns[:3]:
        engine.encode(column)
        engine.encode(arrow.Chunked([column, column]))
        assert column.releases == [1] * 5  # of the column; of the stream, the schema and two arrays
    with pytest.raises(TypeError, match=r"texts\[0\]: expected a text, got null"):
        engine.encode(columns[3])
    assert columns[3].releases == [1, 1]


def test_arrays_may_change_after_a_call(ours: Callable[..., BertTokenizer]) -> None:
    """What a result finds out later is about the texts as they were."""
    tokenizer = ours()
    lists, strings = ["a b", "c"], np.array(["a b", "c"])
    for texts in (lists, strings):
        encoding = tokenizer(texts, padding=True, return_tensors="np")
        plain = tokenizer(texts)
        texts[0] = "x"
        assert encoding.tokens(0) == plain.tokens(0) == ["[CLS]", "a", "b", "[SEP]"]


@pytest.mark.parametrize(
    "make",
    [bytearray, lambda data: np.frombuffer(data, np.uint8).copy(), lambda data: memoryview(bytearray(data))],
    ids=["bytearray", "numpy", "memoryview"],
)
def test_buffers_may_change_after_a_call(make: Callable[[bytes], Any], ours: Callable[..., BertTokenizer]) -> None:
    tokenizer = ours()
    for options in ({}, {"padding": True, "return_tensors": "np"}, {"return_offsets_mapping": True}):
        buffer, boundaries = make(b"a bc"), np.array([0, 3, 4])
        encoding = tokenizer((buffer, boundaries), **options)
        want = tokenizer(["a b", "c"], **options)
        buffer[0], boundaries[1] = ord("x"), 1
        assert [row.tokens for row in encoding.encodings] == [row.tokens for row in want.encodings]
        assert [row.offsets for row in encoding.encodings] == [row.offsets for row in want.encodings]


@needs_native
def test_a_file_in_memory(tmp_path: Path) -> None:
    data, boundaries = arrow.encoded(TEXTS)
    (tmp_path / "texts").write_bytes(data.tobytes())
    engine = make_native(SMALL_VOCAB)
    with open(tmp_path / "texts", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        assert np.array_equal(engine.encode((mapped, boundaries))[0], engine.encode(TEXTS)[0])
        mapped.close()  # nothing holds on to it
        with pytest.raises(ValueError, match="buffer: mmap closed or invalid"):
            engine.encode((mapped, boundaries))


def released_view() -> memoryview:
    view = memoryview(b"abc")
    view.release()
    return view


def bad_utf8_column() -> arrow.Column:
    column = arrow.utf8(["ab", "a"])
    column.buffers[1] = np.array([0, 2, 1], dtype=np.int32)
    return column


def bad_view(size: int, buffer: int, offset: int) -> arrow.Column:
    column = arrow.views(["x" * 20])
    column.buffers[1] = np.array([size, 0, buffer, offset], dtype=np.int32)
    return column


def bad_index(index: int) -> arrow.Column:
    column = arrow.dictionary(["a", "b"])
    column.buffers[1] = np.array([0, index], dtype=np.int32)
    return column


def null_in_dictionary() -> arrow.Column:
    column = arrow.dictionary(["a", "b"])
    assert column.values is not None
    column.values.buffers[0] = np.array([1], dtype=np.uint8)
    return column


BAD = [
    (np.array([1, 2]), TypeError, "texts: expected an array of dtype U, S, object or StringDType, got int64"),
    (np.array([["a"]]), ValueError, "texts: expected an array of one dimension, got 2"),
    (np.array("a"), ValueError, "texts: expected an array of one dimension, got 0"),
    (np.array(["a", None], dtype=object), TypeError, r"texts\[1\]: expected str or bytes, got NoneType"),
    (
        np.array([97, 0x110000], "u4").view("U1"),
        ValueError,
        r"texts\[1\]: expected code points up to 1114111, got 11141",
    ),
    ((b"abc", np.array([0, 2, 1])), ValueError, r"boundaries\[2\]: expected an offset from 2 .* to 3 .*, got 1"),
    ((b"abc", np.array([0, 4])), ValueError, r"boundaries\[1\]: expected an offset from 0 .* to 3 .*, got 4"),
    ((b"abc", np.array([-1, 2])), ValueError, r"boundaries\[0\]: expected an offset from 0 to 3 .*, got -1"),
    ((b"abc", np.array([0, -(2**63)])), ValueError, r"boundaries\[1\]: expected an offset from 0"),
    ((b"abc", np.array([], dtype=np.int64)), ValueError, "boundaries: expected one dimension of at least one entry"),
    ((b"abc", np.array([[0, 2]])), ValueError, "boundaries: expected one dimension .* got 2 dimensions"),
    ((b"abc", np.array([0, 2], dtype=np.int32)), TypeError, "boundaries: expected int64, got items of format 'i'"),
    ((b"abc", np.array([0, 2], dtype=">i8")), TypeError, "boundaries: expected int64, got items of format '>"),
    ((b"abc", np.array([0.0, 2.0])), TypeError, "boundaries: expected int64, got items of format 'd'"),
    ((np.zeros((4, 4), np.uint8)[:, 1], np.array([0, 2])), ValueError, "buffer: ndarray is not C-contiguous"),
    ((np.zeros(4), np.array([0, 2])), TypeError, "buffer: expected items of one byte, got 8"),
    (("abc", np.array([0, 2])), TypeError, "buffer: a bytes-like object is required, not 'str'"),
    ((released_view(), np.array([0, 2])), ValueError, "buffer: operation forbidden on released memoryview"),
    (arrow.utf8(["a", "b"], validity=np.array([1], np.uint8)), TypeError, r"texts\[1\]: expected a text, got null"),
    (arrow.utf8(["a"] * 9, validity=np.array([255, 0], np.uint8), offset=3), TypeError, r"texts\[5\]: .* got null"),
    (null_in_dictionary(), TypeError, r"texts\[1\]: expected a text, got null"),
    (arrow.Column("l", 0, [None, None]), TypeError, "texts: expected an Arrow column of strings .* of format 'l'"),
    (arrow.Chunked([arrow.Column("+s", 0, [])]), TypeError, r"texts: expected an Arrow column .* of format '\+s'"),
    (arrow.Chunked([arrow.utf8(["a"])], fails=True), ValueError, "texts: the Arrow stream fails: the disk is on fire"),
    (bad_utf8_column(), ValueError, "texts: expected Arrow offsets that do not decrease, got 2 before 1"),
    (bad_view(-1, 0, 0), ValueError, "texts: expected Arrow views into the buffers .* got one of -1 bytes"),
    (bad_view(20, 2, 0), ValueError, "texts: expected Arrow views .* got one of 20 bytes at 0 of buffer 2"),
    (bad_view(20, 0, 1), ValueError, "texts: expected Arrow views .* got one of 20 bytes at 1 of buffer 0"),
    (bad_view(20, -1, 0), ValueError, "texts: expected Arrow views .* of buffer -1"),
    (bad_view(20, 0, -30), ValueError, "texts: expected Arrow views .* got one of 20 bytes at -30 of buffer 0"),
    (bad_index(2), ValueError, "texts: expected Arrow indices below 2, got 2"),
    (bad_index(-1), ValueError, "texts: expected Arrow indices below 2, got -1"),
]


@needs_native
@pytest.mark.parametrize(("texts", "error", "message"), BAD, ids=range(len(BAD)))
def test_bad_columns(texts: Any, error: type[Exception], message: str) -> None:
    engine = make_native(SMALL_VOCAB)
    for call in (engine.encode, engine.encode_lists, lambda column: engine.encode_rows(column, None, 0)):
        with pytest.raises(error, match=message):
            call(texts)


@needs_native
@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="NumPy 1 has no StringDType")
def test_missing_values_of_string_arrays() -> None:
    texts = np.array(["a", None], dtype=np.dtypes.StringDType(na_object=None))
    with pytest.raises(TypeError, match=r"texts\[1\]: expected a text, got a missing value"):
        make_native(SMALL_VOCAB).encode(texts)
