"""`XLMRobertaTokenizer` against transformers' fast tokenizer of the same tokenizer.json: calls, batches, files."""

import copy
import json
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_fast import BackendError, BertTokenizer, XLMRobertaTokenizer
from bert_fast.tokenization import engine

from . import test_call
from .native_core import needs_native
from .test_call import SENTENCES, random_call
from .unigram_core import MARK, Piece, added_token, forms, make_state, metaspace, replace, sequence, strip

pytestmark = needs_native

LETTERS = {c for sentence in SENTENCES for c in sentence if not c.isspace()} - set("今supw")
WORDS = (
    "Hello",
    "a",
    "the",
    "café",
    "word",
    "facade",
    "costs",
    "x",
    "new",
    "lines",
    "right",
    "天气",
    "123",
    "fun",
    "and",
)
PIECES: list[Piece] = [
    *((MARK + word, -4.0 - place) for place, word in enumerate(WORDS)),
    *((letter, -8.0 - ord(letter) % 5) for letter in sorted(LETTERS)),
    *((MARK, -3.0), ("un", -6.0), ("aff", -6.5), ("able", -6.0), ("ing", -5.0), ("zero", -7.0), ("wid", -7.5)),
]
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>", "pad_token": "<pad>"}
NAMED |= {"cls_token": "<s>", "mask_token": "<mask>"}


def same(ours: Any, theirs: Any, type_ids: bool = True) -> None:
    """As for BERT; but the library calls an unknown token by the text that it was."""
    state = state_of()
    names = [piece for piece, _ in state["model"]["vocab"]] + ["covid", "x-ray"]
    test_call.same(ours, theirs, names.__getitem__, type_ids)


def state_of(form: str = "xlm-r", **edits: Any) -> dict[str, Any]:
    return make_state(PIECES, forms()[form]) | edits


@pytest.fixture
def theirs(tmp_path: Path) -> Callable[..., Any]:
    transformers = pytest.importorskip("transformers")
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("what is matched is transformers 5")

    def make(state: dict[str, Any], **options: Any) -> Any:
        path = tmp_path / "theirs.json"
        path.write_text(json.dumps(state), encoding="utf-8")
        names = ["input_ids", "attention_mask"]
        return transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(path), **NAMED, **({"model_input_names": names} | options)
        )

    return make


@pytest.mark.filterwarnings("ignore:.*max_length")
@pytest.mark.parametrize("form", ["xlm-r", "bge-m3"])
def test_random_calls(form: str, theirs: Callable[..., Any]) -> None:
    rng = random.Random(form)
    agreed, refused = 0, []
    mine, other = XLMRobertaTokenizer(state_of(form)), theirs(state_of(form))
    for _ in range(250):
        text, pair, options = random_call(rng)
        mine.truncation_side = other.truncation_side = rng.choice(["right", "right", "left"])
        try:
            result = mine(text, pair, **options)
        except ValueError as error:
            refused.append(str(error))
            continue
        # Of further windows the library gives B another type than the template.
        same(result, other(text, pair, **options), type_ids=not options["return_overflowing_tokens"])
        agreed += 1
    assert agreed > 150
    assert all("max_length" in reason or "stride" in reason or "truncat" in reason for reason in refused)


@pytest.mark.parametrize("kind", ["pt", "np"])
def test_padded_matrices(kind: str, theirs: Callable[..., Any]) -> None:
    mine, other = XLMRobertaTokenizer(state_of()), theirs(state_of())
    texts, pairs = [*SENTENCES], [*reversed(SENTENCES)]
    for second in (None, pairs):
        for options in ({"max_length": 9}, {"max_length": 30, "padding_side": "left"}, {"return_token_type_ids": True}):
            options |= {"padding": True, "truncation": True, "return_tensors": kind}
            options.setdefault("max_length", 16)
            same(mine(texts, second, **options), other(texts, second, **options))


