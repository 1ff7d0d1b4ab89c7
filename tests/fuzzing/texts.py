"""Random texts and everything a tokenizer takes or refuses in their place; vocabularies and options for tokenizers.

What a text is made of comes from the grammar by which the tokenizer's ids are checked (`tests/tokenization`).
"""

import array
import functools
import random
from typing import Any

import numpy as np
import pyarrow as pa

from ..tokenization.arrow_columns import Column
from ..tokenization.fuzz_grammar import (
    Setting,
    break_bytes,
    make_pool,
    random_added_tokens,
    random_options,
    random_vocab,
)
from .case import Case
from .tensors import garbage

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_POOLS = 24  # vocabularies with texts for each; made once a worker


@functools.lru_cache(_POOLS)
def vocabulary(number: int) -> list[str]:
    """One of `_POOLS` vocabularies."""
    tokens = random_vocab(random.Random(number), "##")
    return list(dict.fromkeys([*SPECIAL, *tokens]))


@functools.lru_cache(_POOLS)
def _pool(number: int) -> list[str]:
    return make_pool(random.Random(number), Setting("", vocabulary(number)), 400)


def engine_options(rng: random.Random) -> dict[str, Any]:
    """Options of the constructor that say how text is normalized and split."""
    options = random_options(rng)
    return {
        "do_lower_case": options["lowercase"],
        "strip_accents": options["strip_accents"],
        "tokenize_chinese_chars": options["handle_chinese_chars"],
        "clean_text": options["clean_text"],
        "max_input_chars_per_word": options["max_word_chars"],
    }


def added_tokens(rng: random.Random, tokens: list[str]) -> list[dict[str, Any]]:
    """Added tokens as dictionaries of their switches."""
    drawn = random_added_tokens(rng, [*tokens], {"lowercase": rng.random() < 0.5})
    names = ("content", "id", "single_word", "lstrip", "rstrip", "normalized")
    return [dict(zip(names, token, strict=True)) for token in drawn]


class _Word(str):
    """A subclass of str."""


