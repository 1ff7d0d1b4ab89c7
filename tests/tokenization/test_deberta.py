"""`XLMRobertaTokenizer` on DeBERTa's files against transformers' own `DebertaV2Tokenizer`: calls, files, fusing."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from bert_fast import XLMRobertaTokenizer
from bert_fast.huggingface.same_tokenizer import same_tokenizer
from bert_fast.testing.charsmap import encoded
from bert_fast.tokenization import load_tokenizer

from . import test_call
from .native_core import needs_native
from .test_call import SENTENCES, random_call
from .test_unigram import PIECES
from .test_unigram_scores import CHARACTERS, tied_pieces
from .unigram_core import MARK, added_token, forms, make_engine, make_library, make_state, replace, sequence, strip

pytestmark = needs_native

transformers = pytest.importorskip("transformers")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("what is matched is transformers 5", allow_module_level=True)

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
VOCAB = list(dict([*((token, 0.0) for token in SPECIAL), *PIECES, (MARK + ",", -7.0), *tied_pieces()]).items())
NAMES = [*(piece for piece, _ in VOCAB), "[MASK]"]
TEXTS = [
    *SENTENCES,
    "a [MASK] word [MASK]",
    "[MASK]the[UNK] word[CLS]x",
    "cafe\u0301  the\u00a0\u2028word\u3000\r\n and  ",
    "\u1112\u1161\u11ab \u0301\u0323 A\u030a \u212b \u0958",
    " \t\n ",
    *(character * 9 for character in CHARACTERS),  # ties, which the last bit of scores decides
]
OPTIONS = ({}, {"do_lower_case": True, "split_by_punct": True}, {"split_by_punct": True, "add_prefix_space": False})


def make_theirs(**options: Any) -> Any:
    return transformers.DebertaV2Tokenizer(vocab=list(VOCAB), **options)


def same(ours: Any, theirs: Any, type_ids: bool = True) -> None:
    test_call.same(ours, theirs, NAMES.__getitem__, type_ids)


@pytest.mark.parametrize("options", OPTIONS, ids=("plain", "lower and words", "first"))
@pytest.mark.filterwarnings("ignore:.*max_length")
def test_random_calls(options: dict[str, Any], tmp_path: Path) -> None:
    other = make_theirs(**options)
    other.save_pretrained(tmp_path)
    mine = load_tokenizer(tmp_path)
    assert isinstance(mine, XLMRobertaTokenizer)
    for arguments in ((TEXTS,), (TEXTS, TEXTS[::-1]), ("a", "the")):
        same(mine(*arguments, return_offsets_mapping=True), other(*arguments, return_offsets_mapping=True))
    rng = random.Random(str(options))
    agreed, refused = 0, []
    for _ in range(150):
        text, pair, chosen = random_call(rng)
        mine.truncation_side = other.truncation_side = rng.choice(["right", "right", "left"])
        try:
            result = mine(text, pair, **chosen)
        except ValueError as error:
            refused.append(str(error))
            continue
        same(result, other(text, pair, **chosen))
        agreed += 1
    assert agreed > 90
    assert all("max_length" in reason or "stride" in reason or "truncat" in reason for reason in refused)


def test_methods_and_packed_rows(tmp_path: Path) -> None:
    other = make_theirs()
    other.save_pretrained(tmp_path)
    mine = load_tokenizer(tmp_path)
    named = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    for name in (*(f"{name}_token" for name in named), *(f"{name}_token_id" for name in named), "model_input_names"):
        assert getattr(mine, name) == getattr(other, name), name
    assert (len(mine), mine.vocab_size) == (len(other), other.vocab_size)
    ids = other(TEXTS, TEXTS[::-1])["input_ids"]
    for skip in (False, True):
        assert mine.batch_decode(ids, skip_special_tokens=skip) == other.batch_decode(ids, skip_special_tokens=skip)
    packed = mine.pack(TEXTS, TEXTS[::-1], max_length=20)
    want = other(TEXTS, TEXTS[::-1], max_length=20, truncation=True)
    for name in ("input_ids", "token_type_ids"):
        assert packed[name].tolist() == [value for row in want[name] for value in row], name


def test_what_is_saved_is_read_alike(tmp_path: Path) -> None:
    """By us and by the class of transformers, scores as they are written."""
    other = make_theirs(do_lower_case=True, split_by_punct=True)
    other.save_pretrained(tmp_path / "theirs")
    expected = other(TEXTS)["input_ids"]
    rounded = XLMRobertaTokenizer(tmp_path / "theirs" / "tokenizer.json")
    assert rounded(TEXTS)["input_ids"] != expected  # the ties
    exact = XLMRobertaTokenizer(tmp_path / "theirs" / "tokenizer.json", exact_scores=True)
    for name, mine in (("folder", load_tokenizer(tmp_path / "theirs")), ("file", exact)):
        mine.save_pretrained(tmp_path / name)
        again = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert type(again) is transformers.DebertaV2Tokenizer
        for read in (mine, load_tokenizer(tmp_path / name), again):
            assert read(TEXTS)["input_ids"] == expected
            assert read.mask_token == "[MASK]"
    rounded.save_pretrained(tmp_path / "rounded")
    for read in (transformers.AutoTokenizer, XLMRobertaTokenizer):
        assert read.from_pretrained(tmp_path / "rounded")(TEXTS)["input_ids"] == rounded(TEXTS)["input_ids"]


def test_a_folder_of_the_model_alone_has_the_scores_of_its_class(tmp_path: Path) -> None:
    other = make_theirs()
    (tmp_path / "tokenizer.json").write_text(other.backend_tokenizer.to_str(), encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "deberta-v2"}')
    assert load_tokenizer(tmp_path)(TEXTS)["input_ids"] == other(TEXTS)["input_ids"]


@pytest.mark.parametrize("options", OPTIONS, ids=("plain", "lower and words", "first"))
def test_the_one_in_memory_is_the_same(options: dict[str, Any]) -> None:
    other = make_theirs(**options)
    mine = same_tokenizer(other)
    assert isinstance(mine, XLMRobertaTokenizer), mine
    assert mine(TEXTS, TEXTS[::-1])["input_ids"] == other(TEXTS, TEXTS[::-1])["input_ids"]
    tokenizers = pytest.importorskip("tokenizers")
    other.backend_tokenizer.normalizer = tokenizers.normalizers.NFKC()
    assert "expected Precompiled, Strip, Replace, NFC or Lowercase, got NFKC" in str(same_tokenizer(other))


def test_files_that_transformers_4_converted(tmp_path: Path) -> None:
    """Whitespace stripped on both sides, the character map, and an [UNK] that is looked for in normalized text."""
    other = make_theirs()
    state = json.loads(other.backend_tokenizer.to_str()) | forms()["deberta, converted"]
    next(token for token in state["added_tokens"] if token["content"] == "[UNK]")["normalized"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    mine = XLMRobertaTokenizer(tmp_path / "tokenizer.json")
    texts = [*TEXTS, "  \u3000[UNK] the[UNK]word [\uff35NK] [unk] ", "ﬁ \u200b the", "\u2028a  [MASK]  b"]
    for arguments in ((texts,), (texts, texts[::-1])):
        got, want = (made(*arguments, return_offsets_mapping=True) for made in (mine, theirs))
        assert got["input_ids"] == want["input_ids"]
        assert got["offset_mapping"] == want["offset_mapping"]


SPACES_FOR_X = {"type": "Precompiled", "precompiled_charsmap": encoded({b"x": " "})}
Z_FOR_SPACES = {"type": "Precompiled", "precompiled_charsmap": encoded({b" ": "z"})}
NORMALIZERS = {
    "stripped once": sequence("normalizers", strip(True, False), SPACES_FOR_X),
    "stripped twice": sequence("normalizers", strip(True, False), SPACES_FOR_X, strip(True, True)),
    "stripped behind the map": sequence("normalizers", SPACES_FOR_X, strip(True, False)),
    "stripped before runs": sequence("normalizers", strip(True, True), replace(" {2,}", MARK)),
    "stripped before NFC": sequence("normalizers", strip(True, False), {"type": "NFC"}),
    "whitespace before the map": sequence("normalizers", replace(r"\s{2,}|[\n\r\t]", " "), Z_FOR_SPACES),
}


@pytest.mark.parametrize("split", ["spaces", "whitespace first"])
@pytest.mark.parametrize("form", ["deberta", "deberta, lower and words", "deberta, converted", *NORMALIZERS])
def test_words_are_kept_where_a_text_is_cut(form: str, split: str) -> None:
    """Texts cut at spaces and taken whole: the same, with a token in normalized text that any word may hold."""
    parts = forms()["bge-m3"] | {"normalizer": NORMALIZERS[form]} if form in NORMALIZERS else forms()[form]
    if split == "whitespace first":
        parts = parts | {"pre_tokenizer": forms()["bare"]["pre_tokenizer"]}
    state = make_state(PIECES, parts)
    state["added_tokens"][3]["normalized"] = True
    rng = random.Random(form)
    some = ["x", "a", "the", "café", "A", "e\u0301", "<unk>", "<UNK", ">", "<", ",", "天", *" \u3000\n", "  ", "\t "]
    texts = ["".join(rng.choices(some, k=rng.randint(0, 14))) for _ in range(2000)]
    library = make_library(state).encode_batch(texts, add_special_tokens=False)
    for whole in (False, True):
        ours = make_engine(state, whole_texts=whole)
        ids, ends, offsets, word_ids = ours.encode(texts, offsets=True, word_ids=True)
        for row, want in enumerate(library):
            part = slice(ends[row], ends[row + 1])
            got = ids[part].tolist(), [tuple(pair) for pair in offsets[part].tolist()], word_ids[part].tolist()
            assert got == (want.ids, want.offsets, want.word_ids), (whole, texts[row])


@pytest.mark.parametrize(
    ("token", "text"),
    [
        ({"lstrip": True}, "a  <e>b"),
        ({"single_word": True}, "a <e>b <e> a"),
        ({"rstrip": True}, "a <e>  b"),
        ({"content": "x y"}, "a x y a"),
        ({"content": f"x{MARK}y"}, f"a x  y x{MARK}y a"),
        ({"content": "x\u00a8y"}, "a x\u00a8y x \u0308y"),
        ({"content": "\u00c9e"}, "a\u00c9e \u00e9e E\u0301e"),
    ],
    ids=("lstrip", "single word", "rstrip", "a space", "a mark", "becomes a space", "no ASCII"),
)
@pytest.mark.parametrize("form", ["bge-m3", "deberta, lower and words"])
def test_tokens_in_normalized_text_that_reach_across_words(form: str, token: dict[str, Any], text: str) -> None:
    state = make_state(PIECES, forms()[form])
    switches = {"normalized": True, "special": False, **token}
    content = switches.pop("content", "<e>")
    state["added_tokens"].append(added_token(content, len(state["model"]["vocab"]), **switches))
    want = make_library(state).encode(text, add_special_tokens=False)
    ids, _, offsets, words = make_engine(state).encode([text], offsets=True, word_ids=True)
    got = ids.tolist(), [tuple(pair) for pair in offsets.tolist()], words.tolist()
    assert got == (want.ids, want.offsets, want.word_ids)
    assert len(state["model"]["vocab"]) in want.ids
