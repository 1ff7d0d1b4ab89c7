"""WordPiece tokenization in plain Python: the oracle of the C++ core, and its stand-in where that is not built.

It does what Hugging Face `tokenizers` 0.23 does with BertNormalizer, BertPreTokenizer and WordPiece, one step after the
other and without tricks:

    text -> cut out added tokens -> normalize -> cut out added tokens that match normalized text
         -> split at whitespace, around punctuation -> greedy longest match -> ids

Every normalized character remembers the one character of the original string that it came from; that is all that
offsets need. One traced input, uncased, with [MASK] as an added token:

    "Héllo,  [MASK]\u0301!"   pieces     "Héllo,  "         [MASK]   "\u0301!"
                              normalized "hello,  "                  "!"          (the accent is stripped)
                              words      hello | ,           [MASK]   !
                              offsets    (0,5)   (5,6)       (8,14)   (15,16)

Two policies of our own, for input that the Rust library cannot take: a lone surrogate in a `str`, and every maximal
invalid part of UTF-8 `bytes`, count as one U+FFFD, which text cleaning then removes.

Source: Devlin et al. 2018 (arXiv:1810.04805) for the vocabulary; Song et al. 2021 (arXiv:2012.15524) for the
definition of longest-match-first.
"""

import bisect
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bert_fast.reference import _unicode_tables as tables
from bert_fast.reference.wordpiece_rows import WordPieceRows, text_list

AddedToken = tuple[str, int, bool, bool, bool, bool]  # content, id, single_word, lstrip, rstrip, normalized
Word = tuple[str, int | None, int, int]  # text, id if it is known already, start and stop in the string it was cut from


