"""What a call returns: a dictionary, and a map between tokens, words and characters."""

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast.tokenization import BatchEncoding, BertTokenizer, CharSpan, TokenSpan

from .test_call import SENTENCES, same

TEXTS = ["The café's unaffable  waiter.", "x", "今天 [MASK] tokenization"]
PAIRS = ["second text here", "", "unaffable"]


def test_maps_between_tokens_words_and_characters(
    ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]
) -> None:
    for arguments in ((TEXTS,), (TEXTS, PAIRS), ([text.split() for text in TEXTS],)):
        options = {"padding": True, "is_split_into_words": not isinstance(arguments[0][0], str)}
        mine, other = ours()(*arguments, **options), theirs()(*arguments, **options)
        for row in range(len(TEXTS)):
            for token in range(len(mine["input_ids"][row])):
                assert mine.token_to_chars(row, token) == other.token_to_chars(row, token)
                assert mine.token_to_word(row, token) == other.token_to_word(row, token)
                assert mine.token_to_sequence(row, token) == other.token_to_sequence(row, token)
            for sequence in range(len(arguments)):
                for place in range(32):
                    assert mine.char_to_token(row, place, sequence) == other.char_to_token(row, place, sequence)
                    assert mine.char_to_word(row, place, sequence) == other.char_to_word(row, place, sequence)
                    assert mine.word_to_tokens(row, place, sequence) == other.word_to_tokens(row, place, sequence)
                    if mine.word_to_tokens(row, place, sequence) is not None:
                        assert mine.word_to_chars(row, place, sequence) == other.word_to_chars(row, place, sequence)


def test_one_number_means_the_first_row(ours: Callable[..., BertTokenizer]) -> None:
    encoding = ours()("unaffable waiter")
    assert encoding.tokens() == ["[CLS]", "una", "##ffa", "##ble", "waiter", "[SEP]"]
    assert encoding.word_to_tokens(0) == TokenSpan(1, 4)
    assert encoding.token_to_chars(4) == CharSpan(10, 16)
    assert encoding.token_to_chars(0) is None
    assert (encoding.char_to_token(10), encoding.char_to_token(9)) == (4, None)
    assert (encoding.char_to_word(10), encoding.char_to_word(9)) == (1, None)
    assert encoding.word_to_chars(1) == CharSpan(10, 16)
    assert encoding.word_to_chars(7) is None
    assert encoding.words() == encoding.word_ids() == [None, 0, 0, 0, 1, None]
    assert encoding.sequence_ids() == [None, 0, 0, 0, 0, None]


def test_it_is_a_dictionary(ours: Callable[..., BertTokenizer]) -> None:
    encoding = ours()(TEXTS, padding=True, return_tensors="pt")
    assert isinstance(encoding, Mapping)
    assert list(encoding) == ["input_ids", "token_type_ids", "attention_mask"]
    assert encoding.input_ids is encoding["input_ids"]

    def model(input_ids: torch.Tensor, token_type_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Size:
        return input_ids.shape

    assert model(**encoding)[0] == len(TEXTS)
    encoding["labels"] = torch.zeros(3)
    encoding.more = 1
    assert (encoding.pop("labels") == 0).all()
    assert encoding["more"] == 1
    assert not hasattr(encoding, "labels")
    duplicate = encoding.copy()
    assert duplicate.tokens(1)[:2] == ["[CLS]", "x"]
    assert (duplicate | {"a": 1})["a"] == 1


def test_rows(ours: Callable[..., BertTokenizer]) -> None:
    encoding = ours()(TEXTS, PAIRS, padding=True)
    assert len(encoding.encodings) == 3
    assert encoding[-1].tokens == encoding.tokens(2)
    assert [len(row) for row in encoding[0:2]] == [len(encoding["input_ids"][0])] * 2
    assert encoding[0].ids == encoding["input_ids"][0]
    assert "tokens" in repr(encoding[0])
    entries = BatchEncoding({"a": [1, 2, 3]})
    assert entries[1:] == {"a": [2, 3]}
    assert not entries.is_fast


def test_moving(ours: Callable[..., BertTokenizer]) -> None:
    encoding = ours()(TEXTS, padding=True, return_tensors="pt", return_length=True)
    encoding["name"] = "text"
    assert encoding.to("meta") is encoding
    assert encoding["input_ids"].is_meta
    assert encoding["name"] == "text"


def test_pickling_and_copying(ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]) -> None:
    call = {"padding": True, "return_tensors": "pt"}
    for duplicate in (
        pickle.loads(pickle.dumps(ours()(TEXTS, PAIRS, **call))),
        copy.deepcopy(ours()(TEXTS, PAIRS, **call)),
    ):
        same(duplicate, theirs()(TEXTS, PAIRS, **call))


