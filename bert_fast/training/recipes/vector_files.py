"""Files of vectors, .npy, Parquet or Arrow, and the JSON file beside each that says of which model they are."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert_fast.data.token_store import tokenizer_hash
from bert_fast.files import write_atomically
from bert_fast.models.checkpoint import INDEX_SUFFIX, find_weights
from bert_fast.tokenization import Tokenizer

__all__ = [
    "COLUMN",
    "WRITERS",
    "ArrowVectors",
    "NpyVectors",
    "VectorsInfo",
    "import_arrow",
    "info_path",
    "model_digests",
    "npy_header",
    "read_info",
    "weights_digest",
    "write_info",
    "writer_for",
]

COLUMN = "embedding"


@dataclass(frozen=True)
class VectorsInfo:
    """What `<output>.json` says of the vectors beside it.

    Attributes:
        model: the directory of the model, as it was named.
        weights_sha256: of the model's weights files, one behind the other; None of a model that no file holds.
        tokenizer_sha256: of all that decides which ids a text gets.
        dimension, count: the vectors are float32 [count, dimension].
        pooling, normalize, max_length: as in `Embedder`.
    """

    model: str | None
    weights_sha256: str | None
    tokenizer_sha256: str
    dimension: int
    count: int
    pooling: str
    normalize: bool
    max_length: int


def info_path(vectors: Path) -> Path:
    """The JSON file beside the vectors."""
    return vectors.with_name(f"{vectors.name}.json")


def write_info(vectors: Path, info: VectorsInfo) -> None:
    """Writes the JSON file beside the vectors, in one step."""
    text = json.dumps(asdict(info), indent=1) + "\n"
    write_atomically(info_path(vectors), lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_info(vectors: Path) -> VectorsInfo | None:
    """What stands beside the vectors; None if nothing does.

    Raises:
        ValueError: the file is damaged. OSError: it cannot be read.
    """
    path = info_path(vectors)
    try:
        values = json.loads(path.read_bytes())
        info = VectorsInfo(**values)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: expected what embed writes beside vectors ({error})") from None
    kinds = {
        "model": str | None, "weights_sha256": str | None, "tokenizer_sha256": str, "dimension": int, "count": int,
        "pooling": str, "normalize": bool, "max_length": int,
    }  # fmt: skip
    for name, kind in kinds.items():
        if not isinstance(values[name], kind):
            raise ValueError(f"{path}: {name}: expected {kind}, got {type(values[name]).__name__}")
    return info


def weights_digest(directory: str | os.PathLike[str]) -> str:
    """SHA-256 of the weights of a checkpoint directory: of one file, or of an index and its shards in their order.

    Raises:
        CheckpointError: there are none. OSError: they cannot be read.
    """
    path, sums = find_weights(directory), hashlib.sha256()
    files = [path]
    if path.name.endswith(INDEX_SUFFIX):
        shards = json.loads(path.read_bytes())["weight_map"]
        files += [path.parent / name for name in sorted(set(shards.values()))]
    for name in files:
        with open(name, "rb") as file:
            while piece := file.read(1 << 20):
                sums.update(piece)
    return sums.hexdigest()


def model_digests(directory: str | os.PathLike[str], tokenizer: Tokenizer) -> dict[str, str]:
    """`weights_sha256` and `tokenizer_sha256` of a checkpoint directory and its tokenizer."""
    return {"weights_sha256": weights_digest(directory), "tokenizer_sha256": tokenizer_hash(tokenizer)}


def writer_for(path: Path) -> Any:
    """The class that writes files of this name; None for .npy, which is what an unfinished run holds anyway.

    Raises:
        ValueError: another ending. ImportError: pyarrow is needed and not there.
    """
    if path.suffix not in WRITERS:
        *names, last = WRITERS
        raise ValueError(f"output: expected a name that ends in {', '.join(names)} or {last}, got {path}")
    if WRITERS[path.suffix] is not None:
        import_arrow(path)
    return WRITERS[path.suffix]


def import_arrow(path: Path) -> Any:
    """The module pyarrow, which the file needs.

    Raises:
        ImportError: it is not there.
    """
    try:
        import pyarrow
    except ImportError as error:
        kind = "Arrow" if path.suffix == ".arrow" else "Parquet"
        raise ImportError(f"{kind} needs pyarrow: pip install bert_fast[parquet] ({error})") from error
    return pyarrow


def npy_header(file: Any, rows: int, width: int) -> None:
    """Writes the header of float32 [rows, width] where the file stands; its length is the same for all `rows`."""
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (rows, width)})


class _ArrowTable:
    """A file with one column, `embedding`: lists of `width` numbers."""

    def __init__(self, path: Path, width: int) -> None:
        self._arrow, self._width = import_arrow(path), width
        self._schema = self._arrow.schema([(COLUMN, self._arrow.list_(self._arrow.float32(), width))])

    def _column(self, vectors: np.ndarray) -> Any:
        return self._arrow.FixedSizeListArray.from_arrays(self._arrow.array(vectors.reshape(-1)), self._width)


class _ParquetWriter(_ArrowTable):
    def __init__(self, path: Path, width: int) -> None:
        super().__init__(path, width)
        from pyarrow import parquet

        self._writer = parquet.ParquetWriter(path, self._schema)

    def __enter__(self) -> "_ParquetWriter":
        return self

    def add(self, vectors: np.ndarray) -> None:
        """Rows [n, width], fp32: a row group."""
        self._writer.write_table(self._arrow.table([self._column(vectors)], schema=self._schema))

    def __exit__(self, *error: object) -> None:
        self._writer.close()


class _ArrowWriter(_ArrowTable):
    def __init__(self, path: Path, width: int) -> None:
        super().__init__(path, width)
        self._file = self._arrow.OSFile(str(path), "wb")
        self._writer = self._arrow.ipc.new_file(self._file, self._schema)

    def __enter__(self) -> "_ArrowWriter":
        return self

    def add(self, vectors: np.ndarray) -> None:
        """Rows [n, width], fp32: a record batch."""
        self._writer.write_batch(self._arrow.record_batch([self._column(vectors)], schema=self._schema))

    def __exit__(self, *error: object) -> None:
        self._writer.close()
        self._file.close()


WRITERS: dict[str, Any] = {".npy": None, ".parquet": _ParquetWriter, ".arrow": _ArrowWriter}


class NpyVectors:
    """An .npy file as embed writes it, mapped into memory: `rows`, `width`, `blocks`.

    Raises:
        ValueError: it is no float32 [n, H]. OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with open(path, "rb") as file:
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, is_fortran, dtype = read(file)
                offset, size = file.tell(), os.fstat(file.fileno()).st_size
        except ValueError as error:
            raise ValueError(f"index: {path}: expected an .npy file ({error})") from None
        if len(shape) != 2 or dtype != np.dtype("<f4") or is_fortran or not shape[1]:
            raise ValueError(f"index: {path}: expected float32 [n, H], got {dtype} {list(shape)}")
        self.rows, self.width = shape
        if size < offset + 4 * self.rows * self.width:
            raise ValueError(f"index: {path}: expected {offset + 4 * self.rows * self.width} bytes, got {size}")
        self._vectors = np.memmap(path, "<f4", "r", offset, shape) if self.rows else np.empty(shape, np.float32)

    def blocks(self, block_rows: int) -> Iterator[np.ndarray]:
        """The vectors in their order, float32 [n, H] with n up to `block_rows`."""
        for first in range(0, self.rows, block_rows):
            yield self._vectors[first : first + block_rows]


