"""`tokenize_files`: from texts of any size to a token store.

The caller's thread reads, the tokenizer's threads work on the block before, one thread writes behind. Four blocks of
some MB are in memory at a time, whatever the size of the sources.
"""

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_fast.checks import check_count, check_number
from bert_fast.data.arguments import check_tokenizer_kind
from bert_fast.data.text_sources import Block, ReadOptions, TextSource, check_stream, find_sources, read_blocks
from bert_fast.data.token_store import PROGRESS, STORE, TokenStore, check_counts, read_info
from bert_fast.data.token_store_writer import StoreWriter, check_same, describe
from bert_fast.errors import StoreError
from bert_fast.files import path_name
from bert_fast.tokenization import Tokenizer
from bert_fast.tokenization.ragged import RaggedBatch

_BLOCKS_BEHIND = 2  # the reader
_MAX_THREADS = (1 << 31) - 1


@dataclass(frozen=True)
class Report:
    """How far a run is.

    Args:
        bytes_read: of the sources, as they lie on the disk, those that earlier runs read among them.
        bytes_total: size of all sources; None if one is a stream.
        text_bytes: of text, tokenized by this run.
        documents, tokens: in the store.
        seconds: that this run took up to now.
    """

    bytes_read: int
    bytes_total: int | None
    text_bytes: int
    documents: int
    tokens: int
    seconds: float


def tokenize_files(
    files: Sequence[Any],
    directory: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    format: str = "auto",
    field: str = "text",
    errors: str = "strict",
    num_threads: int = 0,
    block_bytes: int = 4 << 20,
    checkpoint_seconds: float = 5.0,
    report: Callable[[Report], None] | None = None,
) -> TokenStore:
    """Tokenizes files into a store, or goes on with one that an interrupted run of the same call left behind.

    The store's bytes depend on the texts, their order, their names and the tokenizer alone: not on the number of
    threads, the size of blocks, or interruptions. A store that is complete already is opened and returned.

    Args:
        files: paths, "-" for stdin, or `datasets.Dataset`s; read one after the other.
        directory: of the store; made if it is not there.
        tokenizer: makes the ids; no special tokens are added, and nothing is truncated.
        format: "text", "lines", "jsonl", "parquet" (see `bert_fast.data.text_sources.FORMATS`), or "auto": by the
            ending of each name.
        field: key of the text in JSON lines, column of Parquet files and data sets.
        errors: what bytes mean that are not UTF-8. "strict": an error, what comes before is kept; "replace": every
            maximal invalid part counts as one U+FFFD, which a tokenizer with clean_text drops.
        num_threads: of the tokenizer; 0: as many as there are processors.
        block_bytes: about how much text is tokenized at a time.
        checkpoint_seconds: how much time at most passes until what is written also survives a crash.
        report: called after every block.

    Returns:
        The complete `TokenStore`, open.

    Raises:
        OSError: a file cannot be read.
        SourceError: a source is not what its format says; see `errors`.
        StoreError: the directory holds something else, or a store that was begun with other files, options or another
            tokenizer; another process writes it; it cannot be written (disk full). What was finished is kept.
        TypeError, ValueError: a wrong argument; an added token that the format's line ends would change.

    Example:
        >>> words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "x.txt").write_text("a text a")
        ...     store = data.tokenize_files([f"{folder}/x.txt"], f"{folder}/store", bert_fast.BertTokenizer(words))
        ...     len(store), store[0].tolist()
        (1, [5, 6, 5])
    """
    checkpoint_seconds = _checked_seconds(checkpoint_seconds)
    num_threads = check_count("num_threads", num_threads, 0, _MAX_THREADS)
    options = ReadOptions(field, errors, block_bytes)
    path = Path(path_name("directory", directory))
    check_tokenizer_kind(tokenizer)
    if report is not None and not callable(report):
        raise TypeError(f"report: expected a function, got {type(report).__name__}")
    sources = find_sources(files, format, field)
    _check_added_tokens(tokenizer, sources)
    description = describe(sources, tokenizer, field)
    if not _is_complete(path, description, sources):
        with contextlib.closing(StoreWriter(path, description)) as writer:
            _run(writer, sources, options, tokenizer, num_threads, checkpoint_seconds, report)
    return TokenStore.open(path, tokenizer)


