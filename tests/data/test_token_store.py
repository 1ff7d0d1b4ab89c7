"""Token stores: the ids of the texts, whatever the format, the threads and the blocks; refused where not fitting."""

import hashlib
import itertools
import json
import pickle
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_fast import BertTokenizer
from bert_fast.data import TokenStore, tokenize_files
from bert_fast.data.token_store import tokenizer_hash
from bert_fast.errors import SourceError, StoreError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "short", "text", "##s", "héllo", "你", "hello", "."]


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    return BertTokenizer(WORDS)


def digests(store: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(store.iterdir())}


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def ids(tokenizer: BertTokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def classic_documents(tokenizer: BertTokenizer, text: str) -> list[list[list[int]]]:
    """Documents as lists of sentences, told apart line by line."""
    documents: list[list[list[int]]] = [[]]
    for line in text.split("\n"):
        sentence = ids(tokenizer, line)
        if sentence:
            documents[-1].append(sentence)
        else:
            documents.append([])
    return [document for document in documents if document]


CLASSIC = [
    "",
    "\n",
    "a short text",
    "a short text\n\n\nhello .\nhello\n",
    "\n\n \t\r\n\u200b\na\n\u3000\nb\n\n",
    "a\r\n\r\nb\r\nhello\r\n\r\n",
    "hello 你 texts\n" * 50 + "\n" + "[MASK] x\n" * 3,
]


@pytest.mark.parametrize("text", CLASSIC, ids=range(len(CLASSIC)))
@pytest.mark.parametrize("block_bytes", [16, 1 << 20])
def test_classic_text_becomes_documents_of_sentences(
    tmp_path: Path, tokenizer: BertTokenizer, text: str, block_bytes: int
) -> None:
    path = written(tmp_path / "x.txt", text)
    store = tokenize_files([path], tmp_path / "store", tokenizer, block_bytes=block_bytes)
    expected = classic_documents(tokenizer, text)
    assert store.has_sentences and len(store) == len(expected)
    for index, sentences in enumerate(expected):
        assert store[index].tolist() == joined(sentences)
        bounds = store.sentences(index)
        assert bounds.dtype == np.int64
        assert [store.tokens[i:j].tolist() for i, j in itertools.pairwise(bounds)] == sentences
    assert store.tokens.tolist() == joined(map(joined, expected))
    assert store.boundaries.tolist() == [0, *np.cumsum([len(joined(document)) for document in expected])]


@pytest.mark.parametrize("block_bytes", [16, 1 << 20])
def test_every_line_a_document(tmp_path: Path, tokenizer: BertTokenizer, block_bytes: int) -> None:
    lines = ["a short text", "", "hello", " ", "你 texts ."]
    path = written(tmp_path / "x.txt", "\n".join(lines))
    store = tokenize_files([path], tmp_path / "store", tokenizer, format="lines", block_bytes=block_bytes)
    assert [document.tolist() for document in store] == [ids(tokenizer, line) for line in lines]
    assert not store.has_sentences and store.info["empty_documents"] == 2
    assert store.sentences(0).tolist() == store.boundaries[:2].tolist()
    assert store.sentences(1).tolist() == [store.boundaries[1]]


def test_formats_and_files_in_one_store_and_a_file_twice(tmp_path: Path, tokenizer: BertTokenizer) -> None:
    classic = written(tmp_path / "x.txt", "a\nshort\n\ntext")
    records = written(tmp_path / "x.jsonl", '{"text": "hello"}\n{"text": ""}\n{"text": "a\\na"}\n')
    store = tokenize_files([classic, records, classic], tmp_path / "store", tokenizer)
    expected = ["a short", "text", "hello", "", "a a", "a short", "text"]
    assert [document.tolist() for document in store] == [ids(tokenizer, text) for text in expected]
    counts = [len(store.sentences(index)) - 1 for index in range(len(store))]
    assert counts == [2, 1, 1, 0, 1, 2, 1]  # a record is one sentence
    assert store.info["sentences"] == 8 and store.info["empty_documents"] == 1
    assert [source["format"] for source in store.info["sources"]] == ["text", "jsonl", "text"]


def test_bytes_do_not_depend_on_threads_or_blocks(tmp_path: Path, tokenizer: BertTokenizer) -> None:
    draw = random.Random(1)
    text = "".join(draw.choice(["a ", "texts ", "héllo ", "你", "\n", "\n\n", ". ", "xyz "]) for _ in range(3000))
    path = written(tmp_path / "x.txt", text)
    found = []
    for index, (num_threads, block_bytes) in enumerate([(1, 1 << 20), (2, 16), (3, 100), (0, 4096)]):
        folder = tmp_path / f"store{index}"
        tokenize_files([path], folder, tokenizer, num_threads=num_threads, block_bytes=block_bytes)
        found.append(digests(folder))
    assert set(found[0]) == {"documents.bin", "sentences.bin", "store.json", "tokens.bin"}
    assert found.count(found[0]) == len(found)


def test_real_books(tmp_path: Path, shared_data: Path) -> None:
    tokenizer = BertTokenizer(shared_data / "vocab" / "bert-base-uncased" / "vocab.txt")
    path = shared_data / "pretrain_en" / "books_valid.txt"
    store = tokenize_files([path], tmp_path / "store", tokenizer, block_bytes=10_000)
    expected = classic_documents(tokenizer, path.read_text(encoding="utf-8"))
    assert len(store) == len(expected) > 1
    assert store.tokens.dtype == np.uint16
    assert [document.tolist() for document in store] == [joined(sentences) for sentences in expected]
    assert [len(store.sentences(index)) - 1 for index in range(len(store))] == list(map(len, expected))


def test_large_vocabularies_take_int32(tmp_path: Path) -> None:
    path = written(tmp_path / "x.txt", "w65530 w65531")
    for size, dtype in ((65531, np.uint16), (65532, np.int32)):
        tokenizer = BertTokenizer([*WORDS[:5], *(f"w{number}" for number in range(size))])
        assert len(tokenizer) == size + 5
        store = tokenize_files([path], tmp_path / f"store{size}", tokenizer)
        assert store.tokens.dtype == dtype
        assert store[0].tolist() == ids(tokenizer, "w65530 w65531")


def test_a_store_is_a_read_only_sequence(tmp_path: Path, tokenizer: BertTokenizer) -> None:
    path = written(tmp_path / "x.txt", "a\n\nshort\ntext")
    store = tokenize_files([path], tmp_path / "store", tokenizer)
    assert store[-1].tolist() == store[1].tolist() == ids(tokenizer, "short text")
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"index: expected -2 to 1, got {index}"):
            store[index]
    with pytest.raises(ValueError, match="read-only"):
        store.tokens[0] = 1
    assert repr(store) == f"TokenStore({str(tmp_path / 'store')!r}, documents=2, tokens=3)"
    again = pickle.loads(pickle.dumps(store))
    assert again.tokens.tolist() == store.tokens.tolist() and len(pickle.dumps(store)) < 500
    with pytest.raises(TypeError, match=r"use TokenStore\.open"):
        TokenStore()


