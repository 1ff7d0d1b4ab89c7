"""Calls against transformers' fast tokenizer, option by option and in random combinations."""

import copy
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_fast.tokenization import BertTokenizer

SENTENCES = (
    "Hello, world!",
    "unaffable",
    "a",
    "",
    "The café's naïve façade costs 1,234.50€ — don't!",
    "今天天气不错 right?",
    "x [MASK] y[SEP] [mask]",
    "word " * 40,
    "supercalifragilisticexpialidocious pneumonoultramicroscopicsilicovolcanoconiosis",
    "tabs\tand\nnew lines  and\u200b zero widths\u00ad",
)


def same(ours: Any, theirs: Any, name_of: Callable[[int], str] | None = None, type_ids: bool = True) -> None:
    """Every entry and every mapping between tokens, words and characters agrees.

    name_of: what tokens are called by their ids; None: as the library calls them.
    type_ids: whether those of rows are compared, which need not be among the entries.
    """
    assert set(ours.keys()) == set(theirs.keys())
    for key, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert ours[key].dtype == value.dtype
            assert torch.equal(ours[key], value), key
        elif isinstance(value, np.ndarray):
            assert ours[key].dtype == value.dtype
            assert ours[key].tolist() == value.tolist(), key
        else:
            assert ours[key] == value, key
    assert len(ours.encodings) == len(theirs.encodings)
    for row in range(len(theirs.encodings)):
        assert ours.tokens(row) == ([*map(name_of, theirs[row].ids)] if name_of else theirs.tokens(row))
        assert ours.word_ids(row) == theirs.word_ids(row)
        assert ours.sequence_ids(row) == theirs.sequence_ids(row)
        assert ours[row].offsets == theirs[row].offsets
        assert not type_ids or ours[row].type_ids == theirs[row].type_ids
        assert ours[row].attention_mask == theirs[row].attention_mask
        assert ours[row].special_tokens_mask == theirs[row].special_tokens_mask


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_special_tokens": False},
        {"padding": True},
        {"padding": "longest", "pad_to_multiple_of": 8},
        {"padding": "max_length", "max_length": 24},
        {"padding": "max_length", "max_length": 12, "truncation": True},
        {"padding": "max_length", "max_length": 24, "padding_side": "left"},
        {"padding": "do_not_pad", "pad_to_multiple_of": 8},
        {"padding": "max_length"},
        {"truncation": True},
        {"truncation": True, "max_length": 7},
        {"truncation": "longest_first", "max_length": 8, "padding": True, "pad_to_multiple_of": 4},
        {"max_length": 7},
        {"truncation": False, "max_length": 7},
        {"truncation": "do_not_truncate", "max_length": 7, "padding": "max_length"},
        {"truncation": True, "max_length": 2},
        {"truncation": True, "max_length": 0, "add_special_tokens": False},
        {"truncation": True, "max_length": 10, "stride": 3, "return_overflowing_tokens": True},
        {"truncation": True, "max_length": 9, "return_overflowing_tokens": True, "padding": True},
        {
            "truncation": True,
            "max_length": 6,
            "stride": 2,
            "return_overflowing_tokens": True,
            "add_special_tokens": False,
        },
        {"truncation": True, "max_length": 2, "return_overflowing_tokens": True, "padding": True},
        {"return_overflowing_tokens": True},
        {"return_token_type_ids": False, "return_attention_mask": False},
        {"return_special_tokens_mask": True, "return_offsets_mapping": True, "return_length": True, "padding": True},
        {"return_offsets_mapping": True, "padding": True, "return_tensors": "np", "return_length": True},
        {"return_offsets_mapping": True, "padding": True, "return_tensors": "pt", "return_length": True},
        {"return_tensors": "np"},
        {
            "truncation": True,
            "max_length": 8,
            "stride": 1,
            "return_overflowing_tokens": True,
            "padding": "max_length",
            "return_tensors": "pt",
        },
    ],
    ids=" ".join,
)
def test_options(options: dict[str, Any], ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]) -> None:
    for text, pair in (
        (list(SENTENCES), None),
        (SENTENCES[0], None),
        (SENTENCES[3], None),
        (SENTENCES[7], None),
    ):
        if options.get("return_tensors") == "np" and "padding" not in options and isinstance(text, list):
            continue  # ragged arrays: test_ragged_arrays
        same(ours()(text, pair, **options), theirs()(text, pair, **options))


