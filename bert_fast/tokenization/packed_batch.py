"""What `pack` returns: the entries of a batch without padding, of which some are made when they are first read."""

import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bert_fast.tokenization.arguments import check_device, check_flags
from bert_fast.tokenization.engine import implementation

if TYPE_CHECKING:
    from torch import Tensor  # the rest of the tokenizer works without it


class Later(enum.Enum):
    """Stands for an entry that was not read yet."""

    ZEROS = enum.auto()
    POSITIONS = enum.auto()


class PackedBatch(dict[str, Any]):
    """Sequences one after the other, for `model(**batch)`; keys are attributes too.

    Entries:
        input_ids, token_type_ids, position_ids (int64 [T]); positions start at 0 in each sequence, and are
            not there where the model is to count them (see `Tokenizer.pack`).
        cu_seqlens (int32 [B + 1]): sequence i is [cu_seqlens[i]:cu_seqlens[i + 1]].
        max_seqlen (int): length of the longest sequence.

    Of `pack`, position_ids and the token_type_ids of single texts are made when they are first read, out
    of input_ids and cu_seqlens and where these are by then.

    Example:
        >>> words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text"]
        >>> batch = bert_fast.BertTokenizer(words).pack(["a text", "a"])
        >>> batch.input_ids.tolist(), batch.cu_seqlens.tolist(), batch.max_seqlen
        ([2, 5, 6, 3, 2, 5, 3], [0, 4, 7], 4)
    """

    @property
    def num_sequences(self) -> int:
        """How many texts are in the batch: with `max_tokens`, possibly fewer than were given."""
        return len(self["cu_seqlens"]) - 1

    def to(self, device: Any, *, non_blocking: bool = False) -> "PackedBatch":
        """Moves every tensor to `device`, in place; returns itself."""
        check_device(device)
        check_flags(non_blocking=non_blocking)
        for key, value in dict.items(self):
            if hasattr(value, "to"):
                self[key] = value.to(device=device, non_blocking=bool(non_blocking))
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has neither attribute nor entry {name!r}") from None

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if type(value) is Later:
            value = self[key] = self._make(value)
        return value

    # Whatever else reads values finds all of them made.

    def _make(self, entry: Later) -> "Tensor":
        """An entry (int64 [T]), without a device sync."""
        import torch

        ids: Tensor = super().__getitem__("input_ids")
        if entry is Later.ZEROS:
            return torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
        ends = super().__getitem__("cu_seqlens")
        if ids.device.type == ends.device.type == "cpu":
            places = implementation().sequence_positions(ends.to(torch.int32).contiguous().numpy())
            return torch.from_numpy(places)
        ends = ends.to(device=ids.device, dtype=torch.int64)
        starts = torch.repeat_interleave(ends[:-1], ends.diff(), output_size=len(ids))
        return torch.arange(len(ids), device=ids.device).sub_(starts)

    def _made(self) -> "PackedBatch":
        for key, value in dict.items(self):
            if type(value) is Later:
                self[key] = self._make(value)
        return self

    def __iter__(self) -> Iterator[str]:
        # Not to be left out: of dictionaries without it, `dict(batch)`, `f(**batch)` and `update` take values unasked.
        return super().__iter__()

    def __delitem__(self, key: str) -> None:
        super(PackedBatch, self._made()).__delitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As that of a dictionary."""
        try:
            return self[key]
        except KeyError:
            return default

    def items(self) -> Any:
        """As those of a dictionary."""
        return super(PackedBatch, self._made()).items()

    def values(self) -> Any:
        """As those of a dictionary."""
        return super(PackedBatch, self._made()).values()

    def pop(self, key: str, *default: Any) -> Any:
        """As that of a dictionary."""
        return super(PackedBatch, self._made()).pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        """As that of a dictionary."""
        return super(PackedBatch, self._made()).popitem()

    def setdefault(self, key: str, default: Any = None) -> Any:
        """As that of a dictionary."""
        return super(PackedBatch, self._made()).setdefault(key, default)

    def copy(self) -> dict[str, Any]:
        """As that of a dictionary."""
        return super(PackedBatch, self._made()).copy()

    def __or__(self, other: Any) -> Any:
        return super(PackedBatch, self._made()).__or__(other)

    def __ror__(self, other: Any) -> Any:
        return super(PackedBatch, self._made()).__ror__(other)

    def __eq__(self, other: object) -> bool:
        return super(PackedBatch, self._made()).__eq__(other)

    __hash__ = None

    def __repr__(self) -> str:
        return super(PackedBatch, self._made()).__repr__()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)
