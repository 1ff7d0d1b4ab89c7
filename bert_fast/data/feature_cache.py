"""Arrays made from texts by a tokenizer, kept in files under a name that says what they were made from.

A file is the SHA-256 of what follows (32 bytes) and an .npz archive. It appears whole or not at all, and is used only
if the checksum fits; whatever else lies there is made anew. Any number of processes may share a directory: two that
miss the same arrays both make them, and either file is right.
"""

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bert_fast.data.token_store import tokenizer_hash
from bert_fast.files import path_name, write_atomically
from bert_fast.tokenization import Tokenizer

__all__ = ["cached_arrays", "feature_key"]

_FORMAT_VERSION = 1  # another one, other keys: of files, and of what the library makes from texts
_DIGEST_BYTES = 32


def feature_key(tokenizer: Tokenizer, *texts: Iterable[str] | None, **options: Any) -> str:
    """A name for all that decides which features come out: 64 hexadecimal digits (SHA-256).

    Args:
        tokenizer: of its settings those count that change ids, and the side on which texts are cut.
        texts: lists of strings, in their order; None is not the same as an empty list.
        options: anything that JSON can hold.
    """
    settings = [tokenizer_hash(tokenizer), tokenizer.form, tokenizer.truncation_side]
    digest = hashlib.sha256(json.dumps([_FORMAT_VERSION, settings, sorted(options.items())], default=vars).encode())
    for column in texts:
        strings = [] if column is None else list(column)
        lengths = np.fromiter(map(len, strings), dtype="<i8", count=len(strings))
        digest.update(json.dumps([column is not None, len(strings)]).encode())
        digest.update(lengths.data)
        digest.update("".join(strings).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def cached_arrays(
    directory: str | os.PathLike[str] | None, key: str, make: Callable[[], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """The arrays that were kept under this key; else those of `make`, which are kept.

    Args:
        directory: made if it is not there; None: nothing is kept.
        key: see `feature_key`.
        make: arrays by name, none of them of objects.

    Raises:
        OSError: the directory or the file cannot be written.
    """
    if not callable(make):
        raise TypeError(f"make: expected a function, got {type(make).__name__}")
    if directory is None:
        return make()
    path = Path(path_name("directory", directory)) / f"{path_name('key', key)}.features"
    arrays = _read(path)
    if arrays is None:
        arrays = make()
        _write(path, arrays)
    return arrays


def _read(path: Path) -> dict[str, np.ndarray] | None:
    """The arrays of a file, None if it is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(memoryview(content)[_DIGEST_BYTES:]).digest() != content[:_DIGEST_BYTES]:
        return None
    with np.load(io.BytesIO(content[_DIGEST_BYTES:]), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    archive = io.BytesIO()
    np.savez(archive, allow_pickle=False, **arrays)
    content = archive.getbuffer()
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            file.write(hashlib.sha256(content).digest())
            file.write(content)

    write_atomically(path, write)