def _is_complete(path: Path, description: dict[str, object], sources: list[TextSource]) -> bool:
    """Whether the store is there already. Streams are read to see that they are the same."""
    if not (path / STORE).exists():
        return False
    info = read_info(path)
    check_same(path, info, description)
    for source, found in zip(sources, info["sources"], strict=True):
        if source.size is None:
            try:
                check_counts(found, ["size", "crc32"])
            except ValueError as error:
                raise StoreError(f"{path / STORE}: is damaged: sources: {error}") from None
            check_stream(source, found["size"], found["crc32"])
    (path / PROGRESS).unlink(missing_ok=True)  # a run was killed between its last two steps
    return True


def _run(
    writer: StoreWriter,
    sources: list[TextSource],
    options: ReadOptions,
    tokenizer: Tokenizer,
    num_threads: int,
    checkpoint_seconds: float,
    report: Callable[[Report], None] | None,
) -> None:
    begin = recorded = time.monotonic()
    sizes = [source.size for source in sources]
    total = None if None in sizes else sum(size for size in sizes if size is not None)
    text_bytes = 0

    def encode(block: Block) -> RaggedBatch:
        return tokenizer.encode_ragged(block.texts, add_special_tokens=False, num_threads=num_threads)

    def write(index: int, block: Block, encoded: Future[RaggedBatch], before: Future[Report] | None) -> Report:
        nonlocal recorded, text_bytes
        if before is not None:
            before.result()  # behind a block that failed nothing is written
        batch = encoded.result()
        writer.add(index, block, batch.ids, batch.cu_seqlens)
        if time.monotonic() - recorded >= checkpoint_seconds:
            writer.record()
            recorded = time.monotonic()
        text_bytes += block.num_bytes
        bytes_read = sum(size or 0 for size in sizes[:index]) + block.bytes_on_disk
        now = writer.progress
        return Report(bytes_read, total, text_bytes, now.documents, now.tokens, time.monotonic() - begin)

    written: deque[Future[Report]] = deque()

    def wait_and_report(most: int) -> None:
        while len(written) > most:
            done = written.popleft().result()
            if report is not None:
                report(done)

    with ThreadPoolExecutor(1, "encode") as encoder, ThreadPoolExecutor(1, "write") as pool:
        try:
            position: Sequence[int] = writer.progress.position
            for index in range(writer.progress.source, len(sources)):
                for block in read_blocks(sources[index], options, position):
                    before = written[-1] if written else None
                    written.append(pool.submit(write, index, block, encoder.submit(encode, block), before))
                    wait_and_report(_BLOCKS_BEHIND)
                position = ()
            wait_and_report(0)
        except StoreError:
            raise  # nothing more can be written
        except BaseException:  # a broken byte, Ctrl-C: keep all that came before
            pool.submit(writer.record).result()  # behind the blocks that are being written
            raise
    writer.finish(options.errors)


def _checked_seconds(seconds: Any) -> float:
    if isinstance(seconds, float) and seconds == math.inf:
        return seconds  # nothing is recorded before the end
    seconds = check_number("checkpoint_seconds", seconds)
    if seconds < 0:
        raise ValueError(f"checkpoint_seconds: expected at least 0, got {seconds}")
    return seconds


def _check_added_tokens(tokenizer: Tokenizer, sources: list[TextSource]) -> None:
    """Refuses added tokens that would match the line ends, which the texts of lines carry along as whitespace."""
    if not any(source.format in ("text", "lines") for source in sources):
        return
    for token in tokenizer.get_added_vocab():
        if "\n" in token or token != token.rstrip():
            raise ValueError(
                f"tokenizer: the added token {token!r} contains a line end or ends with a space; the formats 'text' "
                "and 'lines' cannot tell it from the end of a line"
            )