def random_call(rng: random.Random) -> tuple[Any, Any, dict[str, Any]]:
    """Arguments text and text_pair, and options, in any combination."""
    split = rng.random() < 0.3
    options: dict[str, Any] = {
        "add_special_tokens": rng.random() < 0.8,
        "padding": rng.choice([False, True, "max_length"]),
        "truncation": rng.choice([None, False, True, "only_first", "only_second", "longest_first"]),
        "max_length": rng.choice([None, 5, 8, 13, 24, 40]),
        "stride": rng.choice([0, 0, 1, 2, 3]),
        "pad_to_multiple_of": rng.choice([None, None, 8]),
        "padding_side": rng.choice([None, "left", "right"]),
        "return_overflowing_tokens": rng.random() < 0.5,
        "return_offsets_mapping": rng.random() < 0.5,
        "return_special_tokens_mask": rng.random() < 0.5,
        "return_length": rng.random() < 0.3,
        "is_split_into_words": split,
    }

    def some() -> Any:
        sentence = rng.choice(SENTENCES)
        return sentence.split(" ")[: rng.randint(0, 30)] if split else sentence

    count = rng.randint(1, 4)
    text: Any = [some() for _ in range(count)]
    pair: Any = [some() for _ in range(count)] if rng.random() < 0.5 else None
    if pair is not None and rng.random() < 0.3:
        return list(zip(text, pair, strict=True)), None, options
    if rng.random() < 0.2:
        return text[0], None if pair is None else pair[0], options
    return text, pair, options


@pytest.mark.filterwarnings("ignore:.*max_length")
def test_random_combinations_of_options(ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]) -> None:
    rng = random.Random(5)
    agreed, refused = 0, []
    for _ in range(600):
        text, pair, options = random_call(rng)
        side = rng.choice(["right", "right", "left"])
        mine, other = ours(truncation_side=side), theirs(truncation_side=side)
        try:
            result = mine(text, pair, **options)
        except ValueError as error:
            refused.append(str(error))
            continue
        same(result, other(text, pair, **options))
        agreed += 1
    assert agreed > 300
    # Where we refuse, the library raises, panics, or may do so for longer texts.
    assert all(error.split(":")[0] in ("stride", "truncation", "pad_to_multiple_of") for error in refused), set(refused)


@pytest.mark.parametrize("do_lower_case", [True, False])
@pytest.mark.parametrize("strip_accents", [None, True, False])
@pytest.mark.parametrize("tokenize_chinese_chars", [True, False])
def test_normalizer_options(
    do_lower_case: bool,
    strip_accents: bool | None,
    tokenize_chinese_chars: bool,
    shared_data: Path,
    ours: Callable[..., BertTokenizer],
    theirs: Callable[..., Any],
) -> None:
    options = {
        "do_lower_case": do_lower_case,
        "strip_accents": strip_accents,
        "tokenize_chinese_chars": tokenize_chinese_chars,
    }
    lines = [*SENTENCES, "İstanbul ΣΑΣ ﬁ Å e\u0301 한국어 ｆｕｌｌ", *real_lines(shared_data)]
    is_large = (do_lower_case + tokenize_chinese_chars + (strip_accents is None)) % 2 == 1
    vocabulary = "bert-base-multilingual-cased" if is_large else "bert-base-uncased"
    same(ours(vocabulary, **options)(lines), theirs(vocabulary, **options)(lines))


def real_lines(data: Path, per_file: int = 3) -> list[str]:
    """A few lines of every language and of emoji-rich comments."""
    lines = []
    for path in sorted((data / "text_multilingual" / "udhr").glob("*.txt")):
        lines += [line for line in path.read_text(encoding="utf-8").split("\n") if line][5 : 5 + per_file]
    comments = (data / "text_social" / "youtube_comments_emoji.txt").read_text(encoding="utf-8").split("\n")
    return lines + comments[:100]


@pytest.mark.parametrize("vocabulary", ["bert-base-uncased", "bert-base-chinese"])
def test_pairs_of_real_texts(
    vocabulary: str, shared_data: Path, ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]
) -> None:
    lines = real_lines(shared_data, per_file=2)
    half = len(lines) // 2
    options: dict[str, Any] = {"truncation": True, "max_length": 64, "padding": True, "return_tensors": "pt"}
    same(
        ours(vocabulary)(lines[:half], lines[half : 2 * half], **options),
        theirs(vocabulary)(lines[:half], lines[half : 2 * half], **options),
    )


def test_an_empty_second_text(ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]) -> None:
    for arguments in (("a", ""), (["a"], [""]), ("", ""), ([("a", "")],), ("", "b")):
        same(ours()(*arguments), theirs()(*arguments))


def test_ragged_arrays(ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]) -> None:
    mine, other = (make()(["a b", "c"], return_tensors="np") for make in (ours, theirs))
    assert mine.keys() == other.keys()
    for key in other:
        assert mine[key].dtype == object
        assert [row.tolist() for row in mine[key]] == [row.tolist() for row in other[key]]


