"""CoNLL columns."""

from pathlib import Path

import pytest

from bert_fast.data.conll import read_conll
from bert_fast.errors import SourceError


def write(path: Path, content: str | bytes) -> Path:
    file = path / "file.conll"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def as_lists(sentences: list[dict[str, list[str]]]) -> list[list[tuple[str, str]]]:
    return [list(zip(row["tokens"], row["labels"], strict=True)) for row in sentences]


@pytest.mark.parametrize(
    "content",
    [
        "John\tB-PER\nran\tO\n\nGo\tO\n",
        "John\tB-PER\nran\tO\n\nGo\tO",  # no newline at the end
        "\n\nJohn\tB-PER\r\nran\tO\r\n\t\r\n \n\nGo\tO\r\n\n\n",  # CRLF, lines of whitespace
        "\ufeffJohn\tB-PER\nran\tO\n\nGo\tO\n",  # byte order mark
        "John B-PER\nran   O  \n\n  Go \t O\n",  # spaces, in runs
        "-DOCSTART- O\n\nJohn B-PER\nran O\n-DOCSTART- O\nGo O\n",
        "# id = 1\n# text = John ran\nJohn B-PER\nran O\n\n# 2 O-x y\nGo O\n",
        "# a\tcomment\nJohn\tB-PER\n# inside\nran\tO\n\nGo\tO\n",
    ],
)
def test_files_of_every_shape_give_the_same_sentences(tmp_path: Path, content: str) -> None:
    assert as_lists(read_conll(write(tmp_path, content))) == [[("John", "B-PER"), ("ran", "O")], [("Go", "O")]]


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    sentences = read_conll(write(tmp_path, "# c\n\nJohn B-PER\nran O\n\n\nGo O\n"))
    assert [row["lines"] for row in sentences] == [[3, 4], [7]]


def test_columns_are_chosen_by_number(tmp_path: Path) -> None:
    file = write(tmp_path, "1 John NNP B-PER\n2 ran VBD O\n")
    assert as_lists(read_conll(file, word_column=1, label_column=2)) == [[("John", "NNP"), ("ran", "VBD")]]
    assert as_lists(read_conll(file, word_column=-3)) == [[("John", "B-PER"), ("ran", "O")]]
    assert read_conll(file, word_column=1, label_column=None) == [{"tokens": ["John", "ran"], "lines": [1, 2]}]
    one = read_conll(write(tmp_path, "John\nran\n\nGo\n"), label_column=None)
    assert [row["tokens"] for row in one] == [["John", "ran"], ["Go"]]


def test_words_with_spaces_stand_between_tabs(tmp_path: Path) -> None:
    file = write(tmp_path, "New York\tB-LOC\n\u00a0\tO\n")
    assert as_lists(read_conll(file)) == [[("New York", "B-LOC"), ("\u00a0", "O")]]


@pytest.mark.parametrize("content", ["# O\nis O\n", "#\tO\nis\tO\n", "is O\n# O\n"])
def test_a_number_sign_may_be_a_word(tmp_path: Path, content: str) -> None:
    [sentence] = as_lists(read_conll(write(tmp_path, content)))
    assert sorted(sentence) == [("#", "O"), ("is", "O")]


def test_any_character_may_be_in_a_word(tmp_path: Path) -> None:
    words = ["北", "𝔘𝔫𝔦", "e\u0301", "👩\u200d🚀", "\u2028", "\x00", "\x85", "\u200b", "a\u00a0b"]
    [sentence] = read_conll(write(tmp_path, "".join(f"{word}\tO\n" for word in words)))
    assert sentence["tokens"] == words


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n \n# only this\n", "no words"),
        ("a O\nb\n", "line 2: expected 2 columns as before, got 1"),
        ("a\tO\n\nb\tO\tx\n", "line 3: expected 2 columns as before, got 3"),
        ("a\nb\n", "line 1: expected column 0 of tokens and column -1 of labels, got 1 columns"),
        ("a\tO\n\tO\n", "line 2: expected tokens in column 0, got an empty column"),
        ("a\tO\nb\t\n", "line 2: expected 2 columns as before, got 1"),
        (b"a\tO\n\xe9t\xe9\tO\n", "line 2: expected UTF-8, got byte 0xe9"),
    ],
)
def test_wrong_files_say_where(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        read_conll(write(tmp_path, content))
    assert "file.conll" in str(caught.value)


def test_columns_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="line 1: expected column 3 of tokens and column -1 of labels, got 3 columns"):
        read_conll(write(tmp_path, "a b O\n"), word_column=3)
    with pytest.raises(SourceError, match="expected a file, got a directory"):
        read_conll(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_conll(tmp_path / "none.conll")


@pytest.mark.parametrize(("name", "count"), [("wnut17_en/train", 3394), ("uner_zh/dev", 500), ("ud_ewt_en/dev", 2001)])
def test_real_files_read_as_line_by_line(shared_data: Path, name: str, count: int) -> None:
    file = shared_data / "sequence_labelling" / f"{name}.conll"
    blocks = file.read_text(encoding="utf-8").strip("\n").split("\n\n")
    rows = [[line.split("\t") for line in block.split("\n")] for block in blocks]
    sentences = read_conll(file)
    assert as_lists(sentences) == [[(row[0], row[-1]) for row in sentence] for sentence in rows]
    assert len(sentences) == count
