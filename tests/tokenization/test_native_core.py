"""The C++ WordPiece core against Hugging Face `tokenizers`: ids, offsets and word ids on real and on hostile text."""

import functools
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bert_fast.reference.wordpiece import WordPiece as ReferenceWordPiece

from .native_core import (
    FRAGMENTS,
    SMALL_VOCAB,
    SURROGATES,
    assert_same,
    make_hugging_face,
    make_native,
    needs_native,
    random_texts,
    read_books,
    read_corpus,
    read_labelled_texts,
    read_vocab,
    tokenizers,
)

pytestmark = needs_native

CONFIGURATIONS = {
    "uncased": ("bert-base-uncased", {}),
    "cased": ("bert-base-cased", {"lowercase": False}),
    "uncased-keep-accents": ("bert-base-uncased", {"strip_accents": False}),
    "cased-strip-accents": ("bert-base-cased", {"lowercase": False, "strip_accents": True}),
    "chinese": ("bert-base-chinese", {}),
    "chinese-unsplit": ("bert-base-chinese", {"handle_chinese_chars": False}),
    "multilingual": ("bert-base-multilingual-cased", {"lowercase": False}),
    "multilingual-unclean": ("bert-base-multilingual-cased", {"clean_text": False}),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_real_text(shared_data: Path, name: str) -> None:
    vocabulary, options = CONFIGURATIONS[name]
    vocab = read_vocab(shared_data, vocabulary)
    texts = read_corpus(shared_data) + read_books(shared_data)[::25]
    assert len(texts) > 60_000
    if name not in ("uncased", "multilingual"):
        texts = texts[::3]
    assert_same(make_native(vocab, **options), make_hugging_face(vocab, **options), texts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["uncased", "cased"])
def test_all_books_and_labelled_texts(shared_data: Path, name: str) -> None:
    vocabulary, options = CONFIGURATIONS[name]
    vocab = read_vocab(shared_data, vocabulary)
    texts = read_labelled_texts(shared_data) + read_books(shared_data)
    assert_same(make_native(vocab, **options), make_hugging_face(vocab, **options), texts)


@functools.cache
def character_vocab() -> tuple[str, ...]:
    """Every code point that something can happen to, as a word and as the end of one, so that mapping errors show."""
    code_points = [*range(0x20, 0xD800), *range(0xE000, 0x1F000, 1), *range(0x2F800, 0x2FA20), *range(0xE0100, 0xE01F0)]
    kept = [c for c in code_points if not 0x4E00 <= c < 0x9F00 and not 0x17000 <= c < 0x1AF00]
    return ("[UNK]", *(chr(c) for c in kept), *("##" + chr(c) for c in kept))


@pytest.mark.parametrize("options", [{}, {"lowercase": False}, {"lowercase": False, "clean_text": False}], ids=str)
def test_every_code_point_inside_a_word(options: dict[str, bool]) -> None:
    vocab = character_vocab()
    words = [f"a{chr(c)}b" for c in range(0x110000) if c not in SURROGATES]
    texts = [" ".join(words[start : start + 200]) for start in range(0, len(words), 200)]
    assert_same(make_native(vocab, **options), make_hugging_face(vocab, **options), texts)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"lowercase": False}], ids=str)
def test_every_code_point_alone(options: dict[str, bool]) -> None:
    vocab = character_vocab()
    texts = [chr(c) for c in range(0x110000) if c not in SURROGATES]
    assert_same(make_native(vocab, **options), make_hugging_face(vocab, **options), texts, batch_size=100_000)


# --- random text ------------------------------------------------------------------------------------------------------


def random_options(generator: random.Random) -> dict[str, Any]:
    return {
        "lowercase": generator.random() < 0.5,
        "strip_accents": generator.choice((None, True, False)),
        "handle_chinese_chars": generator.random() < 0.7,
        "clean_text": generator.random() < 0.8,
        "max_word_chars": generator.choice((100, 100, 3)),
    }


def random_added_tokens(generator: random.Random, options: dict[str, Any]) -> list[tuple]:
    """Added tokens with every combination of switches; normalized ones differ from each other once normalized."""
    contents = [
        "[MASK]",
        "[CLS]",
        "<s>",
        "<S>",
        "ab",
        "AB",
        "É",
        "é",
        "a b",
        "x ",
        " x",
        "中a",
        "a",
        "_",
        "\t",
        "İ",
        "b\u0301",
    ]
    normalize = make_native(SMALL_VOCAB, **options).normalize
    taken = {""}
    added: list[tuple] = []
    next_id = len(SMALL_VOCAB)
    for content in generator.sample(contents, generator.randint(1, 7)):
        normalized = generator.random() < 0.4
        if normalized and normalize(content) in taken:
            continue
        if normalized:
            taken.add(normalize(content))
        token_id = SMALL_VOCAB.index(content) if content in SMALL_VOCAB else next_id
        next_id += token_id == next_id
        added.append((content, token_id, *(generator.random() < 0.3 for _ in range(3)), normalized))
    return added


@pytest.mark.parametrize("seed", range(4))
def test_random_text(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(25):
        options = random_options(generator)
        texts = list(random_texts(generator, 800))
        assert_same(make_native(SMALL_VOCAB, **options), make_hugging_face(SMALL_VOCAB, **options), texts)


@pytest.mark.parametrize("seed", range(2))
def test_random_added_tokens(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(50):
        options = random_options(generator)
        options["added_tokens"] = random_added_tokens(generator, options)
        fragments = FRAGMENTS + tuple(token[0] for token in options["added_tokens"]) * 4
        texts = list(random_texts(generator, 300, fragments))
        assert_same(make_native(SMALL_VOCAB, **options), make_hugging_face(SMALL_VOCAB, **options), texts)


def hypothesis_settings(examples: int) -> settings:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples, deadline=None, suppress_health_check=checks)


ANY_TEXT = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from([*"abcAB \t,[]#\u0301\u0323é中"]))
)


