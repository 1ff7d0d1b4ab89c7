"""Which implementation splits the text: the C++ core, or the pure-Python reference where it is missing."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from bert_fast import native
from bert_fast.errors import BackendError


class Engine(Protocol):
    """What both implementations offer; immutable, so threads may share one."""

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
        """Ragged ids of all texts; see `bert_fast.reference.wordpiece.WordPiece.encode`."""
        ...

    def encode_one(
        self, text: str | bytes, around: tuple[int, int] | None = None, max_tokens: int | None = None, /
    ) -> list[int]:
        """Ids of one text as a list."""
        ...

    def encode_lists(
        self, texts: Any, around: tuple[int, int] | None = None, max_tokens: int | None = None, num_threads: int = 0, /
    ) -> list[list[int]]:
        """Ids of texts as a list for each."""
        ...

    def encode_rows(
        self, texts: Any, around: tuple[int, int] | None, pad: int, **options: Any
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None] | None:
        """Padded matrices; see `bert_fast.reference.wordpiece_rows.WordPieceRows.encode_rows`."""
        ...

    def pack(
        self,
        texts: Any,
        around: tuple[int, int] | None = None,
        max_tokens: int | None = None,
        max_batch_tokens: int | None = None,
        num_threads: int = 0,
        /,
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """The first texts without padding; see `bert_fast.reference.wordpiece_rows.WordPieceRows.pack`."""
        ...

    @staticmethod
    def sequence_positions(cu_seqlens: np.ndarray) -> np.ndarray:
        """The place of every token in its sequence (int64 [N]), of cu_seqlens (int32 [n + 1])."""
        ...

    def normalize(self, text: str) -> str:
        """The text as the vocabulary is matched against it."""
        ...

    def pre_tokenize(self, text: str) -> list[tuple[str, tuple[int, int]]]:
        """The words of a text and where they stand."""
        ...


def make_engine(vocab: Sequence[str] | bytes, **options: Any) -> Engine:
    """A WordPiece over `vocab`; options as those of `bert_fast.reference.wordpiece.WordPiece`."""
    engine: Engine = implementation()(vocab, **options)
    return engine


def make_unigram(vocab: Sequence[str], **options: Any) -> Engine:
    """A Unigram over the pieces of `vocab`; options as those of `bert_fast._native.Unigram`.

    Raises:
        BackendError: the C++ extension is not there, which has no substitute.
    """
    module = native.load()
    if module is None or not hasattr(module, "Unigram"):
        reason = native.unavailable_reason() or "the extension was built without it; build it again"
        raise BackendError(f"a Unigram tokenizer needs the C++ extension: {reason}")
    engine: Engine = module.Unigram(vocab, **options)
    return engine


def implementation() -> Any:
    """The class of engines."""
    return _implementation()


@functools.cache  # cached, so that the warning comes once
def _implementation() -> Any:
    module = native.load()
    if hasattr(module, "WordPiece"):
        return module.WordPiece  # type: ignore[union-attr]
    # Here, not above: its Unicode tables are large, and hardly anyone needs them.
    from bert_fast.reference import wordpiece

    reason = native.unavailable_reason() or "the extension was built without the tokenizer; build it again"
    warnings.warn(
        f"the C++ tokenizer is not there, a slow one in pure Python takes its place (same results): {reason}",
        RuntimeWarning,
        stacklevel=6,  # the caller of the constructor
    )
    return wordpiece.WordPiece
