"""Keys of older and newer folders, and `AddedToken`s: ids, special tokens and lengths as transformers 5 makes them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bert_fast import BertTokenizer
from bert_fast.tokenization import AddedToken

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"[]<>abcdefgmsk1", *(f"##{c}" for c in "abcdeghiklmnostw1")]
TEXTS = ["a [E1] b [e1] <ent> <ENT> c", "[MASK] [mask] a  [E1] ", "a[E1]b <x>", "a b c d e " * 30]
NEW = len(TOKENS)  # the first id that is free
FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def token(content: str, **switches: bool) -> dict[str, Any]:
    return {"content": content, "lstrip": False, "rstrip": False, "single_word": False, **switches}


def typed(content: str, **switches: bool) -> dict[str, Any]:
    return {"__type": "AddedToken", **token(content, **switches)}


def decoder(entry: Any) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(NEW): entry}}


CONFIGURATIONS: dict[str, tuple[Any, ...]] = {
    "max_len": ({"max_len": 16},),
    "max_len beside its new name": ({"max_len": 16, "model_max_length": 8},),
    "max_len beside no limit": ({"max_len": 16, "model_max_length": None},),
    "max_len and sides": ({"max_len": 16, "padding_side": "left", "truncation_side": "left"},),
    "by name": ({"extra_special_tokens": {"ent_token": "<ent>", "x": "<x>"}},),
    "by name, typed": ({"extra_special_tokens": {"ent_token": typed("<ent>", normalized=True, special=True)}},),
    "by name, known": ({"extra_special_tokens": {"ent_token": "[E1]"}} | decoder(token("[E1]", special=True)),),
    "by no name": ({"extra_special_tokens": {}},),
    "a key of its own": ({"ent_token": "<ent>", "add_bos_token": False},),
    "a key of its own in the map": (None, {"ent_token": "<ent>"}),
    "both": ({"ent_token": "<ent>", "extra_special_tokens": ["<x>"]},),
    "list": ({"extra_special_tokens": ["<ent>", "<x>"]},),
    "former name": ({"additional_special_tokens": [typed("[E1]", special=True)]},),
    "special without normalized": (decoder({"content": "[E1]", "special": True}),),
    "without either": (decoder({"content": "[E1]"}),),
    "special and normalized": (decoder(token("[E1]", special=True, normalized=True)),),
    "strips": (decoder({"content": "[E1]", "lstrip": True, "rstrip": True, "normalized": False}),),
    "mask, typed": ({"mask_token": typed("[MASK]", normalized=False) | {"lstrip": True}},),
    "mask in the map": (None, {"mask_token": token("[MASK]", normalized=True) | {"lstrip": True}}),
    "mask in the map, bare": (None, {"mask_token": {"content": "[MASK]", "special": False}}),
    "added": (None, None, {"<ent>": NEW, "<x>": NEW + 1}),
    "added and listed": ({"additional_special_tokens": ["<ent>"]}, None, {"<ent>": NEW}),
    "added and listed in the map": (None, {"additional_special_tokens": ["<ENT>"]}, {"<ENT>": NEW}),
    "no meaning": ({"init_inputs": [], "full_tokenizer_file": None, "never_split": None, "do_basic_tokenize": True},),
}


def auto_tokenizer(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("what is matched is transformers 5")
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def folder_of(path: Path, contents: tuple[Any, ...], with_json: bool) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "bert"}')
    if with_json:
        BertTokenizer(TOKENS).save_pretrained(path)
        (path / FILES[0]).unlink()
        (path / FILES[1]).unlink()
    (path / "vocab.txt").write_text("".join(f"{entry}\n" for entry in TOKENS))
    for name, content in zip(FILES, contents, strict=False):
        if content is not None:
            (path / name).write_text(json.dumps(content))
    return path


def switches_of(tokenizer: Any) -> dict[int, list[Any]]:
    names = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")
    return {key: [getattr(value, name) for name in names] for key, value in tokenizer.added_tokens_decoder.items()}


def assert_same(ours: BertTokenizer, theirs: Any) -> None:
    assert ours.model_max_length == theirs.model_max_length
    assert (ours.padding_side, ours.truncation_side) == (theirs.padding_side, theirs.truncation_side)
    is_limited = theirs.model_max_length < 10**20
    mine = ours(TEXTS, truncation=is_limited, padding=True)
    assert mine["input_ids"] == theirs(TEXTS, truncation=is_limited, padding=True)["input_ids"]
    assert len(ours) == len(theirs)
    assert set(ours.all_special_tokens) == set(theirs.all_special_tokens)
    assert ours.extra_special_tokens == theirs.extra_special_tokens
    assert switches_of(ours) == switches_of(theirs)
    assert {name: getattr(ours, name) for name in theirs.special_tokens_map} == theirs.special_tokens_map


@pytest.mark.parametrize("with_json", [True, False])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_folder_is_what_transformers_makes_of_it(name: str, with_json: bool, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", CONFIGURATIONS[name], with_json)
    theirs, ours = auto_tokenizer(folder), BertTokenizer.from_pretrained(folder)
    assert_same(ours, theirs)
    ours.save_pretrained(tmp_path / "saved")
    again = BertTokenizer.from_pretrained(tmp_path / "saved")
    assert again(TEXTS, verbose=False)["input_ids"] == ours(TEXTS, verbose=False)["input_ids"]
    assert again(TEXTS, verbose=False)["input_ids"] == auto_tokenizer(tmp_path / "saved")(TEXTS)["input_ids"]
    assert again.special_tokens_map == ours.special_tokens_map
    assert again.model_max_length == ours.model_max_length


def test_special_tokens_by_name_are_attributes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", CONFIGURATIONS["by name"], False)
    theirs, ours = auto_tokenizer(folder), BertTokenizer.from_pretrained(folder)
    made = BertTokenizer(TOKENS, extra_special_tokens={"ent_token": "<ent>", "x": AddedToken("<x>", special=True)})
    for tokenizer in (ours, made):
        for name in ("ent_token", "ent_token_id", "x", "x_id"):
            assert getattr(tokenizer, name) == getattr(theirs, name), name
        assert tokenizer.decode([5, NEW, 6], skip_special_tokens=True) == "[ ]"
    with pytest.raises(AttributeError, match="'BertTokenizer' object has no attribute 'y_token'"):
        made.y_token  # noqa: B018
    with pytest.raises(ValueError, match="extra_special_tokens: mask_token is an argument of its own"):
        BertTokenizer(TOKENS, extra_special_tokens={"mask_token": "<m>"})
    with pytest.raises(TypeError, match="extra_special_tokens: expected a str as name, got 3"):
        BertTokenizer(TOKENS, extra_special_tokens={3: "<m>"})
    with pytest.raises(TypeError, match=r"extra_special_tokens\['m'\]: expected a str or an AddedToken, got int"):
        BertTokenizer(TOKENS, extra_special_tokens={"m": 3})


def test_special_tokens_that_are_split_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", ({"split_special_tokens": True},), False)
    with pytest.raises(ValueError, match=r"tokenizer_config.json: split_special_tokens: only false is supported"):
        BertTokenizer.from_pretrained(folder)


ADDITIONS: dict[str, Callable[[Any, Any], Any]] = {
    "special": lambda tok, kind: tok.add_tokens([kind("[E1]", special=True)]),
    "special and normalized": lambda tok, kind: tok.add_tokens([kind("[E1]", special=True, normalized=True)]),
    "as special": lambda tok, kind: tok.add_tokens([kind("[E1]")], special_tokens=True),
    "as special, normalized": lambda tok, kind: tok.add_tokens([kind("[E1]", normalized=True)], special_tokens=True),
    "not special": lambda tok, kind: tok.add_tokens([kind("[E1]")]),
    "named": lambda tok, kind: tok.add_special_tokens({"bos_token": kind("[E1]")}),
    "extra": lambda tok, kind: tok.add_special_tokens({"extra_special_tokens": [kind("[E1]")]}),
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_added_tokens_are_normalized_if_not_special(name: str, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    theirs = auto_tokenizer(folder_of(tmp_path / "model", (), True))
    ADDITIONS[name](theirs, tokenizers.AddedToken)
    for kind in (AddedToken, tokenizers.AddedToken):
        ours = BertTokenizer(TOKENS)
        ADDITIONS[name](ours, kind)
        mine, other = ours.added_tokens_decoder[NEW], theirs.added_tokens_decoder[NEW]
        assert (mine.special, mine.normalized) == (other.special, other.normalized)
        assert ours(TEXTS)["input_ids"] == theirs(TEXTS)["input_ids"]


def test_an_added_token_alone_is_as_the_library_has_it() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    for switches in ({}, {"special": True}, {"special": True, "normalized": True}, {"normalized": False}):
        mine, other = AddedToken("a", **switches), tokenizers.AddedToken("a", **switches)
        assert (mine.special, mine.normalized) == (other.special, other.normalized)
    token = tokenizers.AddedToken("[E1]")
    BertTokenizer(TOKENS).add_tokens([token], special_tokens=True)
    assert (token.special, token.normalized) == (False, True)  # the caller's stays as it was