class ArrowVectors:
    """A Parquet or Arrow file as embed writes it, one row group or record batch at a time; as `NpyVectors`."""

    def __init__(self, path: Path) -> None:
        self._path, self._arrow = path, import_arrow(path)
        with open(path, "rb"):  # raises what Python says of a file that is not there
            pass
        try:
            if path.suffix == ".arrow":
                self._file = self._arrow.ipc.open_file(self._arrow.memory_map(str(path)))
                schema, batches = self._file.schema, range(self._file.num_record_batches)
                self.rows = sum(self._file.get_batch(index).num_rows for index in batches)
            else:
                from pyarrow import parquet

                self._file = parquet.ParquetFile(path, pre_buffer=False)
                schema, self.rows = self._file.schema_arrow, self._file.metadata.num_rows
        except (self._arrow.ArrowException, OSError) as error:
            raise ValueError(f"index: {path}: cannot be read: {error}") from None
        found = schema.field(COLUMN).type if schema.names.count(COLUMN) == 1 else None
        types = self._arrow.types
        if found is None or not types.is_fixed_size_list(found) or not types.is_float32(found.value_type):
            raise ValueError(f"index: {path}: expected a column {COLUMN!r} of lists of H float32, got {found}")
        self.width = found.list_size

    def blocks(self, block_rows: int) -> Iterator[np.ndarray]:
        """The vectors in their order, float32 [n, H] with n up to `block_rows`."""
        try:
            for batch in self._batches(block_rows):
                column = batch.column(batch.schema.names.index(COLUMN))
                if column.null_count or column.flatten().null_count:
                    raise ValueError(f"index: {self._path}: expected vectors, got null")
                yield column.flatten().to_numpy(zero_copy_only=False).reshape(-1, self.width)
        except (self._arrow.ArrowException, OSError) as error:
            raise ValueError(f"index: {self._path}: cannot be read: {error}") from None

    def _batches(self, block_rows: int) -> Iterator[Any]:
        if self._path.suffix != ".arrow":
            yield from self._file.iter_batches(block_rows, columns=[COLUMN], use_threads=False)
            return
        for index in range(self._file.num_record_batches):
            batch = self._file.get_batch(index)
            for first in range(0, batch.num_rows, block_rows):
                yield batch.slice(first, block_rows)
