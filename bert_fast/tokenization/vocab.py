"""Vocabularies: a list of token strings in which the position is the id, read from vocab.txt or a mapping."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_fast.tokenization.arguments import shown

_SHOWN = 5  # how many offenders an error message lists
_MAX_SEARCHES = 32  # one through the bytes of a file costs some 10 us, the dictionary 2 ms


class Vocabulary:
    """The tokens by id; immutable. Those of a file become strings when they are first asked for: encoding needs none.

    Args:
        source: the tokens, or the content of a vocab.txt without a fault but, perhaps, tokens on two lines.
        path: of the file, for messages.
    """

    def __init__(self, source: list[str] | bytes, path: str = "") -> None:
        self.source = source
        self._path = path
        self._tokens = source if isinstance(source, list) else None
        self._ids: dict[str, int] | None = None
        self._num_searches = 0
        if isinstance(source, list):
            self._size = len(source)
        else:
            self._size = source.count(b"\n") + (not source.endswith(b"\n"))

    def __len__(self) -> int:
        return self._size

    @property
    def tokens(self) -> list[str]:
        """The tokens by id; not to be changed."""
        if self._tokens is None:
            assert isinstance(self.source, bytes)
            self._tokens = _split_lines(self.source.decode())
        return self._tokens

    @property
    def ids(self) -> dict[str, int]:
        """Token -> id; not to be changed."""
        if self._ids is None:
            self._ids = dict(zip(self.tokens, range(self._size), strict=True))
        return self._ids

    def find(self, token: str) -> int | None:
        """The id of a token, or None."""
        data = self.source
        is_line = bool(token) and "\n" not in token and "\r" not in token
        if self._ids is not None or isinstance(data, list) or not is_line or self._num_searches == _MAX_SEARCHES:
            return self.ids.get(token)
        self._num_searches += 1
        wanted = token.encode(errors="surrogatepass")  # which matches nothing where it passes a lone surrogate
        start = data.find(wanted)
        while start >= 0:
            end = start + len(wanted)
            rest = data[end : end + 2]
            if data[max(0, start - 1) : start] in (b"", b"\n") and (rest[:1] == b"\n" or rest in (b"", b"\r", b"\r\n")):
                return data.count(b"\n", 0, start)
            start = data.find(wanted, start + 1)
        return None

    def check_distinct(self) -> None:
        """Raises ValueError if a token stands on two lines of the file; the message says on which."""
        _check_distinct(self.tokens, self._path)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Vocabulary":
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "path": self._path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Vocabulary.__init__(self, **state)


def open_vocab(path: str | os.PathLike[str]) -> Vocabulary:
    """Reads a vocab.txt: one token a line, the line number (from 0) is the id.

    Lines end with LF or CR LF and with nothing else: U+2028 and its like are characters of the token (the Chinese
    vocabulary has two entries with it, which `str.splitlines` would tear apart, shifting every later id).

    Whether all tokens are distinct is left to the engine that is made of them, and to `Vocabulary.check_distinct`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is a directory, empty, not UTF-8, starts with a byte order mark, or has spaces or tabs
            behind a token.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"vocab: {path} is a directory; pass the file, or use BertTokenizer.from_pretrained")
    if not path.is_file():
        raise FileNotFoundError(f"vocab: there is no file {path}")
    data = path.read_bytes()
    if not data.strip():
        raise ValueError(f"vocab: {path} is empty")
    if data.startswith(b"\xef\xbb\xbf"):
        raise ValueError(f"vocab: {path} starts with a byte order mark; save it as UTF-8 without one")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"vocab: {path} is not UTF-8: line {line}, byte {error.start} of the file") from None
    if b" " in data or b"\t" in data:
        _check_ends(data, path)
    return Vocabulary(data, str(path))


def read_vocab(path: str | os.PathLike[str]) -> list[str]:
    """The tokens of a vocab.txt, by id; see `open_vocab`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: as there, or the file repeats a token.
    """
    vocabulary = open_vocab(path)
    vocabulary.check_distinct()
    return vocabulary.tokens


