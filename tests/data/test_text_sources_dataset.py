"""`datasets.Dataset`s as corpora."""

import pytest

from bert_fast import BertTokenizer
from bert_fast.data import TokenStore, tokenize_files
from bert_fast.errors import SourceError, StoreError

datasets = pytest.importorskip("datasets")
parquet = pytest.importorskip("pyarrow.parquet")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "short", "text", "##s", "héllo", "你"]
TEXTS = ["a short text", "", None, "texts 你", "héllo a a", "text\ntext", *(["a " * 30] * 50)]


@pytest.fixture
def tokenizer() -> BertTokenizer:
    return BertTokenizer(WORDS, strip_accents=False)


def documents(store: TokenStore) -> list[list[int]]:
    return [store[i].tolist() for i in range(len(store))]


def test_rows_become_documents(tmp_path, tokenizer) -> None:
    rows = datasets.Dataset.from_dict({"text": TEXTS, "other": list(range(len(TEXTS)))})
    file = tmp_path / "texts.parquet"
    parquet.write_table(rows.data.table, file)
    expected = documents(tokenize_files([file], tmp_path / "a", tokenizer))
    assert len(expected) == len(TEXTS)
    assert expected[0] == tokenizer.encode("a short text", add_special_tokens=False)
    for block_bytes in (16, 100, 4 << 20):
        store = tokenize_files([rows], tmp_path / str(block_bytes), tokenizer, block_bytes=block_bytes)
        assert documents(store) == expected
    again = tokenize_files([rows], tmp_path / "100", tokenizer)
    assert documents(again) == expected


def test_chosen_rows_and_renamed_columns(tmp_path, tokenizer) -> None:
    rows = datasets.Dataset.from_dict({"text": TEXTS}).rename_column("text", "body")
    chosen = rows.select([4, 0, 3]).with_format("torch")
    store = tokenize_files([chosen, rows.select([5])], tmp_path / "store", tokenizer, field="body")
    assert [tokenizer.decode(ids) for ids in documents(store)] == ["héllo a a", "a short text", "texts 你", "text text"]
    with pytest.raises(StoreError, match="store"):
        tokenize_files([rows.select([4, 0])], tmp_path / "store", tokenizer, field="body")


def test_what_is_no_column_of_texts(tmp_path, tokenizer) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a"], "number": [1]})
    with pytest.raises(SourceError, match="expected one column 'body', got 'text', 'number'"):
        tokenize_files([rows], tmp_path / "a", tokenizer, field="body")
    with pytest.raises(SourceError, match="expected strings in the column 'number', got int64"):
        tokenize_files([rows], tmp_path / "a", tokenizer, field="number")
    with pytest.raises(TypeError, match="files: expected a str or a path, got IterableDataset"):
        tokenize_files([rows.to_iterable_dataset()], tmp_path / "a", tokenizer)
    assert not (tmp_path / "a").exists()


def test_no_rows(tmp_path, tokenizer) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a"]}).select([])
    assert len(tokenize_files([rows], tmp_path / "a", tokenizer)) == 0
