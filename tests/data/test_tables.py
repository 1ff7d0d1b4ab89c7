"""Tables: the same rows from every format, and messages that say where."""

import csv
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from bert_fast.data.tables import Table, read_table
from bert_fast.errors import SourceError

ROWS = [
    {"text": "a cat", "label": "no"},
    {"text": 'say "hi", 東京 🙂', "label": "yes"},
    {"text": "", "label": "no"},
    {"text": "a\u2028b\x0bc\x85d", "label": "yes"},  # no ends of lines here
]


def columns(table: Table) -> dict[str, list[Any]]:
    return {name: table.values(name) for name in table.names}


EXPECTED = {name: [row[name] for row in ROWS] for name in ("text", "label")}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("last", ["", "end", "end end end"])
def test_tsv(tmp_path: Path, end: str, bom: bytes, last: str) -> None:
    lines = ["text\tlabel"] + ["\t".join(row.values()) for row in ROWS]
    path = tmp_path / "a.tsv"
    path.write_bytes(bom + (end.join(lines) + last.replace(" ", "").replace("end", end)).encode())
    table = read_table(path, ["text", "label"])
    assert columns(table) == EXPECTED
    assert (len(table), table.place(0), table.place(3)) == (4, f"{path}: line 2", f"{path}: line 5")


def test_tsv_with_mixed_line_ends_and_quotes(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b'text\tlabel\r\n"a\tb"\nc"d""\te\r\nlone\rreturn\tf')
    assert columns(read_table(path)) == {"text": ['"a', 'c"d""', "lone\rreturn"], "label": ['b"', "e", "f"]}


