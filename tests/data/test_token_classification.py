"""Labelled words as labelled tokens."""

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast.data import PackedCollator
from bert_fast.data.batches import Source
from bert_fast.data.conll import read_conll, sentences_from_rows
from bert_fast.data.token_classification import TokenClassificationSource
from bert_fast.errors import SourceError
from bert_fast.tokenization import BertTokenizer

VOCABULARY = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "john",
    "##son",
    "lives",
    "in",
    "os",
    "##lo",
    ".",
    "北",
    "京",
]
ROWS = [
    {"tokens": ["Johnson", "lives", "in", "\u200b", "Oslo", "."],
     "ner_tags": ["B-PER", "O", "O", "I-LOC", "B-LOC", "O"]},
    {"tokens": ["\ufffd", "\x07"], "ner_tags": ["O", "O"]},
    {"tokens": [], "ner_tags": []},
    {"tokens": ["Oslo"], "ner_tags": ["B-LOC"]},
]  # fmt: skip


@pytest.fixture
def tokenizer(tmp_path: Path) -> BertTokenizer:
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(VOCABULARY), encoding="utf-8")
    return BertTokenizer(file)


def tokens(source: TokenClassificationSource, index: int) -> list[str]:
    return source.tokenizer.convert_ids_to_tokens(source[index]["input_ids"].tolist())


def labels(source: TokenClassificationSource, index: int) -> list[str]:
    return [source.label_names[label] if label >= 0 else "" for label in source[index]["labels"]]


def test_first_sub_words_carry_the_labels(tokenizer: BertTokenizer) -> None:
    source = TokenClassificationSource.read(ROWS, tokenizer)
    assert isinstance(source, Source)
    assert source.label_names == ["O", "B-LOC", "I-LOC", "B-PER"]
    assert tokens(source, 0) == ["[CLS]", "john", "##son", "lives", "in", "os", "##lo", ".", "[SEP]"]
    assert labels(source, 0) == ["", "B-PER", "", "O", "O", "B-LOC", "", "O", ""]
    assert source.word_tokens.tolist() == [1, 3, 4, -1, 5, 7, -1, -1, 14]
    assert source.lengths(0).tolist() == [9, 2, 2, 4] and source.lengths(0).dtype == np.int32


def test_a_batch_is_its_examples_in_any_order(tokenizer: BertTokenizer) -> None:
    source = TokenClassificationSource.read(ROWS, tokenizer)
    indices = np.array([3, 1, 0, 3, 2])
    batch, joined = source.batch(5, indices), PackedCollator()([source[index] for index in indices])
    assert set(batch) == set(joined) | {"position_ids"}
    for name in ("input_ids", "token_type_ids", "labels", "cu_seqlens"):
        assert torch.equal(batch[name], joined[name]) and batch[name].dtype == joined[name].dtype, name
    assert batch["max_seqlen"] == 9
    assert batch["position_ids"].tolist() == [*range(4), *range(2), *range(9), *range(4), *range(2)]


def test_examples_as_text(tokenizer: BertTokenizer) -> None:
    source = TokenClassificationSource.read(ROWS, tokenizer)
    assert source.decode(0) == "[CLS] john/B-PER ##son lives/O in/O os/B-LOC ##lo ./O [SEP]"
    source = TokenClassificationSource.read(ROWS, tokenizer, labels=["O"], label_column=None)
    assert source.decode(3) == "[CLS] os ##lo [SEP]"


@pytest.mark.parametrize("index", [-1, 4])
def test_examples_that_are_not_there(tokenizer: BertTokenizer, index: int) -> None:
    with pytest.raises(IndexError, match="expected 0 to 3"):
        TokenClassificationSource.read(ROWS, tokenizer).batch(0, np.array([index]))


def test_words_get_their_labels_back(tokenizer: BertTokenizer) -> None:
    source = TokenClassificationSource.read(ROWS, tokenizer)
    true = source.true_word_labels()
    assert true is not None
    given = np.concatenate([source[index]["labels"] for index in range(4)])
    back = source.word_labels(given)
    is_lost = source.word_tokens < 0
    assert (back[~is_lost] == true[~is_lost]).all()
    assert [source.label_names[label] for label in back[is_lost]] == ["O", "O", "O"]


