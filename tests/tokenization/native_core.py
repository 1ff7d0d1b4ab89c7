"""The C++ WordPiece core and the same tokenizer composed from Hugging Face `tokenizers`; texts to compare them on."""

import bz2
import functools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_fast import native

tokenizers = pytest.importorskip("tokenizers")
module = native.load()
needs_native = pytest.mark.skipif(module is None, reason=f"no C++ tokenizer: {native.unavailable_reason()}")

SURROGATES = range(0xD800, 0xE000)


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
        for k, encoding in enumerate(theirs.encode_batch(batch, add_special_tokens=False)):
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
                lines += file.read_text(encoding="utf-8", errors="replace").split("\n")
    strings: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, str):
            strings.append(value)
        for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            collect(child)

    for file in sorted((data / "question_answering").glob("*.json")):
        collect(json.loads(file.read_text(encoding="utf-8")))
    return list(dict.fromkeys(lines + strings))


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