class WordPiece(WordPieceRows):
    """Splits texts into WordPiece ids, as Hugging Face's fast BERT tokenizer does; adds no [CLS] or [SEP].

    Args:
        vocab: token strings, the position is the id; no duplicates. Or the content of a vocab.txt: UTF-8, one a line.
        unk_token: stands for a word that cannot be composed of the vocabulary; must be in it.
        lowercase: lower-case the text (one character at a time: no final sigma).
        strip_accents: decompose (NFD) and drop non-spacing marks; None means "if lowercase".
        handle_chinese_chars: make every CJK ideograph a word.
        clean_text: drop control characters and turn whitespace into spaces.
        max_word_chars: longer words (in code points, after normalization) become unk_token.
        continuing_prefix: marks vocabulary entries that continue a word.
        added_tokens: (content, id, single_word, lstrip, rstrip, normalized), recognised anywhere in the text before it
            is split; of equal contents the first wins.
        never_split: words that, standing between whitespace in the cleaned text, are looked up whole and as they are.

    Raises:
        ValueError: duplicate vocabulary entries, or unk_token is not in the vocabulary.
    """

    def __init__(
        self,
        vocab: Sequence[str] | bytes,
        *,
        unk_token: str = "[UNK]",
        lowercase: bool = True,
        strip_accents: bool | None = None,
        handle_chinese_chars: bool = True,
        clean_text: bool = True,
        max_word_chars: int = 100,
        continuing_prefix: str = "##",
        added_tokens: Sequence[AddedToken] = (),
        never_split: Sequence[str] = (),
    ) -> None:
        if isinstance(vocab, bytes):
            vocab = [line.removesuffix("\r") for line in vocab.decode().removesuffix("\n").split("\n")]
        self._ids = {token: position for position, token in enumerate(vocab)}
        if len(self._ids) != len(vocab):
            raise ValueError("vocab: tokens must be distinct")
        added_ids = {token[0]: token[1] for token in reversed(added_tokens)}
        unk_id = self._ids.get(unk_token, added_ids.get(unk_token))
        if unk_id is None:
            raise ValueError(f"unk_token: {unk_token!r} is not in the vocabulary")
        self._unk_id = unk_id
        self._lowercase = lowercase
        self._strip_accents = lowercase if strip_accents is None else strip_accents
        self._handle_chinese_chars = handle_chinese_chars
        self._clean_text = clean_text
        self._max_word_chars = max_word_chars
        self._prefix = continuing_prefix
        self._never_split = frozenset(never_split)
        # A matching piece is never longer than the longest entry: no need to try longer ones.
        self._max_token_chars = max(map(len, vocab), default=0)
        raw = {token[0]: token for token in reversed(added_tokens) if not token[5]}
        normalized = {self.normalize(token[0]): token for token in reversed(added_tokens) if token[5]}
        self._raw_tokens = _TokenFinder(raw)
        self._normalized_tokens = _TokenFinder(normalized)

    def encode(
        self,
        texts: Any,
        *,
        offsets: bool = False,
        word_ids: bool = False,
        num_threads: int = 0,
        dtype: str = "int32",
        around: tuple[int, int] | None = None,
        max_tokens: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Ids of all texts, one after the other, with the boundaries between texts.

        Args:
            texts: n texts: a sequence of str or UTF-8 bytes; a NumPy array [n] of dtype U, S, object or StringDType; an
                Arrow column of strings or binary values; or (buffer, boundaries): UTF-8 bytes and int64 [n + 1], text i
                is buffer[boundaries[i]:boundaries[i + 1]].
            offsets: also return where each token comes from.
            word_ids: also return which word of its text each token belongs to.
            num_threads: ignored; the C++ core uses it (0: as many as the texts are worth).
            dtype: of the ids, "int32" or "int64".
            around: ids (cls, sep) of tokens put before and behind each text, with offsets (0, 0) and word id -1.
            max_tokens: of each text, those around it not counted; the others are left out.

        Returns:
            ids ([N]); cu_seqlens (int64 [n + 1]), text i has ids[cu_seqlens[i]:cu_seqlens[i + 1]];
            offsets (int32 [N, 2] or None), start and stop in code points of the original string;
            word_ids (int32 [N] or None).

        Raises:
            TypeError: a text is neither str nor bytes.
            ValueError: an array, a buffer or boundaries of another form.
        """
        if dtype not in ("int32", "int64"):
            raise ValueError(f"dtype: expected 'int32' or 'int64', got {dtype!r}")
        tokens: list[tuple[int, int, int, int]] = []  # id, start, stop, word
        boundaries = [0]
        for index, text in enumerate(text_list(texts)):
            found = [
                (token_id, start, stop, word)
                for word, pieces in enumerate(self._words_of(_to_str(text, index)))
                for token_id, start, stop in pieces
            ]
            found = found if max_tokens is None else found[:max_tokens]
            tokens += found if around is None else [(around[0], 0, 0, -1), *found, (around[1], 0, 0, -1)]
            boundaries.append(len(tokens))
        columns = np.array(tokens, dtype=np.int64).reshape(-1, 4)
        return (
            columns[:, 0].astype(dtype),
            np.array(boundaries, dtype=np.int64),
            columns[:, 1:3].astype(np.int32) if offsets else None,
            columns[:, 3].astype(np.int32) if word_ids else None,
        )

    def normalize(self, text: str) -> str:
        """The text as the vocabulary is matched against it: cleaned, CJK spaced, accents stripped, lower-cased."""
        return self._fold(*self._clean(_to_str(text)))[0]

    def pre_tokenize(self, text: str) -> list[tuple[str, tuple[int, int]]]:
        """Words and where they stand in `text`: split at whitespace, every punctuation character alone."""
        return [(word, (start, stop)) for word, _, start, stop in _split_words(_to_str(text))]

    def _words_of(self, text: str) -> Iterator[list[tuple[int, int, int]]]:
        """Per word its tokens: id, start and stop in `text`."""
        for piece, known_id, piece_start, piece_stop in self._raw_tokens.split(text):
            if known_id is not None:
                yield [(known_id, piece_start, piece_stop)]
                continue
            for word, word_id, positions in self._normalized_words(piece):
                tokens = [(word_id, 0, len(word))] if word_id is not None else self._match(word)
                yield [
                    (token_id, piece_start + positions[start], piece_start + positions[stop - 1] + 1)
                    for token_id, start, stop in tokens
                ]

    def _normalized_words(self, piece: str) -> Iterator[tuple[str, int | None, Sequence[int]]]:
        """Words of a piece without raw added tokens: normalized text, id if known, position of each character."""
        cleaned, cleaned_positions = self._clean(piece)
        for part, never_split_id, start, stop in self._cut_never_split(cleaned):
            if never_split_id is not None:
                yield part, never_split_id, cleaned_positions[start:stop]
                continue
            text, positions = self._fold(part, cleaned_positions[start:stop])
            for section, added_id, begin, end in self._normalized_tokens.split(text):
                if added_id is not None:
                    yield section, added_id, positions[begin:end]
                    continue
                for word, _, first, last in _split_words(section):
                    yield word, None, positions[begin + first : begin + last]

    def _cut_never_split(self, text: str) -> Iterator[Word]:
        """Cuts the words of `never_split` out of cleaned text; they get their vocabulary id, or that of unk_token."""
        if not self._never_split:
            yield text, None, 0, len(text)
            return
        done = 0
        for match in _NOT_WHITESPACE.finditer(text):
            word = match.group()
            if word in self._never_split:
                yield text[done : match.start()], None, done, match.start()
                yield word, self._ids.get(word, self._unk_id), match.start(), match.end()
                done = match.end()
        yield text[done:], None, done, len(text)

    def _clean(self, text: str) -> tuple[str, Sequence[int]]:
        """First half of normalization, clean_text and handle_chinese_chars; with the origin of every character."""
        positions: Sequence[int] = range(len(text))
        if self._clean_text:
            positions = [p for p, c in enumerate(text) if c not in _CONTROL] if _ANY_CONTROL.search(text) else positions
            text = _WHITESPACE_RUN.sub(lambda run: " " * len(run.group()), _ANY_CONTROL.sub("", text))
        if self._handle_chinese_chars and not text.isascii():
            spaced = [f" {c} " if c in _CJK else c for c in text]
            positions = [p for p, out in zip(positions, spaced, strict=True) for _ in out]
            text = "".join(spaced)
        return text, positions

    def _fold(self, text: str, positions: Sequence[int]) -> tuple[str, Sequence[int]]:
        """Second half of normalization, strip_accents and lowercase; with the origin of every character."""
        if text.isascii():
            return (text.lower() if self._lowercase else text), positions
        if self._strip_accents:
            text, positions = _decompose(text, positions)
            kept = [(c, p) for c, p in zip(text, positions, strict=True) if c not in _MARK]
            text, positions = "".join(c for c, _ in kept), [p for _, p in kept]
        if self._lowercase:
            lowered = [tables.LOWER.get(ord(c), c) for c in text]
            positions = [p for p, out in zip(positions, lowered, strict=True) for _ in out]
            text = "".join(lowered)
        return text, positions

    def _match(self, word: str) -> list[tuple[int, int, int]]:
        """Greedy longest match of one word: (id, start, stop) per token; the whole word is unknown if any part is."""
        unknown = [(self._unk_id, 0, len(word))]
        if len(word) > self._max_word_chars:
            return unknown
        tokens = []
        start = 0
        while start < len(word):
            prefix = self._prefix if start else ""
            stop = min(len(word), start + self._max_token_chars)
            while stop > start and prefix + word[start:stop] not in self._ids:
                stop -= 1
            if stop == start:
                return unknown
            tokens.append((self._ids[prefix + word[start:stop]], start, stop))
            start = stop
        return tokens


class _TokenFinder:
    """Finds added tokens in a text: the leftmost match, the longest of those; matches do not overlap."""

    def __init__(self, tokens: dict[str, AddedToken]) -> None:
        self._tokens = tokens
        longest_first = sorted((content for content in tokens if content), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def split(self, text: str) -> Iterator[Word]:
        """The text in pieces without gaps; pieces that are an added token carry its id."""
        done = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            start, stop = match.span()
            _, token_id, single_word, lstrip, rstrip, _ = self._tokens[match.group()]
            if single_word and (text[start - 1 : start] in _WORD or text[stop : stop + 1] in _WORD):
                continue
            if lstrip:
                while start > done and text[start - 1] in _WHITESPACE:
                    start -= 1
            if rstrip:
                while stop < len(text) and text[stop] in _WHITESPACE:
                    stop += 1
            if start > done:
                yield text[done:start], None, done, start
            yield text[start:stop], token_id, start, stop
            done = stop
        if done < len(text):
            yield text[done:], None, done, len(text)


class _CharacterSet:
    """Membership of single characters in inclusive ranges of code points; the empty string is in no set."""

    def __init__(self, ranges: tables.Ranges) -> None:
        self._firsts = [first for first, _ in ranges]
        self._lasts = [last for _, last in ranges]

    def __contains__(self, character: str) -> bool:
        if not character:
            return False
        index = bisect.bisect_right(self._firsts, ord(character)) - 1
        return index >= 0 and ord(character) <= self._lasts[index]


def _character_class(*range_lists: tables.Ranges) -> str:
    """The inside of a regular expression's [...] for all these ranges."""
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for ranges in range_lists for first, last in ranges)


