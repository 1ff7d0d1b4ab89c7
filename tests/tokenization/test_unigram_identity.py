"""The C++ Unigram core against Hugging Face `tokenizers`: fuzzed texts, code points, real texts.

The check `unigram` of the check runner writes a million texts with the library's tokens to a file; where that is there,
it is read. Without it a small file of the same grammar is made here.
"""

import base64
import itertools
import random
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_fast.testing.charsmap import charsmap, encoded

from . import fuzz_file, unigram_fuzz_file
from .native_core import assert_same, needs_native, read_books, read_corpus
from .unigram_core import MARK, Piece, added_token, forms, make_engine, make_library, make_state, trained_pieces
from .unigram_fuzz_file import UNIGRAM, every_code_point, fuzzed_settings, make_setting

pytestmark = needs_native

LETTERS: list[Piece] = [(c, -5.0 - ord(c) % 3) for c in "abcdefgh"] + [(MARK, -2.0), (MARK + "a", -3.0)]


def split(engine: Any, text: str) -> list[int]:
    return engine.encode_one(text)


@pytest.fixture(scope="module")
def texts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if fuzz_file.is_current(unigram_fuzz_file.FULL_FILE, form=UNIGRAM):
        return unigram_fuzz_file.FULL_FILE
    path = tmp_path_factory.mktemp("fuzz") / "some.bin"
    fuzz_file.write_file(path, num_texts=20_000, form=UNIGRAM)
    return path


def test_every_text(texts_file: Path) -> None:
    count, found = fuzz_file.check_file(texts_file, form=UNIGRAM)
    assert not found, "\n".join(found)
    assert count >= (1_000_000 if texts_file == unigram_fuzz_file.FULL_FILE else 20_000)


def test_code_points() -> None:
    """Every seventh in words and beside others; those of the check runner's file are all."""
    for setting, texts in every_code_point():
        assert_same(setting.make_ours(), setting.make_library(), [text.decode() for text in texts[::7]])


@pytest.mark.parametrize("form", ["xlm-r", "bge-m3", "deberta", "deberta, converted"])
def test_real_texts(form: str, shared_data: Path) -> None:
    state = make_state(trained_pieces(shared_data), forms()[form])
    texts = [*read_corpus(shared_data)[::12], *read_books(shared_data)[::25]]
    assert len(texts) > 2500
    assert_same(make_engine(state), make_library(state), texts)


def same_from_threads(ours: Any, text: str) -> int:
    """Several threads give what one gives; how many tokens these are."""
    for wanted in ({}, {"offsets": True, "word_ids": True}):
        one, four = (ours.encode([text, "a"], num_threads=threads, **wanted) for threads in (1, 4))
        for a, b in zip(one, four, strict=True):
            assert (a is None and b is None) or np.array_equal(a, b)
    return len(one[0])


@pytest.mark.parametrize("form", ["xlm-r", "bge-m3", "deberta", "deberta, converted"])
def test_long_texts_are_cut_for_threads(form: str, shared_data: Path) -> None:
    """Also where the map removes characters in front of all, which shifts the offsets of the whole text."""
    text = " ".join(read_corpus(shared_data)[::30]) + "\n\n" + "\n".join(read_books(shared_data)[:1500])
    ours = make_engine(make_state(trained_pieces(shared_data), forms()[form]))
    for start in ("", "\x01\u200b", " \u3000"):
        assert same_from_threads(ours, start + text) > 100_000


def test_no_cut_goes_through_an_added_token() -> None:
    """Nor between one and the whitespace that it takes along from behind."""
    for token in (added_token("a b", 15, special=False), added_token("<r>", 15, rstrip=True)):
        state = make_state(LETTERS, forms()["bare"])
        assert len(state["model"]["vocab"]) == 15
        state["added_tokens"].append(token)
        ours = make_engine(state)
        assert same_from_threads(ours, "a b c <r>  " * 60_000) > 100_000
        assert_same(ours, make_library(state), ["a b c <r>  " * 40])


def test_tokenizers_of_one_thread_do_not_mix_their_words() -> None:
    """They share a cache, in which some of these words meet."""
    words = [format(number, "b").replace("0", "a").replace("1", "b") for number in range(1 << 16)]
    states = [make_state(pieces, forms()["xlm-r"]) for pieces in (LETTERS, LETTERS[::-1])]
    for state in states:
        found, right = (make_engine(state, whole_texts=whole).encode(words)[0] for whole in (False, True))
        assert np.array_equal(found, right)


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "text", "want"),
    [
        pytest.param([("ab", -3.0), ("a", -1.0), ("b", -1.5)], "ab", ["a", "b"], id="the greater sum wins"),
        pytest.param([("ab", -2.5), ("a", -1.0), ("b", -1.5)], "ab", ["ab"], id="of equal sums the longer last piece"),
        pytest.param([("aa", -1.0), ("a", -1.0)], "aaa", ["a", "aa"], id="of equal ways the first found"),
        pytest.param([("ab", -30.0), ("a", -1.0)], "ab", ["ab"], id="unknown: ten below the least"),
        pytest.param([("a", -1.0)], "xyaz", ["<unk>", "a", "<unk>"], id="unknown ones side by side are one"),
        pytest.param([("xy", -1.0), ("a", -1.0)], "axy", ["a", "xy"], id="of unknown letters one piece"),
    ],
)
def test_best_way(pieces: list[Piece], text: str, want: list[str]) -> None:
    state = make_state([(MARK, -1.0), *pieces], forms()["bare"] | {"pre_tokenizer": never()})
    names = [piece for piece, _ in state["model"]["vocab"]]
    assert make_library(state).encode(text, add_special_tokens=False).ids == split(make_engine(state), text)
    assert [names[token] for token in split(make_engine(state), text)] == want