def test_type_ids_and_separators_are_those_of_the_template(theirs: Callable[..., Any]) -> None:
    state = state_of()
    template = state["post_processor"]
    template["pair"] = [*template["single"], {"Sequence": {"id": "B", "type_id": 1}}]
    template["pair"].append({"SpecialToken": {"id": "</s>", "type_id": 1}})
    options: dict[str, Any] = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    mine, other = XLMRobertaTokenizer(state, **options), theirs(state, **options)
    for arguments in (("a", "the word"), (["a", "x"], ["", "the"]), ("", "")):
        same(mine(*arguments), other(*arguments))
        same(mine(*arguments, padding=True, return_tensors="np"), other(*arguments, padding=True, return_tensors="np"))
    assert mine("a", "x")["token_type_ids"] == [0, 0, 0, 1, 1]
    assert (mine.num_special_tokens_to_add(), mine.num_special_tokens_to_add(pair=True)) == (2, 3)
    assert XLMRobertaTokenizer(state_of()).num_special_tokens_to_add(pair=True) == 4


def test_methods(theirs: Callable[..., Any]) -> None:
    mine, other = XLMRobertaTokenizer(state_of()), theirs(state_of())
    text, pair = "Hello the <mask>, word", "x 天气"
    assert mine.encode(text, pair) == other.encode(text, pair)
    assert mine.tokenize(text) == [token.strip() for token in other.tokenize(text)]  # <mask> without its space
    ids = mine.encode(text, pair)
    for skip in (False, True):
        assert mine.decode(ids, skip_special_tokens=skip) == other.decode(ids, skip_special_tokens=skip)
    tokens = [MARK + "the", "nothing"]
    assert mine.convert_tokens_to_ids(tokens) == other.convert_tokens_to_ids(tokens)
    first, second = mine.encode(text, add_special_tokens=False), mine.encode(pair, add_special_tokens=False)
    assert mine.build_inputs_with_special_tokens(first, second) == ids
    assert (
        mine.get_special_tokens_mask(first, second)
        == mine(text, pair, return_special_tokens_mask=True)["special_tokens_mask"]
    )
    assert mine.create_token_type_ids_from_sequences(first, second) == [0] * len(ids)
    assert {name: getattr(mine, name) for name in NAMED} == NAMED
    assert (len(mine), mine.vocab_size) == (len(other), other.vocab_size)


def test_added_tokens(theirs: Callable[..., Any]) -> None:
    mine, other = XLMRobertaTokenizer(state_of()), theirs(state_of())
    for tokenizer in (mine, other):
        assert tokenizer.add_tokens(["covid", "x-ray"]) == 2
    texts = ["a covid x-ray", "covidx-ray", "COVID <mask>covid"]
    same(mine(texts, return_offsets_mapping=True), other(texts, return_offsets_mapping=True))


def test_ragged_and_packed_are_the_rows_of_a_call() -> None:
    tokenizer = XLMRobertaTokenizer(state_of())
    rows = tokenizer([*SENTENCES], return_offsets_mapping=True)
    ragged = tokenizer.encode_ragged([*SENTENCES], return_offsets_mapping=True, return_word_ids=True)
    assert ragged.ids.tolist() == [token for row in rows["input_ids"] for token in row]
    assert ragged.offsets.tolist() == [list(pair) for row in rows["offset_mapping"] for pair in row]
    words = [-1 if word is None else word for row in range(len(SENTENCES)) for word in rows.word_ids(row)]
    assert ragged.word_ids.tolist() == words
    assert tokenizer.encode_ragged(np.array(SENTENCES)).ids.tolist() == ragged.ids.tolist()  # a column
    packed = tokenizer.pack([*SENTENCES])
    assert packed.input_ids.tolist() == ragged.ids.tolist()
    assert packed.cu_seqlens.tolist() == ragged.cu_seqlens.tolist()
    pairs = tokenizer.pack([*SENTENCES], [*reversed(SENTENCES)], max_length=20)
    want = tokenizer([*SENTENCES], [*reversed(SENTENCES)], max_length=20, truncation=True)["input_ids"]
    assert pairs.input_ids.tolist() == [token for row in want for token in row]
    assert not pairs.token_type_ids.any()


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:a row has")
def test_what_is_saved_is_read_alike(tmp_path: Path, theirs: Callable[..., Any]) -> None:
    mine = XLMRobertaTokenizer(state_of("bge-m3"), model_max_length=24, padding_side="left")
    mine.add_tokens(["covid"])
    names = sorted(Path(path).name for path in mine.save_pretrained(tmp_path / "saved"))
    assert names == ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
    state = json.loads((tmp_path / "saved" / "tokenizer.json").read_text(encoding="utf-8"))
    want = theirs(state)(list(SENTENCES))
    for again in (XLMRobertaTokenizer.from_pretrained(tmp_path / "saved"), pickle.loads(pickle.dumps(mine)),
                  copy.deepcopy(mine)):  # fmt: skip
        assert (again.model_max_length, again.padding_side, len(again)) == (24, "left", len(mine))
        same(again(list(SENTENCES)), want)
    (tmp_path / "tokenizer.json").write_text(json.dumps(state | {"padding": {"direction": "Left"}}), encoding="utf-8")
    assert XLMRobertaTokenizer.from_pretrained(tmp_path).padding_side == "left"
    assert XLMRobertaTokenizer(tmp_path / "tokenizer.json").encode("a covid") == mine.encode("a covid")