def vocab_from_mapping(mapping: Mapping[str, int]) -> list[str]:
    """The tokens of a token -> id mapping, by id.

    Raises:
        TypeError: a key is not a string or an id is not an integer.
        ValueError: the mapping is empty, or its ids are not 0, 1, ..., len - 1, each once.
    """
    if not mapping:
        raise ValueError("vocab: the mapping is empty")
    tokens: list[str | None] = [None] * len(mapping)
    for token, token_id in mapping.items():
        if not isinstance(token, str) or isinstance(token_id, bool) or not isinstance(token_id, int):
            raise TypeError(f"vocab: expected str -> int, got {shown(token)} -> {shown(token_id)}")
        if not 0 <= token_id < len(mapping):
            raise ValueError(
                f"vocab: ids must be 0 to {len(mapping) - 1}, without gaps, for {len(mapping)} tokens; "
                f"{shown(token)} has {shown(token_id)}"
            )
        if tokens[token_id] is not None:
            raise ValueError(f"vocab: id {token_id} is given to both {shown(tokens[token_id])} and {shown(token)}")
        tokens[token_id] = token
    return [token for token in tokens if token is not None]


def load_vocab(vocab: Any, vocab_file: Any) -> Vocabulary:
    """The vocabulary from either argument of the constructor."""
    if vocab is not None and vocab_file is not None:
        raise TypeError("vocab: give either vocab or vocab_file, not both")
    source = vocab_file if vocab is None else vocab
    if isinstance(source, Vocabulary):
        return source
    if isinstance(source, (str, os.PathLike)):
        return open_vocab(source)
    if isinstance(source, Mapping):
        return Vocabulary(vocab_from_mapping(source))
    if isinstance(source, (list, tuple)):
        return Vocabulary(vocab_from_mapping(_numbered(source)))
    raise TypeError(f"vocab: expected a path, a mapping or a list of tokens, got {type(source).__name__}")


def _numbered(tokens: Sequence[str]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if not isinstance(token, str):
            raise TypeError(f"vocab[{token_id}]: expected a str, got {shown(token)}")
        if numbers.setdefault(token, token_id) != token_id:
            raise ValueError(f"vocab: the token {token!r} stands at {numbers[token]} and at {token_id}")
    return numbers


def vocab_to_text(tokens: Iterable[str]) -> str:
    """The content of the vocab.txt that `read_vocab` reads back as these tokens, if none has blanks behind it.

    Raises:
        ValueError: a token contains a line feed or ends with a carriage return, which the format cannot hold.
    """
    tokens = list(tokens)
    for token_id, token in enumerate(tokens):
        if "\n" in token or token.endswith("\r"):
            raise ValueError(f"vocab: token {token_id}, {token!r}, cannot be written as one line of vocab.txt")
    return "".join(f"{token}\n" for token in tokens)


def _split_lines(text: str) -> list[str]:
    lines = text.removesuffix("\n").split("\n")
    return [line.removesuffix("\r") for line in lines] if "\r" in text else lines


def _check_ends(data: bytes, path: Path) -> None:
    """Raises ValueError if a token has spaces or tabs behind it: no text has such a token."""
    wrong = []
    for line, token in enumerate(_split_lines(data.decode()), start=1):
        if token.rstrip(" \t") not in (token, "", "##"):  # blanks alone may be entries of characters
            wrong.append(f"{token!r:.80} on line {line}")
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError(
            f"vocab: {path}: expected one token a line and nothing behind it, got spaces or tabs behind tokens: "
            f"{'; '.join(wrong[:_SHOWN])}{more}; remove them"
        )


def _check_distinct(tokens: list[str], source: str) -> None:
    first_line: dict[str, int] = {}
    repeated = []
    for line, token in enumerate(tokens, start=1):
        if first_line.setdefault(token, line) != line:
            repeated.append(f"{token!r:.80} on lines {first_line[token]} and {line}")
    if repeated:
        more = f" and {len(repeated) - _SHOWN} more" if len(repeated) > _SHOWN else ""
        raise ValueError(f"vocab: {source} repeats tokens: {'; '.join(repeated[:_SHOWN])}{more}")
