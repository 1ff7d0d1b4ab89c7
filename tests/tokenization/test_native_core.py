"""The C++ WordPiece core against Hugging Face `tokenizers`: ids, offsets and word ids on real and on hostile text."""

import bz2
import functools
import hashlib
import json
import os
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bert_fast import native
from bert_fast.reference.wordpiece import WordPiece as ReferenceWordPiece

tokenizers = pytest.importorskip("tokenizers")
module = native.load()
pytestmark = pytest.mark.skipif(module is None, reason=f"no C++ tokenizer: {native.unavailable_reason()}")

SURROGATES = range(0xD800, 0xE000)
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


def make_native(vocab: Sequence[str], **options: Any) -> Any:
    assert module is not None
    return module.WordPiece(vocab, **options)


def make_hugging_face(
    vocab: Sequence[str],
    *,
    added_tokens: Sequence[tuple[str, int, bool, bool, bool, bool]] = (),
    max_word_chars: int = 100,
    continuing_prefix: str = "##",
    **options: Any,
) -> Any:
    """The same tokenizer composed from the library's parts."""
    model = tokenizers.models.WordPiece(
        {token: position for position, token in enumerate(vocab)},
        unk_token="[UNK]",
        max_input_chars_per_word=max_word_chars,
        continuing_subword_prefix=continuing_prefix,
    )
    tokenizer = tokenizers.Tokenizer(model)
    defaults = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(**(defaults | options))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    for content, token_id, single_word, lstrip, rstrip, normalized in added_tokens:
        switches = {"single_word": single_word, "lstrip": lstrip, "rstrip": rstrip, "normalized": normalized}
        tokenizer.add_tokens([tokenizers.AddedToken(content, special=False, **switches)])
        assert tokenizer.token_to_id(content) == token_id
    return tokenizer


def assert_same(ours: Any, theirs: Any, texts: Sequence[str], batch_size: int = 20_000) -> None:
    """Ids, offsets and word ids agree on every text; ids also when nothing else is asked for."""
    for start in range(0, len(texts), batch_size):
        batch = texts[start : start + batch_size]
        ids, cu_seqlens, offsets, word_ids = ours.encode(batch, offsets=True, word_ids=True)
        plain_ids, plain_cu_seqlens, no_offsets, no_word_ids = ours.encode(batch)
        assert np.array_equal(ids, plain_ids) and np.array_equal(cu_seqlens, plain_cu_seqlens)
        assert no_offsets is None and no_word_ids is None
        for k, encoding in enumerate(theirs.encode_batch(batch)):
            part = slice(cu_seqlens[k], cu_seqlens[k + 1])
            got = ids[part].tolist(), [tuple(pair) for pair in offsets[part].tolist()], word_ids[part].tolist()
            assert got == (encoding.ids, encoding.offsets, encoding.word_ids), repr(batch[k][:500])


@functools.cache
def read_vocab(data: Path, name: str) -> list[str]:
    return (data / "vocab" / name / "vocab.txt").read_text(encoding="utf-8").split("\n")[:-1]


@functools.cache
def read_corpus(data: Path) -> list[str]:
    """Every line of the texts, each different one once; every string of NormalizationTest."""
    files = [*sorted((data / "text_multilingual" / "udhr").glob("*.txt")), data / "text_unicode" / "emoji-test.txt"]
    files += [*sorted((data / "text_zh").glob("*.txt")), *sorted((data / "text_social").glob("*.txt"))]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").split("\n")]
    with bz2.open(data / "text_unicode" / "NormalizationTest.txt.bz2", "rt", encoding="utf-8") as file:
        for line in file:
            lines.append(line)
            if line[0] not in "#@":
                columns = line.split(";")[:5]
                lines += ["".join(chr(int(c, 16)) for c in column.split()) for column in columns]
    return list(dict.fromkeys(lines))