def test_long_sentences_are_divided_between_words(tokenizer: BertTokenizer) -> None:
    source = TokenClassificationSource.read(ROWS, tokenizer, max_length=5)  # room for 3 tokens
    assert [tokens(source, index)[1:-1] for index in range(len(source))] == [
        ["john", "##son", "lives"], ["in", "os", "##lo"], ["."], [], [], ["os", "##lo"],
    ]  # fmt: skip
    true = source.true_word_labels()
    given = np.concatenate([source[index]["labels"] for index in range(len(source))])
    assert true is not None and (source.word_labels(given) == true)[source.word_tokens >= 0].all()
    assert (source.word_tokens < 0).tolist() == [False] * 3 + [True] + [False] * 2 + [True] * 2 + [False]


def test_words_longer_than_an_example_keep_their_beginning(tokenizer: BertTokenizer) -> None:
    source = TokenClassificationSource.read(ROWS, tokenizer, max_length=3)
    assert [tokens(source, index)[1:-1] for index in range(len(source))] == [
        ["john"], ["lives"], ["in"], ["os"], ["."], [], [], ["os"],
    ]  # fmt: skip
    assert labels(source, 3) == ["", "B-LOC", ""]
    assert source.lengths(0).max() == 3


def test_long_sentences_are_cut_on_request(tokenizer: BertTokenizer) -> None:
    source = TokenClassificationSource.read(ROWS, tokenizer, max_length=5, truncate=True)
    assert len(source) == len(ROWS)
    assert tokens(source, 0) == ["[CLS]", "john", "##son", "lives", "[SEP]"]
    found = source.word_labels(np.full(int(source.lengths(0).sum()), source.label_names.index("B-PER")))
    assert [source.label_names[label] for label in found] == ["B-PER"] * 2 + ["O"] * 6 + ["B-PER"]


def test_sentences_without_labels(tokenizer: BertTokenizer) -> None:
    source = TokenClassificationSource.read(ROWS, tokenizer, labels=["O", "B-LOC"], label_column=None)
    assert not source.is_labelled and source.true_word_labels() is None
    assert "labels" not in source.batch(0, np.array([0])) and "labels" not in source[0]
    with pytest.raises(ValueError, match="labels: expected the names of the labels"):
        TokenClassificationSource.read(ROWS, tokenizer, label_column=None)


def test_labels_come_from_training(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    names = ["B-PER", "B-LOC", "O", "I-PER", "I-LOC"]
    source = TokenClassificationSource.read(ROWS, tokenizer, labels=names)
    assert source.label_names == names and labels(source, 3) == ["", "B-LOC", "", ""]
    file = tmp_path / "valid.conll"
    file.write_text("Oslo B-LOC\n\nlives O\nin B-ORG\n")
    with pytest.raises(SourceError, match=r"valid.conll: line 4: expected one of B-PER, .*, I-LOC, got 'B-ORG'"):
        TokenClassificationSource.read(file, tokenizer, labels=names)


def test_room_for_a_word(tokenizer: BertTokenizer) -> None:
    with pytest.raises(ValueError, match="max_length: expected at least 3"):
        TokenClassificationSource.read(ROWS, tokenizer, max_length=2)


def test_sources_travel_to_worker_processes(tokenizer: BertTokenizer) -> None:
    source = TokenClassificationSource.read(ROWS, tokenizer)
    copy = pickle.loads(pickle.dumps(source))
    batches = source.batch(0, np.array([0, 3])), copy.batch(0, np.array([0, 3]))
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in ("input_ids", "labels", "cu_seqlens"))


def aligned(tokenizer: Any, words: list[str], word_labels: list[int]) -> tuple[list[int], list[int]]:
    """Ids and labels by the definition, one word after the other."""
    ids, found = [tokenizer.cls_token_id], [-100]
    for word, label in zip(words, word_labels, strict=True):
        pieces = tokenizer([word], is_split_into_words=True, add_special_tokens=False)["input_ids"]
        ids += pieces
        found += [label, *[-100] * (len(pieces) - 1)][: len(pieces)]
    return [*ids, tokenizer.sep_token_id], [*found, -100]


