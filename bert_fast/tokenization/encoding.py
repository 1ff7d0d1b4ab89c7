"""What a call of the tokenizer returns: a dictionary of ids and masks that also knows where every token came from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_fast.tokenization.arguments import as_index, check_device, check_flags
from bert_fast.tokenization.layout import Layout
from bert_fast.tokenization.options import tensor_kind
from bert_fast.tokenization.padding import to_tensor

FoundTokens = tuple[Layout, np.ndarray, np.ndarray, np.ndarray]  # and ids [T], offsets [T, 2], word ids [T]


class CharSpan(NamedTuple):
    """Start and stop in code points of the original string (or word).

    Example:
        >>> tokenizer = bert_fast.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text", "##s"])
        >>> tokenizer(["a texts"]).token_to_chars(0, 3)  # of "##s"
        CharSpan(start=6, end=7)
    """

    start: int
    end: int


class TokenSpan(NamedTuple):
    """First token and the one after the last.

    Example:
        >>> tokenizer = bert_fast.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text", "##s"])
        >>> tokenizer(["a texts"]).word_to_tokens(0, 1)
        TokenSpan(start=2, end=4)
    """

    start: int
    end: int


class Encoding:
    """One row of a batch: its tokens and where they came from. Lists are made when asked for.

    Example:
        >>> tokenizer = bert_fast.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text", "##s"])
        >>> row = tokenizer(["a texts"])[0]
        >>> row.tokens, row.word_ids
        (['[CLS]', 'a', 'text', '##s', '[SEP]'], [None, 0, 1, 1, None])
    """

    def __init__(self, arrays: dict[str, np.ndarray], tokens: Sequence[str]) -> None:
        self._arrays = arrays
        self.tokens = list(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Encoding(tokens={self.tokens})"

    @property
    def ids(self) -> list[int]:
        """Token ids."""
        return self._list("ids")

    @property
    def type_ids(self) -> list[int]:
        """0 for the first segment, 1 for the second."""
        return self._list("type_ids")

    @property
    def attention_mask(self) -> list[int]:
        """0 for padding."""
        return self._list("attention_mask")

    @property
    def special_tokens_mask(self) -> list[int]:
        """1 for special tokens that were added, and for padding."""
        return self._list("special_tokens_mask")

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """(start, stop) in the original string of each token; (0, 0) for added special tokens and padding."""
        return [(start, stop) for start, stop in self._list("offsets")]

    @property
    def word_ids(self) -> list[int | None]:
        """Index of each token's word in its segment; None for added special tokens and padding."""
        return [None if word < 0 else word for word in self._list("word_ids")]

    @property
    def sequence_ids(self) -> list[int | None]:
        """Index of each token's segment; None for added special tokens and padding."""
        return [None if segment < 0 else segment for segment in self._list("sequence_ids")]

    def tokens_where(
        self, sequence_index: int | None, array: str, test: Callable[[np.ndarray], np.ndarray]
    ) -> list[int]:
        """Indices of the text tokens (of one segment, or of any) whose entry in `array` passes."""
        if sequence_index is not None:
            sequence_index = as_index("sequence_index", sequence_index)
        segments = self._arrays["sequence_ids"]
        in_segment = segments >= 0 if sequence_index is None else segments == sequence_index
        return [int(index) for index in np.flatnonzero(in_segment & test(self._arrays[array]))]

    def _list(self, name: str) -> list[Any]:
        values: list[Any] = self._arrays[name].tolist()
        return values