_CONTROL, _WHITESPACE = _CharacterSet(tables.CONTROL), _CharacterSet(tables.WHITESPACE)
_CJK, _MARK, _WORD = _CharacterSet(tables.CJK), _CharacterSet(tables.MARK), _CharacterSet(tables.WORD)
_ANY_CONTROL = re.compile(f"[{_character_class(tables.CONTROL)}]")
_WHITESPACE_RUN = re.compile(f"[{_character_class(tables.WHITESPACE)}]+")
_NOT_WHITESPACE = re.compile(f"[^{_character_class(tables.WHITESPACE)}]+")
_WORD_OR_PUNCTUATION = re.compile(
    f"[{_character_class(tables.PUNCTUATION)}]|[^{_character_class(tables.PUNCTUATION, tables.WHITESPACE)}]+"
)
_SURROGATE = re.compile("[\ud800-\udfff]")


def _to_str(text: str | bytes, index: int = 0) -> str:
    """The text as valid Unicode; what is not valid becomes U+FFFD."""
    if isinstance(text, bytes):
        return text.decode("utf-8", errors="replace")
    if not isinstance(text, str):
        raise TypeError(f"texts[{index}]: expected str or bytes, got {type(text).__name__}")
    return _SURROGATE.sub("\ufffd", text)