class _Hostile:
    """A sequence that lies about its length and fails half way."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> str:
        if index:
            raise ValueError("text: no more")
        return "a"

    def __iter__(self) -> Any:
        yield "a"
        raise ValueError("text: an iterator's own error, which comes through")


class Texts:
    """Draws texts of one case, over one vocabulary."""

    def __init__(self, case: Case) -> None:
        self.case, self.rng = case, case.rng
        self.number = self.rng.randrange(_POOLS)
        self.vocab = vocabulary(self.number)

    def text(self) -> str:
        """A str; now and then with something a str may hold and UTF-8 may not."""
        count = self.rng.choice((0, 1, 1, 2, 3, 5, 8, 13, 30, 30, 200 if self.rng.random() < 0.05 else 4))
        text = "".join(self.rng.choices(_pool(self.number), k=count))
        if self.rng.random() < 0.04:
            text += self.rng.choice(
                ("\ud800", "\udfff\ud800", "\0", "\U0010ffff", "a" * 5000, " " * 3000, "\u0301" * 999)
            )
        return text

    def texts(self, most: int = 6) -> list[str]:
        """Several."""
        return [self.text() for _ in range(self.rng.randint(0, most))]

    def encoded(self) -> bytes:
        """UTF-8, whole or broken."""
        text = self.text().encode(errors="surrogatepass")
        return break_bytes(self.rng, text) if self.rng.random() < 0.4 else text

    def single(self) -> Any:
        """One text, in one of its forms."""
        kind = self.rng.randrange(8)
        if kind < 5:
            return self.text()
        return self.encoded() if kind < 7 else _Word(self.text())

    def words(self) -> Any:
        """A text that is split already."""
        return self.rng.choice((list, list, tuple))(self.single() for _ in range(self.rng.randint(0, 5)))

    def batch(self) -> Any:
        """Several texts, in one of the forms of a batch."""
        texts = self.texts()
        match self.rng.randrange(12):
            case 0 | 1 | 2:
                return [self.single() for _ in texts]
            case 3:
                return tuple(texts)
            case 4:
                return [(self.single(), self.single()) for _ in texts]
            case 5:
                return self._numpy(texts)
            case 6 | 7:
                return self._arrow(texts)
            case 8 | 9:
                return self._buffer()
            case 10:
                return self._arrow_by_hand(texts)
            case _:
                return texts

    def anything(self) -> Any:
        """What may or may not be a text or several."""
        match self.rng.randrange(10):
            case 0:
                return garbage(self.rng)
            case 1:
                return self._nested(3)
            case 2:
                return self.rng.choice((_Hostile(), iter(self.texts()), set(self.texts()), dict.fromkeys(self.texts())))
            case 3 | 4 | 5:
                return self.single()
            case _:
                return self.batch()

    def _nested(self, depth: int) -> Any:
        if depth == 0 or self.rng.random() < 0.4:
            return self.rng.choice((self.text(), self.encoded(), None, 3, 1.5, [], "", (), True, bytearray(b"ab")))
        return self.rng.choice((list, tuple))(self._nested(depth - 1) for _ in range(self.rng.randint(0, 4)))

    def _numpy(self, texts: list[str]) -> Any:
        match self.rng.randrange(6):
            case 0:
                return np.array(texts, dtype=object)
            case 1:
                return np.array([text.encode(errors="replace") for text in texts], dtype="S")
            case 2:
                return np.array(texts, dtype="U").reshape(-1, 1)
            case 3:
                clean = [text.encode(errors="replace").decode() for text in texts]
                return np.array(clean, dtype=np.dtypes.StringDType()) if hasattr(np.dtypes, "StringDType") else clean
            case 4:
                return np.array([*texts, *texts], dtype="U")[::2]
            case _:
                return np.array(texts, dtype=self.rng.choice(("U", ">U", "<U3")))

    def _arrow(self, texts: list[str]) -> Any:
        clean: list[Any] = [text.encode(errors="replace").decode() for text in texts]
        if self.rng.random() < 0.15:
            clean.append(None)
        kinds = (pa.string(), pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.int64(), pa.null())
        kind = self.rng.choice(kinds)
        if kind in (pa.int64(), pa.null()):
            clean = [None if kind == pa.null() else 3 for _ in clean]
        elif kind == pa.binary():
            clean = [None if text is None else text.encode() for text in clean]
        column = pa.array(clean, kind)
        match self.rng.randrange(5):
            case 0:
                return pa.chunked_array([column, column])
            case 1 if kind not in (pa.string_view(), pa.null()):
                return column.dictionary_encode()
            case 2:
                return column.slice(self.rng.randint(0, 3), self.rng.randint(0, 3))
            case 3:
                return pa.table({"text": column})
            case _:
                return column

    def _arrow_by_hand(self, texts: list[str]) -> Any:
        """A column whose numbers are wrong in a way that can be seen without knowing how long its buffers are."""
        blob = "".join(texts).encode(errors="replace")
        data = np.frombuffer(blob + b"\0", np.uint8)
        ends = np.cumsum([0, *(len(text.encode(errors="replace")) for text in texts)])
        offsets = ends.astype(self.rng.choice((np.int32, np.int32, np.int64)))
        layout = self.rng.choice(("u", "u", "U", "z", "vu", "i", "", "+s", "\xff"))
        if (offsets.dtype == np.int64) != (layout == "U"):
            layout = "U" if offsets.dtype == np.int64 else self.rng.choice(("u", "i", "", "tdD"))
        length = len(texts)
        if self.rng.random() < 0.5:
            offsets = offsets.copy()
            offsets[self.rng.randrange(len(offsets))] = self.rng.choice((-1, 0, -(2**31)))
        elif self.rng.random() < 0.3:
            length = self.rng.choice((-1, -(2**62), 0))
        return Column(layout, length, [None, offsets, data])

    def _buffer(self) -> Any:
        """(buffer, boundaries), the boundaries good or bad."""
        blobs = [self.encoded() for _ in range(self.rng.randint(0, 4))]
        ends = np.cumsum([0, *map(len, blobs)]).astype(np.int64)
        data: Any = b"".join(blobs)
        data = self.rng.choice((bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8)))(data)
        if self.rng.random() < 0.4:
            bad = (-1, -(2**63), 2**63 - 1, len(data) + 1, 2**32, 0, len(data))
            ends[self.rng.randrange(len(ends))] = self.rng.choice(bad)
        if self.rng.random() < 0.15:
            others = (ends[:0], ends.astype(np.int32), ends[::-1], ends.reshape(1, -1), np.repeat(ends, 2)[::2])
            ends = self.rng.choice(others)
        if self.rng.random() < 0.1:
            data = self.rng.choice(("text", array.array("d", [1.5, 2.5]), np.zeros((3, 4), np.uint8)[:, ::2], None, 5))
        return data, ends
