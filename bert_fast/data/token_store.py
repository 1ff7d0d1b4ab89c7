"""`TokenStore`: tokenized texts in a directory, mapped into memory.

    tokens.bin     ids of all documents, one behind the other: uint16, or int32 for vocabularies of more than 65,536
    documents.bin  int64 [n + 1], document i has tokens[documents[i]:documents[i + 1]]
    sentences.bin  int64 [s + 1], likewise for sentences, where the source has them; sentences have at least one token
    store.json     what is in it, its digests, how it was made; written last, so that a store that has one is complete
    progress.json  how far the store is, while it is written

Two lines of text, a blank one and a third, tokenized to 4, 2 and 5 tokens, are two documents:

    documents [0, 6, 11]    sentences [0, 4, 6, 11]

All numbers are little-endian. No special tokens are stored: who trains puts them where a sequence begins and ends.
"""

import hashlib
import json
import mmap
import os
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from bert_fast.data.arguments import check_tokenizer_kind, row_index
from bert_fast.data.digests import DIGESTS, check_seal, chunk_digests, data_digest
from bert_fast.errors import StoreError
from bert_fast.files import path_name
from bert_fast.tokenization import Tokenizer

FORMAT_VERSION = 1
TOKENS, DOCUMENTS, SENTENCES = "tokens.bin", "documents.bin", "sentences.bin"
STORE, PROGRESS = "store.json", "progress.json"
BOUNDARY_DTYPE = "<i8"
_TOKEN_DTYPES = ("<u2", "<i4")


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """SHA-256 of all that decides which ids a text gets: the tokenizer's `identity`."""
    return hashlib.sha256(json.dumps(tokenizer.identity()).encode()).hexdigest()


