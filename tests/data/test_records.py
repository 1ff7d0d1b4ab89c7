"""Whole text files: UTF-8 or a message with the place."""

from pathlib import Path

import pytest

from bert_fast.data.records import read_text
from bert_fast.errors import SourceError


@pytest.mark.parametrize("content", ["a\r\nb\nc\rd\u2028e", "é" * 5_000_000, "x", "\n"])
def test_the_text_as_it_stands(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content.encode())
    assert read_text(path) == content
    path.write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert read_text(str(path)) == content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a.txt: is empty"),
        (b"\xef\xbb\xbf", "a.txt: is empty"),
        ("é".encode() + b"\nab\xe9c\n", r"a.txt: line 2: expected UTF-8, got byte 0xe9 \(byte 5 of the file\)"),
        (b"\xef\xbb\xbf\nab\xe9c\n", r"a.txt: line 2: expected UTF-8, got byte 0xe9 \(byte 6 of the file\)"),
        (b"ab\xc3", r"line 1: expected UTF-8, got byte 0xc3 \(byte 2 of the file\)"),
        ("text".encode("utf-16"), "is UTF-16"),
        (b"\x1f\x8b\x08\x00", "is gzip"),
    ],
)
def test_what_is_no_utf8_text(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=message):
        read_text(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "missing.txt")
    with pytest.raises(SourceError, match="expected a file, got a directory"):
        read_text(tmp_path)