def test_equal_sums_are_rounded_alike() -> None:
    """Scores of many digits, of which the library's JSON reader makes its own doubles: their last bits decide."""
    rng = random.Random(3)
    decided = 0
    for _ in range(150):
        scores = [-rng.uniform(1, 12) * 10.0 ** rng.choice((0, 0, 0, -3, -9, 3)) for _ in range(3)]
        pieces = list(zip(("a", "aa", MARK), scores, strict=True))
        state = make_state(pieces, forms()["bare"] | {"pre_tokenizer": never()})
        ours, library = make_engine(state), make_library(state)
        texts = ["a" * size for size in range(1, 24)]
        want = [encoding.ids for encoding in library.encode_batch(texts, add_special_tokens=False)]
        assert [split(ours, text) for text in texts] == want, scores
        decided += any(len(set(ids)) > 1 and ids != sorted(ids) for ids in want)
    assert decided > 10


def never() -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "never", "split": True}


def test_bytes_of_unknown_text() -> None:
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    complete = [*LETTERS, *((name, -9.0) for name in names)]
    lacking = [(name, score) for name, score in complete if name != "<0xC3>"]
    for pieces, is_complete in ((complete, True), (lacking, False)):
        state = make_state(pieces, forms()["xlm-r"], byte_fallback=True)
        ours, library = make_engine(state), make_library(state)
        assert_same(ours, library, ["aéb", "é", "€😀 a", "ß", "ab\u0301"])
        assert (3 in split(ours, "é")) is not is_complete  # <unk> where a byte has no token


# --- DeBERTa's own steps ----------------------------------------------------------------------------------------------


def pieces_of(characters: Iterable[str]) -> list[Piece]:
    """Each a piece, so that offsets show what became of which."""
    return [(c, -3.0 - ord(c) % 7) for c in sorted({*characters, MARK, *"abcdefgh"}) if not c.isspace()]


def assert_form(form: str, texts: list[str], pieces: list[Piece]) -> None:
    """Texts cut at spaces, texts taken whole, and normalized texts."""
    state = make_state(pieces, forms()[form])
    library = make_library(state)
    for whole in (False, True):
        assert_same(make_engine(state, whole_texts=whole), library, texts)
    ours = make_engine(state)
    assert [ours.normalize(text) for text in texts] == [library.normalizer.normalize_str(text) for text in texts]


def test_marks_in_all_orders() -> None:
    """Marks of several classes, of which some compose with what stands before them; decompositions of more than one."""
    marks = ("\u0301", "\u0308", "\u0323", "\u0327", "\u0338", "\u0345", "\u0f73")
    texts = [
        before + "".join(some)
        for before in ("a", "\u1fbf", "u ", "", "=", "\u1e69", "\u212b")
        for count in (1, 2, 3)
        for some in itertools.product(marks, repeat=count)
    ]
    texts = [*texts, *(" ".join(texts[start : start + 9]) + " b" for start in range(0, len(texts), 9))]
    characters = {c for text in texts for form in ("NFC", "NFD") for c in unicodedata.normalize(form, text)}
    assert_form("deberta", texts, pieces_of(characters))


def test_every_character_composes_as_in_the_library() -> None:
    """Every decomposition with something before, between and behind; those that stay apart; Hangul at its ends."""
    rng = random.Random(5)
    decomposed = [d for c in map(chr, range(0x30000)) if (d := unicodedata.normalize("NFD", c)) != c]
    hangul = [d for d in decomposed if 0x1100 <= ord(d[0]) <= 0x1112]
    decomposed = [*(d for d in decomposed if d not in set(hangul)), *rng.sample(hangul, 300)]
    parts = ["", "a", "\u0334", "\u0301", "\u0305", " ", "\u1161", "\u11a8"]
    jamo = [chr(c) for c in (0x1100, 0x1112, 0x1113, 0x1161, 0x1175, 0x1176, 0x11A7, 0x11A8, 0x11C2, 0x11C3, 0xAC00)]
    texts = [d[:cut] + rng.choice(parts) + d[cut:] + rng.choice(parts) for d in decomposed for cut in range(len(d) + 1)]
    texts += ["".join(some) for count in (2, 3) for some in itertools.product([*jamo, "\ud7a3"], repeat=count)]
    characters = {c for text in texts for form in ("NFC", "NFD") for c in unicodedata.normalize(form, text)}
    assert_form("deberta", texts, pieces_of(c for c in characters if not "\uac00" < c < "\ud7a3"))


