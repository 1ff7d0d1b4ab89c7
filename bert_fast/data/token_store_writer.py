"""Writing a token store: files that only grow, and a record of how much of them counts.

Data is appended and synced, then progress.json, which says how long each file is and where the sources are read on, is
replaced in one step. Whatever the moment a run ends at, killed or by a full disk, the next one cuts the files to the
recorded lengths and goes on there. Nothing that is written depends on how often this happens.

Digests are made of the bytes on their way to the files; a run that goes on reads the last chunk of each file for them.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bert_fast.data import digests
from bert_fast.data.digests import DIGESTS, ChunkDigests, seal
from bert_fast.data.text_sources import Block, TextSource
from bert_fast.data.token_store import (
    BOUNDARY_DTYPE,
    DOCUMENTS,
    FORMAT_VERSION,
    PROGRESS,
    SENTENCES,
    STORE,
    TOKENS,
    check_counts,
    parse_json,
    tokenizer_hash,
)
from bert_fast.errors import StoreError
from bert_fast.files import is_temporary, write_atomically
from bert_fast.tokenization import Tokenizer

_FRESH = {TOKENS, DOCUMENTS, SENTENCES}  # what a run that ended before its first record leaves behind
_WAY_OUT = "; write into another directory, or remove this one"


@dataclass(frozen=True)
class Progress:
    """How far a store is.

    Args:
        source: index of the source that is read.
        position: where it is read on; [] is its start.
        tokens, sentences, documents, empty_documents: numbers written; empty documents are among the documents.
        is_open: whether the last sentences belong to a document that has not ended.
        streams: what was read of each finished stream, by index of the source: [bytes, CRC-32].
    """

    source: int = 0
    position: list[int] = field(default_factory=list)
    tokens: int = 0
    sentences: int = 0
    documents: int = 0
    empty_documents: int = 0
    is_open: bool = False
    streams: dict[str, list[int]] = field(default_factory=dict)


def describe(sources: list[TextSource], tokenizer: Tokenizer, text_field: str) -> dict[str, Any]:
    """All that decides what is in a store: another run may go on with it only if it says the same."""
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    return {
        "format_version": FORMAT_VERSION,
        "tokenizer": tokenizer_hash(tokenizer),
        "vocab_size": vocab_size,
        "dtype": "<u2" if vocab_size <= 1 << 16 else "<i4",
        "field": text_field,
        "sources": [
            {"name": source.name, "format": source.format, "size": source.size, "mtime_ns": source.mtime_ns}
            for source in sources
        ],
    }


class StoreWriter:
    """Appends to the store in a directory; at most one at a time, in one process.

    Args:
        path: the directory; made if it is not there.
        description: see `describe`.

    Attributes:
        progress: how far the store is: not at its start if an earlier run did not finish.

    Raises:
        StoreError: the directory holds something else, or a store of another description; another process writes it;
            a file of it is damaged.
    """

    def __init__(self, path: Path, description: dict[str, Any]) -> None:
        self.path = path
        self.progress = Progress()
        self._description = description
        self._files: dict[str, _GrowingFile] = {}
        with contextlib.suppress(FileExistsError), _room_needed(path):
            path.mkdir(parents=True)
        _check_directory(path)
        dtypes = {TOKENS: description["dtype"], DOCUMENTS: BOUNDARY_DTYPE}
        if any(source["format"] == "text" for source in description["sources"]):
            dtypes[SENTENCES] = BOUNDARY_DTYPE
        try:
            for name, dtype in dtypes.items():
                self._files[name] = _GrowingFile(path / name, np.dtype(dtype))
                self._files[name].lock()
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        record = self.path / PROGRESS
        if (self.path / STORE).exists():  # another process finished it before it gave up the lock
            raise StoreError(f"{self.path}: was finished by another process")
        for name in filter(_is_temporary, os.listdir(self.path)):  # of a run that was killed
            (self.path / name).unlink()
        if record.exists():
            info = parse_json(record, record.read_bytes())
            check_same(self.path, info, self._description)
            try:
                self.progress = _read_progress(info.get("progress"))
            except (TypeError, ValueError) as error:
                raise StoreError(f"{record}: is damaged: {error}") from None
            recorded = info.get(DIGESTS, {})  # earlier versions had none
            for name, length in self._lengths().items():
                self._files[name].cut(length, recorded.get(name))
            return
        for name, file in self._files.items():
            file.cut(0)
            if name != TOKENS:
                file.append(np.zeros(1))
        self.record()

    def add(self, index: int, block: Block, ids: np.ndarray, cu_seqlens: np.ndarray) -> None:
        """Appends what a block of source `index` became: text i has ids[cu_seqlens[i]:cu_seqlens[i + 1]].

        `progress` changes at the end and at once: if this fails half-way, `record` still writes what is true.
        """
        before, source = self.progress, self._description["sources"][index]
        stops = cu_seqlens[1:] + before.tokens
        has_tokens = np.diff(cu_seqlens) > 0
        sentence_stops = stops[has_tokens]
        if source["format"] == "text":
            follows_sentence = np.concatenate([[before.is_open], has_tokens])
            document_stops = stops[~has_tokens & follows_sentence[:-1]]
            is_open = bool(follows_sentence[-1]) and not block.ends_source
            if follows_sentence[-1] and block.ends_source:
                document_stops = np.append(document_stops, before.tokens + len(ids))
            num_empty = 0
        else:
            document_stops, is_open = stops, False
            num_empty = len(stops) - len(sentence_stops)
        arrays = {TOKENS: ids, DOCUMENTS: document_stops, SENTENCES: sentence_stops}
        for name, file in self._files.items():
            file.append(arrays[name])
        streams = before.streams
        if block.ends_source and source["size"] is None:
            streams = {**streams, str(index): [block.position[0], block.position[2]]}
        self.progress = Progress(
            source=index + 1 if block.ends_source else index,
            position=[] if block.ends_source else block.position,
            tokens=before.tokens + len(ids),
            sentences=before.sentences + len(sentence_stops),
            documents=before.documents + len(document_stops),
            empty_documents=before.empty_documents + num_empty,
            is_open=is_open,
            streams=streams,
        )

    def record(self) -> None:
        """Makes what was added outlive a crash: a run that is interrupted later goes on from here."""
        self._replace(PROGRESS, {**self._description, "progress": asdict(self.progress), DIGESTS: self._digests()})

    def finish(self, errors: str) -> None:
        """Makes the store complete. `errors` is for the reader of store.json."""
        now = self.progress
        sources = [{key: one[key] for key in ("name", "format", "size")} for one in self._description["sources"]]
        for index, (size, checksum) in now.streams.items():
            sources[int(index)] |= {"size": size, "crc32": checksum}
        counts = {"documents": now.documents, "empty_documents": now.empty_documents, "tokens": now.tokens}
        sentences = now.sentences if SENTENCES in self._files else None
        info = {
            **self._description, "errors": errors, "sources": sources, **counts, "sentences": sentences,
            "chunk_bytes": digests.CHUNK_BYTES, DIGESTS: self._digests(),
        }  # fmt: skip
        self._replace(STORE, info)
        (self.path / PROGRESS).unlink(missing_ok=True)

    def close(self) -> None:
        """Gives up the lock. What was added behind the last `record` does not count."""
        for file in self._files.values():
            file.close()

    def _lengths(self) -> dict[str, int]:
        """Bytes of each file that count."""
        now = self.progress
        counts = {TOKENS: now.tokens, DOCUMENTS: now.documents + 1, SENTENCES: now.sentences + 1}
        return {name: counts[name] * file.dtype.itemsize for name, file in self._files.items()}

    def _digests(self) -> dict[str, list[str]]:
        """Of all files that hold what `progress` says; others, of a block that was added in part, are read again."""
        lengths = self._lengths()
        written = {name: file.written for name, file in self._files.items()}
        return {name: one.digests() for name, one in written.items() if one.num_bytes == lengths[name]}

    def _replace(self, name: str, content: dict[str, Any]) -> None:
        """Writes a JSON file that says what is in the others, in one step: a reader sees the old one or the new one."""
        for file in self._files.values():
            file.sync()
        text = json.dumps(seal(content), indent=1).encode() + b"\n"
        with _room_needed(self.path):
            write_atomically(self.path / name, lambda temporary: temporary.write_bytes(text))


class _GrowingFile:
    """A file that is appended to. written: how many bytes, those that were there before included, and their digests."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._path, self.dtype = path, dtype
        self.written = ChunkDigests()
        with _room_needed(path.parent):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def lock(self) -> None:
        """Until it is closed, or the process ends in whatever way."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"{self._path.parent}: another process is writing it") from None

    def cut(self, num_bytes: int, recorded: list[str] | None = None) -> None:
        """Drops what stands behind `num_bytes` and goes on there.

        Args:
            num_bytes: that count.
            recorded: their digests; None: they are not known, and are made of what is there.
        """
        found = os.fstat(self._descriptor).st_size
        if found < num_bytes:
            raise StoreError(
                f"{self._path}: expected at least {num_bytes} bytes, got {found}: the unfinished store is damaged; "
                "remove it and begin again"
            )
        whole = [] if recorded is None else recorded[: num_bytes // digests.CHUNK_BYTES]
        self.written = ChunkDigests(whole)
        while self.written.num_bytes < num_bytes:
            start = self.written.num_bytes
            self.written.update(memoryview(os.pread(self._descriptor, min(num_bytes - start, 1 << 20), start)))
        if recorded is not None and self.written.digests() != recorded:
            raise StoreError(
                f"{self._path}: its last {num_bytes % digests.CHUNK_BYTES} bytes have changed since they were written: "
                "the unfinished store is damaged; remove it and begin again"
            )
        os.ftruncate(self._descriptor, num_bytes)
        os.lseek(self._descriptor, num_bytes, os.SEEK_SET)

    def append(self, values: np.ndarray) -> None:
        rest = np.ascontiguousarray(values, dtype=self.dtype).view(np.uint8)
        self.written.update(rest.data)
        with _room_needed(self._path.parent):
            while len(rest):
                rest = rest[os.write(self._descriptor, rest.data) :]

    def sync(self) -> None:
        with _room_needed(self._path.parent):
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def _read_progress(values: Any) -> Progress:
    """What progress.json says; raises TypeError or ValueError if it cannot be that."""
    progress = Progress(**values)
    check_counts(asdict(progress), ["source", "tokens", "sentences", "documents", "empty_documents"])
    streams = progress.streams.values() if isinstance(progress.streams, dict) else [None]
    for numbers in (progress.position, *streams):
        if not isinstance(numbers, list) or not all(isinstance(one, int) and 0 <= one < 1 << 63 for one in numbers):
            raise ValueError(f"position, streams: expected numbers from 0 on, got {numbers!r}")
    return progress


@contextlib.contextmanager
def _room_needed(path: Path) -> Iterator[None]:
    """Says what a full disk, a quota or a broken device means for the store."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be written ({error.strerror}); what was finished is kept: the same command goes on from "
            "there once this is mended"
        ) from error


