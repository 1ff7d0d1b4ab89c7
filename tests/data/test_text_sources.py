"""Blocks of texts: whatever the size of the blocks and wherever reading goes on, the texts are the same."""

import contextlib
import gzip
import itertools
import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_fast.data.text_sources import Block, ReadOptions, find_sources, read_blocks
from bert_fast.errors import SourceError

BLOCK_SIZES = [16, 17, 64, 1 << 20]


def texts_of(block: Block) -> list[bytes]:
    if not isinstance(block.texts, tuple):
        return [text.encode("utf-8", "surrogatepass") for text in block.texts]
    data, boundaries = block.texts
    assert data.dtype == np.uint8 and boundaries.dtype == np.int64
    content = data.tobytes()
    return [content[start:stop] for start, stop in itertools.pairwise(boundaries)]


def read(path: Path, format: str = "lines", **options: Any) -> list[bytes]:
    (source,) = find_sources([path], format, options.get("field", "text"))
    blocks = list(read_blocks(source, ReadOptions(**options)))
    assert [block.ends_source for block in blocks] == [False] * (len(blocks) - 1) + [True]
    assert blocks[-1].bytes_on_disk == path.stat().st_size
    return [text for block in blocks for text in texts_of(block)]


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("block_bytes", BLOCK_SIZES)
@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\n", [b"a\n"]),
        (b"\n", [b"\n"]),
        (b"\n\nb", [b"\n", b"\n", b"b"]),
        (b"a\r\nb\r\n", [b"a\r\n", b"b\r\n"]),
        (b"\xef\xbb\xbfa\nb", [b"a\n", b"b"]),
        (b"\xef\xbb\xbf", []),
        (b"\xef\xbb\xbf\n", [b"\n"]),
        ("héllo\n你好\x0b\u2028x\n".encode(), ["héllo\n".encode(), "你好\x0b\u2028x\n".encode()]),
        (b"x" * 1000 + b"\ny", [b"x" * 1000 + b"\n", b"y"]),
    ],
)
def test_lines(tmp_path: Path, content: bytes, lines: list[bytes], block_bytes: int) -> None:
    assert read(written(tmp_path / "x.txt", content), block_bytes=block_bytes) == lines


def test_reading_goes_on_behind_any_block_with_blocks_of_any_size(tmp_path: Path) -> None:
    draw = random.Random(5)
    content = "".join(draw.choice(["a", "é", "你 ", "\n", "\n", "\r\n", "word "]) for _ in range(600))
    path = written(tmp_path / "x.txt", content.encode())
    (source,) = find_sources([path])
    whole = content.encode().splitlines(keepends=True)
    assert read(path) == whole
    seen = []
    for block in read_blocks(source, ReadOptions(block_bytes=40)):
        seen += texts_of(block)
        rest = read_blocks(source, ReadOptions(block_bytes=draw.randrange(16, 200)), block.position)
        assert seen + [text for other in rest for text in texts_of(other)] == whole
    assert seen == whole


def test_long_lines_are_read_whole_and_nothing_yielded_is_written_again(tmp_path: Path) -> None:
    lines = [b"a" * length + b"\n" for length in (5, 5000, 1, 0, 70000, 3)]
    path = written(tmp_path / "x.txt", b"".join(lines))
    assert read(path, block_bytes=16) == lines  # `read` looks at the blocks only after all of them were made


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("hello\n".encode("utf-16"), "is UTF-16 .*, expected UTF-8 text; convert"),
        ("hello\n".encode("utf-16-be"), "many zero bytes: UTF-16 without a byte order mark"),
        (b"\xfe\xff\0h", "is UTF-16"),
        (gzip.compress(b"hello", mtime=0), "is gzip.*convert or unpack it into a pipe and read '-'"),
        (b"\x28\xb5\x2f\xfdxxxx", "is Zstandard"),
        (b"PK\x03\x04xxxx", "is a zip archive"),
        (b"PAR1xxxx", "is Parquet.*format 'parquet'"),
    ],
)
@pytest.mark.parametrize("format", ["text", "jsonl"])
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, message: str, format: str) -> None:
    with pytest.raises(SourceError, match=message):
        read(written(tmp_path / "x.txt", content), format, errors="replace")


BROKEN = [b"\xff", b"\xc3", b"\xe4\xbd", b"\xf0\x9f\x98", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80"]


@pytest.mark.parametrize("block_bytes", [50, 1 << 20])
@pytest.mark.parametrize("broken", BROKEN)
def test_strict_reading_names_file_byte_and_line(tmp_path: Path, broken: bytes, block_bytes: int) -> None:
    path = written(tmp_path / "x.txt", b"\xef\xbb\xbf" + b"fine line\n" * 20 + b"then " + broken + b"\n")
    message = rf"x\.txt: not UTF-8: byte 208 \(line 21\) is 0x{broken[0]:02x}; errors='replace' reads on"
    with pytest.raises(SourceError, match=message):
        read(path, block_bytes=block_bytes)
    assert read(path, errors="replace", block_bytes=block_bytes)[-1] == b"then " + broken + b"\n"


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="errors: expected 'strict' or 'replace', got 'ignore'"):
        ReadOptions(errors="ignore")
    with pytest.raises(ValueError, match=r"block_bytes: expected .*16.*, got 15"):
        ReadOptions(block_bytes=15)