def test_the_same_call_again_opens_the_store(tmp_path: Path, tokenizer: BertTokenizer) -> None:
    path = written(tmp_path / "x.txt", "a\n")
    tokenize_files([path], tmp_path / "store", tokenizer)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "store").iterdir()}
    store = tokenize_files([path], tmp_path / "store", tokenizer)
    assert len(store) == 1
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "store").iterdir()} == before
    written(path, "a a\n")
    with pytest.raises(StoreError, match=r"x\.txt was changed since the store was begun \(size: expected 2, got 4\)"):
        tokenize_files([path], tmp_path / "store", tokenizer)
    other = written(tmp_path / "y.txt", "a\n")
    with pytest.raises(StoreError, match="was begun with other files or formats"):
        tokenize_files([other], tmp_path / "store", tokenizer)


def test_another_tokenizer_is_refused(tmp_path: Path, tokenizer: BertTokenizer) -> None:
    path = written(tmp_path / "x.txt", "a\n")
    folder = tmp_path / "store"
    tokenize_files([path], folder, tokenizer)
    assert len(TokenStore.open(folder, BertTokenizer(WORDS))) == 1
    more = BertTokenizer(WORDS)
    more.add_tokens(["added"])
    others = {
        "vocabulary": BertTokenizer([*WORDS, "new"]),
        "order": BertTokenizer([*WORDS[:-2], WORDS[-1], WORDS[-2]]),
        "case": BertTokenizer(WORDS, do_lower_case=False),
        "accents": BertTokenizer(WORDS, strip_accents=False),
        "CJK": BertTokenizer(WORDS, tokenize_chinese_chars=False),
        "never_split": BertTokenizer(WORDS, never_split=["text"]),
        "word length": BertTokenizer(WORDS, max_input_chars_per_word=50),
        "added": more,
    }
    assert len({tokenizer_hash(other) for other in others.values()} | {tokenizer_hash(tokenizer)}) == len(others) + 1
    for other in others.values():
        with pytest.raises(StoreError, match="store: was made with another tokenizer"):
            TokenStore.open(folder, other)
        with pytest.raises(StoreError, match="store: was begun with another"):
            tokenize_files([path], folder, other)