def _split_words(text: str) -> Iterator[Word]:
    for match in _WORD_OR_PUNCTUATION.finditer(text):
        yield match.group(), None, match.start(), match.end()


def _decompose(text: str, positions: Sequence[int]) -> tuple[str, list[int]]:
    """Canonical decomposition (NFD) with origins as Hugging Face counts them.

    Runs of combining characters are sorted by class. The k-th decomposed character that is the first of its original
    gets the origin of the k-th original, whichever it came from; the others share the origin of what stands before
    them. Without reordering that is the character's own origin.
    """
    run: list[tuple[int, str, bool]] = []  # class, character, "is the first of its original"
    decomposed: list[tuple[str, bool]] = []
    for c in text:
        for k, part in enumerate(_decompose_character(c)):
            combining_class = tables.COMBINING_CLASS.get(ord(part), 0)
            if combining_class == 0:
                decomposed += [(char, first) for _, char, first in sorted(run, key=lambda entry: entry[0])]
                run.clear()
                decomposed.append((part, k == 0))
            else:
                run.append((combining_class, part, k == 0))
    decomposed += [(char, first) for _, char, first in sorted(run, key=lambda entry: entry[0])]
    origins: list[int] = []
    originals = iter(positions)
    for _, first in decomposed:
        origins.append(next(originals) if first else origins[-1])
    return "".join(char for char, _ in decomposed), origins


def _decompose_character(c: str) -> str:
    code_point = ord(c)
    first_hangul, last_hangul = tables.HANGUL[0]
    if not first_hangul <= code_point <= last_hangul:
        return tables.NFD.get(code_point, c)
    # Syllables are numbered by lead, vowel, tail (Unicode standard, section 3.12): 21 vowels, 28 tails with "none".
    lead_and_vowel, tail = divmod(code_point - first_hangul, 28)
    lead, vowel = divmod(lead_and_vowel, 21)
    return chr(0x1100 + lead) + chr(0x1161 + vowel) + (chr(0x11A7 + tail) if tail else "")