def test_empty_batches(ours: Callable[..., BertTokenizer]) -> None:
    assert dict(ours()([])) == {"input_ids": [], "token_type_ids": [], "attention_mask": []}
    assert ours()([], padding=True, return_tensors="pt")["input_ids"].shape == (0, 0)
    assert ours()([], is_split_into_words=True)["input_ids"] == [101, 102]  # one text of no words
    assert ours()([[], ["a"]], is_split_into_words=True)["input_ids"] == [[101, 102], [101, 1037, 102]]


def test_mixed_singles_and_pairs(ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]) -> None:
    batch = ["a b c d e", ("f", "g h i j k"), "l"]
    for options in ({}, {"padding": True}, {"truncation": True, "max_length": 6, "padding": True}):
        same(ours()(batch, **options), theirs()(batch, **options))


def test_methods_of_tutorials(ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]) -> None:
    mine, other = ours(), theirs()
    text, pair = "Don't split [MASK], please.", "second one"
    assert mine.tokenize(text) == other.tokenize(text)
    assert mine.tokenize(text, pair, add_special_tokens=True) == other.tokenize(text, pair, add_special_tokens=True)
    assert mine.encode(text, pair) == other.encode(text, pair)
    assert mine.encode(text, add_special_tokens=False) == other.encode(text, add_special_tokens=False)
    assert mine.encode(text, max_length=5, truncation=True) == other.encode(text, max_length=5, truncation=True)
    assert mine.encode(text, return_tensors="pt").tolist() == other.encode(text, return_tensors="pt").tolist()
    assert dict(mine.encode_plus(text, pair)) == dict(mine(text, pair))
    assert dict(mine.batch_encode_plus([(text, pair), (pair, text)])) == dict(mine([text, pair], [pair, text]))


def test_bytes_are_utf8(ours: Callable[..., BertTokenizer]) -> None:
    for text in SENTENCES:
        assert dict(ours()(text.encode(), return_offsets_mapping=True)) == dict(
            ours()(text, return_offsets_mapping=True)
        )


def test_sequences_other_than_lists(ours: Callable[..., BertTokenizer]) -> None:
    expected = dict(ours()(["a b", "c"]))
    assert dict(ours()(("a b", "c"))) == expected
    assert dict(ours()(np.array(["a b", "c"], dtype=object))) == expected


def test_texts_without_a_rust_equivalent(ours: Callable[..., BertTokenizer]) -> None:
    tokenizer = ours()
    assert tokenizer.tokenize("a\ud800b \udfff c") == ["ab", "c"]  # lone surrogates
    assert tokenizer.tokenize(b"a\xff\xe2\x82b \xf0\x9f c") == ["ab", "c"]  # invalid UTF-8
    assert tokenizer.tokenize("a\x00b") == ["ab"]  # NUL
    encoding = tokenizer("x \ud800y", return_offsets_mapping=True)
    assert encoding["offset_mapping"] == [(0, 0), (0, 1), (3, 4), (0, 0)]


def test_very_long_inputs(ours: Callable[..., BertTokenizer], use_engine: str) -> None:
    tokenizer = ours()
    assert tokenizer.tokenize("a" * 1_000_000) == ["[UNK]"]
    assert tokenizer.tokenize("a" * 100) != ["[UNK]"]
    assert tokenizer.tokenize("a" * 101) == ["[UNK]"]
    megabytes = 10 if use_engine == "native" else 1
    text = "the quick brown fox. " * (megabytes * 1_000_000 // 21)
    ids = tokenizer(text, truncation=True, max_length=6)["input_ids"]
    assert ids == tokenizer("the quick brown fox.", truncation=True, max_length=6)["input_ids"]


def test_warnings(ours: Callable[..., BertTokenizer]) -> None:
    tokenizer = copy.deepcopy(ours(model_max_length=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer(["a b", "c"], padding=True)
        tokenizer("a b c", truncation=True)
        tokenizer("a b c", max_length=9)
        tokenizer("a b c", verbose=False)
    with pytest.warns(UserWarning, match="a row has 5 tokens, more than model_max_length=4; pass truncation=True"):
        tokenizer(["a", "a b c"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer("a b c")  # said once
    with pytest.warns(UserWarning, match="max_length has no effect with padding=True and no truncation"):
        tokenizer(["a"], padding=True, max_length=3)


@pytest.mark.parametrize("do_lower_case", [True, False])
def test_any_text(do_lower_case: bool, ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]) -> None:
    mine = ours("bert-base-multilingual-cased", do_lower_case=do_lower_case)
    other = theirs("bert-base-multilingual-cased", do_lower_case=do_lower_case)

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])))
    def agree(text: str, pair: str) -> None:
        same(mine(text, pair), other(text, pair))

    agree()