def test_numbers_are_the_columns_of_a_file_without_header(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("ham\thello\nspam\twin\n")
    table = read_table(path, ["1", "0"])
    assert columns(table) == {"0": ["ham", "spam"], "1": ["hello", "win"]}
    assert table.place(1) == f"{path}: line 2"
    with pytest.raises(SourceError, match=r"a.tsv: expected a column '2', got '0', '1'$"):
        read_table(path, ["1", "2"])


def test_one_column_keeps_its_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n\nthree\n\n")
    assert columns(read_table(path, ["0"])) == {"0": ["one", "", "three", ""]}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.csv"
    rows = [*ROWS, {"text": "two\nlines\r\nand three", "label": "no"}, {"text": "x" * 200_000, "label": "no"}]
    limit = csv.field_size_limit()
    with open(path, "w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"], lineterminator=end)
        writer.writeheader()
        writer.writerows(rows)
    table = read_table(path, ["label"])
    assert columns(table) == {name: [row[name] for row in rows] for name in ("text", "label")}
    assert [table.place(row).split(": ")[1] for row in range(6)] == [f"line {k}" for k in (2, 3, 4, 5, 6, 9)]
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_json_lines(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    path.write_bytes(f"{lines[0]}{end}  {end}{end.join(lines[1:])}{end}".encode())
    table = read_table(path, ["text"])
    assert columns(table) == EXPECTED
    assert [table.place(row).split(": ")[1] for row in (0, 1, 3)] == ["line 1", "line 3", "line 5"]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    table = read_table(path, ["text"])
    assert columns(table) == EXPECTED
    assert table.place(2) == f"{path}: row 2"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(SourceError, match=r"a.parquet: cannot be read as Parquet"):
        read_table(path)


def test_datasets_name_their_classes() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = [{"text": row["text"], "label": ["no", "yes"].index(row["label"])} for row in ROWS]
    dataset = datasets.Dataset.from_list([*rows, {"text": "?", "label": -1}], features=features)
    table = read_table(dataset.with_format("torch"), ["text", "label"])
    assert table.values("label") == [*EXPECTED["label"], None]
    assert table.texts("text") == [*EXPECTED["text"], "?"]
    assert table.place(3) == "dataset[3]"
    with pytest.raises(TypeError, match="expected one table, got several: 'train'"):
        read_table(datasets.DatasetDict({"train": dataset}))
    with pytest.raises(SourceError, match="dataset: expected at least one row"):
        read_table(dataset.select([]))


def test_a_list_of_mappings() -> None:
    table = read_table(ROWS, ["text", "label"])
    assert columns(table) == EXPECTED
    assert table.place(1) == "source[1]"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "text\tlabel\na\tb\nc\n", r"a.tsv: line 3: expected 2 columns \('text', 'label'\), got 1"),
        ("a.tsv", "text\tlabel\n\na\tb\n", r"a.tsv: line 2: expected 2 columns \('text', 'label'\), got 1"),
        ("a.tsv", "text\tlabel\na\tb\tc\n", "a.tsv: line 2: expected 2 columns .*, got 3"),
        ("a.tsv", "text\ttext\na\tb\n", "line 1: expected every column once in the header, got 'text' twice"),
        ("a.tsv", "text\tlabel\n", "a.tsv: expected at least one row, got none"),
        ("a.tsv", "", "a.tsv: is empty"),
        ("a.tsv", "\n", "a.tsv: expected at least one row"),
        ("a.tsv", "\n\n\n", "a.tsv: expected a column 'text', got ''"),
        ("a.tsv", "label\tsentence\n0\ta\n", "a.tsv: expected a column 'text', got 'label', 'sentence'"),
        ("a.csv", 'text,label\n"a\nb",c\nd\n', "a.csv: line 4: expected 2 columns .*, got 1"),
        ("a.csv", 'text,label\n"a"b,c\n', "a.csv: line 2: expected comma-separated fields"),
        ("a.csv", 'text,label\na,b\n"c,d\n\n', "a.csv: line 3: expected comma-separated fields .*end of data"),
        ("a.csv", "text,label\na\rb,c\n", "a.csv: line 2: expected comma-separated fields .*new-line character"),
        ("a.csv", "text\n", "a.csv: expected at least one row"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b"\n', 'a.jsonl: line 2: expected one JSON object, got \'{"text": "b"\''),
        ("a.jsonl", '{"text": "a"}\n["b"]\n', "a.jsonl: line 2: expected a JSON object, got list"),
        ("a.json", '[\n{"text": "b"}]', r"a.json: line 1: expected one JSON object, got '\['"),
        ("a.jsonl", '{"sentence": "a"}', "a.jsonl: expected a column 'text', got 'sentence'"),
        ("a.jsonl", " \n\n", "a.jsonl: expected at least one row, got none"),
        ("a.jsonl", "[" * 100_000, "a.jsonl: line 1: expected one JSON object"),
        ("a.parquet", "no", "a.parquet: cannot be read as Parquet"),
        ("a.xlsx", "text", "a.xlsx: expected a file that ends in .tsv"),
        ("a", "text", "a: expected a file that ends in .tsv"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode())
    with pytest.raises(SourceError, match=message):
        read_table(path, ["text"])


def test_columns_that_rows_lack(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "label": 1}\n{"text": "b"}\n')
    table = read_table(path, ["text"])
    assert table.values("text") == ["a", "b"]
    with pytest.raises(SourceError, match=r"a.jsonl: line 2: expected a field 'label', got 'text'"):
        table.values("label")
    with pytest.raises(SourceError, match=r"source\[1\]: expected a field 'label', got an empty object"):
        read_table([{"label": 1}, {}], ["label"]).values("label")


def test_names_for_a_file_with_a_header_asked_for_by_number(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("text\tlabel\na\tb\n")
    with pytest.raises(SourceError, match=r"expected a column '1', got 'text', 'label' \(a file without a header"):
        read_table(path, ["text", "1"])


@pytest.mark.parametrize("value", [None, 3, ["a"], float("nan")])
def test_texts_are_strings(value: Any) -> None:
    with pytest.raises(SourceError, match=r"source\[1\]: column 'text': expected a string, got"):
        read_table([{"text": "a"}, {"text": value}]).texts("text")


def test_texts_are_unicode(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "\\ud83d\\ude42"}\n{"text": "\\ud83d"}\n')
    with pytest.raises(SourceError, match=r"a.jsonl: line 2: column 'text': expected Unicode, got half of a surrogate"):
        read_table(path).texts("text")


@pytest.mark.parametrize("source", [3, None, b"text", {"text": ["a"]}, iter([]), [["a"]], ["a"]])
def test_other_sources(source: Any) -> None:
    with pytest.raises(TypeError, match="source"):
        read_table(source)


def test_no_file(tmp_path: Path) -> None:
    for name in ("a.tsv", "a.csv", "a.jsonl", "a.parquet"):
        with pytest.raises(FileNotFoundError):
            read_table(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "wanted", "length"),
    [
        ("sms_spam/SMSSpamCollection.tsv", ["0", "1"], 5574),
        ("sentence_polarity/train.tsv", ["sentence", "label"], 9596),
        ("question_sentence_pairs/dev.tsv", ["question", "sentence", "label"], 459),
    ],
)
def test_real_files(shared_data: Path, name: str, wanted: list[str], length: int) -> None:
    table = read_table(shared_data / "classification" / name, wanted)
    assert len(table) == length
    assert all(len(table.texts(column)) == length for column in wanted)
    assert len(set(table.values(next(column for column in wanted if column in ("0", "label"))))) == 2


def test_csv_of_any_text_comes_back(tmp_path: Path) -> None:
    draw = random.Random(4)
    pieces = ["a", '"', ",", "\n", "\r", "\r\n", "\t", " ", "é", "🙂", "\u2028", "\x85", "\x0c", "\ufeff", "'"]
    pieces += ["\x00"] * (sys.version_info >= (3, 11))  # csv of 3.10 refuses it, and an error names the line
    path = tmp_path / "a.csv"
    for _ in range(300):
        names = [f"c{number}" for number in range(draw.choice([1, 2, 3]))]
        rows = [["".join(draw.choices(pieces, k=draw.choice([0, 0, 1, 2, 5]))) for _ in names] for _ in range(3)]
        with open(path, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator=draw.choice(["\n", "\r\n"]), quoting=csv.QUOTE_ALL).writerows(
                [names, *rows]
            )
        table = read_table(path, names)
        assert [table.values(name) for name in names] == [list(column) for column in zip(*rows, strict=True)]
