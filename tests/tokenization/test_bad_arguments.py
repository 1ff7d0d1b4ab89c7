"""Arguments of the wrong kind: TypeErrors and ValueErrors that name the argument of the called function."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast.tokenization import AddedToken, BatchEncoding, BertTokenizer

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##c"]
SCALAR, FLAGS, META = torch.tensor(5), torch.ones(2, dtype=torch.bool), torch.ones(2, device="meta")


class Silent:
    """Neither true nor false, and without words."""

    def __bool__(self) -> bool:
        raise KeyError("bool")

    def __repr__(self) -> str:
        raise KeyError("repr")


@pytest.fixture
def tokenizer() -> BertTokenizer:
    return BertTokenizer(VOCAB)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("never_split", SCALAR),
        ("never_split", [1]),
        ("model_input_names", 5),
        ("model_max_length", float("inf")),
        ("model_max_length", FLAGS),
        ("max_input_chars_per_word", 1.5),
        ("max_input_chars_per_word", -1),
        ("tokenize_chinese_chars", 1),
        ("do_lower_case", 1),
        ("continuing_subword_prefix", 5),
        ("do_basic_tokenize", FLAGS),
        ("clean_up_tokenization_spaces", FLAGS),
        ("padding_side", np.array(["left", "right"])),
        ("pad_token_type_id", [0]),
        ("extra_special_tokens", FLAGS),
        ("extra_special_tokens", ["\ud800"]),
        ("added_tokens", 5),
        ("added_tokens", {-1: AddedToken("x")}),
        ("additional_special_tokens", [5]),
        ("model_max_length", -1),
        ("model_max_length", 10**5000),
        ("model_input_names", ["\ud800"]),
        ("pad_token_type_id", 2**64),
        ("name_or_path", 5),
        ("added_tokens", {9: "x"}),
        ("vocab", ["[PAD]", ["[UNK]"]]),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_constructor(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{name}\b"):
        BertTokenizer(**{"vocab": VOCAB, name: value})


METHODS: list[tuple[str, tuple[Any, ...], str]] = [
    ("decode", (5.5,), "token_ids"),
    ("decode", ([5, "a"],), "token_ids[1]"),
    ("decode", ([5, FLAGS], True), "token_ids[1]"),
    ("decode", ([8],), "token_ids[0]"),
    ("decode", ({"ids": [5]},), "token_ids"),
    ("decode", (META,), "token_ids"),
    ("batch_decode", (5,), "sequences"),
    ("batch_decode", ([[5], [8]],), "sequences[1]: token_ids[0]"),
    ("convert_ids_to_tokens", (None,), "ids"),
    ("convert_ids_to_tokens", (8,), "ids"),
    ("convert_ids_to_tokens", ([5, 1.5],), "ids[1]"),
    ("convert_ids_to_tokens", ([[5]], True), "ids[0]"),
    ("convert_tokens_to_ids", (5,), "tokens"),
    ("convert_tokens_to_ids", ([["a"]],), "tokens"),
    ("convert_tokens_to_string", ([5],), "tokens"),
    ("convert_tokens_to_string", (SCALAR,), "tokens"),
    ("add_tokens", (["new", "\ud800"],), "new_tokens[1]"),
    ("add_special_tokens", (5,), "special_tokens_dict"),
    ("build_inputs_with_special_tokens", (5,), "token_ids_0"),
    ("build_inputs_with_special_tokens", ([5], SCALAR), "token_ids_1"),
    ("create_token_type_ids_from_sequences", (5,), "token_ids_0"),
    ("get_special_tokens_mask", (5,), "token_ids_0"),
    ("get_special_tokens_mask", ([[5]], None, True), "token_ids_0"),
    ("tokenize", ([],), "text"),
    ("pad", ([{"input_ids": [5], "labels": 1}, {"input_ids": [5]}],), "encoded_inputs"),
    ("pad", ({"input_ids": 5},), "encoded_inputs"),
    ("pad", ({"input_ids": [[5], 5]},), "encoded_inputs"),
    ("pad", ({"input_ids": [[5]], "labels": 1},), "encoded_inputs"),
    ("decode", ([5], FLAGS), "skip_special_tokens"),
    ("decode", ([5], False, FLAGS), "clean_up_tokenization_spaces"),
    ("decode", (10**5000,), "token_ids[0]"),
    ("convert_ids_to_tokens", ([5], FLAGS), "skip_special_tokens"),
    ("add_tokens", (["x"], FLAGS), "special_tokens"),
    ("add_special_tokens", ({"eos_token": ""},), "eos_token"),
    ("add_special_tokens", ({"extra_special_tokens": ["x", ""]},), "extra_special_tokens"),
    ("add_special_tokens", ({"eos_token": "x"}, FLAGS), "replace_extra_special_tokens"),
    ("num_special_tokens_to_add", (FLAGS,), "pair"),
    ("get_special_tokens_mask", ([5], None, FLAGS), "already_has_special_tokens"),
    ("tokenize", ("a", 5), "pair"),
    ("encode", ("a", None, FLAGS), "add_special_tokens"),
    ("pad", ({1: 2, "a": 3},), "encoded_inputs"),
    ("pad", ({"input_ids": {5}},), "encoded_inputs"),
    ("pad", ({"input_ids": [5], "labels": META},), "encoded_inputs"),
    ("pad", ({"input_ids": [5], "labels": ["a"]}, True, None, None, None, None, "pt"), "encoded_inputs"),
    ("pad", ({"input_ids": [5]}, True, None, "8"), "pad_to_multiple_of"),
    ("pad", ({"input_ids": [5]}, True, None, None, None, FLAGS), "return_attention_mask"),
    ("pad", ({"input_ids": [5]}, "max_length", 2**64), "max_length"),
    ("save_pretrained", (".", 5), "filename_prefix"),
    ("pack", (["a", 5],), "texts[1]"),
    ("pack", (["a", "b"], ["a"]), "pairs"),
    ("save_pretrained", ("\0",), "save_directory"),
    ("save_vocabulary", (5,), "save_directory"),
    ("save_vocabulary", (".", "\0"), "filename_prefix"),
    ("from_pretrained", (5,), "pretrained_model_name_or_path"),
]


@pytest.mark.parametrize(
    ("method", "arguments", "name"), METHODS, ids=[f"{method} {name}" for method, _, name in METHODS]
)
def test_methods(tokenizer: BertTokenizer, method: str, arguments: tuple[Any, ...], name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(name)}: "):
        getattr(tokenizer, method)(*arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"add_special_tokens": FLAGS},
        {"verbose": FLAGS},
        {"return_length": FLAGS},
        {"return_offsets_mapping": FLAGS},
        {"is_split_into_words": FLAGS},
        {"padding_side": np.array(["left", "right"])},
        {"padding": np.array(["longest", "longest"])},
        {"return_tensors": np.array(["pt", "np"])},
        {"padding": 10**5000},
        {"stride": -(10**5000)},
        {"max_length": 2**31, "padding": "max_length"},
        {"pad_to_multiple_of": 2**31, "padding": True},
        {"verbose": Silent()},
        {"return_tensors": Silent()},
    ],
    ids=lambda options: next(iter(options)),
)
def test_calls(tokenizer: BertTokenizer, options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        tokenizer(["a", "b"], **options)


@pytest.mark.parametrize("text", [SCALAR, np.array("a"), (None, np.array([0, 1]))], ids=["tensor", "array", "buffer"])
def test_texts(tokenizer: BertTokenizer, text: Any) -> None:
    with pytest.raises(TypeError, match=r"^text: expected"):
        tokenizer(text)


def test_flags_are_truth_values(tokenizer: BertTokenizer) -> None:
    flags: dict[str, Any] = {"add_special_tokens": 2, "return_offsets_mapping": 1}
    assert tokenizer(["a b"], max_length=3, **flags)["input_ids"] == [[2, 5, 3]]
    assert tokenizer.encode_ragged(["a b"], **flags).offsets is not None
    with pytest.raises(TypeError, match="return_word_ids"):
        tokenizer.encode_ragged(["a"], return_word_ids=FLAGS)  # type: ignore[arg-type]


def test_assigned_ids(tokenizer: BertTokenizer) -> None:
    for value in (-1, 8, [], "a", FLAGS):
        with pytest.raises((TypeError, ValueError), match=r"^mask_token_id: "):
            tokenizer.mask_token_id = value
    assert tokenizer.mask_token_id == 4


def test_refused_tokens_are_not_added(tokenizer: BertTokenizer) -> None:
    before = tokenizer.get_vocab()
    with pytest.raises(ValueError, match=r"^new_tokens\[1\]"):
        tokenizer.add_tokens(["new", "\ud800"])
    assert tokenizer.get_vocab() == before
    assert tokenizer.add_tokens("new") == 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_huge_max_length_cuts_nothing(side: str) -> None:
    tokenizer = BertTokenizer(VOCAB, truncation_side=side, model_max_length=2**64)
    assert tokenizer("a b", max_length=10**30)["input_ids"] == [2, 5, 6, 3]
    assert tokenizer(["a b"], truncation=True, padding=True, return_tensors="np")["input_ids"].tolist() == [
        [2, 5, 6, 3]
    ]
    assert tokenizer.pack([("a", "b")], max_length=2**63).max_seqlen == 5
    assert tokenizer.encode_ragged(["a b"], max_length=10**30).ids.tolist() == [2, 5, 6, 3]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("padding_side", "top"),
        ("truncation_side", 5),
        ("model_max_length", "long"),
        ("model_input_names", 5),
        ("pad_token_type_id", 0.5),
        ("clean_up_tokenization_spaces", FLAGS),
    ],
)
def test_assigned_attributes(tokenizer: BertTokenizer, name: str, value: Any) -> None:
    before = getattr(tokenizer, name)
    with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
        setattr(tokenizer, name, value)
    assert getattr(tokenizer, name) == before


@pytest.mark.parametrize(("name", "value"), [("content", 5), ("lstrip", 1), ("special", FLAGS)])
def test_added_tokens(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name}: "):
        AddedToken(**{"content": "x", name: value})


@pytest.mark.parametrize(
    ("method", "arguments", "name"),
    [
        ("tokens", (FLAGS,), "batch_index"),
        ("word_ids", ("0",), "batch_index"),
        ("token_to_chars", (0.5,), "batch_or_token_index"),
        ("token_to_word", (0, [1]), "token_index"),
        ("char_to_token", (0, 2**64), "char_index"),
        ("word_to_tokens", (0, 0, META), "sequence_index"),
        ("__getitem__", (FLAGS,), "index"),
        ("to", ("nowhere",), "device"),
        ("to", ("cpu",), "non_blocking"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_encodings(tokenizer: BertTokenizer, method: str, arguments: tuple[Any, ...], name: str) -> None:
    encoding = tokenizer(["a b"], return_tensors="pt")
    options = {name: FLAGS} if name == "non_blocking" else {}
    with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
        getattr(encoding, method)(*arguments, **options)


def test_entries_of_an_encoding() -> None:
    with pytest.raises(TypeError, match=r"^data: expected a mapping, got Tensor"):
        BatchEncoding(FLAGS)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^encodings: expected rows"):
        BatchEncoding({}, 5)  # type: ignore[arg-type]
