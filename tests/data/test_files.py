"""Rows of files: the same from every format, and messages that say where."""

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest

from bert_fast.data.files import column_texts, column_values, read_rows, value_error
from bert_fast.errors import SourceError

datasets = pytest.importorskip("datasets")

ROWS = [
    {"text": "a cat", "label": "01"},
    {"text": 'say "hi", 東京 🙂', "label": "NA"},
    {"text": "", "label": "null"},
    {"text": "a\u2028b\x0bc\x85d", "label": "1.0"},  # no ends of lines here
]
EXPECTED = {name: [row[name] for row in ROWS] for name in ("text", "label")}


def columns(data: Any, *names: str, **options: Any) -> dict[str, list[Any]]:
    rows = read_rows(data, names or ("text", "label"), **options)
    return {name: column_values(rows, name) for name in rows.column_names}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("last", [0, 1, 3], ids="ends {}".format)
def test_tsv(tmp_path: Path, end: str, bom: bytes, last: int) -> None:
    lines = ["text\tlabel"] + ["\t".join(row.values()) for row in ROWS]
    path = tmp_path / "a.tsv"
    path.write_bytes(bom + (end.join(lines) + last * end).encode())
    assert columns(path) == EXPECTED
    assert str(value_error(path, 3, "label", "wrong")) == f"{path}: line 5: column 'label': wrong"


def test_tsv_has_no_quoting(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b'text\tlabel\r\n"a\tb"\nc"d""\te\r\n')
    assert columns(path) == {"text": ['"a', 'c"d""'], "label": ['b"', "e"]}


def test_numbers_are_the_columns_of_a_file_without_header(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("ham\thello\nspam\twin\n")
    assert columns(path, "1", "0") == {"1": ["hello", "win"], "0": ["ham", "spam"]}
    assert "line 2: " in str(value_error(path, 1, "0", "wrong"))
    with pytest.raises(SourceError, match=r"a.tsv: expected a column '2', got '0', '1'$"):
        read_rows(path, ["1", "2"])
    with pytest.raises(SourceError, match=r"expected a column '1', got 'ham', 'hello' \(a file without a header"):
        read_rows(path, ["ham", "1"])


def test_one_column_keeps_its_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n\nthree\n\n")
    assert columns(path, "0") == {"0": ["one", "", "three", ""]}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.csv"
    rows = [*ROWS, {"text": "two\nlines\r\nand three", "label": "no"}, {"text": "x" * 200_000, "label": ""}]
    with open(path, "w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"], lineterminator=end)
        writer.writeheader()
        writer.writerows(rows)
    assert columns(path) == {name: [row[name] for row in rows] for name in ("text", "label")}
    lines = [str(value_error(path, row, "text", "")).split(": ")[1] for row in range(6)]
    assert lines == [f"line {number}" for number in (2, 3, 4, 5, 6, 9)]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_json_lines(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({**row, "other": [number, "x"][number % 2]}) for number, row in enumerate(ROWS)]
    path.write_bytes(f"{lines[0]}{end}  {end}{end.join(lines[1:])}{end}".encode())
    assert columns(path) == EXPECTED  # `other`, of several types, is not asked for
    assert "line 3: " in str(value_error(path, 1, "text", ""))


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_list(ROWS).to_parquet(path)
    assert columns(path, "text", optional=["label", "none"]) == EXPECTED
    assert "a.parquet[2]: column 'text': " in str(value_error(path, 2, "text", ""))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(SourceError, match=r"a.parquet: cannot be read as Parquet"):
        read_rows(path, ["text"])


def test_data_sets_name_their_classes() -> None:
    names = datasets.ClassLabel(names=["no", "yes"])
    features = datasets.Features({"text": datasets.Value("string"), "label": names, "all": datasets.List(names)})
    rows = [{"text": "a", "label": 1, "all": [0, 1]}, {"text": "b", "label": -1, "all": []}]
    data = datasets.Dataset.from_list(rows, features=features)
    for given, order in ((data.with_format("torch"), 1), (data.select([1, 0]), -1)):
        assert columns(given, "label", "all") == {"label": ["yes", None][::order], "all": [["no", "yes"], []][::order]}
    with pytest.raises(TypeError, match=r"data: expected a path, .* got DatasetDict"):
        read_rows(datasets.DatasetDict({"train": data}), ["text"])
    with pytest.raises(SourceError, match="data: expected at least one row"):
        read_rows(data.select([]), ["text"])
    with pytest.raises(SourceError, match="data: expected a column 'word', got 'text', 'label', 'all'"):
        read_rows(data, ["word"])


