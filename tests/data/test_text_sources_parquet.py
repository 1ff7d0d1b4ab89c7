"""Columns of Parquet files."""

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from bert_fast.data.files import column_values, read_rows
from bert_fast.data.text_sources import Block, ReadOptions, find_sources, read_blocks
from bert_fast.errors import SourceError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = ["one", "", "zwölf", None, "你好 😀", "x" * 900, None, "last"]
CONTENTS = [b"" if text is None else text.encode() for text in TEXTS]


def texts_of(block: Block) -> list[bytes]:
    texts: list[bytes] = block.texts if isinstance(block.texts, list) else block.texts.to_pylist()
    assert block.num_bytes == sum(map(len, texts))
    return texts


def written(path: Path, texts: list[Any], type: Any = None, rows: int = 3, **options: Any) -> Path:
    table = pa.table({"id": list(range(len(texts))), "text": pa.array(texts, type=type or pa.string())})
    parquet.write_table(table, path, row_group_size=rows, **options)
    return path


def read(path: Path, field: str = "text", position: Any = (), **options: Any) -> list[bytes]:
    (source,) = find_sources([path], "auto", field)
    blocks = list(read_blocks(source, ReadOptions(field, **options), position))
    assert [block.ends_source for block in blocks] == [False] * (len(blocks) - 1) + [True]
    assert blocks[-1].bytes_on_disk == path.stat().st_size
    return [text for block in blocks for text in texts_of(block)]


@pytest.mark.parametrize(
    "type", [pa.string(), pa.large_string(), pa.binary(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
@pytest.mark.parametrize("block_bytes", [16, 1 << 20])
def test_every_kind_of_string(tmp_path: Path, type: Any, block_bytes: int) -> None:
    assert read(written(tmp_path / "x.parquet", TEXTS, type), block_bytes=block_bytes) == CONTENTS
    assert read(written(tmp_path / "y.pq", [], type)) == []
    assert read(written(tmp_path / "z.parquet", [None] * 5, type)) == [b""] * 5


def test_reading_goes_on_behind_any_block_with_blocks_of_any_size(tmp_path: Path) -> None:
    draw = random.Random(3)
    texts = [f"text {number} " * draw.randrange(6) for number in range(200)]
    path = written(tmp_path / "x.parquet", texts, rows=37)
    (source,) = find_sources([path])
    seen = []
    for block in read_blocks(source, ReadOptions(block_bytes=64)):
        seen += texts_of(block)
        rest = read(path, position=block.position, block_bytes=draw.randrange(16, 999))
        assert seen + rest == [text.encode() for text in texts]


def test_broken_bytes_are_named_by_row(tmp_path: Path) -> None:
    contents = [b"fine"] * 7 + ["né".encode() + b"\xff!", b"fine"]
    path = written(tmp_path / "x.parquet", contents, pa.binary())
    for block_bytes in (16, 1 << 20):
        with pytest.raises(SourceError, match=r"x\.parquet: not UTF-8: byte 3 of row 7 is 0xff; errors='replace'"):
            read(path, block_bytes=block_bytes)
    assert read(path, errors="replace") == contents


def test_wrong_files_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "x.parquet", TEXTS)
    with pytest.raises(SourceError, match=r"x\.parquet: expected one column 'body', got 'id', 'text'"):
        find_sources([path], "auto", "body")
    with pytest.raises(SourceError, match="expected strings in the column 'id', got int64"):
        find_sources([path], "auto", "id")
    for content in (b"", b"hello\n", path.read_bytes()[:-20]):
        (tmp_path / "bad.parquet").write_bytes(content)
        with pytest.raises(SourceError, match=r"bad\.parquet: cannot be read as Parquet"):
            find_sources([tmp_path / "bad.parquet"])


def test_a_damaged_row_group_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "x.parquet", [f"some text {n}" for n in range(60)], rows=30, compression="zstd")
    content = bytearray(path.read_bytes())
    chunk = parquet.ParquetFile(path).metadata.row_group(1).column(1)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    content[start + 8 : start + 60] = bytes(52)
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"x\.parquet: row group 1 is damaged behind row 0"):
        read(path)


def test_a_count_of_rows_that_is_wrong_and_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = written(tmp_path / "x.parquet", [f"some text {n}" for n in range(60)], store_schema=False)
    content = path.read_bytes()
    footer = content.rindex(b"schema")
    count = content.index(b"\x16\x78", footer)  # of the file: an i64, 60 in zigzag; the row group's comes later
    path.write_bytes(content[:count] + b"\x16\x00" + content[count + 2 :])
    assert parquet.ParquetFile(path).metadata.num_rows == 0
    assert len(read(path)) == 60
    assert column_values(read_rows(path, ["text"]), "text") == [f"some text {n}" for n in range(60)]
    path.write_bytes(content[:footer] + content[footer:].replace(b"text", b"te\xe5t"))
    for open_file in (lambda: find_sources([path]), lambda: read_rows(path, ["text"])):
        with pytest.raises(SourceError, match=r"x\.parquet: cannot be read as Parquet"):
            open_file()


def test_without_pyarrow_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "x.parquet", TEXTS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SourceError, match=r"Parquet needs pyarrow: pip install 'bert_fast\[parquet\]'"):
        find_sources([path])