class Encodings(Sequence[Encoding]):
    """The rows of a batch as `Encoding`s.

    Offsets and word ids are found by tokenizing the texts again when they are first asked for, unless the call wanted
    them: most batches go straight into a model, and should not pay for them. Pickling asks for them.

    Args:
        num_rows: how many there are.
        find_tokens: returns where each token is, and ids, offsets and word ids of all segments, flat; called at most
            once.
        special: ids by `Code`, for what is not text.
        types: type ids by `Code`.
        token_of: token string of an id.
    """

    def __init__(
        self,
        num_rows: int,
        find_tokens: Callable[[], FoundTokens],
        special: tuple[int, ...],
        types: tuple[int, ...],
        token_of: Callable[[int], str],
    ) -> None:
        self._num_rows = num_rows
        self._find_tokens: Callable[[], FoundTokens] | None = find_tokens
        self._special = special
        self._types = types
        self._token_of: Callable[[int], str] | None = token_of
        self._found: tuple[dict[str, np.ndarray], np.ndarray, dict[int, str]] | None = None

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = as_index("index", index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of a batch of {len(self)}")
        arrays, row_starts, names = self._materialise()
        row = index % len(self)
        piece = slice(row_starts[row], row_starts[row + 1])
        mine = {name: values[piece] for name, values in arrays.items()}
        return Encoding(mine, [names[token_id] for token_id in mine["ids"].tolist()])

    def __getstate__(self) -> dict[str, Any]:
        self._materialise()
        return {**self.__dict__, "_find_tokens": None, "_token_of": None}

    def _materialise(self) -> tuple[dict[str, np.ndarray], np.ndarray, dict[int, str]]:
        """Values per position, the boundaries of the rows, and the names of the ids that occur."""
        if self._found is None:
            assert self._find_tokens is not None and self._token_of is not None
            layout, ids, offsets, word_ids = self._find_tokens()
            arrays = {
                "ids": layout.fill(ids, self._special),
                "offsets": layout.fill(offsets, (0,) * 6),
                "word_ids": layout.fill(word_ids, (-1,) * 6),
                "sequence_ids": layout.lookup((-1, -1, 0, -1, 1, -1)),
                "type_ids": layout.lookup(self._types),
                "attention_mask": layout.lookup((0, 1, 1, 1, 1, 1)),
                "special_tokens_mask": layout.lookup((1, 1, 0, 1, 0, 1)),
            }
            token_of = self._token_of
            names = {token_id: token_of(token_id) for token_id in np.unique(arrays["ids"]).tolist()}
            self._found = arrays, layout.row_starts, names
        return self._found


class BatchEncoding(dict[str, Any]):
    """A dictionary of `input_ids`, `attention_mask`, ... for `model(**encoding)`; keys are attributes too.

    Where the tokenizer made it, `tokens`, `word_ids` and the other methods below map between tokens, words and
    characters. With two numbers, the methods of the form `token_to_chars(batch_index, token_index)` take the row first;
    with one, they mean row 0. `encoding[i]` is row i as an `Encoding`.

    Args:
        data: the entries.
        encodings: the rows, or a function that makes them when they are first asked for; None if nothing but the
            entries is known.

    Example:
        >>> words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text"]
        >>> batch = bert_fast.BertTokenizer(words)(["a text"])
        >>> batch["input_ids"], batch.tokens(0)
        ([[2, 5, 6, 3]], ['[CLS]', 'a', 'text', '[SEP]'])
    """

    def __init__(
        self, data: Mapping[str, Any] | None = None, encodings: Encodings | Callable[[], Encodings] | None = None
    ) -> None:
        if type(data) is not dict and not (data is None or isinstance(data, Mapping)):
            raise TypeError(f"data: expected a mapping, got {type(data).__name__}")
        if not (encodings is None or callable(encodings) or isinstance(encodings, Encodings)):
            raise TypeError(f"encodings: expected rows or a function that makes them, got {type(encodings).__name__}")
        super().__init__(data or {})
        self.__dict__["_encodings"] = encodings

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return super().__getitem__(key)
        if isinstance(key, slice) and self.encodings is None:
            return {name: value[key] for name, value in self.items()}
        return self._rows()[key]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has neither attribute nor entry {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self), self.encodings)

    def copy(self) -> "BatchEncoding":
        """A shallow copy."""
        return BatchEncoding(self, self.encodings)

    @property
    def encodings(self) -> Encodings | None:
        """The rows, or None."""
        encodings: Encodings | Callable[[], Encodings] | None = self.__dict__["_encodings"]
        if callable(encodings):
            encodings = self.__dict__["_encodings"] = encodings()
        return encodings

    @property
    def is_fast(self) -> bool:
        """Whether rows know their tokens, words and characters."""
        return self.__dict__["_encodings"] is not None

    @property
    def data(self) -> dict[str, Any]:
        """The entries: itself."""
        return self

    def convert_to_tensors(self, tensor_type: Any = None, prepend_batch_axis: bool = False) -> "BatchEncoding":
        """Makes tensors of the entries, in place; returns itself.

        Args:
            tensor_type: "pt" for torch tensors, "np" for NumPy arrays, None to leave everything as it is.
            prepend_batch_axis: whether each entry is one row, and becomes a batch of it.

        Raises:
            ValueError: rows of an entry differ in length ("pt"; "np" makes an array of arrays), or `tensor_type` names
                neither.
        """
        check_flags(prepend_batch_axis=prepend_batch_axis)
        kind = tensor_kind(tensor_type, "tensor_type")
        for key, value in self.items() if kind else ():
            try:
                value = [value] if prepend_batch_axis else value
                self[key] = ragged(value) if kind == "np" and _is_ragged(value) else to_tensor(value, kind)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{key}: {error}") from None
        return self

    def to(self, device: Any, *, non_blocking: bool = False) -> "BatchEncoding":
        """Moves every tensor to `device`, in place; returns itself."""
        movable = {key: value for key, value in self.items() if callable(getattr(value, "to", None))}
        if movable:
            check_device(device)
            check_flags(non_blocking=non_blocking)
        for key, value in movable.items():
            self[key] = value.to(device=device, non_blocking=bool(non_blocking))
        return self

    def tokens(self, batch_index: int = 0) -> list[str]:
        """The token strings of a row."""
        return list(self._row(batch_index).tokens)

    def word_ids(self, batch_index: int = 0) -> list[int | None]:
        """Per token of a row the index of its word; None for added special tokens and padding."""
        return self._row(batch_index).word_ids

    words = word_ids

    def sequence_ids(self, batch_index: int = 0) -> list[int | None]:
        """Per token of a row 0 (first text), 1 (second text) or None."""
        return self._row(batch_index).sequence_ids

    def token_to_sequence(self, batch_or_token_index: int, token_index: int | None = None) -> int | None:
        """Which text a token belongs to."""
        row, token = self._locate("token", batch_or_token_index, token_index)
        return row.sequence_ids[token]

    def token_to_word(self, batch_or_token_index: int, token_index: int | None = None) -> int | None:
        """Which word of its text a token belongs to."""
        row, token = self._locate("token", batch_or_token_index, token_index)
        return row.word_ids[token]

    def token_to_chars(self, batch_or_token_index: int, token_index: int | None = None) -> CharSpan | None:
        """Where a token stands in its text; None for added special tokens and padding."""
        row, token = self._locate("token", batch_or_token_index, token_index)
        return None if row.sequence_ids[token] is None else CharSpan(*row.offsets[token])

    def char_to_token(
        self, batch_or_char_index: int, char_index: int | None = None, sequence_index: int = 0
    ) -> int | None:
        """The token that covers a character of the text; None for whitespace and what normalization removes."""
        row, char = self._locate("char", batch_or_char_index, char_index)
        hits = row.tokens_where(sequence_index, "offsets", lambda spans: (spans[:, 0] <= char) & (char < spans[:, 1]))
        return hits[0] if hits else None

    def word_to_tokens(
        self, batch_or_word_index: int, word_index: int | None = None, sequence_index: int = 0
    ) -> TokenSpan | None:
        """First token of a word and the one after its last; None if the row has none of it."""
        row, word = self._locate("word", batch_or_word_index, word_index)
        hits = row.tokens_where(sequence_index, "word_ids", lambda words: words == word)
        return TokenSpan(hits[0], hits[-1] + 1) if hits else None

    def word_to_chars(
        self, batch_or_word_index: int, word_index: int | None = None, sequence_index: int = 0
    ) -> CharSpan | None:
        """Where a word stands in its text."""
        row, _ = self._locate("word", batch_or_word_index, word_index)
        span = self.word_to_tokens(batch_or_word_index, word_index, sequence_index)
        return None if span is None else CharSpan(row.offsets[span.start][0], row.offsets[span.end - 1][1])

    def char_to_word(
        self, batch_or_char_index: int, char_index: int | None = None, sequence_index: int = 0
    ) -> int | None:
        """The word that covers a character of the text."""
        row, _ = self._locate("char", batch_or_char_index, char_index)
        token = self.char_to_token(batch_or_char_index, char_index, sequence_index)
        return None if token is None else row.word_ids[token]

    def _rows(self) -> Encodings:
        if self.encodings is None:
            raise ValueError(
                "this BatchEncoding holds entries only; tokens and words are known to those that a call made"
            )
        return self.encodings

    def _row(self, batch_index: int) -> Encoding:
        row: Encoding = self._rows()[as_index("batch_index", batch_index)]
        return row

    def _locate(self, kind: str, batch_or_index: int, index: int | None) -> tuple[Encoding, int]:
        """The row and the index of a `kind` in it, from one number or two."""
        first = as_index(f"batch_or_{kind}_index", batch_or_index)
        batch, inner = (0, first) if index is None else (first, as_index(f"{kind}_index", index))
        return self._rows()[batch], inner


def _is_ragged(value: Any) -> bool:
    """Whether a list holds rows of different lengths."""
    is_rows = isinstance(value, (list, tuple)) and all(isinstance(row, (list, tuple, np.ndarray)) for row in value)
    return is_rows and len({len(row) for row in value}) > 1


def ragged(rows: Sequence[Any]) -> np.ndarray:
    """Rows of different lengths as an array of arrays."""
    array = np.empty(len(rows), dtype=object)
    array[:] = [np.asarray(row) for row in rows]
    return array
