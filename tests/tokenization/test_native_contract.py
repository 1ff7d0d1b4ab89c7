"""The C++ WordPiece core: threads and processes, what it returns, odd vocabularies, messages for bad arguments."""

import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .native_core import (
    SMALL_VOCAB,
    assert_same,
    make_hugging_face,
    make_native,
    needs_native,
    read_books,
    read_vocab,
)

pytestmark = needs_native


def digest(result: tuple) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in result)).hexdigest()


def test_any_number_of_threads_gives_the_same(shared_data: Path) -> None:
    ours = make_native(read_vocab(shared_data, "bert-base-uncased"))
    texts = read_books(shared_data)
    alone = digest(ours.encode(texts, offsets=True, word_ids=True, num_threads=1))
    for num_threads in (0, 2, 3, 16):
        assert digest(ours.encode(texts, offsets=True, word_ids=True, num_threads=num_threads)) == alone


def test_callers_on_several_threads(shared_data: Path) -> None:
    ours = make_native(read_vocab(shared_data, "bert-base-uncased"))
    texts = read_books(shared_data)[:4000]
    want = digest(ours.encode(texts, offsets=True, word_ids=True))
    got: list[str] = []

    def work() -> None:
        got.extend(digest(ours.encode(texts, offsets=True, word_ids=True, num_threads=2)) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [want] * 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_works_in_a_forked_child(shared_data: Path) -> None:
    ours = make_native(read_vocab(shared_data, "bert-base-uncased"))
    texts = read_books(shared_data)[:4000]
    want = digest(ours.encode(texts, offsets=True, word_ids=True, num_threads=2))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, digest(ours.encode(texts, offsets=True, word_ids=True, num_threads=2)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == want
    assert os.waitpid(child, 0)[1] == 0


def test_results_are_arrays_that_own_their_memory() -> None:
    ids, cu_seqlens, offsets, word_ids = make_native(SMALL_VOCAB).encode(
        ("ab", b"a b", ""), offsets=True, word_ids=True
    )
    assert (ids.dtype, cu_seqlens.dtype, offsets.dtype, word_ids.dtype) == (np.int32, np.int64, np.int32, np.int32)
    assert cu_seqlens.tolist() == [0, 1, 3, 3] and offsets.shape == (3, 2) and word_ids.tolist() == [0, 0, 1]
    ids[:] = 7  # writable
    empty = make_native(SMALL_VOCAB).encode([], offsets=True, word_ids=True)
    assert [array.shape for array in empty] == [(0,), (1,), (0, 2), (0,)]


def test_entries_of_any_characters() -> None:
    odd = ["[UNK]", "\u2028", "a\r", "", " ", "a b", "\0", "##", "##\u2028", "a", "##a\0", "é" * 200, "##"[:1], "中国"]
    for options in ({}, {"clean_text": False, "lowercase": False}):
        ours, theirs = make_native(odd, **options), make_hugging_face(odd, **options)
        assert_same(ours, theirs, ["a\u2028a a\r\na b\0", "aa\0", "##a", "é" * 200, "中国 a", "\0", "\u2028", "a\0a\0"])


@pytest.mark.parametrize("prefix", ["", "x", "##", "é", "@@"])
def test_other_prefixes(prefix: str) -> None:
    vocab = ["[UNK]", "a", "b", "ab", "x", "é", "xa", "xab", "##a", "##b", "##ab", "éa", "@@a", "@@b"]
    options = {"continuing_prefix": prefix, "strip_accents": False}
    texts = ["aab", "xaab", "abab", "##a", "éaéb", "aé", "ax", "@@a", "xxa", "b", "ba", "bab"]
    assert_same(make_native(vocab, **options), make_hugging_face(vocab, **options), texts)


def test_unknown_token_may_be_an_added_one() -> None:
    ours = make_native(["a"], unk_token="<unk>", added_tokens=[("<unk>", 5, False, False, False, False)])
    assert ours.encode(["a b <unk>"])[0].tolist() == [0, 5, 5]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((["[UNK]", "a", "b", "a"],), {}, ValueError, "vocab: expected distinct tokens, got 'a' at positions 1 and 3"),
        ((["a"],), {}, ValueError, r"unk_token: expected a token of the vocabulary, got '\[UNK\]'"),
        ((["[UNK]", 5],), {}, TypeError, r"vocab\[1\]: expected str, got int"),
        ((["[UNK]", "\ud800"],), {}, ValueError, r"vocab\[1\]: expected a str without lone surrogates, got '\\ud800'"),
        (("[UNK]",), {}, TypeError, "vocab: expected a sequence of str, got str"),
        ((None,), {}, TypeError, "vocab: expected a sequence of str, got NoneType"),
        ((["[UNK]"],), {"lowercase": 1}, TypeError, "lowercase: expected bool, got int"),
        ((["[UNK]"],), {"strip_accents": "no"}, TypeError, "strip_accents: expected bool, got str"),
        (
            (["[UNK]"],),
            {"max_word_chars": -1},
            ValueError,
            "max_word_chars: expected an int from 0 to 2147483647, got -1",
        ),
        ((["[UNK]"],), {"max_word_chars": 1.5}, TypeError, "max_word_chars: expected int, got float"),
        ((["[UNK]"],), {"unk_token": None}, TypeError, "unk_token: expected str, got NoneType"),
        ((["[UNK]"],), {"never_split": "abc"}, TypeError, "never_split: expected a sequence of str, got str"),
        ((["[UNK]"],), {"never_split": [b"a"]}, TypeError, r"never_split\[0\]: expected str, got bytes"),
        (
            (["[UNK]"],),
            {"added_tokens": ["x"]},
            TypeError,
            r"added_tokens\[0\]: expected a tuple \(con.*got str",
        ),
        ((["[UNK]"],), {"added_tokens": [("x", 1)]}, ValueError, r"added_tokens\[0\]: expected .*, got 2 fields"),
        (
            (["[UNK]"],),
            {"added_tokens": [("x", -1, False, False, False, False)]},
            ValueError,
            r"added_tokens\[0\].id: expected an int from 0 to \d+, got -1",
        ),
        (
            (["[UNK]"],),
            {"added_tokens": [("x", 1, False, 0, False, False)]},
            TypeError,
            r"added_tokens\[0\].lstrip: expected bool, got int",
        ),
    ],
)
def test_bad_constructor_arguments(arguments: tuple, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        make_native(*arguments, **options)


@pytest.mark.parametrize(
    ("texts", "options", "error", "message"),
    [
        ("abc", {}, TypeError, "texts: expected a sequence of str or bytes, got str"),
        (b"abc", {}, TypeError, "texts: expected a sequence of str or bytes, got bytes"),
        (None, {}, TypeError, "texts: expected a sequence of str or bytes, got NoneType"),
        (["a", "b", b"c", 5], {}, TypeError, r"texts\[3\]: expected str or bytes, got int"),
        (["a", None], {}, TypeError, r"texts\[1\]: expected str or bytes, got NoneType"),
        ([["a"]], {}, TypeError, r"texts\[0\]: expected str or bytes, got list"),
        (["a"], {"num_threads": -1}, ValueError, "num_threads: expected an int from 0 to 4096, got -1"),
        (["a"], {"num_threads": "2"}, TypeError, "num_threads: expected int, got str"),
        (["a"], {"offsets": 1}, TypeError, "offsets: expected bool, got int"),
    ],
)
def test_bad_calls(texts: Any, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        make_native(SMALL_VOCAB).encode(texts, **options)
    with pytest.raises(TypeError, match=r"^text: expected str, got bytes"):
        make_native(SMALL_VOCAB).normalize(b"a")


def test_subclasses_of_str_are_texts() -> None:
    class Text(str):
        pass

    assert make_native(SMALL_VOCAB).encode([Text("ab"), np.str_("a b")])[0].tolist() == [5, 3, 4]