def test_the_hash_is_of_what_decides_ids_alone(tmp_path: Path, tokenizer: BertTokenizer) -> None:
    tokenizer.save_pretrained(tmp_path)
    same = [
        BertTokenizer(WORDS, strip_accents=True),  # what None means here
        BertTokenizer(WORDS, model_max_length=8, padding_side="left"),
        BertTokenizer.from_pretrained(tmp_path),
        BertTokenizer(tmp_path / "vocab.txt"),
        pickle.loads(pickle.dumps(tokenizer)),
    ]
    assert {tokenizer_hash(other) for other in same} == {tokenizer_hash(tokenizer)}


def test_damage_is_noticed(tmp_path: Path, tokenizer: BertTokenizer) -> None:
    path = written(tmp_path / "x.txt", "a\n\nshort\n")
    folder = tmp_path / "store"

    def fails(message: str, name: str, content: bytes | None) -> None:
        tokenize_files([path], folder, tokenizer)
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
        with pytest.raises(StoreError, match=message):
            TokenStore.open(folder)
        (folder / name).write_bytes(kept)

    fails(r"tokens\.bin: expected 4 bytes, got 3: the store is damaged", "tokens.bin", b"abc")
    fails(r"tokens\.bin: is missing: the store is damaged", "tokens.bin", None)
    fails(r"documents\.bin: expected 24 bytes, got 25", "documents.bin", b"a" * 25)
    fails("expected boundaries from 0 to 2, got 0 to 0", "sentences.bin", bytes(24))
    fails(r"store\.json: is damaged or not of a token store", "store.json", b"{")
    fails(r"store\.json: is damaged or not of a token store", "store.json", b"[]")
    fails(r"store\.json: expected format_version 1, got 2", "store.json", b'{"format_version": 2}')
    fails(r"is not a token store: there is no store\.json", "store.json", None)
    with pytest.raises(StoreError, match="none: is not a token store"):
        TokenStore.open(tmp_path / "none")
    with pytest.raises(StoreError, match=r"x\.txt: is not a token store"):
        TokenStore.open(path)


def test_nothing_is_written_where_something_else_is(tmp_path: Path, tokenizer: BertTokenizer) -> None:
    path = written(tmp_path / "x.txt", "a\n")
    with pytest.raises(StoreError, match=r"expected an empty directory or an unfinished store, got one with 'x\.txt'"):
        tokenize_files([path], tmp_path, tokenizer)
    (tmp_path / "store").mkdir()
    written(tmp_path / "store" / "tokens.bin", "somebody's")
    with pytest.raises(StoreError, match=r"got one with 'tokens\.bin'"):
        tokenize_files([path], tmp_path / "store", tokenizer)
    with pytest.raises(StoreError, match=r"x\.txt: expected a directory, got a file"):
        tokenize_files([path], path, tokenizer)
    with pytest.raises(FileNotFoundError):
        tokenize_files([tmp_path / "none"], tmp_path / "new", tokenizer)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["store", "x.txt"]
    (tmp_path / "empty").mkdir()
    assert len(tokenize_files([path], tmp_path / "empty", tokenizer)) == 1


@pytest.mark.parametrize("token", ["x\ny", "x "])
def test_added_tokens_that_line_ends_would_change_are_refused(tmp_path: Path, token: str) -> None:
    tokenizer = BertTokenizer(WORDS)
    tokenizer.add_tokens([token])
    path = written(tmp_path / "x.txt", "a\n")
    with pytest.raises(ValueError, match=r"the added token .* contains a line end or ends with a space"):
        tokenize_files([path], tmp_path / "store", tokenizer)
    records = written(tmp_path / "x.jsonl", json.dumps({"text": f"a {token}a"}))
    store = tokenize_files([records], tmp_path / "store", tokenizer)
    assert store[0].tolist() == ids(tokenizer, f"a {token}a") == [5, len(WORDS), 5]


def test_parquet(tmp_path: Path, tokenizer: BertTokenizer) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    texts = ["a short text", None, "héllo", "", "texts"] * 7
    parquet.write_table(pa.table({"body": texts}), tmp_path / "x.parquet", row_group_size=4)
    for block_bytes in (16, 1 << 20):
        folder = tmp_path / f"store{block_bytes}"
        store = tokenize_files([tmp_path / "x.parquet"], folder, tokenizer, field="body", block_bytes=block_bytes)
        assert [document.tolist() for document in store] == [ids(tokenizer, text or "") for text in texts]
    assert digests(tmp_path / "store16") == digests(tmp_path / f"store{1 << 20}")
    with pytest.raises(SourceError, match="expected one column 'text', got 'body'"):
        tokenize_files([tmp_path / "x.parquet"], tmp_path / "store", tokenizer)
    assert not (tmp_path / "store").exists()


def test_the_page_shows_code_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "token_store.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    written(Path("vocab.txt"), "\n".join(WORDS) + "\n")
    written(Path("corpus.txt"), "a short\ntext\n\nhello\n")
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["ids"].tolist() == [5, 6, 7]
    assert names["first_sentence"].tolist() == [5, 6]