def test_origins_are_found_when_asked_for(ours: Callable[..., BertTokenizer]) -> None:
    tokenizer = copy.deepcopy(ours())
    calls: list[tuple[str, dict[str, Any]]] = []

    class Spy:
        def __init__(self, engine: Any) -> None:
            self.engine = engine

        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                calls.append((name, options))
                return getattr(self.engine, name)(*arguments, **options)

            return call

    tokenizer._engine = Spy(tokenizer._engine)  # type: ignore[assignment]
    origins = ("encode", {"offsets": True, "word_ids": True})
    for options, method in (
        ({"padding": True}, "encode"),
        ({"padding": True, "return_tensors": "np"}, "encode_rows"),
        ({}, "encode_lists"),
    ):
        calls.clear()
        encoding = tokenizer(TEXTS, **options)
        assert [name for name, _ in calls] == [method]
        assert not calls[0][1].get("offsets")
        encoding.word_ids(0)
        encoding.tokens(1)
        assert [call for call in calls[1:] if call[0] != "normalize"] == [origins]
    calls.clear()
    tokenizer(TEXTS, return_offsets_mapping=True).word_ids(0)
    assert [call for call in calls if call[0] != "normalize"] == [origins]


def test_offsets_point_at_the_text(ours: Callable[..., BertTokenizer]) -> None:
    tokenizer = ours("bert-base-cased", do_lower_case=False)
    for text in SENTENCES:
        encoding = tokenizer(text, return_offsets_mapping=True)
        for token, (start, stop) in list(zip(encoding.tokens(), encoding["offset_mapping"], strict=True))[1:-1]:
            assert token == "[UNK]" or text[start:stop] == token.removeprefix("##")


def test_dtypes(ours: Callable[..., BertTokenizer]) -> None:
    call = {"padding": True, "return_special_tokens_mask": True, "return_offsets_mapping": True, "return_length": True}
    for value in ours()(TEXTS, return_tensors="np", **call).values():
        assert value.dtype == np.int64
        assert value.flags.writeable
    for value in ours()(TEXTS, return_tensors="pt", **call).values():
        assert value.dtype == torch.int64
        assert value.is_contiguous()


@pytest.mark.parametrize("kind", ["pt", "np", None])
@pytest.mark.parametrize("batch_axis", [False, True])
@pytest.mark.parametrize("padding", [False, True])
def test_entries_become_tensors_afterwards(
    kind: str | None, batch_axis: bool, padding: bool, ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]
) -> None:
    more: list[dict[str, Any]] = [
        {},
        {"labels": [0.5, 1.0, 2.0]},
        {"labels": [1, 2, 3]},
        {"mask": [True, False, True], "none": []},
        {"matrix": [[0.5], [1.5]], "array": np.zeros(2, np.float32), "doubles": [np.float64(1), np.float64(2)]},
        {"arrays": [np.zeros(2), np.ones(2)], "words": ["a", "b"]},
    ]
    for entries in more:
        mine, other = ours()(TEXTS, padding=padding), theirs()(TEXTS, padding=padding)
        mine.update(entries)
        other.update(entries)
        try:
            other.convert_to_tensors(kind, prepend_batch_axis=batch_axis)
        except ValueError:
            with pytest.raises(ValueError, match=r"^(input_ids|words): "):
                mine.convert_to_tensors(kind, prepend_batch_axis=batch_axis)
            continue
        assert mine.convert_to_tensors(kind, prepend_batch_axis=batch_axis) is mine
        assert mine.data is mine
        for name, value in other.items():
            assert type(mine[name]) is type(value), name
            assert getattr(mine[name], "dtype", None) == getattr(value, "dtype", None), name
            assert str(mine[name]) == str(value), name


def test_no_other_tensors(ours: Callable[..., BertTokenizer]) -> None:
    with pytest.raises(ValueError, match="tensor_type: expected 'pt', 'np' or None, got 'tf'"):
        ours()("x").convert_to_tensors("tf")


def test_labels_of_padded_rows_are_of_torchs_default_type(
    ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]
) -> None:
    rows = [{"input_ids": [101, 102], "label": 0.5}, {"input_ids": [101], "label": 1.5}]
    mine, other = (make().pad(rows, return_tensors="pt")["label"] for make in (ours, theirs))
    assert mine.dtype == other.dtype == torch.get_default_dtype()
    assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((TEXTS,), {"text_target": PAIRS}),
        (("x",), {"text_target": "y z"}),
        ((), {"text_target": "y z"}),
        ((), {"text_target": TEXTS, "text_pair_target": PAIRS}),
        ((TEXTS, PAIRS), {"text_target": TEXTS, "return_offsets_mapping": True}),
        ((TEXTS,), {"text_target": TEXTS, "padding": "max_length", "max_length": 5, "truncation": True}),
        (([["x", "y"]],), {"text_target": [["z"]], "is_split_into_words": True}),
    ],
)
def test_targets_are_labels(
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    ours: Callable[..., BertTokenizer],
    theirs: Callable[..., Any],
) -> None:
    assert dict(ours()(*arguments, **options)) == dict(theirs()(*arguments, **options))


def test_bad_targets_are_named(ours: Callable[..., BertTokenizer]) -> None:
    with pytest.raises(TypeError, match=r"^text_target\[1\]: expected a str"):
        ours()(["a", "b"], text_target=["a", 3])
    with pytest.raises(TypeError, match=r"^text_pair_target\[0\]: expected a str"):
        ours()(["a"], text_target=["a"], text_pair_target=[3])
