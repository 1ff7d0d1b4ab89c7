"""Every kind of bad argument of a call gives an error that names the argument."""

from collections.abc import Callable
from typing import Any

import pytest

from bert_fast.tokenization import BertTokenizer


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None,), TypeError, "text: expected a str .* got None"),
        ((3,), TypeError, "text: expected a str .* got int"),
        (({"a": 1},), TypeError, "text: expected a str .* got dict"),
        ((["a", None],), TypeError, r"text\[1\]: expected a str .* got None"),
        ((["a", 2.5],), TypeError, r"text\[1\]: expected a str .* got float"),
        (("a", 3), TypeError, "text_pair: expected a str .* got int"),
        (("a", ["b"]), TypeError, "text_pair: expected a str .* got list"),
        ((["a"], "b"), TypeError, "text_pair: expected a list, as text is one, got str"),
        ((["a", "b"], ["c"]), ValueError, "text_pair: expected 2 texts, one for each of text, got 1"),
        ((["a", "b"], ["c", 4]), TypeError, r"text_pair\[1\]: expected a str"),
        (([("a", "b"), ("c", None)],), TypeError, r"text_pair\[1\]: expected a str .* got None"),
        (([["a", "b", "c"]],), ValueError, r"text\[0\]: expected a pair of texts, got 3 members \(a list of words"),
    ],
)
def test_texts(
    arguments: tuple[Any, ...], error: type[Exception], message: str, ours: Callable[..., BertTokenizer]
) -> None:
    with pytest.raises(error, match=message):
        ours()(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a b",), "text: with is_split_into_words=True, expected a list of words, got str"),
        ((["a", None],), r"text\[1\]: expected a str .* got None"),
        (([["a"], "b"],), r"text\[1\]: with is_split_into_words=True, expected a list of words, got str"),
        (([["a"], ["b", 3]],), r"text\[1\]\[1\]: expected a str .* got int"),
        (([["a"]], [["b", None]]), r"text_pair\[0\]\[1\]: expected a str .* got None"),
    ],
)
def test_words(arguments: tuple[Any, ...], message: str, ours: Callable[..., BertTokenizer]) -> None:
    with pytest.raises(TypeError, match=message):
        ours()(*arguments, is_split_into_words=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"padding": "longer"},
            "padding: expected True, False or one of longest, max_length, do_not_pad, got 'longer'",
        ),
        ({"truncation": "first"}, "truncation: expected True, False or one of longest_first.* got 'first'"),
        ({"padding_side": "up"}, "padding_side: expected 'right' or 'left', got 'up'"),
        ({"return_tensors": "tf"}, "return_tensors: expected 'pt', 'np' or None, got 'tf'"),
        ({"max_length": -1}, "max_length: expected an int of at least 0, got -1"),
        ({"max_length": 2.5}, "max_length: expected an int of at least 0, got 2.5"),
        ({"max_length": True}, "max_length: expected an int"),
        ({"stride": -1}, "stride: expected an int of at least 0, got -1"),
        ({"pad_to_multiple_of": 0, "padding": True}, "pad_to_multiple_of: expected an int of at least 1, got 0"),
        ({"truncation": True, "max_length": 1}, "max_length: 1 leaves no room for the 2 special tokens of a text"),
        (
            {"truncation": True, "max_length": 6, "stride": 4},
            r"stride: expected less than 4 \(max_length=6 without special tokens\), got 4",
        ),
        (
            {"truncation": True, "max_length": 10, "padding": True, "pad_to_multiple_of": 8},
            r"pad_to_multiple_of: with truncation, max_length \(10\) must be a multiple of it, got 8",
        ),
        (
            {"truncation": "only_second", "max_length": 4},
            r"truncation: 'only_second', but text\[0\] is too long and has",
        ),
    ],
)
def test_options(options: dict[str, Any], message: str, ours: Callable[..., BertTokenizer]) -> None:
    with pytest.raises(ValueError, match=message):
        ours()("one two three four", **options)


