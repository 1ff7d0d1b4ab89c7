"""CoNLL columns and rows of labelled words."""

import pickle
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bert_fast.data.conll import LabelledSentences, read_conll, sentences_from_rows
from bert_fast.errors import SourceError


def write(path: Path, content: str | bytes) -> Path:
    file = path / "file.conll"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def as_lists(sentences: LabelledSentences) -> list[list[tuple[str, str]]]:
    assert sentences.label_ids is not None
    labels = [sentences.label_names[index] for index in sentences.label_ids]
    pairs, ends = list(zip(sentences.words, labels, strict=True)), sentences.boundaries.tolist()
    return [pairs[start:stop] for start, stop in pairwise(ends)]


JOHN = [[("John", "B-PER"), ("ran", "O")], [("Go", "O")]]


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
    assert as_lists(read_conll(write(tmp_path, content))) == JOHN


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    sentences = read_conll(write(tmp_path, "# c\n\nJohn B-PER\nran O\n\n\nGo O\n"))
    assert sentences.lines is not None and sentences.lines.tolist() == [3, 4, 7]
    assert sentences.place(2).endswith("file.conll: line 7")
    assert sentences.num_words == 3 and len(sentences) == 2


def test_columns_are_chosen_by_number(tmp_path: Path) -> None:
    file = write(tmp_path, "1 John NNP B-PER\n2 ran VBD O\n")
    assert as_lists(read_conll(file, word_column=1, label_column=2)) == [[("John", "NNP"), ("ran", "VBD")]]
    assert as_lists(read_conll(file, word_column=-3)) == [[("John", "B-PER"), ("ran", "O")]]
    unlabelled = read_conll(file, word_column=1, label_column=None)
    assert unlabelled.words == ["John", "ran"] and unlabelled.label_ids is None and unlabelled.label_names == []


def test_one_column_is_enough_where_no_labels_are_asked_for(tmp_path: Path) -> None:
    sentences = read_conll(write(tmp_path, "John\nran\n\nGo\n"), label_column=None)
    assert sentences.words == ["John", "ran", "Go"] and sentences.boundaries.tolist() == [0, 2, 3]


def test_words_with_spaces_stand_between_tabs(tmp_path: Path) -> None:
    assert as_lists(read_conll(write(tmp_path, "New York\tB-LOC\n\u00a0\tO\n"))) == [
        [("New York", "B-LOC"), ("\u00a0", "O")]
    ]


@pytest.mark.parametrize("content", ["# O\nis O\n", "#\tO\nis\tO\n", "is O\n# O\n"])
def test_a_number_sign_may_be_a_word(tmp_path: Path, content: str) -> None:
    [sentence] = as_lists(read_conll(write(tmp_path, content)))
    assert sorted(sentence) == [("#", "O"), ("is", "O")]


def test_any_character_may_be_in_a_word(tmp_path: Path) -> None:
    words = ["北", "𝔘𝔫𝔦", "e\u0301", "👩\u200d🚀", "\u2028", "\x00", "\x85", "\u200b", "a\u00a0b"]
    [sentence] = as_lists(read_conll(write(tmp_path, "".join(f"{word}\tO\n" for word in words))))
    assert [word for word, _ in sentence] == words