def _is_temporary(name: str) -> bool:
    return any(is_temporary(name, Path(whole)) for whole in (PROGRESS, STORE))


def _check_directory(path: Path) -> None:
    """Refuses to write where something else is."""
    if not path.is_dir():
        raise StoreError(f"{path}: expected a directory, got a file")
    names = set(os.listdir(path))
    if STORE in names or PROGRESS in names:
        return
    foreign = sorted(name for name in names - _FRESH if not _is_temporary(name))
    if foreign or (TOKENS in names and os.path.getsize(path / TOKENS)):
        raise StoreError(
            f"{path}: expected an empty directory or an unfinished store, got one with {(foreign or [TOKENS])[0]!r}"
        )


def check_same(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises StoreError if a store, complete or not, was begun with something else than is wanted now."""
    for name, value in wanted.items():
        if name != "sources" and found.get(name) != value:
            raise StoreError(
                f"{path}: was begun with another {name}: expected {found.get(name)!r}, got {value!r}{_WAY_OUT}"
            )
    before, now = found["sources"], wanted["sources"]
    names = [[(source["name"], source["format"]) for source in sources] for sources in (before, now)]
    if names[0] != names[1]:
        raise StoreError(
            f"{path}: was begun with other files or formats: expected {names[0]}, got {names[1]}{_WAY_OUT}"
        )
    for old, new in zip(before, now, strict=True):
        changed = [key for key in ("size", "mtime_ns") if key in old and new[key] is not None and old[key] != new[key]]
        if changed:
            raise StoreError(
                f"{path}: {new['name']} was changed since the store was begun ({changed[0]}: expected "
                f"{old[changed[0]]}, got {new[changed[0]]}){_WAY_OUT}"
            )