def test_what_an_added_token_says_counts(tmp_path: Path, theirs: Callable[..., Any]) -> None:
    """And not what a configuration file says beside its name."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_text(json.dumps(state_of()), encoding="utf-8")
    mask = {"__type": "AddedToken", "content": "<mask>", "lstrip": False, "normalized": True}
    config = {"tokenizer_class": "XLMRobertaTokenizer", **NAMED, "mask_token": mask}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    ours, other = XLMRobertaTokenizer.from_pretrained(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    token, expected = (made.added_tokens_decoder[made.mask_token_id] for made in (ours, other))
    assert (token.lstrip, token.normalized) == (expected.lstrip, expected.normalized) == (True, False)
    texts = ["a <mask> the", "a<mask>"]
    assert ours(texts, return_offsets_mapping=True) == dict(other(texts, return_offsets_mapping=True))


def test_its_own_class_of_transformers_reads_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    mine = XLMRobertaTokenizer(state_of(), exact_scores=True)
    mine.save_pretrained(tmp_path)
    other = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert type(other).__name__.startswith("XLMRobertaTokenizer")
    assert mine(list(SENTENCES), list(SENTENCES))["input_ids"] == other(list(SENTENCES), list(SENTENCES))["input_ids"]


def bad_states() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Name, what is changed, and what the message says."""
    nfkc, model = forms()["xlm-r"]["normalizer"], state_of()["model"]
    broken = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    long_map = {"type": "Precompiled", "precompiled_charsmap": "/////w=="}
    yield "wordpiece", {"model": {"type": "WordPiece", "vocab": {}}}, "expected a Unigram model, got WordPiece"
    yield "no model", {"model": None}, "expected a Unigram model, got None"
    yield "no unk", {"model": model | {"unk_id": None}}, "model: unk_id: expected an integer"
    yield "far unk", {"model": model | {"unk_id": 99999}}, "model: unk_id: expected the id of one of the"
    twice, endless = [["a", 0.0], ["a", -1.0]], [*model["vocab"], ["zz", float("inf")]]
    yield "twice", {"model": model | {"vocab": twice, "unk_id": 0}}, r"vocab\[1\]: the piece 'a' stands at 0 already"
    yield "no score", {"model": model | {"vocab": [["a"]]}}, r"model: vocab\[0\]: expected a piece and its score"
    yield "endless", {"model": model | {"vocab": endless}}, r"scores\[\d+\]: expected a finite number"
    yield "nfkc", {"normalizer": {"type": "NFKC"}}, "normalizer: expected Precompiled, Strip, .*, got NFKC"
    yield "two maps", {"normalizer": sequence("normalizers", nfkc, nfkc)}, r"normalizer\[1\]: expected one Precompiled"
    yield "base64", {"normalizer": broken | {"precompiled_charsmap": "a"}}, "precompiled_charsmap: expected base64"
    yield "short map", {"normalizer": broken}, "charsmap: expected the size of a trie and the trie, got 3 bytes"
    yield "long map", {"normalizer": long_map}, "charsmap: expected the size of a trie and the trie, got 4 bytes"
    yield "regex", {"normalizer": replace("[ab]", "c")}, "pattern: expected a String, a Regex of spaces alone"
    yield "strip", {"normalizer": strip(True, True) | {"strip_left": 1}}, "strip_left: expected true or false, got 1"
    yield "bytelevel", {"pre_tokenizer": {"type": "ByteLevel"}}, "pre_tokenizer: expected Metaspace, alone or behind"
    removed = sequence("pretokenizers", {"type": "Punctuation", "behavior": "Removed"}, metaspace())
    yield "punctuation", {"pre_tokenizer": removed}, r"pre_tokenizer\[0\]: behavior: expected 'Isolated', got 'Removed'"
    yield "no words", {"pre_tokenizer": None}, "pre_tokenizer: expected Metaspace, .*, got None"
    yield "mark", {"pre_tokenizer": metaspace() | {"replacement": "__"}}, "replacement: expected one character"
    yield "scheme", {"pre_tokenizer": metaspace("last")}, "prepend_scheme: expected 'always', 'first' or 'never'"
    yield "no template", {"post_processor": None}, "post_processor: expected a TemplateProcessing that makes <s> A </s>"
    yield "roberta", {"post_processor": {"type": "RobertaProcessing"}}, "post_processor: .*got RobertaProcessing"
    yield "decoder", {"decoder": {"type": "WordPiece"}}, "decoder: expected Metaspace, got WordPiece"
    yield "added", {"added_tokens": [{"content": "a"}]}, r"added_tokens\[0\]: id: expected an integer"


