"""Vocabularies: a list of token strings in which the position is the id, read from vocab.txt or a mapping."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["load_vocab", "read_vocab", "vocab_from_mapping", "vocab_to_text", "write_atomically"]

_SHOWN = 5  # how many offenders an error message lists


def read_vocab(path: str | os.PathLike[str]) -> list[str]:
    """Reads a vocab.txt: one token a line, the line number (from 0) is the id.

    Lines end with LF or CR LF and with nothing else: U+2028 and its like are characters of the token (the Chinese
    vocabulary has two entries with it, which `str.splitlines` would tear apart, shifting every later id).

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is a directory, empty, not UTF-8, starts with a byte order mark or repeats a token.
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
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"vocab: {path} is not UTF-8: line {line}, byte {error.start} of the file") from None
    lines = text.removesuffix("\n").split("\n")
    tokens = [line.removesuffix("\r") for line in lines]
    _check_distinct(tokens, str(path))
    return tokens


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
            raise TypeError(f"vocab: expected str -> int, got {token!r} -> {token_id!r}")
        if not 0 <= token_id < len(mapping):
            raise ValueError(
                f"vocab: ids must be 0 to {len(mapping) - 1}, without gaps, for {len(mapping)} tokens; "
                f"{token!r} has {token_id}"
            )
        if tokens[token_id] is not None:
            raise ValueError(f"vocab: id {token_id} is given to both {tokens[token_id]!r} and {token!r}")
        tokens[token_id] = token
    return [token for token in tokens if token is not None]


def load_vocab(vocab: Any, vocab_file: Any) -> list[str]:
    """The token list from either argument of the constructor."""
    if vocab is not None and vocab_file is not None:
        raise TypeError("vocab: give either vocab or vocab_file, not both")
    source = vocab_file if vocab is None else vocab
    if isinstance(source, (str, os.PathLike)):
        return read_vocab(source)
    if isinstance(source, Mapping):
        return vocab_from_mapping(source)
    if isinstance(source, (list, tuple)):
        return vocab_from_mapping(_numbered(source))
    raise TypeError(f"vocab: expected a path, a mapping or a list of tokens, got {type(source).__name__}")


def _numbered(tokens: Sequence[str]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if numbers.setdefault(token, token_id) != token_id:
            raise ValueError(f"vocab: the token {token!r} stands at {numbers[token]} and at {token_id}")
    return numbers


def vocab_to_text(tokens: Iterable[str]) -> str:
    """The content of the vocab.txt that `read_vocab` reads back as these tokens.

    Raises:
        ValueError: a token contains a line feed or ends with a carriage return, which the format cannot hold.
    """
    tokens = list(tokens)
    for token_id, token in enumerate(tokens):
        if "\n" in token or token.endswith("\r"):
            raise ValueError(f"vocab: token {token_id}, {token!r}, cannot be written as one line of vocab.txt")
    return "".join(f"{token}\n" for token in tokens)


def write_atomically(path: Path, text: str) -> None:
    """Writes UTF-8 to a temporary name beside `path` and renames it: readers see the old file or the new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _check_distinct(tokens: list[str], source: str) -> None:
    first_line: dict[str, int] = {}
    repeated = []
    for line, token in enumerate(tokens, start=1):
        if first_line.setdefault(token, line) != line:
            repeated.append(f"{token!r} on lines {first_line[token]} and {line}")
    if repeated:
        more = f" and {len(repeated) - _SHOWN} more" if len(repeated) > _SHOWN else ""
        raise ValueError(f"vocab: {source} repeats tokens: {'; '.join(repeated[:_SHOWN])}{more}")