def read_books(data: Path) -> list[str]:
    names = ("books_train.txt", "books_valid.txt", "books_tiny.txt", "bert_sample_text.txt")
    return [line for name in names for line in (data / "pretrain_en" / name).read_text(encoding="utf-8").split("\n")]


def read_labelled_texts(data: Path) -> list[str]:
    """Lines of all other text files as they stand, and the strings inside the JSON ones."""
    lines = []
    for folder in ("classification", "sequence_labelling", "multiple_choice", "question_answering"):
        for file in sorted((data / folder).rglob("*")):
            if file.suffix in (".tsv", ".txt", ".conll", ".csv", ".json", ".jsonl"):
                lines += file.read_text(encoding="utf-8").split("\n")
    strings: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, str):
            strings.append(value)
        for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            collect(child)

    for file in sorted((data / "question_answering").glob("*.json")):
        collect(json.loads(file.read_text(encoding="utf-8")))
    return list(dict.fromkeys(lines + strings))


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

FRAGMENTS = (
    *("a", "b", "ab", "A", "B", "é", "e\u0301", "É", "\u0301", "\u0323", "\u0334", " ", "  ", "\t", "\u3000", "\u200b"),
    *(
        "\0",
        "!",
        "[MASK]",
        "[MASK",
        "[CLS]",
        "中",
        "İ",
        "\U0001d15e",
        "\U0001d15e\u0334",
        "_",
        "-",
        "x",
        "X",
        "1",
        "한",
    ),
    *("가\u0301", "<s>", "<S>", "\u00ad", "ß", "Σ", "\ufffd", "\u0f73\u0f71", "\u1e17\u0323", "\u0344\u0323"),
    "\uf900",
)
SMALL_VOCAB = (
    *("[UNK]", "[MASK]", "[CLS]", "a", "b", "ab", "##a", "##b", "##ab", "e", "##e", "i", "##i", "é", "##é", "中", "!"),
    *("#", "[", "]", "MASK", "mask", "##mask", "x", "##x", "s", "<", ">", "##s", "-", "_", "1", "##1", "ss", "##ss"),
)


def random_texts(generator: random.Random, count: int, fragments: Sequence[str] = FRAGMENTS) -> Iterator[str]:
    """Fragments of which something happens to most, with code points from anywhere in between."""
    for _ in range(count):
        size = generator.randint(0, 12)
        anywhere = generator.choice((0x180, 0x3000, 0x11000, 0x110000))
        pieces = []
        for _ in range(size):
            code_point = generator.randrange(anywhere)
            is_fragment = generator.random() < 0.8 or code_point in SURROGATES
            pieces.append(generator.choice(fragments) if is_fragment else chr(code_point))
        yield "".join(pieces)


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
        "中" * 300_000,
    ],
    ids=lambda text: f"{text[:3]!r}-{len(text)}",
)
def test_extreme_text(text: str) -> None:
    added = [("[MASK]", 1, False, True, False, False), ("[CLS]", 2, False, False, False, False)]
    ours, theirs = (make(SMALL_VOCAB, added_tokens=added) for make in (make_native, make_hugging_face))
    assert_same(ours, theirs, [text, text + "!"])


def test_ten_megabytes(shared_data: Path) -> None:
    vocab = read_vocab(shared_data, "bert-base-uncased")
    book = "\n".join(read_books(shared_data)) + " é中\u0301\0"
    text = (book * 4)[:10_000_000]
    ids, cu_seqlens, offsets, _ = make_native(vocab).encode([text], offsets=True)
    encoding = make_hugging_face(vocab).encode(text)
    assert len(text) == 10_000_000 and cu_seqlens.tolist() == [0, len(ids)]
    assert np.array_equal(ids, np.array(encoding.ids))
    assert np.array_equal(offsets, np.array(encoding.offsets))


# --- threads, processes, results --------------------------------------------------------------------------------------


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


# --- vocabularies and bad input ---------------------------------------------------------------------------------------


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