RECORDS = (
    b'{"text": "one"}\n \t\n{"id": [1, {"text": 2}], "text": "tw\\u00f6 \\ud83d\\ude00\\n"}\r\n'
    b'  {"text": ""}  \n{"text": null}\n\n{"text": "{\\"text\\": 1}"}'
)
RECORD_TEXTS = [b"one", "twö 😀\n".encode(), b"", b"", b'{"text": 1}']


@pytest.mark.parametrize("block_bytes", BLOCK_SIZES)
def test_json_lines(tmp_path: Path, block_bytes: int) -> None:
    path = written(tmp_path / "x.jsonl", RECORDS)
    assert read(path, "auto", block_bytes=block_bytes) == RECORD_TEXTS
    assert read(written(tmp_path / "y.ndjson", b"\xef\xbb\xbf" + RECORDS), "auto") == RECORD_TEXTS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', 'expected a JSON object, got \'{"text": "a"\': .*delimiter'),
        (b'{"text": "a"} {"text": "b"}', "expected a JSON object.*Extra data"),
        (b'{"text":\n"a"}', "expected a JSON object"),
        (b'{"body": "a", "id": 3}', "expected a string in the field 'text', got {'body': 'a', 'id': 3}"),
        (b"{}", "expected a string in the field 'text', got {}"),
        (b'{"text": ["a"]}', r"expected a string in the field 'text', got {'text': \['a'\]}"),
        (b'"text"', "expected a JSON object, got .* this is a str"),
        (b"null", "expected a JSON object, got .* this is a NoneType"),
        (b"[" * 100_000, "expected a JSON object.*recursion"),
        (b"\xff", r"not UTF-8: byte 32 \(line 3\)"),
    ],
)
@pytest.mark.parametrize("block_bytes", [16, 1 << 20])
def test_wrong_json_names_file_and_line(tmp_path: Path, line: bytes, message: str, block_bytes: int) -> None:
    path = written(tmp_path / "x.jsonl", b'{"text": "a"}\n' * 2 + b"    " + line + b"\n")
    where = "x.jsonl: " if "UTF-8" in message else "x.jsonl: line 3: "
    with pytest.raises(SourceError, match=where + message):
        read(path, "auto", block_bytes=block_bytes)


def test_broken_json_text_is_replaced(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", b'{"text": "a\xffb\xe4\xbdc"}')
    assert read(path, "auto", errors="replace") == ["a\ufffdb\ufffdc".encode()]


def test_sources_are_looked_up_before_they_are_read(tmp_path: Path) -> None:
    path = written(tmp_path / "x.txt", b"a\n")
    with pytest.raises(FileNotFoundError, match="none"):
        find_sources([path, tmp_path / "none.txt"])
    with pytest.raises(SourceError, match="is a directory; pass the files in it"):
        find_sources([tmp_path])
    with pytest.raises(SourceError, match="stdin can be read only once"):
        find_sources(["-", path, "-"])
    with pytest.raises(SourceError, match="Parquet cannot be read from a stream"):
        find_sources(["-"], "parquet")
    with pytest.raises(ValueError, match=r"format: expected 'auto', 'text', .*, got 'csv'"):
        find_sources([path], "csv")
    names = ["a.JSONL", "a.ndjson", "a.txt", "a"]
    for name in names:
        written(tmp_path / name, b"")
    assert [source.format for source in find_sources([tmp_path / name for name in names])] == [
        "jsonl", "jsonl", "text", "text"
    ]  # fmt: skip


@pytest.mark.parametrize("change", [b"a\nb\nc\n", b"a\n"])
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path, change: bytes) -> None:
    path = written(tmp_path / "x.txt", b"a\n" * 20)
    (source,) = find_sources([path])
    blocks = read_blocks(source, ReadOptions(block_bytes=16))
    next(blocks)
    written(path, change)
    with pytest.raises(SourceError, match=r"x\.txt: was changed while it was read"):
        list(blocks)


def through_pipe(path: Path, content: bytes, position: Any = ()) -> list[Block]:
    """Reads a named pipe that another thread writes in small pieces."""

    def write() -> None:
        # Broken by a reader that saw enough.
        with contextlib.suppress(BrokenPipeError), open(path, "wb", buffering=0) as pipe:
            for start in range(0, len(content), 5):
                pipe.write(content[start : start + 5])

    writer = threading.Thread(target=write)
    (source,) = find_sources([path])
    assert source.size is None
    writer.start()
    try:
        return list(read_blocks(source, ReadOptions(block_bytes=16), position))
    finally:
        writer.join()


def test_pipes_are_read_on_only_if_they_begin_as_before(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    content = b"".join(b"line %d\n" % number for number in range(40)) + b"end"
    blocks = through_pipe(path, content)
    lines = content.splitlines(keepends=True)
    assert [text for block in blocks for text in texts_of(block)] == lines
    for count in (1, 7, len(blocks)):
        rest = through_pipe(path, content, blocks[count - 1].position)
        num_done = sum(len(texts_of(block)) for block in blocks[:count])
        assert [text for block in rest for text in texts_of(block)] == lines[num_done:]
    position = blocks[3].position
    with pytest.raises(SourceError, match=f"begin with the {position[0]} bytes that were read before; got other bytes"):
        through_pipe(path, b"x" + content[1:], position)
    with pytest.raises(SourceError, match="got only 10 bytes"):
        through_pipe(path, content[:10], position)