@pytest.mark.parametrize(("edit", "message"), [pytest.param(*case[1:], id=case[0]) for case in bad_states()])
def test_what_is_not_run_is_named(edit: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        XLMRobertaTokenizer(state_of() | edit)


def test_bad_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="tokenizer_file: expected a path, got int"):
        XLMRobertaTokenizer(5)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="tokenizer_file: there is no file"):
        XLMRobertaTokenizer(tmp_path / "none.json")
    with pytest.raises(ValueError, match="special tokens are missing from the vocabulary: pad_token '<void>'"):
        XLMRobertaTokenizer(state_of(), pad_token="<void>")
    with pytest.raises(TypeError, match="added_tokens: expected a mapping"):
        XLMRobertaTokenizer(state_of(), added_tokens=["a"])  # type: ignore[arg-type]
    (tmp_path / "tokenizer.json").write_text(json.dumps(state_of()), encoding="utf-8")
    with pytest.raises(ValueError, match=r"expected a WordPiece model, got Unigram; XLMRobertaTokenizer reads it"):
        BertTokenizer.from_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("a\n")
    with pytest.raises(ValueError, match=r"vocab\.txt: expected a tokenizer\.json"):
        XLMRobertaTokenizer.from_pretrained(tmp_path / "vocab.txt")
    tokenizer = XLMRobertaTokenizer(state_of())
    with pytest.raises(TypeError, match="tokens: expected a list of str"):
        tokenizer.convert_tokens_to_string([1])  # type: ignore[list-item]
    monkeypatch.setattr(engine.native, "load", lambda: None)
    with pytest.raises(BackendError, match=r"a Unigram tokenizer needs the C\+\+ extension"):
        XLMRobertaTokenizer(state_of())


def test_a_prefix_space_that_is_off_is_older_files_never() -> None:
    """`add_prefix_space: false`, in the pre-tokenizer and the decoder."""
    older = {"type": "Metaspace", "replacement": MARK, "add_prefix_space": False}
    tokenizer = XLMRobertaTokenizer(state_of() | {"pre_tokenizer": older, "decoder": older})
    assert tokenizer.tokenize("word word")[-1] == MARK + "word"
    assert not tokenizer.tokenize("word")[0].startswith(MARK)
    assert tokenizer.decode(tokenizer.encode(" the", add_special_tokens=False)) == " the"


def test_an_added_token_of_the_file_has_its_switches() -> None:
    size = len(state_of()["model"]["vocab"])
    state = state_of()
    state["added_tokens"].append(added_token("<e>", size, rstrip=True, special=False))
    encoding = XLMRobertaTokenizer(state)("a <e>   the", return_offsets_mapping=True)
    assert encoding["offset_mapping"][-3:] == [(2, 8), (8, 11), (0, 0)]