WHITESPACE = [c for c in map(chr, range(0x3001)) if c.isspace() and c not in "\x1c\x1d\x1e\x1f"]


@pytest.mark.parametrize("form", ["deberta", "deberta, lower and words", "deberta, first", "deberta, converted"])
def test_runs_of_whitespace(form: str) -> None:
    assert len(WHITESPACE) == 25
    runs = [*WHITESPACE, *("".join(pair) for pair in itertools.product(WHITESPACE, repeat=2)), "\n \n", "\u2000\u0338"]
    texts = [shape.format(run) for run in runs for shape in ("a{0}b", "{0}a", "a{0}", "{0}", "a.{0}<mask>{0}\u0301b")]
    assert_form(form, texts, pieces_of(WHITESPACE))


@pytest.mark.parametrize("form", ["deberta, lower and words", "deberta, first", "deberta, converted"])
def test_punctuation_is_a_word_of_its_own(form: str) -> None:
    """That of every category, alone and beside letters, spaces and marks; and symbols, of which ASCII's alone are."""
    punctuation = [c for c in map(chr, range(0x20000)) if unicodedata.category(c)[0] in "PS"]
    texts = [f"a{c}b {c}{c} a{c} {c}\u0301." for c in [*punctuation, MARK, "\u037e", "\u226e"]]
    assert_form(form, texts, pieces_of(punctuation))
    words = [word for word, _ in make_engine(make_state([], forms()[form])).pre_tokenize("a,b \u20ac")]
    assert words[1] == (MARK if form != "deberta, first" else "") + ","


def test_lower_case_of_every_character() -> None:
    """One that becomes two among them: both come from it."""
    changed = [c for c in map(chr, range(0x20000)) if c.lower() != c and not 0xD800 <= ord(c) < 0xE000]
    assert "\u0130" in changed
    texts = [f"a{c}b {c} {c}\u0301{c}" for c in changed]
    assert_form("deberta, lower and words", texts, pieces_of({d for c in changed for d in c.lower()}))


# --- the character map ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param({b"ab": "x", b"abc": "y", b"a": "z"}, id="the shortest key"),
        pytest.param({b"a": "", b" ": ""}, id="removed"),
        pytest.param({"é".encode(): "e\u0301", "e\u0301".encode(): "é"}, id="composed"),
        pytest.param({" \u0301".encode(): "b", "\n\u0301".encode(): "c"}, id="a space with a mark"),
        pytest.param({b"\r\n": "b", b"\t": "a", b"\n": " a"}, id="line ends"),
        pytest.param({"\u0600".encode(): "a", "\u0600a".encode(): "b"}, id="a prepended mark"),
        pytest.param({b"a": "bcdefgh", "中".encode(): " "}, id="longer and spaces"),
    ],
)
def test_maps(rules: dict[bytes, str]) -> None:
    parts = ["a", "b", "c", "é", "e\u0301", " ", "  ", "\u0301", "\r\n", "\r", "\n", "\t", "\u0600", "中", MARK]
    rng = random.Random(str(rules))
    texts = ["".join(rng.choices(parts, k=rng.randint(0, 9))) for _ in range(1500)]
    precompiled = {"type": "Precompiled", "precompiled_charsmap": encoded(rules)}
    for name in ("xlm-r", "bge-m3"):
        form = {**forms()[name]}
        inner = form["normalizer"]
        form["normalizer"] = precompiled if inner["type"] == "Precompiled" else {
            **inner, "normalizers": [precompiled, *inner["normalizers"][1:]]
        }  # fmt: skip
        state = make_state(LETTERS, form)
        ours, library = make_engine(state), make_library(state)
        assert_same(ours, library, texts)
        assert_same(make_engine(state, whole_texts=True), library, texts[:300])
        assert ours.normalize("aé\u0301") == library.normalizer.normalize_str("aé\u0301")


def test_damaged_maps_do_no_harm() -> None:
    """A map with changed bytes is refused, or replaces something else by valid text."""
    rng = random.Random(11)
    whole = charsmap({b"a": "bc", b"ab": "d", "é".encode(): "e", "中".encode(): " ", b"\n": " "})
    refused = 0
    for _ in range(25):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 40)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        if rng.random() < 0.3:
            del damaged[rng.randint(1, len(damaged)) :]
        rules = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(damaged)).decode()}
        try:
            ours = make_engine(make_state(LETTERS, forms()["xlm-r"] | {"normalizer": rules}))
        except ValueError as error:
            refused += str(error).startswith("charsmap: expected")
            continue
        assert ours.normalize("abc é\n中 a").encode()
        ours.encode(["abc é\n中 a\u0301" * 9], offsets=True, word_ids=True)
    assert 0 < refused < 25


def test_settings_have_what_they_say() -> None:
    settings = {setting.name: setting for setting in fuzzed_settings(7)}
    assert len(settings) == 5 * len(forms())
    assert any(setting.broken for setting in settings.values())
    again = make_setting("again", settings["xlm-r, bytes, added tokens"].state)
    assert len(again.options["added_tokens"]) > 5
