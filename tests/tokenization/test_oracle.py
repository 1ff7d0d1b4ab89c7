"""The pure-Python WordPiece against Hugging Face `tokenizers`, step by step and as a whole."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_fast.reference import _unicode_tables as tables
from bert_fast.reference.wordpiece import WordPiece
from bert_fast.tokenization.vocab import read_vocab

from .conftest import VOCABULARIES
from .fuzz_file import special_code_points

tokenizers = pytest.importorskip("tokenizers")

SWITCHES = [  # lowercase, strip_accents, handle_chinese_chars, clean_text
    (True, None, True, True),
    (False, None, True, True),
    (True, False, True, True),
    (False, True, True, True),
    (True, None, False, True),
    (False, None, True, False),
    (True, None, False, False),
]
ADDED = [
    tokenizers.AddedToken("NewTok"),
    tokenizers.AddedToken("<x>", lstrip=True, rstrip=True),
    tokenizers.AddedToken("single", single_word=True),
    tokenizers.AddedToken("中文"),
    tokenizers.AddedToken("Sp ace", normalized=False, rstrip=True),
    tokenizers.AddedToken("Ünder", lstrip=True, single_word=True),
]
PIECES = [
    *("[MASK]", "[SEP]", "[mask]", "newtok", "NewTok", "NEWTOK", "hello", "unaffable", "<x>", " <x> ", "<x><x>"),
    *("single", "Single", "asingle", "中文", "Sp ace", "sp ace", "Ünder", "under", "UNDER", "[M\u200bASK]", "##able"),
]


def library_tokenizer(vocab: list[str], switches: tuple[Any, ...]) -> Any:
    """Hugging Face's tokenizer with BERT's special tokens and ADDED."""
    lowercase, strip_accents, handle_chinese_chars, clean_text = switches
    ids = {token: token_id for token_id, token in enumerate(vocab)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(
        clean_text=clean_text,
        handle_chinese_chars=handle_chinese_chars,
        strip_accents=strip_accents,
        lowercase=lowercase,
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.add_tokens(ADDED)
    return tokenizer


def oracle(vocab: list[str], switches: tuple[Any, ...], library: Any) -> WordPiece:
    """Our tokenizer with the same options and added tokens."""
    lowercase, strip_accents, handle_chinese_chars, clean_text = switches
    added = library.get_added_tokens_decoder()
    return WordPiece(
        vocab,
        lowercase=lowercase,
        strip_accents=strip_accents,
        handle_chinese_chars=handle_chinese_chars,
        clean_text=clean_text,
        added_tokens=[
            (t.content, token_id, t.single_word, t.lstrip, t.rstrip, t.normalized) for token_id, t in added.items()
        ],
    )


def random_texts(rng: random.Random, count: int) -> list[str]:
    """Strings that mix every class of characters, words and added tokens."""
    groups = [tables.CONTROL, tables.WHITESPACE, tables.PUNCTUATION, tables.CJK, tables.MARK, tables.WORD]
    pools = [[chr(rng.randint(*span)) for span in rng.choices(group, k=150)] for group in groups]
    pools += [[chr(c) for c in rng.choices(list(table), k=150)] for table in (tables.NFD, tables.LOWER)]
    pools += [[chr(c) for c in rng.choices(list(tables.COMBINING_CLASS), k=150)]]
    pools += [[chr(rng.randint(0xAC00, 0xD7A3)) for _ in range(50)], list("abcdefghij   .,ABC"), PIECES]
    return ["".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(0, 25))) for _ in range(count)]


def assert_same(engine: WordPiece, library: Any, texts: list[str]) -> None:
    """Ids, offsets and word ids of every text agree."""
    ids, cu_seqlens, offsets, word_ids = engine.encode(texts, offsets=True, word_ids=True)
    assert offsets is not None
    assert word_ids is not None
    assert (ids.dtype, cu_seqlens.dtype, offsets.dtype, word_ids.dtype) == (np.int32, np.int64, np.int32, np.int32)
    assert offsets.shape == (len(ids), 2)
    for index, expected in enumerate(library.encode_batch(texts, add_special_tokens=False)):
        mine = slice(cu_seqlens[index], cu_seqlens[index + 1])
        actual = ids[mine].tolist(), [tuple(span) for span in offsets[mine].tolist()], word_ids[mine].tolist()
        assert actual == (expected.ids, expected.offsets, expected.word_ids), ascii(texts[index])


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_random_strings(switches: tuple[Any, ...], shared_data: Path) -> None:
    rng = random.Random(str(switches))
    for name in ("bert-base-uncased", "bert-base-chinese"):
        vocab = read_vocab(shared_data / "vocab" / name / "vocab.txt")
        library = library_tokenizer(vocab, switches)
        assert_same(oracle(vocab, switches, library), library, random_texts(rng, 150))


@pytest.mark.slow
@pytest.mark.parametrize("name", VOCABULARIES)
def test_real_texts(name: str, shared_data: Path) -> None:
    texts = []
    for path in sorted(shared_data.glob("text_*/**/*.txt")):
        texts += path.read_text(encoding="utf-8", errors="replace").split("\n")[::23]
    switches = (name.endswith("uncased"), None, True, True)
    vocab = read_vocab(shared_data / "vocab" / name / "vocab.txt")
    library = library_tokenizer(vocab, switches)
    assert len(texts) > 500
    assert_same(oracle(vocab, switches, library), library, texts)


@pytest.mark.parametrize("lowercase", [True, False])
def test_every_code_point_inside_a_word(lowercase: bool, shared_data: Path) -> None:
    """The table of what the library makes of c in "a" + c + "b".

    Of code points that are alike, which only the tables tell apart, the ends: test_native_core.py asks the library
    about all that is in the tables.
    """
    classes: dict[int, str] = {}
    mapped: dict[int, str] = {}
    name = "codepoints_lower.tsv" if lowercase else "codepoints_cased.tsv"
    for line in (shared_data / "fixtures" / "unicode" / name).read_text(encoding="utf-8").splitlines()[1:]:
        kind, start, end, value = line.split("\t")
        first, last = int(start, 16), int(end, 16)
        if kind == "run":
            classes.update(dict.fromkeys(range(first, last + 1), value))
        elif kind == "map":
            replacement = "".join(chr(int(c, 16)) for c in value.split())
            mapped.update(dict.fromkeys(range(first, last + 1), replacement))
    engine = WordPiece(["[UNK]"], lowercase=lowercase)
    assert len(classes) > 1_000_000
    code_points = [c for c in special_code_points() if c in classes and not 0xAC00 <= c <= 0xD7A3]
    assert len(code_points) > 40_000
    for start in range(0, len(code_points), 4096):
        chunk = code_points[start : start + 4096]
        expected = []
        for code_point in chunk:
            own = mapped.get(code_point, chr(code_point))
            shapes = {"R": ["ab"], "W": ["a", "b"], "I": ["a", own, "b"], "K": [f"a{own}b"]}
            expected += shapes[classes[code_point]]
        text = " ".join(f"a{chr(code_point)}b" for code_point in chunk)
        words = [word for word, _ in engine.pre_tokenize(engine.normalize(text))]
        assert words == expected, hex(chunk[0])


def test_normalize_and_pre_tokenize_are_those_of_the_library() -> None:
    rng = random.Random(3)
    for lowercase, strip_accents, chinese, clean in SWITCHES:
        engine = WordPiece(
            ["[UNK]"],
            lowercase=lowercase,
            strip_accents=strip_accents,
            handle_chinese_chars=chinese,
            clean_text=clean,
        )
        normalizer = tokenizers.normalizers.BertNormalizer(clean, chinese, strip_accents, lowercase)
        splitter = tokenizers.pre_tokenizers.BertPreTokenizer()
        for text in random_texts(rng, 150):
            assert engine.normalize(text) == normalizer.normalize_str(text)
            assert engine.pre_tokenize(text) == splitter.pre_tokenize_str(text)


def test_hangul_normalizes_to_jamo() -> None:
    normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    syllables = "".join(map(chr, range(0xAC00, 0xD7A4, 7)))
    assert WordPiece(["[UNK]"]).normalize(syllables) == normalizer.normalize_str(syllables)


def test_word_limit_counts_code_points_after_normalization() -> None:
    engine = WordPiece(["[UNK]", "a", "##a"])
    assert engine.encode(["a" * 100])[0].tolist() == [1, *[2] * 99]
    assert engine.encode(["a" * 101])[0].tolist() == [0]
    assert engine.encode(["\u00e1" * 100])[0].tolist() == [1, *[2] * 99]
    assert WordPiece(["[UNK]", "a", "##a"], max_word_chars=3).encode(["aaa aaaa"])[0].tolist() == [1, 2, 2, 0]


def test_a_word_with_one_unknown_part_is_unknown() -> None:
    engine = WordPiece(["[UNK]", "un", "##aff", "##able", "##a"])
    assert engine.encode(["unaffable unaffablex affable"])[0].tolist() == [1, 2, 3, 0, 0]


def test_never_split() -> None:
    vocab = ["[UNK]", "Hello-World", "hello", "-", "world", "x"]
    engine = WordPiece(vocab, never_split=["Hello-World", "Not-There"])
    text = "Hello-World hello-world x Hello-World. Not-There"
    ids, _, offsets, word_ids = engine.encode([text], offsets=True, word_ids=True)
    # Only between whitespace: with a full stop beside it, it is split like any other word.
    assert ids.tolist() == [1, 2, 3, 4, 5, 2, 3, 4, 0, 0]
    assert [text[start:stop] for start, stop in offsets.tolist()][:2] == ["Hello-World", "hello"]
    assert word_ids.tolist() == list(range(10))


def test_never_split_is_that_of_the_python_tokenizer() -> None:
    """The words that transformers 4's BasicTokenizer(never_split=...) leaves alone, written out."""
    vocab = ["[UNK]", "Don't", "don", "'", "t", "STOP", "stop", "!"]
    engine = WordPiece(vocab, never_split=["Don't", "STOP"])
    assert engine.encode(["Don't don't STOP STOP! D\u200bon't"])[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 1]


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="vocab: tokens must be distinct"):
        WordPiece(["[UNK]", "a", "a"])
    with pytest.raises(ValueError, match=r"unk_token: '\[UNK\]' is not in the vocabulary"):
        WordPiece(["a"])
    with pytest.raises(TypeError, match=r"texts\[1\]: expected str or bytes, got int"):
        WordPiece(["[UNK]"]).encode(["a", 3])  # type: ignore[list-item]