def test_a_list_of_mappings_that_lack_a_column() -> None:
    data = [{"text": "a", "more": 1}, {"text": "b"}, {"more": 2}]
    assert columns(data, "more", optional=["text", "none"]) == {"more": [1, None, 2], "text": ["a", "b", None]}
    with pytest.raises(SourceError, match=r"data\[2\]: column 'text': expected a string, got None"):
        column_texts(data, read_rows(data, ["text"]), "text")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "text\tlabel\na\tb\nc\n", "a.tsv: line 3: expected 2 columns as in line 1, got 1"),
        ("a.tsv", "text\tlabel\n\na\tb\tc\n", "a.tsv: line 3: expected 2 columns .*, got 3"),
        ("a.tsv", "text\tlabel\nlone\rreturn\tc\n", "a.tsv: line 2: expected fields of a table: new-line character"),
        ("a.tsv", "text\ttext\na\tb\n", "line 1: expected every column once, got 'text', 'text'"),
        ("a.tsv", "text\tlabel\n", "a.tsv: expected at least one row, got none"),
        ("a.tsv", "", "a.tsv: is empty"),
        ("a.tsv", b"\xef\xbb\xbf", "a.tsv: is empty"),
        ("a.tsv", "\n", "a.tsv: expected at least one row"),
        ("a.tsv", "label\tsentence\n0\ta\n", "a.tsv: expected a column 'text', got 'label', 'sentence'"),
        ("a.tsv", b"text\tlabel\na\tb\n\xe9\tc\n", "a.tsv: line 3: expected UTF-8, got byte 0xe9"),
        ("a.tsv", "text\tlabel\n".encode("utf-16"), "a.tsv: is UTF-16 or UTF-32, expected UTF-8 text"),
        ("a.csv", 'text,label\n"a\nb",c\nd\n', "a.csv: line 4: expected 2 columns .*, got 1"),
        ("a.csv", 'text,label\n"a"b,c\n', "a.csv: line 2: expected fields of a table"),
        ("a.csv", 'text,label\na,b\n"c,d\n\n', "a.csv: line 3: expected fields of a table: unexpected end of data"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b"\n', 'a.jsonl: line 2: expected a JSON object, got \'{"text": "b"\''),
        ("a.jsonl", '{"text": "a"}\n["b"]\n', "a.jsonl: line 2: expected a JSON object, got .*this is a list"),
        ("a.json", '[\n{"text": "b"}]', r"a.json: line 1: expected a JSON object, got '\['"),
        (
            "a.jsonl",
            '{"text": "a"}\n\n{"text": 2}\n',
            "a.jsonl: line 3: column 'text': expected a value like 'a', got 2",
        ),
        ("a.jsonl", '{"text": "a"}\n{"text": "\\ud83d"}\n', "a.jsonl: line 2: column 'text': .*surrogates not allowed"),
        ("a.jsonl", '{"sentence": "a"}', "a.jsonl: expected a column 'text', got 'sentence'"),
        ("a.jsonl", " \n\n", "a.jsonl: expected at least one row, got none"),
        ("a.jsonl", "[" * 100_000, "a.jsonl: line 1: expected a JSON object"),
        ("a.parquet", "no", "a.parquet: cannot be read as Parquet"),
        ("a.xlsx", "text", "a.xlsx: expected a file that ends in .tsv"),
        ("a", "text", "a: expected a file that ends in .tsv"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SourceError, match=message) as caught:
        read_rows(path, ["text"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ending", ["tsv", "csv", "jsonl", "parquet"])
def test_no_file(tmp_path: Path, ending: str) -> None:
    with pytest.raises(FileNotFoundError):
        read_rows(tmp_path / f"a.{ending}", ["text"])
    (tmp_path / f"folder.{ending}").mkdir()
    with pytest.raises(SourceError, match=f"folder.{ending}: expected a file, got a directory"):
        read_rows(tmp_path / f"folder.{ending}", ["text"])


@pytest.mark.parametrize("data", [3, None, b"text", {"text": ["a"]}, iter([]), [["a"]], ["a"]])
def test_other_data(data: Any) -> None:
    with pytest.raises(TypeError, match="data"):
        read_rows(data, ["text"])


def test_reading_says_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    path = tmp_path / "a.tsv"
    path.write_text("text\tlabel\na\tb\n")
    assert read_rows(path, ["text"]).cache_files == [] and not cache.exists()
    assert capfd.readouterr() == ("", "")
    assert [file.name for file in tmp_path.iterdir()] == ["a.tsv"]


@pytest.mark.parametrize(
    ("name", "wanted", "length"),
    [
        ("sms_spam/SMSSpamCollection.tsv", ["1", "0"], 5574),
        ("sentence_polarity/train.tsv", ["sentence", "label"], 9596),
        ("question_sentence_pairs/dev.tsv", ["question", "sentence", "label"], 459),
    ],
)
def test_real_files(shared_data: Path, name: str, wanted: list[str], length: int) -> None:
    path = shared_data / "classification" / name
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").removesuffix("\n").split("\n")]
    found = columns(path, *wanted)
    header = [str(place) for place in range(len(rows[0]))] if "0" in wanted else rows.pop(0)
    assert found == {column: [row[header.index(column)] for row in rows] for column in wanted}
    assert len(rows) == length and len(set(found[wanted[-1]])) == 2


def test_csv_of_any_text_comes_back(tmp_path: Path) -> None:
    draw = random.Random(4)
    pieces = ["a", '"', ",", "\n", "\r", "\r\n", "\t", " ", "é", "🙂", "\u2028", "\x85", "\x0c", "\ufeff", "'", "\0"]
    path = tmp_path / "a.csv"
    for _ in range(100):
        names = [f"c{number}" for number in range(draw.choice([1, 2, 3]))]
        rows = [["".join(draw.choices(pieces, k=draw.choice([0, 0, 1, 2, 5]))) for _ in names] for _ in range(3)]
        with open(path, "w", encoding="utf-8", newline="") as file:
            end = draw.choice(["\n", "\r\n"])
            csv.writer(file, lineterminator=end, quoting=csv.QUOTE_ALL).writerows([names, *rows])
        assert list(columns(path, *names).values()) == [list(column) for column in zip(*rows, strict=True)]
