"""Arrow columns that break the C data interface: an error for each, and everything is released exactly once."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from . import arrow_columns as arrow
from .native_core import SMALL_VOCAB, make_native, needs_native

pytestmark = needs_native

Edit = Callable[[Any], None]
Make = Callable[[Sequence[str]], arrow.Column]


class Lying(arrow.Column):
    """Another column with its structures changed before they are handed out."""

    def __init__(self, column: arrow.Column, *, schema: Edit | None = None, array: Edit | None = None) -> None:
        super().__init__(
            column.layout.decode(), column.length, column.buffers, offset=column.offset, values=column.values
        )
        self._edit_schema, self._edit_array = schema, array

    def schema(self, place: arrow.Schema | None = None) -> arrow.Schema:
        place = super().schema(place)
        if self._edit_schema is not None:
            self._edit_schema(place)
        return place

    def array(self, place: arrow.Array | None = None) -> arrow.Array:
        place = super().array(place)
        if self._edit_array is not None:
            self._edit_array(place)
        return place


def setting(**fields: Any) -> Edit:
    def edit(place: Any) -> None:
        for name, value in fields.items():
            setattr(place, name, value)

    return edit


def without_buffer(index: int) -> Edit:
    def edit(place: Any) -> None:
        place.buffers[index] = None

    return edit


def of_dictionary(edit: Edit) -> Edit:
    return lambda place: edit(place.dictionary.contents)


TEXTS = ["ab", "a", "x" * 20]
RELEASED = setting(release=arrow.CALLBACK())
NULL_POINTER = "texts: expected an Arrow buffer of {}, got a null pointer"

# What becomes of a column of these texts, the lie, the message.
SCHEMA_LIES: dict[str, tuple[Make, Edit, str]] = {
    "released": (arrow.utf8, RELEASED, "texts: expected an Arrow schema of its own for every call"),
    "released dictionary": (arrow.dictionary, of_dictionary(RELEASED), "texts: expected an Arrow schema of a dictio"),
    "no format": (arrow.utf8, setting(format=None), "texts: expected an Arrow column of strings .* of format ''"),
    "strange format": (arrow.utf8, setting(format=b"\xff" * 500), "column of strings .* of format '\ufffd{200}'"),
    "longer format": (arrow.utf8, setting(format=b"uu"), "column of strings .* of format 'uu'"),
    "indices of texts": (arrow.dictionary, setting(format=b"u"), "texts: expected Arrow indices .* of format 'u'"),
    "indices without format": (arrow.dictionary, setting(format=b""), "Arrow indices that are integers, .* format ''"),
    "dictionary of integers": (arrow.dictionary, of_dictionary(setting(format=b"i")), "strings .* of format 'i'"),
}
ARRAY_LIES: dict[str, tuple[Make, Edit, str]] = {
    "negative length": (arrow.utf8, setting(length=-1), "texts: .* array of offsets of a length from 0 on, got -1"),
    "endless length": (arrow.utf8, setting(length=2**62), "of offsets of a length from 0 on, got 46"),
    "negative offset": (arrow.utf8, setting(offset=-1), "array of offsets that starts at 0 or later, got -1"),
    "endless offset": (arrow.views, setting(offset=2**62), "array of views that starts at 0 or later, got 46"),
    "too many nulls": (arrow.utf8, setting(null_count=4), "of offsets with nulls in its length, or -1, got 4"),
    "negative nulls": (arrow.utf8, setting(null_count=-2), "of offsets with nulls in its length, or -1, got -2"),
    "nulls without bits": (arrow.utf8, setting(null_count=1), NULL_POINTER.format("validity bits")),
    "children": (arrow.utf8, setting(n_children=1), "array of offsets without children, got 1"),
    "two buffers of texts": (arrow.utf8, setting(n_buffers=2), "array of offsets with 3 buffers, got 2"),
    "four buffers of texts": (arrow.utf8, setting(n_buffers=4), "array of offsets with 3 buffers, got 4"),
    "two buffers of views": (arrow.views, setting(n_buffers=2), "array of views with 3 buffers or more, got 2"),
    "negative buffers": (arrow.views, setting(n_buffers=-1), "array of views with 3 buffers or more, got -1"),
    "three buffers of indices": (arrow.dictionary, setting(n_buffers=3), "array of indices with 2 buffers, got 3"),
    "no buffers": (
        arrow.utf8,
        setting(buffers=ctypes.POINTER(ctypes.c_void_p)()),
        NULL_POINTER.format("offsets"),
    ),
    "no offsets": (arrow.utf8, without_buffer(1), NULL_POINTER.format("offsets")),
    "no text": (arrow.utf8, without_buffer(2), NULL_POINTER.format("text")),
    "no views": (arrow.views, without_buffer(1), NULL_POINTER.format("views")),
    "no text of views": (arrow.views, without_buffer(2), "Arrow views .* got one of 20 bytes at 0 of buffer 0"),
    "no sizes": (arrow.views, without_buffer(4), NULL_POINTER.format("sizes")),
    "no indices": (arrow.dictionary, without_buffer(1), NULL_POINTER.format("indices")),
    "no dictionary": (
        arrow.dictionary,
        setting(dictionary=ctypes.POINTER(arrow.Array)()),
        "array of indices with a dictionary where its schema has one, got 0",
    ),
    "needless dictionary": (
        arrow.utf8,
        setting(dictionary=ctypes.pointer(arrow.Array())),
        "array of offsets with a dictionary where its schema has one, got 1",
    ),
    "released dictionary": (arrow.dictionary, of_dictionary(RELEASED), "texts: expected an Arrow array of its own"),
    "dictionary without offsets": (arrow.dictionary, of_dictionary(without_buffer(1)), NULL_POINTER.format("offsets")),
    "dictionary of nothing": (arrow.dictionary, of_dictionary(setting(length=0)), "indices below 0, got 0"),
    "dictionary of negative length": (
        arrow.dictionary,
        of_dictionary(setting(length=-(2**63))),
        "array of offsets of a length from 0 on",
    ),
}


@pytest.mark.parametrize("name", SCHEMA_LIES)
def test_schemas(name: str) -> None:
    make, lie, message = SCHEMA_LIES[name]
    column = Lying(make(TEXTS), schema=lie)
    for texts in (column, arrow.Chunked([column])):
        column.releases.clear()
        with pytest.raises((TypeError, ValueError), match=message):
            make_native(SMALL_VOCAB).encode(texts)
        assert column.releases == [int(name != "released"), 1][: 2 if texts is column else 1]


@pytest.mark.parametrize("name", ARRAY_LIES)
def test_arrays(name: str) -> None:
    """In every kind of call, and as the second batch of a stream."""
    make, lie, message = ARRAY_LIES[name]
    column, truth, engine = Lying(make(TEXTS), array=lie), make(TEXTS), make_native(SMALL_VOCAB)
    for call in (engine.encode, engine.encode_lists, lambda texts: engine.encode_rows(texts, None, 0)):
        column.releases.clear()
        with pytest.raises((TypeError, ValueError), match=message):
            call(column)
        assert column.releases == [1, 1]
    column.releases.clear()
    stream = arrow.Chunked([truth, column])
    with pytest.raises((TypeError, ValueError), match=message):
        engine.encode(stream)
    assert (truth.releases, column.releases, stream.releases) == ([1, 1], [1], 1)


def test_a_batch_of_another_format() -> None:
    """Which shows where it has other buffers; where not, nobody can know."""
    stream = arrow.Chunked([arrow.views(TEXTS), arrow.dictionary(TEXTS)])
    with pytest.raises(ValueError, match="array of views with a dictionary where its schema has one, got 1"):
        make_native(SMALL_VOCAB).encode(stream)


def test_arrays_without_values_need_no_buffers() -> None:
    engine = make_native(SMALL_VOCAB)
    for layout in ("u", "U", "vu"):
        assert engine.encode_lists(arrow.Column(layout, 0, [None, None, None])) == []
    assert engine.encode_lists(arrow.Column("u", 2, [None, np.zeros(3, np.int32), None])) == [[], []]


class Returning:
    """Returns these in place of new capsules."""

    def __init__(self, **returned: Any) -> None:
        for name, value in returned.items():
            setattr(self, f"__arrow_c_{name}__", lambda value=value: value)


def test_capsules_that_come_twice() -> None:
    """Their texts are gone after the first call."""
    engine, column = make_native(SMALL_VOCAB), arrow.utf8(TEXTS)
    array = Returning(array=column.__arrow_c_array__())
    stream = Returning(stream=arrow.Chunked([column]).__arrow_c_stream__())
    for texts, kind in ((array, "schema"), (stream, "stream")):
        assert engine.encode_lists(texts) == engine.encode_lists(TEXTS)
        for _ in range(2):
            with pytest.raises(ValueError, match=f"texts: expected an Arrow {kind} of its own for every call"):
                engine.encode_lists(texts)
    _, used = array.__arrow_c_array__()
    fresh, _ = column.__arrow_c_array__()
    with pytest.raises(ValueError, match="texts: expected an Arrow array of its own for every call"):
        engine.encode_lists(Returning(array=(fresh, used)))
    del fresh, _
    assert column.releases == [1] * len(column.releases)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"array": None}, "texts: expected a tuple of two capsules from __arrow_c_array__, got NoneType"),
        ({"array": (1, 2, 3)}, "texts: expected a tuple of two capsules from __arrow_c_array__, got tuple"),
        ({"array": (1, 2)}, "texts: expected a capsule 'arrow_schema' from an Arrow column, got int"),
        ({"stream": "a"}, "texts: expected a capsule 'arrow_array_stream' from an Arrow column, got str"),
        ({"stream": arrow.utf8(["a"])}, "texts: .* 'arrow_array_stream' .* got PyCapsule"),
    ],
    ids=["nothing", "three", "integers", "text", "another capsule"],
)
def test_what_is_no_capsule(returned: dict[str, Any], message: str) -> None:
    """Capsules are made here: one of the parameters would be there when Python ends and its destructor is gone."""
    returned = {
        name: value.__arrow_c_array__()[0] if isinstance(value, arrow.Column) else value
        for name, value in returned.items()
    }
    with pytest.raises(TypeError, match=message):
        make_native(SMALL_VOCAB).encode(Returning(**returned))


def stream_of(edit: Callable[[arrow.Stream], None]) -> tuple[arrow.Chunked, Returning]:
    """A good stream of one batch, changed before it is handed out."""
    chunked = arrow.Chunked([arrow.utf8(TEXTS)])
    capsule = chunked.__arrow_c_stream__()
    edit(chunked.handed_out[-1])
    return chunked, Returning(stream=capsule)


def fails_with_something_left(_: int, out: int) -> int:
    """An error, and what was not handed over has the marks of a structure that was."""
    ctypes.memset(out, 0xFF, ctypes.sizeof(arrow.Schema))
    return 5


LEFT = arrow.GET(fails_with_something_left)
UNREADABLE = ctypes.create_string_buffer(b"\xff\xfe" * 400)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"get_schema": arrow.GET()}, "texts: the Arrow stream fails: the disk is on fire"),
        ({"get_next": arrow.GET()}, "texts: the Arrow stream fails: the disk is on fire"),
        ({"get_schema": LEFT}, "texts: the Arrow stream fails: the disk is on fire"),
        ({"get_next": LEFT}, "texts: the Arrow stream fails: the disk is on fire"),
        ({"get_schema": LEFT, "get_last_error": arrow.GET_ERROR()}, "texts: the Arrow stream fails: Input/output err"),
        ({"get_schema": arrow.GET(lambda _, out: 0)}, "texts: expected an Arrow schema of its own"),
        (
            {"get_schema": LEFT, "get_last_error": arrow.GET_ERROR(lambda _: ctypes.addressof(UNREADABLE))},
            "texts: the Arrow stream fails: \ufffd{200}$",
        ),
    ],
    ids=["no get_schema", "no get_next", "schema fails", "batch fails", "no reason", "no schema", "unreadable reason"],
)
def test_streams(fields: dict[str, Any], message: str) -> None:
    chunked, texts = stream_of(setting(**fields))
    with pytest.raises(ValueError, match=message):
        make_native(SMALL_VOCAB).encode(texts)
    assert chunked.releases == 1
    assert chunked.columns[0].releases == [1] * len(chunked.columns[0].releases)


def test_a_producer_that_raises() -> None:
    class Raising:
        def __arrow_c_array__(self) -> Any:
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        make_native(SMALL_VOCAB).encode(Raising())
