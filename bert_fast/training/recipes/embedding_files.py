"""`embed_files`: the vectors of all texts of files of any size, by runs that may be interrupted.

One thread reads and tokenizes the next texts while the model computes. Texts are taken in groups, whose bounds follow
from the texts alone: the same texts share a batch in every run, whether it began at the first text or went on later.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bert_fast.checks import check_flag
from bert_fast.data.digests import Digest
from bert_fast.data.read_ahead import ReadAhead
from bert_fast.data.text_files import ReadOptions, TextSource
from bert_fast.data.text_sources import find_sources, read_blocks
from bert_fast.data.token_store import tokenizer_hash
from bert_fast.files import path_name
from bert_fast.tokenization import RaggedBatch
from bert_fast.training.recipes.embedding import Embedder
from bert_fast.training.recipes.unfinished import UnfinishedVectors
from bert_fast.training.recipes.vector_files import (
    VectorsInfo,
    info_path,
    model_digests,
    write_info,
    writer_for,
)

__all__ = ["Embedded", "TextGroup", "embed_files", "find_texts", "read_groups"]

_GROUP_TEXTS, _GROUP_BYTES = 2048, 1 << 20  # a handful of batches, of which only the last is not full
_GROUPS_AHEAD = 2
_RECORD_SECONDS = 2.0  # work that being killed may cost, beside the group at hand


@dataclass(frozen=True)
class Embedded:
    """How far `embed_files` is.

    Attributes:
        texts, tokens: those with a vector, of earlier runs, too.
        bytes_read, bytes_total: of the files; None for streams.
        seconds: that this run took up to now.
        resumed_texts, resumed_tokens: those of earlier runs.
    """

    texts: int = 0
    bytes_read: int = 0
    bytes_total: int | None = None
    seconds: float = 0.0
    tokens: int = 0
    resumed_texts: int = 0
    resumed_tokens: int = 0


@dataclass(frozen=True)
class TextGroup:
    """Some texts of one source.

    Attributes:
        texts: a list of str, or (uint8 [n], int64 [k + 1]): text i is data[boundaries[i]:boundaries[i + 1]].
        bytes_read: of all sources, about up to here.
        is_lines: whether a text ends with its line end.
    """

    texts: Any
    bytes_read: int
    is_lines: bool

    def __len__(self) -> int:
        return len(self.texts[1]) - 1 if isinstance(self.texts, tuple) else len(self.texts)

    def text(self, place: int) -> str:
        """One text, without its line end; bytes that are not UTF-8 become U+FFFD."""
        if not isinstance(self.texts, tuple):
            return self.texts[place]
        data, boundaries = self.texts
        text = data[boundaries[place] : boundaries[place + 1]].tobytes().decode(errors="replace")
        return text.removesuffix("\n").removesuffix("\r") if self.is_lines else text

    def add_to(self, digest: Digest) -> None:
        """Makes the texts and their bounds part of a digest."""
        if isinstance(self.texts, tuple):
            data, boundaries = self.texts
        else:
            encoded = [text.encode("utf-8", "surrogatepass") for text in self.texts]
            data = np.frombuffer(b"".join(encoded), np.uint8)
            boundaries = np.cumsum([0, *map(len, encoded)])
        digest.update(np.diff(boundaries).astype("<i8"))
        digest.update(np.ascontiguousarray(data))


def find_texts(files: Sequence[str | os.PathLike[str]], format: str, field: str) -> list[TextSource]:
    """The sources of `embed_files`, whose lines are texts of their own, empty ones too: line i belongs to row i."""
    sources = find_sources(files, format, field)
    return [replace(source, format="lines") if source.format == "text" else source for source in sources]


def read_groups(sources: Sequence[TextSource], options: ReadOptions) -> Iterator[TextGroup]:
    """All texts in groups of at most `_GROUP_TEXTS` of one source; one that reaches `_GROUP_BYTES` ends there.

    The bounds do not depend on the blocks that sources are read in.
    """
    before = 0
    for source in sources:
        is_lines, held, read = source.format == "lines", _Held(), before
        for block in read_blocks(source, options):
            read = before + block.bytes_on_disk
            held.add(block.texts)
            while (count := held.group_size()) is not None:
                yield TextGroup(held.take(count), read, is_lines)
        if held.count:
            yield TextGroup(held.take(held.count), read, is_lines)
        before += source.size or 0


class _Held:
    """Texts that were read and are in no group yet."""

    def __init__(self) -> None:
        self._texts: Any = None
        self._ends: np.ndarray = np.zeros(1, np.int64)  # ends[i]: the size of the first i texts

    @property
    def count(self) -> int:
        return len(self._ends) - 1

    def add(self, texts: Any) -> None:
        if isinstance(texts, tuple):
            data, boundaries = texts
            ends = boundaries - boundaries[0]
            if self.count:
                held = self._texts
                self._texts = np.concatenate([held, data[boundaries[0] : boundaries[-1]]])
            else:
                self._texts = data[boundaries[0] : boundaries[-1]]
        else:
            ends = np.cumsum([0, *map(len, texts)])
            self._texts = [*self._texts, *texts] if self.count else list(texts)
        self._ends = np.concatenate([self._ends, self._ends[-1] + ends[1:]]).astype(np.int64)

    def group_size(self) -> int | None:
        """How many texts are a whole group; None: more must be read."""
        # As few texts as reach the size.
        by_size = int(np.searchsorted(self._ends[: _GROUP_TEXTS + 1], _GROUP_BYTES))
        count = min(by_size, _GROUP_TEXTS)
        return count if count <= self.count else None

    def take(self, count: int) -> Any:
        """The first texts, which are held no longer."""
        end, ends = int(self._ends[count]), self._ends
        self._ends = ends[count:] - end
        if isinstance(self._texts, list):
            taken, self._texts = self._texts[:count], self._texts[count:]
            return taken
        taken, self._texts = self._texts[:end], self._texts[end:]
        return taken, ends[: count + 1]


def embed_files(
    embedder: Embedder,
    files: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    format: str = "auto",
    field: str = "text",
    errors: str = "strict",
    resume: bool = False,
    report: Callable[[Embedded], None] | None = None,
) -> Embedded:
    """The vectors of all texts of files, in their order, into one file; memory does not grow with their number.

    A run works in the folder `<output>.partial`, which stays if it is ended before its time, in whatever way. With
    `resume` another run goes on from there; on the same machine, with as many threads, the file that it writes is that
    of a run which nothing interrupted, byte for byte. `<output>.json` says which model the vectors are of, see
    `VectorsInfo`.

    Args:
        embedder: makes the vectors.
        files: paths, or "-" for stdin.
        output: written when all is done, else left as it was. A name that ends in .npy: an array, float32 [n, H]; in
            .parquet or .arrow (an IPC file): a column `embedding`, lists of H float32.
        format: as in `tokenize_files`; but every line of a text file is a text, also an empty one.
        field: key of the text in JSON lines, column of Parquet files.
        errors: "strict" or "replace", see `tokenize_files`.
        resume: go on behind the texts that an interrupted run had finished, if there is one; else begin again.
        report: called now and then.

    Returns: what was done.

    Raises:
        OSError: a file cannot be read or written; another process writes the same output.
        SourceError: a source is not what its format says; with `resume`, other texts than before.
        ValueError: a wrong argument, another ending of `output`; with `resume`, other settings or files than before.
        ImportError: a Parquet or Arrow file, without pyarrow.
    """
    if not isinstance(embedder, Embedder):
        raise TypeError(f"embedder: expected an Embedder, got {type(embedder).__name__}")
    if report is not None and not callable(report):
        raise TypeError(f"report: expected a function, got {type(report).__name__}")
    check_flag("resume", resume)
    if resume and embedder.checkpoint is None:
        raise ValueError("resume: expected an Embedder of from_pretrained, got one whose weights no file holds")
    options = ReadOptions(field, errors)
    path = Path(path_name("output", output))
    writer = writer_for(path)
    sources = find_texts(files, format, field)
    info = _describe(embedder)
    width = embedder.model.config.hidden_size
    unfinished = UnfinishedVectors(path, width, _settings(embedder, info, sources, options), resume)
    try:
        done = _run(embedder, sources, options, unfinished, report)
        info_path(path).unlink(missing_ok=True)  # it must not stand beside vectors that it is not about
        unfinished.finish(writer)
        write_info(path, replace(info, count=done.texts))
        unfinished.remove()
    finally:
        unfinished.close()
    return done


def _describe(embedder: Embedder) -> VectorsInfo:
    checkpoint = embedder.checkpoint
    digests: dict[str, Any] = {"weights_sha256": None, "tokenizer_sha256": tokenizer_hash(embedder.tokenizer)}
    if checkpoint is not None:
        digests = model_digests(checkpoint, embedder.tokenizer)
    width, longest = embedder.model.config.hidden_size, embedder.max_length
    assert longest is not None  # set when the Embedder was made
    return VectorsInfo(
        model=checkpoint, **digests, dimension=width, count=0, pooling=embedder.pooling,
        normalize=embedder.normalize, max_length=longest,
    )  # fmt: skip


def _settings(
    embedder: Embedder, info: VectorsInfo, sources: Sequence[TextSource], options: ReadOptions
) -> dict[str, Any]:
    """All that decides what is in the file."""
    return {
        "weights_sha256": info.weights_sha256,
        "tokenizer_sha256": info.tokenizer_sha256,
        "pooling": info.pooling,
        "normalize": info.normalize,
        "max_length": info.max_length,
        "batch_tokens": embedder.batch_tokens,
        "precision": str(embedder.model.dtype).removeprefix("torch."),
        "device": embedder.model.device.type,
        "group": [_GROUP_TEXTS, _GROUP_BYTES],
        "field": options.field,
        "errors": options.errors,
        "files": [[source.name, source.format, source.size] for source in sources],
    }


def _run(
    embedder: Embedder,
    sources: Sequence[TextSource],
    options: ReadOptions,
    unfinished: UnfinishedVectors,
    report: Callable[[Embedded], None] | None,
) -> Embedded:
    begin = recorded = time.monotonic()
    sizes = [source.size for source in sources]
    total = None if None in sizes else sum(size for size in sizes if size is not None)
    done = Embedded(unfinished.texts, 0, total, 0.0, unfinished.tokens, unfinished.texts, unfinished.tokens)
    if unfinished.resumed and report is not None:
        report(done)

    def tokenized() -> Iterator[tuple[TextGroup, str, RaggedBatch]]:
        for group, digest in unfinished.skip(read_groups(sources, options)):
            yield group, digest, embedder.tokenize(group.texts)

    with contextlib.closing(ReadAhead(tokenized(), _GROUPS_AHEAD, "tokenize")) as ready:
        try:
            for group, digest, ragged in ready:
                unfinished.add(embedder.embed_tokens(ragged), len(ragged.ids), digest)
                if time.monotonic() - recorded >= _RECORD_SECONDS:
                    unfinished.record()
                    recorded = time.monotonic()
                done = replace(
                    done, texts=unfinished.texts, tokens=unfinished.tokens, bytes_read=group.bytes_read,
                    seconds=time.monotonic() - begin,
                )  # fmt: skip
                if report is not None:
                    report(done)
        finally:  # a broken byte, Ctrl-C, or the end: keep all that was done
            unfinished.record()
    return replace(done, seconds=time.monotonic() - begin)