class TokenStore:
    """A complete store of tokenized documents, read-only and mapped into memory: opening one costs no time.

    `len(store)` is the number of documents, `store[i]` the ids of document i: a view into the map, [length], uint16 or
    int32, without special tokens. Pickled stores are opened again by path, so workers of a DataLoader share the pages.

    Attributes:
        path: the directory.
        tokens (uint16 or int32 [N]): the ids of all documents.
        boundaries (int64 [n + 1]): document i is tokens[boundaries[i]:boundaries[i + 1]].
        sentence_boundaries (int64 [s + 1]): likewise of all sentences of all documents; None without sentences.
        info: what store.json says.

    Example:
        >>> words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text"]
        >>> tokenizer = bert_fast.BertTokenizer(words)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "x.txt").write_text("a text a text " * 4)
        ...     store = data.tokenize_files([f"{folder}/x.txt"], f"{folder}/store", tokenizer)
        ...     opened = data.TokenStore.open(f"{folder}/store", tokenizer)
        ...     len(opened), opened[0][:3].tolist(), opened.boundaries.tolist()
        (1, [5, 6, 5], [0, 16])
    """

    path: Path
    tokens: np.ndarray
    boundaries: np.ndarray
    sentence_boundaries: np.ndarray | None
    info: dict[str, Any]

    @classmethod
    def open(cls, directory: str | os.PathLike[str], tokenizer: Tokenizer | None = None) -> "TokenStore":
        """Opens a store and sees that it is complete: store.json by its digest, the other files by their sizes.

        What the other files hold is not read; `verify` does that.

        Args:
            directory: where `tokenize_files` or `bert-fast tokenize` wrote it.
            tokenizer: the tokenizer that it must have been made with; None: any.

        Raises:
            StoreError: there is no store, it is not finished, a file is missing or has another size, or it was made
                with another tokenizer.
            TypeError, ValueError: an argument of another kind.
        """
        path = Path(path_name("directory", directory))
        if tokenizer is not None:
            check_tokenizer_kind(tokenizer)
        info = read_info(path)
        check_tokenizer(path, info, tokenizer)
        store = cls.__new__(cls)
        store.path, store.info = path, info
        store.tokens = _map(path / TOKENS, info["dtype"], info["tokens"])
        store.boundaries = _map(path / DOCUMENTS, BOUNDARY_DTYPE, info["documents"] + 1)
        store.sentence_boundaries = None
        ends = [store.boundaries]
        if info["sentences"] is not None:
            store.sentence_boundaries = _map(path / SENTENCES, BOUNDARY_DTYPE, info["sentences"] + 1)
            ends.append(store.sentence_boundaries)
        for boundaries in ends:
            if (boundaries[0], boundaries[-1]) != (0, info["tokens"]):
                raise StoreError(
                    f"{path}: is damaged: expected boundaries from 0 to {info['tokens']}, got {boundaries[0]} to "
                    f"{boundaries[-1]}"
                )
        return store

    def __init__(self) -> None:
        raise TypeError("TokenStore: use TokenStore.open(directory)")

    def __len__(self) -> int:
        return len(self.boundaries) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        start, stop = self._range(index)
        return self.tokens[start:stop]

    def __repr__(self) -> str:
        return f"TokenStore({str(self.path)!r}, documents={len(self)}, tokens={len(self.tokens)})"

    def __reduce__(self) -> Any:
        return TokenStore.open, (str(self.path),)

    @property
    def has_sentences(self) -> bool:
        """Whether a source told its sentences apart; if not, every document is one sentence."""
        return self.sentence_boundaries is not None

    @property
    def digest(self) -> str:
        """A digest of what is in the store, as it was when it was written, whatever its sources are called.

        Of a store without digests: of the tokenizer and of how much there is.
        """
        digests = self.info.get(DIGESTS) or [self.info[name] for name in ("documents", "tokens", "sentences")]
        return data_digest(self.info["tokenizer"], self.info["dtype"], digests)

    def verify(self) -> bool:
        """Reads all files and compares them with the digests in store.json, one per GiB, on all processors.

        Returns: whether there are digests; stores of earlier versions have none.

        Raises:
            StoreError: bytes have changed since they were written; the message names the file and the place.
        """
        chunk_bytes: int = self.info.get("chunk_bytes", 0)
        for name, expected in self.info.get(DIGESTS, {}).items():
            file = self.path / name
            try:
                found = chunk_digests(file, chunk_bytes)
            except OSError as error:
                raise StoreError(f"{file}: cannot be read: {error.strerror}: the store is damaged") from None
            if found != expected:
                number = next(number for number, pair in enumerate(zip_longest(found, expected)) if pair[0] != pair[1])
                digests = (one[number][:16] if number < len(one) else "none" for one in (expected, found))
                raise StoreError(
                    "{}: is damaged from byte {:,} on, in the next {:,}: expected digest {}..., got {}...".format(
                        file, number * chunk_bytes, chunk_bytes, *digests
                    )
                )
        return DIGESTS in self.info

    def sentences(self, index: int) -> np.ndarray:
        """Where the sentences of a document begin and end in `tokens`: int64 [k + 1] for k sentences, k = 0 if empty.

        Sentence j is tokens[result[j]:result[j + 1]].
        """
        start, stop = self._range(index)
        if self.sentence_boundaries is None:
            return np.array([start, stop] if start < stop else [start], dtype=np.int64)
        # Documents begin and end where sentences do, and no sentence is empty.
        first, last = np.searchsorted(self.sentence_boundaries, np.array([start, stop]))
        return self.sentence_boundaries[first : last + 1]

    def _range(self, index: int) -> tuple[int, int]:
        index = row_index(index, len(self))
        return int(self.boundaries[index]), int(self.boundaries[index + 1])