@hypothesis_settings(300)
@given(texts=st.lists(ANY_TEXT, max_size=40), lowercase=st.booleans(), clean_text=st.booleans())
def test_hypothesis_text(shared_data: Path, texts: list[str], lowercase: bool, clean_text: bool) -> None:
    ours, theirs = _cached_pair(shared_data, lowercase, clean_text)
    assert_same(ours, theirs, texts)


@functools.cache
def _cached_pair(data: Path, lowercase: bool, clean_text: bool) -> tuple[Any, Any]:
    vocab = read_vocab(data, "bert-base-multilingual-cased")
    options = {"lowercase": lowercase, "clean_text": clean_text}
    return make_native(vocab, **options), make_hugging_face(vocab, **options)


@hypothesis_settings(200)
@given(text=st.text(), raw=st.binary(max_size=60))
def test_text_that_is_not_valid_unicode(text: str, raw: bytes) -> None:
    """Surrogates and invalid bytes count as one U+FFFD each; str and bytes of the same text give the same tokens."""
    ours = make_native(SMALL_VOCAB)
    for given_text, plain in (
        (text, "".join("\ufffd" if ord(c) in SURROGATES else c for c in text)),
        (raw, raw.decode(errors="replace")),
        (plain_bytes := text.encode(errors="replace"), plain_bytes.decode()),
    ):
        got, want = (ours.encode([t], offsets=True, word_ids=True) for t in (given_text, plain))
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    assert_same(ours, make_hugging_face(SMALL_VOCAB), [raw.decode(errors="replace")])


def test_surrogates_keep_their_place() -> None:
    ids, _, offsets, _ = make_native(SMALL_VOCAB).encode(["a\ud800b \udfff!", "\ud83d\ude00"], offsets=True)
    assert ids.tolist() == [SMALL_VOCAB.index("ab"), SMALL_VOCAB.index("!")]
    assert offsets.tolist() == [[0, 3], [5, 6]]


@pytest.mark.parametrize("seed", range(20))
def test_never_split_like_the_reference(seed: int) -> None:
    generator = random.Random(seed)
    options = random_options(generator) | {"never_split": ["A", "É", "[MASK", "ab!", "中"]}
    texts = [" ".join(random_texts(generator, 4)) for _ in range(200)]
    got, want = (
        make(SMALL_VOCAB, **options).encode(texts, offsets=True, word_ids=True)
        for make in (make_native, ReferenceWordPiece)
    )
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("switched_off", [None, "lowercase", "strip_accents", "clean_text"])
def test_normalize_and_pre_tokenize(shared_data: Path, switched_off: str | None) -> None:
    options = {switched_off: False} if switched_off else {}
    ours, theirs = make_native(SMALL_VOCAB, **options), make_hugging_face(SMALL_VOCAB, **options)
    for text in [*read_corpus(shared_data)[::20], *random_texts(random.Random(5), 2000)]:
        assert ours.normalize(text) == theirs.normalizer.normalize_str(text)
        assert ours.pre_tokenize(text) == theirs.pre_tokenizer.pre_tokenize_str(text)


# --- extreme text -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\0",
        "\0" * 10_000,
        "a" * 1_000_000,
        "é" * 1_000_000,
        "a " + "\u0301" * 1_000_000 + " b",
        "a" + "\u0301\u0323" * 500_000 + "b",
        "\U0001d15e\u0334" * 100_000,
        "a" * 100 + " " + "a" * 101 + " " + "한" * 33 + " " + "한" * 34,
        "[" * 100_000,
        "[MASK" * 20_000 + "]",
        "中" * 100_000,
    ],
    ids=lambda text: f"{text[:3]!r}-{len(text)}",
)
def test_extreme_text(text: str) -> None:
    added = [("[MASK]", 1, False, True, False, False), ("[CLS]", 2, False, False, False, False)]
    ours, theirs = (make(SMALL_VOCAB, added_tokens=added) for make in (make_native, make_hugging_face))
    assert_same(ours, theirs, [text, text + "!"])


def test_ten_megabytes(shared_data: Path) -> None:
    vocab = read_vocab(shared_data, "bert-base-uncased")
    block = ("\n".join(read_books(shared_data)) + " é中\u0301\0")[-1_999_999:] + "\n"
    text = block * 5
    ids, cu_seqlens, offsets, word_ids = make_native(vocab).encode([text], offsets=True, word_ids=True)
    one = make_hugging_face(vocab).encode(block)  # a block ends with whitespace, so nothing reaches into the next
    assert len(text) == 10_000_000 and cu_seqlens.tolist() == [0, len(ids)]
    assert np.array_equal(ids, np.tile(one.ids, 5))
    assert np.array_equal(offsets, np.concatenate([np.array(one.offsets) + k * len(block) for k in range(5)]))
    assert word_ids[-1] == 5 * (one.word_ids[-1] + 1) - 1


@pytest.mark.slow
def test_unicode_tables_are_what_the_library_says() -> None:
    root = Path(__file__).resolve().parents[2]
    recorded = re.search(r"tokenizers ([\d.]+)", (root / "bert_fast/reference/_unicode_tables.py").read_text())
    assert recorded is not None
    if recorded[1] != tokenizers.__version__:
        pytest.skip(f"the tables were probed from tokenizers {recorded[1]}, this is {tokenizers.__version__}")
    command = [sys.executable, root / "tools" / "generate_unicode_tables.py", "--check"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