@pytest.mark.parametrize(
    ("name", "vocabulary", "column"),
    [("wnut17_en/test", "bert-base-uncased", -1), ("uner_zh/test", "bert-base-chinese", 2),
     ("ud_ewt_en/dev", "bert-base-cased", 1)],
)  # fmt: skip
def test_real_sentences_are_those_of_the_definition(shared_data: Path, name: str, vocabulary: str, column: int) -> None:
    ours = BertTokenizer.from_pretrained(shared_data / "vocab" / vocabulary)
    sentences = read_conll(shared_data / "sequence_labelling" / f"{name}.conll", label_column=column)
    source = TokenClassificationSource(sentences, ours, max_length=512)
    assert len(source) == len(sentences)
    true, ends = source.true_word_labels(), sentences.boundaries
    assert true is not None
    for index in range(0, len(source), 7):
        words = sentences.words[ends[index] : ends[index + 1]]
        ids, expected = aligned(ours, words, true[ends[index] : ends[index + 1]].tolist())
        assert ids == ours(words, is_split_into_words=True)["input_ids"]
        assert source[index]["input_ids"].tolist() == ids
        assert source[index]["labels"].tolist() == expected


@pytest.mark.parametrize("max_length", [3, 7, 16, 128])
def test_no_word_of_a_real_file_is_lost(shared_data: Path, max_length: int) -> None:
    tokenizer = BertTokenizer.from_pretrained(shared_data / "vocab" / "bert-base-uncased")
    sentences = read_conll(shared_data / "sequence_labelling" / "wnut17_en" / "dev.conll")
    source = TokenClassificationSource(sentences, tokenizer, max_length=max_length)
    assert source.lengths(0).max() <= max_length
    true = source.true_word_labels()
    given = source.batch(0, np.arange(len(source)))["labels"].numpy()
    assert true is not None and (given >= 0).sum() == (source.word_tokens >= 0).sum()
    kept = source.word_tokens >= 0
    assert (source.word_labels(given) == true)[kept].all()
    assert (np.diff(source.word_tokens[kept]) > 0).all()


def stored_lengths(shared_data: Path, name: str) -> dict[int, int]:
    stored = json.loads((shared_data / "length_distributions" / f"{name}.json").read_text())
    return {int(length): count for length, count in stored["histogram"].items()}


def test_lengths_are_those_counted_by_another_tokenizer(shared_data: Path) -> None:
    tokenizer = BertTokenizer.from_pretrained(shared_data / "vocab" / "bert-base-uncased")
    file = shared_data / "sequence_labelling" / "wnut17_en" / "train.conll"
    lengths = TokenClassificationSource.read(file, tokenizer).lengths(0)
    assert Counter(lengths.tolist()) == stored_lengths(shared_data, "ner_wnut17_words")


def test_real_words_may_vanish(shared_data: Path) -> None:
    tokenizer = BertTokenizer.from_pretrained(shared_data / "vocab" / "bert-base-chinese")
    file = shared_data / "sequence_labelling" / "uner_zh" / "train.conll"
    source = TokenClassificationSource.read(file, tokenizer, max_length=512)
    lost = np.flatnonzero(source.word_tokens < 0)
    assert {source.sentences.words[word] for word in lost} == {"\u0304", "\u200b"}
    # The stored lengths count a token for every character.
    lengths = source.lengths(0)
    np.add.at(lengths, np.searchsorted(source.sentences.boundaries, lost, side="right") - 1, 1)
    assert Counter(lengths.tolist()) == stored_lengths(shared_data, "zh_ner_uner")


def test_rows_read_as_files_do(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    file = tmp_path / "file.conll"
    file.write_text("john B-PER\nlives O\n\noslo B-LOC\n")
    rows = [{"words": ["john", "lives"], "tags": ["B-PER", "O"]}, {"words": ["oslo"], "tags": ["B-LOC"]}]
    ours = TokenClassificationSource.read(rows, tokenizer, word_column="words", label_column="tags")
    theirs = TokenClassificationSource(read_conll(file), tokenizer)
    assert sentences_from_rows(rows, word_column="words", label_column="tags").words == theirs.sentences.words
    assert [tokens(ours, 0), labels(ours, 0)] == [tokens(theirs, 0), labels(theirs, 0)]