def test_labels_are_ordered_by_type(tmp_path: Path) -> None:
    labels = ["I-PER", "O", "I-LOC", "B-PER", "B-LOC", "I-ÄÖ"]
    sentences = read_conll(write(tmp_path, "".join(f"w\t{label}\n" for label in labels)))
    assert sentences.label_names == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER", "I-ÄÖ"]
    assert [label for _, label in as_lists(sentences)[0]] == labels


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n \n# only this\n", "no words"),
        ("a O\nb\n", "line 2: expected 2 columns as in line 1, got 1"),
        ("a\tO\n\nb\tO\tx\n", "line 3: expected 2 columns as in line 1, got 3"),
        ("a\nb\n", "line 1: expected a column of words and one of labels, got 1 columns"),
        ("a\tO\n\tO\n", "line 2: expected a word, got an empty column"),
        (b"a\tO\n\xe9t\xe9\tO\n", "line 2: expected UTF-8, got byte 0xe9 .byte 4 of"),
        ("a\tO\nb\t" + "x" * 300 + "\n", "line 2: expected a label of at most 256 bytes, got 300"),
    ],
)
def test_wrong_files_say_where(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        read_conll(write(tmp_path, content))
    assert "file.conll" in str(caught.value)


def test_columns_that_are_not_there(tmp_path: Path) -> None:
    file = write(tmp_path, "a b O\n")
    with pytest.raises(SourceError, match="line 1: expected a column 3 with the words, got 3 columns"):
        read_conll(file, word_column=3)
    with pytest.raises(SourceError, match="expected a column -4 with the labels"):
        read_conll(file, label_column=-4)


@pytest.mark.parametrize(("name", "count"), [("wnut17_en/train", 3394), ("uner_zh/dev", 500), ("ud_ewt_en/dev", 2001)])
def test_real_files_read_as_line_by_line(shared_data: Path, name: str, count: int) -> None:
    file = shared_data / "sequence_labelling" / f"{name}.conll"
    blocks = file.read_text(encoding="utf-8").strip("\n").split("\n\n")
    rows = [[line.split("\t") for line in block.split("\n")] for block in blocks]
    sentences = read_conll(file)
    assert as_lists(sentences) == [[(row[0], row[-1]) for row in sentence] for sentence in rows]
    assert len(sentences) == count


ROWS = [{"tokens": ["John", "ran"], "ner_tags": ["B-PER", "O"]}, {"tokens": [], "ner_tags": []},
        {"tokens": ["Go", ""], "ner_tags": ["O", "O"]}]  # fmt: skip


def test_rows() -> None:
    sentences = sentences_from_rows(ROWS)
    assert as_lists(sentences) == [[("John", "B-PER"), ("ran", "O")], [], [("Go", "O"), ("", "O")]]
    assert sentences.place(3) == "rows: row 2: word 1"
    assert sentences_from_rows(ROWS, label_column=None).label_ids is None


def test_rows_of_a_data_set_with_named_labels() -> None:
    datasets = pytest.importorskip("datasets")
    names = ["O", "B-PER", "I-PER"]
    column = datasets.Sequence(datasets.ClassLabel(names=names))
    features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("string")), "ner_tags": column})
    data = datasets.Dataset.from_list(
        [{"tokens": ["John", "ran"], "ner_tags": [1, 0]}, {"tokens": ["Go"], "ner_tags": [0]}], features=features
    )
    sentences = sentences_from_rows(data)
    assert as_lists(sentences) == JOHN and sentences.label_names == names
    assert as_lists(sentences_from_rows(data.with_format("numpy"))) == JOHN
    with pytest.raises(SourceError, match="expected a column 'words', got 'tokens', 'ner_tags'"):
        sentences_from_rows(data, word_column="words")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "expected at least one row"),
        ([{"tokens": ["a"], "ner_tags": []}], r"rows\[0\]: ner_tags: expected a label for each of 1 words, got 0"),
        ([{"tokens": "John ran", "ner_tags": []}], r"rows\[0\]: tokens: expected a list, got str"),
        ([ROWS[0], {"tokens": ["a", 3], "ner_tags": ["O", "O"]}], r"rows\[1\]: tokens: expected strings, got int"),
        (
            [{"tokens": ["\ud800"], "ner_tags": ["O"]}],
            r"rows\[0\]: tokens: expected Unicode text, got a lone surrogate",
        ),
        ([{"tokens": ["a"], "ner_tags": [3]}], "ner_tags: expected strings, or numbers that the features"),
        (
            [{"tokens": ["a", "b"], "ner_tags": ["O", ""]}],
            r"rows\[0\]: ner_tags: expected a label, got an empty one: ''",
        ),
        (
            [{"tokens": ["a"], "ner_tags": ["O\ud800"]}],
            r"rows\[0\]: ner_tags: expected Unicode, got half of a surrogate",
        ),
        ([{"words": ["a"]}], "rows: expected a column 'tokens', got 'words'"),
        ([*ROWS, {"words": ["a"]}], r"rows\[3\]: expected a field 'tokens', got 'words'"),
    ],
)
def test_wrong_rows_say_where(rows: list[Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        sentences_from_rows(rows)
    with pytest.raises(TypeError, match=r"rows\[0\]: expected a mapping, got int"):
        sentences_from_rows([17])


def test_labels_are_numbers_that_the_features_name() -> None:
    class Rows(list):  # type: ignore[type-arg]
        column_names = ("tokens", "ner_tags")
        features = {"ner_tags": SimpleNamespace(feature=SimpleNamespace(names=["O", "B-PER"]))}  # noqa: RUF012

        def __getitem__(self, column: Any) -> Any:
            return [row[column] for row in self]

    for wrong in (2, -1, 0.5, True, [1], 2**70):
        with pytest.raises(SourceError, match="dataset: ner_tags: expected numbers from 0 to 1, got others"):
            sentences_from_rows(Rows([{"tokens": ["a"], "ner_tags": [wrong]}]))
    assert sentences_from_rows(Rows([{"tokens": ["a"], "ner_tags": [1]}])).label_ids.tolist() == [1]  # type: ignore[union-attr]


def test_sentences_travel_to_worker_processes(tmp_path: Path) -> None:
    sentences = read_conll(write(tmp_path, "John\tB-PER\nran\tO\n\nGo\tO\n"))
    assert as_lists(pickle.loads(pickle.dumps(sentences))) == JOHN
