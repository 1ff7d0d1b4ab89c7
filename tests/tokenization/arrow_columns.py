"""Arrow columns made by hand, good and bad: the C data interface filled in with ctypes; no Arrow library is needed."""

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
GET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
GET_ERROR = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
ERROR = ctypes.create_string_buffer(b"the disk is on fire")


class Schema(ctypes.Structure):
    """ArrowSchema."""


Schema._fields_ = [
    *[(name, ctypes.c_char_p) for name in ("format", "name", "metadata")],
    *[(name, ctypes.c_int64) for name in ("flags", "n_children")],
    ("children", ctypes.c_void_p),
    ("dictionary", ctypes.POINTER(Schema)),
    ("release", CALLBACK),
    ("private_data", ctypes.c_void_p),
]


class Array(ctypes.Structure):
    """ArrowArray."""


Array._fields_ = [
    *[(name, ctypes.c_int64) for name in ("length", "null_count", "offset", "n_buffers", "n_children")],
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.c_void_p),
    ("dictionary", ctypes.POINTER(Array)),
    ("release", CALLBACK),
    ("private_data", ctypes.c_void_p),
]


class Stream(ctypes.Structure):
    """ArrowArrayStream."""

    _fields_ = (
        ("get_schema", GET),
        ("get_next", GET),
        ("get_last_error", GET_ERROR),
        ("release", CALLBACK),
        ("private_data", ctypes.c_void_p),
    )


# A capsule owns no Python object, and what it calls at its end cannot be freed by that call: structures of capsules, by
# number, and the numbers of those whose capsule is gone.
_ALIVE: dict[int, Any] = {}
_ENDED: list[int] = []
_NUMBERS = itertools.count()


def make_capsule(structure: Any, name: bytes) -> Any:
    """A capsule that releases the structure at its end, unless somebody has taken it over."""
    while _ENDED:
        del _ALIVE[_ENDED.pop()]
    number = next(_NUMBERS)

    def destroy(_: int) -> None:
        if structure.release:
            structure.release(ctypes.addressof(structure))
        _ENDED.append(number)

    called = CALLBACK(destroy)
    _ALIVE[number] = structure, called
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, CALLBACK]
    return make(ctypes.addressof(structure), name, called)


class Column:
    """A column that knows how often each of the structures that it handed out was released.

    Args:
        layout: Arrow's format string.
        length: number of values.
        buffers: validity bitmap (or None) and what the format asks for, as NumPy arrays.
        offset: of the first value.
        values: the column of values, of a dictionary-encoded one.
    """

    def __init__(
        self,
        layout: str,
        length: int,
        buffers: Sequence[np.ndarray | None],
        *,
        offset: int = 0,
        values: "Column | None" = None,
    ) -> None:
        self.layout, self.length, self.buffers = layout.encode(), length, list(buffers)
        self.offset, self.values = offset, values
        self.releases: list[int] = []
        self._kept: list[Any] = []

    def schema(self, place: Schema | None = None) -> Schema:
        place = Schema() if place is None else place
        place.format, place.release = self.layout, self._release(Schema.release.offset)
        if self.values is not None:
            place.dictionary = ctypes.pointer(self.values.schema())
        self._kept.append(place)
        return place

    def array(self, place: Array | None = None) -> Array:
        place = Array() if place is None else place
        pointers = (ctypes.c_void_p * len(self.buffers))(*[None if b is None else b.ctypes.data for b in self.buffers])
        place.length, place.null_count, place.offset = self.length, -1, self.offset
        place.n_buffers, place.buffers = len(self.buffers), pointers
        place.release = self._release(Array.release.offset)
        if self.values is not None:
            place.dictionary = ctypes.pointer(self.values.array())
        self._kept += [place, pointers]
        return place

    def _release(self, release_offset: int) -> Any:
        index = len(self.releases)
        self.releases.append(0)

        def release(address: int) -> None:
            self.releases[index] += 1
            ctypes.c_void_p.from_address(address + release_offset).value = None

        callback = CALLBACK(release)
        self._kept.append(callback)
        return callback

    def __arrow_c_array__(self, requested_schema: Any = None) -> tuple[Any, Any]:
        return make_capsule(self.schema(), b"arrow_schema"), make_capsule(self.array(), b"arrow_array")


class Chunked:
    """Columns of one kind, one after the other; `fails` makes the stream fail where they end."""

    def __init__(self, columns: Sequence[Column], *, fails: bool = False) -> None:
        self.columns, self.fails = columns, fails
        self.handed_out: list[Stream] = []
        self.releases = 0  # of streams

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        rest = iter(self.columns)
        stream = Stream()

        def get_schema(_: int, out: int) -> int:
            self.columns[0].schema(Schema.from_address(out))
            return 0

        def get_next(_: int, out: int) -> int:
            column = next(rest, None)
            if column is None and self.fails:
                return 5
            if column is None:
                Array.from_address(out).release = CALLBACK()
            else:
                column.array(Array.from_address(out))
            return 0

        def release(address: int) -> None:
            self.releases += 1
            ctypes.c_void_p.from_address(address + Stream.release.offset).value = None

        stream.get_schema, stream.get_next = GET(get_schema), GET(get_next)
        stream.get_last_error, stream.release = GET_ERROR(lambda _: ctypes.addressof(ERROR)), CALLBACK(release)
        self.handed_out.append(stream)
        return make_capsule(stream, b"arrow_array_stream")


def encoded(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of all texts (uint8) and their boundaries (int64 [n + 1])."""
    parts = [text.encode() for text in texts]
    return np.frombuffer(b"".join(parts) + b"\0", dtype=np.uint8), np.cumsum([0, *map(len, parts)], dtype=np.int64)


def utf8(texts: Sequence[str], layout: str = "u", validity: np.ndarray | None = None, offset: int = 0) -> Column:
    """Offsets into one buffer; "u" and "z" have 32 bits."""
    data, starts = encoded(texts)
    starts = starts.astype(np.int32 if layout in "uz" else np.int64)
    return Column(layout, len(texts) - offset, [validity, starts, data], offset=offset)


def views(texts: Sequence[str], layout: str = "vu", num_buffers: int = 2) -> Column:
    """Sixteen bytes for each text; those of more than twelve bytes lie in one of several buffers."""
    parts: list[bytes] = [b""] * num_buffers
    table = b""
    for index, text in enumerate(text.encode() for text in texts):
        size = np.int32(len(text)).tobytes()
        if len(text) <= 12:
            table += size + text.ljust(12, b"\0")
            continue
        buffer = index % num_buffers
        table += size + text[:4] + np.array([buffer, len(parts[buffer])], dtype=np.int32).tobytes()
        parts[buffer] += text
    sizes = np.array([len(part) for part in parts], dtype=np.int64)
    data = [np.frombuffer(part + b"\0", dtype=np.uint8) for part in parts]
    return Column(layout, len(texts), [None, np.frombuffer(table + b"\0", dtype=np.uint8), *data, sizes])


def dictionary(texts: Sequence[str], layout: str = "i", make: Callable[[Sequence[str]], Column] = utf8) -> Column:
    """Indices into a column of the different texts."""
    different = list(dict.fromkeys(texts))
    dtypes = dict(zip("cCsSiIlL", ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"), strict=True))
    indices = np.array([different.index(text) for text in texts], dtype=dtypes[layout])
    return Column(layout, len(texts), [None, indices], values=make(different))
