"""Sequences: the ids of the tokenizer's call, gathered in any order."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from bert_fast.data.sequences import Sequences
from bert_fast.tokenization import BertTokenizer
from tests.data.corpora import rows_of

TEXTS = ["the cat sat", "", "a", "naïve café 東京 🙂", "the " * 40, "un" * 30, "\x00\u200b", "cat the cat"]


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "the",
        "cat",
        "sat",
        "a",
        "un",
        "##un",
        "cafe",
        "naive",
        "東",
    ]
    return BertTokenizer(words)


@pytest.mark.parametrize("max_length", [None, 3, 4, 5, 8, 20])
@pytest.mark.parametrize("side", ["right", "left"])
def test_pairs_have_the_ids_of_the_tokenizers_call(tokenizer: BertTokenizer, max_length: int | None, side: str) -> None:
    one_side = BertTokenizer(list(tokenizer.get_vocab()), truncation_side=side)
    draw = random.Random(3)
    texts, pairs = [draw.choice(TEXTS) for _ in range(80)], [draw.choice(TEXTS) for _ in range(80)]
    sequences = Sequences.joined(one_side, texts, pairs, max_length=max_length)
    expected = one_side(texts, pairs, truncation=max_length is not None, max_length=max_length)
    assert rows_of(sequences) == expected["input_ids"]
    assert rows_of(sequences, "token_type_ids") == expected["token_type_ids"]
    assert sequences.ids.dtype == np.int32


@pytest.mark.parametrize("max_length", [None, 2, 3, 10])
def test_single_texts_have_the_ids_of_the_tokenizers_call(tokenizer: BertTokenizer, max_length: int | None) -> None:
    sequences = Sequences.joined(tokenizer, TEXTS, max_length=max_length)
    expected = tokenizer(TEXTS, truncation=max_length is not None, max_length=max_length)
    assert rows_of(sequences) == expected["input_ids"]
    assert sequences.token_type_ids is None
    assert sequences.lengths.tolist() == [len(row) for row in expected["input_ids"]]
    assert sequences.lengths.dtype == np.int32


def test_only_second_cuts_the_second_text(tokenizer: BertTokenizer) -> None:
    sequences = Sequences.joined(tokenizer, ["the cat"], ["the " * 30], max_length=10, truncation="only_second")
    expected = tokenizer("the cat", "the " * 30, truncation="only_second", max_length=10)
    assert rows_of(sequences) == [expected["input_ids"]]


def test_real_pairs_are_cut_as_the_tokenizer_cuts_them(shared_data: Path) -> None:
    tokenizer = BertTokenizer(shared_data / "vocab" / "bert-base-uncased" / "vocab.txt")
    lines = (shared_data / "classification/question_sentence_pairs/dev.tsv").read_text("utf-8").splitlines()[1:]
    texts, pairs = zip(*(line.split("\t")[1:3] for line in lines), strict=True)
    sequences = Sequences.joined(tokenizer, list(texts), list(pairs), max_length=48)
    assert rows_of(sequences) == tokenizer(list(texts), list(pairs), truncation=True, max_length=48)["input_ids"]
    assert sequences.lengths.max() == 48


def test_gather_is_each_sequence_in_the_order_asked_for(tokenizer: BertTokenizer) -> None:
    sequences = Sequences.joined(tokenizer, TEXTS, TEXTS[::-1])
    order = [3, 0, 0, 7, 1]
    batch = sequences.gather(np.array(order), labels=np.arange(5), num_choices=1)
    parts, types = ([rows_of(sequences, name)[i] for i in order] for name in ("ids", "token_type_ids"))
    assert batch.input_ids.tolist() == [token for part in parts for token in part]
    assert batch.token_type_ids.tolist() == [one for part in types for one in part]
    assert batch.position_ids.tolist() == [place for part in parts for place in range(len(part))]
    assert batch.cu_seqlens.diff().tolist() == list(map(len, parts))
    assert batch.max_seqlen == max(map(len, parts))
    for name in ("input_ids", "token_type_ids", "position_ids", "labels"):
        assert batch[name].dtype == torch.int64
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.num_choices == 1


def test_gather_nothing(tokenizer: BertTokenizer) -> None:
    batch = Sequences.joined(tokenizer, TEXTS).gather(np.array([], dtype=np.int64))
    assert (batch.input_ids.numel(), batch.cu_seqlens.tolist(), batch.max_seqlen) == (0, [0], 0)


def test_no_texts(tokenizer: BertTokenizer) -> None:
    assert len(Sequences.joined(tokenizer, [])) == len(Sequences.joined(tokenizer, [], [])) == 0


@pytest.mark.parametrize("index", [-1, 8])
def test_an_index_that_is_not_there(tokenizer: BertTokenizer, index: int) -> None:
    with pytest.raises(IndexError, match=f"expected 0 to 7, got {index}"):
        Sequences.joined(tokenizer, TEXTS).gather(np.array([0, index]))


def test_bad_arguments(tokenizer: BertTokenizer) -> None:
    with pytest.raises(ValueError, match="pairs: expected 2 texts, one for each of texts, got 1"):
        Sequences.joined(tokenizer, ["a", "b"], ["c"])
    with pytest.raises(ValueError, match="truncation: expected one of longest_first, only_first, only_second"):
        Sequences.joined(tokenizer, ["a"], ["c"], truncation="first")
    with pytest.raises(ValueError, match="max_length"):
        Sequences.joined(tokenizer, ["a"], ["c"], max_length=2)


@pytest.mark.parametrize(
    ("ids", "boundaries", "types", "error", "message"),
    [
        (np.zeros(3, np.int64), np.array([0, 3]), None, TypeError, "ids: expected int32"),
        (np.zeros(3, np.int32), np.array([0, 2]), None, ValueError, "from 0 to 3"),
        (np.zeros(3, np.int32), np.array([0, 2, 1, 3]), None, ValueError, "ascending"),
        (np.zeros(3, np.int32), np.array([], np.int64), None, ValueError, "boundaries"),
        (np.zeros(3, np.int32), np.array([0, 3]), np.zeros(2, np.uint8), ValueError, "token_type_ids: expected 3"),
    ],
)
def test_arrays_that_do_not_fit(
    ids: np.ndarray, boundaries: np.ndarray, types: np.ndarray | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Sequences(ids, boundaries, types)


def test_take(tokenizer: BertTokenizer) -> None:
    for pairs in (None, TEXTS[::-1]):
        sequences = Sequences.joined(tokenizer, TEXTS, pairs)
        taken = sequences.take(np.array([5, 2, 2]))
        for name in ("ids", "token_type_ids") if pairs else ("ids",):
            assert rows_of(taken, name) == [rows_of(sequences, name)[i] for i in (5, 2, 2)]
    assert len(sequences.take(np.array([], dtype=np.int64))) == 0
    with pytest.raises(IndexError, match="got 8"):
        sequences.take([8])
