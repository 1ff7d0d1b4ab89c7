"""Special and added tokens, ids and tokens, and decoding, against transformers."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast.tokenization import AddedToken, BertTokenizer

from .test_call import SENTENCES

tokenizers = pytest.importorskip("tokenizers")

TEXT = "Hello NewTok<e> anewtokb NEWTOK <r>  x single asingle [MASK] <m>hello"


def both(ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]) -> tuple[BertTokenizer, Any]:
    """Copies of the two tokenizers, to change."""
    return copy.deepcopy(ours()), copy.deepcopy(theirs())


def assert_alike(mine: BertTokenizer, other: Any) -> None:
    """The same vocabulary, special tokens and results."""
    assert len(mine) == len(other)
    assert mine.vocab_size == other.vocab_size
    assert mine.get_vocab() == other.get_vocab()
    assert mine.get_added_vocab() == other.get_added_vocab()
    assert mine.special_tokens_map == other.special_tokens_map
    assert mine.all_special_tokens == other.all_special_tokens
    assert mine.all_special_ids == other.all_special_ids
    for text in (TEXT, *SENTENCES):
        for call in ({}, {"return_offsets_mapping": True}):
            assert dict(mine(text, **call)) == dict(other(text, **call))
        ids = mine(text)["input_ids"]
        for skip in (True, False):
            assert mine.decode(ids, skip_special_tokens=skip) == other.decode(ids, skip_special_tokens=skip)


def test_named_tokens(ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]) -> None:
    mine, other = ours(), theirs()
    assert_alike(mine, other)
    for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):
        assert getattr(mine, f"{name}_token") == getattr(other, f"{name}_token")
        assert getattr(mine, f"{name}_token_id") == getattr(other, f"{name}_token_id")
    assert mine.num_special_tokens_to_add() == other.num_special_tokens_to_add()
    assert mine.num_special_tokens_to_add(pair=True) == other.num_special_tokens_to_add(pair=True)
    assert mine.is_fast
    assert ours(model_max_length=512).max_len_single_sentence == 510
    assert ours(model_max_length=512).max_len_sentences_pair == 509
    with pytest.raises(AttributeError, match="no attribute 'tokeniser'"):
        _ = mine.tokeniser


def test_added_tokens(ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]) -> None:
    mine, other = both(ours, theirs)
    for tokens in ("NewTok", ["hello", "hello", ""], ["NewTok", "other"], []):
        assert mine.add_tokens(tokens) == other.add_tokens(tokens)
    for arguments in ({"content": "<r>", "rstrip": True, "lstrip": True}, {"content": "single", "single_word": True}):
        assert mine.add_tokens(AddedToken(**arguments)) == other.add_tokens(tokenizers.AddedToken(**arguments))
    assert mine.add_tokens(["<s1>", "<s2>"], special_tokens=True) == other.add_tokens(
        ["<s1>", "<s2>"], special_tokens=True
    )
    assert_alike(mine, other)
    assert mine.added_tokens_decoder[mine.convert_tokens_to_ids("<r>")] == AddedToken("<r>", lstrip=True, rstrip=True)
    assert len(ours()) == 30522  # the copy was changed, not the original
    with pytest.raises(TypeError, match=r"new_tokens\[1\]: expected a str or an AddedToken, got int"):
        mine.add_tokens(["a", 3])


def test_tokens_of_the_rust_library_are_understood(ours: Callable[..., BertTokenizer]) -> None:
    mine = copy.deepcopy(ours())
    mine.add_tokens(tokenizers.AddedToken("Xy", normalized=False, lstrip=True))
    assert mine.added_tokens_decoder[30522] == AddedToken("Xy", lstrip=True, normalized=False)


def test_special_tokens(ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]) -> None:
    mine, other = both(ours, theirs)
    for tokens in (
        {"additional_special_tokens": ["<e>", "hello"]},
        {"mask_token": "<m>"},
        {"pad_token": "[unused0]", "eos_token": "[SEP]"},
    ):
        assert mine.add_special_tokens(tokens) == other.add_special_tokens(tokens)
        assert_alike(mine, other)
    assert mine.extra_special_tokens == mine.additional_special_tokens == other.extra_special_tokens
    assert mine.additional_special_tokens_ids == [30522, 7592]
    assert mine.mask_token_id == other.mask_token_id
    with pytest.raises(ValueError, match="there is no special token 'masks'; known are bos_token"):
        mine.add_special_tokens({"masks": "<m>"})
    with pytest.raises(TypeError, match="additional_special_tokens: expected a list of tokens, got str"):
        mine.add_special_tokens({"additional_special_tokens": "<m>"})


def test_assignment(ours: Callable[..., BertTokenizer]) -> None:
    mine = copy.deepcopy(ours())
    mine.eos_token = "[SEP]"
    mine.bos_token_id = 101
    assert (mine.eos_token_id, mine.bos_token) == (102, "[CLS]")
    mine.mask_token = None
    assert mine.mask_token_id is None
    with pytest.raises(
        ValueError, match="pad_token: '<none>' is not in the vocabulary; add it with add_special_tokens"
    ):
        mine.pad_token = "<none>"
    with pytest.raises(TypeError, match="pad_token: expected a str or an AddedToken, got int"):
        mine.pad_token = 3


def test_ids_and_tokens(ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]) -> None:
    mine, other = ours(), theirs()
    assert mine.convert_tokens_to_ids(["hello", "zzzz", "[MASK]"]) == other.convert_tokens_to_ids(
        ["hello", "zzzz", "[MASK]"]
    )
    assert mine.convert_tokens_to_ids("hello") == other.convert_tokens_to_ids("hello")
    assert mine.convert_ids_to_tokens([101, 7592]) == other.convert_ids_to_tokens([101, 7592])
    assert mine.convert_ids_to_tokens(7592) == other.convert_ids_to_tokens(7592)
    assert mine.convert_ids_to_tokens([101, 7592], skip_special_tokens=True) == ["hello"]
    assert mine.convert_ids_to_tokens(torch.tensor([101, 7592])) == ["[CLS]", "hello"]
    assert mine.convert_ids_to_tokens(np.array([101, 7592])) == ["[CLS]", "hello"]
    for tokens in (["##a", "b", "##c", "."], [], ["hello", "##s", "do", "n", "'", "t"]):
        assert mine.convert_tokens_to_string(tokens) == other.convert_tokens_to_string(tokens)


def test_sequences_with_special_tokens(ours: Callable[..., BertTokenizer]) -> None:
    mine = ours()
    assert mine.build_inputs_with_special_tokens([5, 6]) == [101, 5, 6, 102]
    assert mine.build_inputs_with_special_tokens([5], [6, 7]) == [101, 5, 102, 6, 7, 102]
    assert mine.create_token_type_ids_from_sequences([5, 6]) == [0] * 4
    assert mine.create_token_type_ids_from_sequences([5], [6, 7]) == [0, 0, 0, 1, 1, 1]
    assert mine.get_special_tokens_mask([5], [6, 7]) == [1, 0, 1, 0, 0, 1]
    assert mine.get_special_tokens_mask([5, 6]) == [1, 0, 0, 1]
    assert mine.get_special_tokens_mask([101, 5, 103, 102, 0], already_has_special_tokens=True) == [1, 0, 1, 1, 1]
    with pytest.raises(ValueError, match="token_ids_1: a sequence that has its special tokens already comes alone"):
        mine.get_special_tokens_mask([101], [102], already_has_special_tokens=True)


def test_decoding(ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]) -> None:
    mine, other = ours(), theirs()
    batch = [mine(text)["input_ids"] for text in SENTENCES]
    contractions = mine("We're sure they've said it's John's, I'm \" quoted \" ; don't ' x ' do not. ? !")["input_ids"]
    for ids in [*batch, contractions, [], [7592]]:
        for options in ({}, {"skip_special_tokens": True}, {"clean_up_tokenization_spaces": True}):
            assert mine.decode(ids, **options) == other.decode(ids, **options)
    assert mine.decode(7592) == "hello"
    assert mine.decode(torch.tensor([101, 7592])) == "[CLS] hello"
    assert mine.decode(np.array([[101, 7592], [7592, 102]])) == ["[CLS] hello", "hello [SEP]"]
    assert mine.decode(mine("hello")) == "[CLS] hello [SEP]"
    assert mine.batch_decode(batch, skip_special_tokens=True) == other.batch_decode(batch, skip_special_tokens=True)
    assert mine.batch_decode(torch.tensor([[101, 7592]])) == ["[CLS] hello"]


def test_normalized_tokens_come_back_normalized(ours: Callable[..., BertTokenizer], theirs: Callable[..., Any]) -> None:
    mine, other = both(ours, theirs)
    mine.add_tokens(["NewTok", "Café", AddedToken("XyZ", normalized=False)])
    other.add_tokens(["NewTok", "Café", tokenizers.AddedToken("XyZ", normalized=False)])
    ids = [30522, 30523, 30524]
    assert mine.convert_ids_to_tokens(ids) == other.convert_ids_to_tokens(ids) == ["newtok", "cafe", "XyZ"]
    assert mine.tokenize("NEWTOK café XyZ") == other.tokenize("NEWTOK café XyZ")


def test_equal_contents_after_normalization(ours: Callable[..., BertTokenizer]) -> None:
    """The library takes one of them by chance; we take the lowest id."""
    mine = copy.deepcopy(ours())
    mine.add_tokens(["Abc", "ABC"])
    assert mine.tokenize("abc ABC xAbcx", add_special_tokens=False).count("abc") == 3
    assert mine("abc ABC")["input_ids"] == [101, 30522, 30522, 102]
    mine.add_tokens("ABC", special_tokens=True)  # special tokens are looked for in the text as it is
    assert mine("abc ABC")["input_ids"] == [101, 30522, 30523, 102]