def test_pairs_that_cannot_be_truncated(ours: Callable[..., BertTokenizer]) -> None:
    tokenizer = ours()
    with pytest.raises(ValueError, match="max_length: 2 leaves no room for the 3 special tokens of a pair"):
        tokenizer("a", "b", truncation=True, max_length=2)
    message = "'only_first' cannot make sample 1 short enough: 3 tokens have to go and its first text has 1"
    with pytest.raises(ValueError, match=message):
        tokenizer(["a b", "a"], ["c", "b c d e"], truncation="only_first", max_length=5)
    message = r"stride: 2 is not smaller than the 2 tokens that a window of text_pair\[0\] holds with max_length=8"
    with pytest.raises(ValueError, match=message):
        tokenizer("a b c", "d e f g", truncation="only_second", max_length=8, stride=2)


def test_rows_of_different_lengths_make_no_tensor(ours: Callable[..., BertTokenizer]) -> None:
    with pytest.raises(ValueError, match="rows of different lengths; pass padding=True and truncation=True"):
        ours()(["a", "b c"], return_tensors="pt")


def test_padding_without_a_padding_token(shared_data: Any) -> None:
    vocab = shared_data / "vocab" / "bert-base-uncased" / "vocab.txt"
    tokenizer = BertTokenizer(vocab, pad_token=None)
    assert tokenizer("a")["input_ids"] == [101, 1037, 102]
    with pytest.raises(ValueError, match="padding: the tokenizer has no pad_token"):
        tokenizer(["a", "b"], padding=True)


def test_constructor(shared_data: Any) -> None:
    vocab = shared_data / "vocab" / "bert-base-uncased" / "vocab.txt"
    with pytest.raises(ValueError, match="padding_side: expected 'right' or 'left', got 'middle'"):
        BertTokenizer(vocab, padding_side="middle")
    with pytest.raises(ValueError, match="do_basic_tokenize: only True is supported"):
        BertTokenizer(vocab, do_basic_tokenize=False)
    with pytest.raises(TypeError, match="mask_token: expected a str or an AddedToken, got int"):
        BertTokenizer(vocab, mask_token=103)


def test_ids_out_of_range(ours: Callable[..., BertTokenizer]) -> None:
    tokenizer = ours()
    with pytest.raises(ValueError, match=r"ids\[1\]: 30522 is not in the vocabulary \(0 to 30521\)"):
        tokenizer.decode([101, 30522])
    with pytest.raises(ValueError, match=r"ids\[0\]: -100 is not in the vocabulary"):
        tokenizer.convert_ids_to_tokens([-100])
    with pytest.raises(ValueError, match="ids: 99999 is not in the vocabulary"):
        tokenizer.convert_ids_to_tokens(99999)


def test_pad(ours: Callable[..., BertTokenizer]) -> None:
    tokenizer = ours()
    with pytest.raises(ValueError, match=r"encoded_inputs: expected an entry input_ids, got \['labels'\]"):
        tokenizer.pad({"labels": [1]})
    with pytest.raises(TypeError, match="encoded_inputs: expected a mapping or a list of mappings, got str"):
        tokenizer.pad("text")
    with pytest.raises(ValueError, match="encoded_inputs: labels has 1 rows, input_ids 2"):
        tokenizer.pad({"input_ids": [[1], [2]], "labels": [1]})
    with pytest.raises(ValueError, match="labels: cannot make tensors of rows of different lengths"):
        tokenizer.pad([{"input_ids": [1], "labels": [1]}, {"input_ids": [2, 3], "labels": [1, 2]}], return_tensors="pt")


def test_pack(ours: Callable[..., BertTokenizer]) -> None:
    tokenizer = ours()
    with pytest.raises(TypeError, match="texts: expected a list of texts, got str"):
        tokenizer.pack("a")
    with pytest.raises(ValueError, match=r"max_tokens: text\[0\] has 5 tokens, more than 4; pass max_length"):
        tokenizer.pack(["a b c", "d"], max_tokens=4)
    with pytest.raises(ValueError, match="max_tokens: expected an int of at least 1, got 0"):
        tokenizer.pack(["a"], max_tokens=0)


def test_encodings_without_rows(ours: Callable[..., BertTokenizer]) -> None:
    padded = ours().pad({"input_ids": [[1], [2, 3]]})
    with pytest.raises(ValueError, match="this BatchEncoding holds entries only"):
        padded.word_ids(0)
    with pytest.raises(AttributeError, match="neither attribute nor entry 'labels'"):
        _ = padded.labels
    with pytest.raises(IndexError, match="row 2 of a batch of 2"):
        ours()(["a", "b"]).tokens(2)
