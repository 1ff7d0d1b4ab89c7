"""The C++ WordPiece core against Hugging Face `tokenizers` on hostile text; test_identity.py compares far more."""

import functools
import random
import re
import subprocess
import sys
import time
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bert_fast.reference.wordpiece import WordPiece as ReferenceWordPiece

from .fuzz_grammar import random_options
from .native_core import (
    SMALL_VOCAB,
    SURROGATES,
    assert_same,
    make_hugging_face,
    make_native,
    needs_native,
    random_texts,
    read_books,
    read_corpus,
    read_vocab,
    tokenizers,
)

pytestmark = needs_native

# --- random text ------------------------------------------------------------------------------------------------------


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
    ids=lambda text: f"{text[:3]!a}-{len(text)}".replace("\\", ""),
)
def test_extreme_text(text: str) -> None:
    added = [("[MASK]", 1, False, True, False, False), ("[CLS]", 2, False, False, False, False)]
    ours, theirs = (make(SMALL_VOCAB, added_tokens=added) for make in (make_native, make_hugging_face))
    assert_same(ours, theirs, [text, text + "!"])


@pytest.mark.parametrize("normalized", [False, True], ids=["raw", "normalized"])
@pytest.mark.parametrize("rstrip", [False, True], ids=["", "rstrip"])
@pytest.mark.parametrize("lstrip", [False, True], ids=["", "lstrip"])
@pytest.mark.parametrize("content", [" ", "\u3000", " a", "a "], ids=["space", "wide space", "before", "behind"])
def test_whitespace_that_tokens_take(content: str, lstrip: bool, rstrip: bool, normalized: bool) -> None:
    """As in the library where it can be in several tokens; in time that grows as the text does."""
    added = [(content, len(SMALL_VOCAB), False, lstrip, rstrip, normalized)]
    options = {"added_tokens": added, "clean_text": not normalized}
    ours, theirs = (make(SMALL_VOCAB, **options) for make in (make_native, make_hugging_face))
    pieces = (" ", " ", "\u3000", "a", "b ", "é")
    generator = random.Random(0)
    texts = ["".join(generator.choices(pieces, k=generator.randint(0, 12))) for _ in range(300)]
    assert_same(ours, theirs, [*texts, content * 50, " " * 50 + "a"])
    start = time.process_time()
    ours.encode([content * 200_000, " " * 200_000], offsets=True, word_ids=True, num_threads=1)
    assert time.process_time() - start < 10  # a second; minutes where every token goes over all that follows


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
    source = (root / "bert_fast/reference/_unicode_tables.py").read_text()
    recorded = re.search(r"tokenizers (\d[\d.]*\d).*unicodedata (\d[\d.]*\d)", source, re.DOTALL)
    assert recorded is not None
    present = (tokenizers.__version__, unicodedata.unidata_version)
    if recorded.groups() != present:
        pytest.skip(f"the tables are of tokenizers and unicodedata {recorded.groups()}, these are {present}")
    command = [sys.executable, root / "tools" / "generate_unicode_tables.py", "--check"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