def read_info(path: Path) -> dict[str, Any]:
    """The content of store.json.

    Raises:
        StoreError: see `TokenStore.open`.
    """
    file = path / STORE
    try:
        content = file.read_bytes()
    except OSError as error:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise StoreError(f"{file}: cannot be read: {error.strerror}") from None
        if (path / PROGRESS).is_file():
            raise StoreError(f"{path}: is not finished; run the command that began it once more") from None
        raise StoreError(f"{path}: is not a token store: there is no {STORE}") from None
    info = parse_json(file, content)
    try:
        check_counts(info, ["documents", "tokens", *(["sentences"] if info.get("sentences", 0) is not None else [])])
        _check_digests(info)
    except ValueError as error:
        raise StoreError(f"{file}: is damaged: {error}") from None
    return info


def _check_digests(info: dict[str, Any]) -> None:
    if DIGESTS not in info:
        return
    digests = info[DIGESTS]
    if not isinstance(digests, dict) or not digests.keys() <= {TOKENS, DOCUMENTS, SENTENCES}:
        raise ValueError(f"{DIGESTS}: expected those of {TOKENS}, {DOCUMENTS} and {SENTENCES}")
    if not all(isinstance(chunks, list) and all(isinstance(one, str) for one in chunks) for chunks in digests.values()):
        raise ValueError(f"{DIGESTS}: expected lists of texts")
    check_counts(info, ["chunk_bytes"])
    if not info["chunk_bytes"]:
        raise ValueError("chunk_bytes: expected a number above 0")


def parse_json(file: Path, content: bytes) -> dict[str, Any]:
    """A JSON file of a store.

    Raises:
        StoreError: it is damaged, or of another version of the format.
    """
    try:
        info = json.loads(content)
        check_seal(info)
        if info.get("format_version") != FORMAT_VERSION:
            raise StoreError(f"{file}: expected format_version {FORMAT_VERSION}, got {info.get('format_version')!r}")
        _check_fields(info)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{file}: is damaged or not of a token store: {error}") from None
    return info


def _check_fields(info: dict[str, Any]) -> None:
    """Raises ValueError naming a field that store.json and progress.json have, and that is of a wrong kind."""
    if info.get("dtype") not in _TOKEN_DTYPES:
        raise ValueError(f"dtype: expected one of {_TOKEN_DTYPES}, got {info.get('dtype')!r}")
    if not isinstance(info.get("tokenizer"), str):
        raise ValueError(f"tokenizer: expected a text, got {info.get('tokenizer')!r}")
    sources = info.get("sources")
    if not isinstance(sources, list) or not all(
        isinstance(source, dict) and isinstance(source.get("name"), str) and isinstance(source.get("format"), str)
        for source in sources
    ):
        raise ValueError("sources: expected a list of objects, each with name and format")
    check_counts(info, ["vocab_size"])


def check_counts(info: dict[str, Any], names: Iterable[str]) -> None:
    """Raises ValueError unless all these are whole numbers from 0 on."""
    for name in names:
        value = info.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name}: expected a number from 0 on, got {value!r}")


def check_tokenizer(path: Path, info: dict[str, Any], tokenizer: Tokenizer | None) -> None:
    """Raises StoreError if the store was made with another tokenizer."""
    if tokenizer is not None and tokenizer_hash(tokenizer) != info["tokenizer"]:
        raise StoreError(
            f"{path}: was made with another tokenizer (vocabulary, options or added tokens): expected "
            f"{tokenizer_hash(tokenizer)[:12]} (vocabulary of {len(tokenizer)}), got {info['tokenizer'][:12]} "
            f"(vocabulary of {info['vocab_size']})"
        )


def _map(file: Path, dtype: str, length: int) -> np.ndarray:
    """A file as an array [length] that cannot be written; without np.memmap, whose slices cost ten times as much."""
    num_bytes = length * np.dtype(dtype).itemsize
    try:
        with open(file, "rb") as opened:
            found = os.fstat(opened.fileno()).st_size
            if found != num_bytes:
                raise StoreError(f"{file}: expected {num_bytes} bytes, got {found}: the store is damaged")
            if num_bytes == 0:  # cannot be mapped
                return np.empty(0, dtype=dtype)
            return np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), dtype=dtype)
    except OSError as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise StoreError(f"{file}: {what}: the store is damaged") from None
