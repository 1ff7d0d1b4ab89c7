"""Tokenized examples with labels: the one `Source` of all fine-tuning tasks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bert_fast.checks import check_count
from bert_fast.data.arguments import row_indices
from bert_fast.data.sequences import Sequences
from bert_fast.tokenization.pack import PackedBatch


@dataclass(frozen=True, eq=False)
class Examples:
    """n examples, the same in every epoch: a `Source`, of which `Batches` makes batches.

    Attributes:
        sequences: their tokens; example i is the sequences i * num_choices to (i + 1) * num_choices - 1.
        labels: by the name of the model's argument: an array with an entry per example ([n]), or per token of all
            sequences ([N]). Batches have them as int64 or fp32. Empty: the examples have no labels.
        num_choices: sequences of one example. Batches have it where it is not 1.
        rows: what the examples were made of, as `read_rows` returned it; several examples may be of one row.
        row_of (int64 [n]): the row of each example; where none is given, example i is of row i.
        details: further arrays, as `labels`, which no batch has: what answers are made from.
        per_token: the names of those labels and details that have an entry per token.

    Raises:
        TypeError, ValueError: an array has another length; num_choices does not divide the number of sequences.

    Example:
        >>> from bert_fast.data.sequences import Sequences
        >>> tokenizer = bert_fast.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"])
        >>> sequences = Sequences.joined(tokenizer, ["good film", "bad"])
        >>> examples = data.Examples(sequences, {"labels": torch.tensor([1, 0]).numpy()})
        >>> examples.batch(0, torch.tensor([0]).numpy())["input_ids"].tolist()
        [2, 5, 7, 3]
    """

    sequences: Sequences
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)
    num_choices: int = 1
    rows: Any = None
    row_of: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    details: Mapping[str, np.ndarray] = field(default_factory=dict)
    per_token: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.sequences) % check_count("num_choices", self.num_choices, 1):
            raise ValueError(f"num_choices: expected a divisor of {len(self.sequences)}, got {self.num_choices}")
        if not len(self.row_of):
            object.__setattr__(self, "row_of", np.arange(len(self)))
        for name, array in {"row_of": self.row_of, **self.labels, **self.details}.items():
            expected = len(self.sequences.ids) if name in self.per_token else len(self)
            if len(array) != expected:
                raise ValueError(f"{name}: expected {expected} entries, got {len(array)}")

    def __len__(self) -> int:
        return len(self.sequences) // self.num_choices

    def lengths(self, epoch: int) -> np.ndarray:
        """Tokens of every example, of all its choices together: int32 [n]."""
        return np.diff(self.sequences.boundaries[:: self.num_choices]).astype(np.int32)

    def batch(self, epoch: int, indices: np.ndarray) -> PackedBatch:
        """See `Source.batch`: the examples `indices` (int64 [B]), of num_choices sequences each."""
        indices = row_indices(indices, len(self))
        labels: dict[str, Any] = {
            name: part.astype(np.float32 if part.dtype.kind == "f" else np.int64, copy=False)
            for name, part in self._parts(self.labels, indices).items()
        }
        if self.num_choices > 1:
            labels["num_choices"] = self.num_choices
        return self.sequences.gather(self._sequences_of(indices), **labels)

    def take(self, indices: np.ndarray) -> "Examples":
        """Returns some of the examples (int [m]), in this order; `rows` stay, and `row_of` says which are theirs."""
        indices = row_indices(indices, len(self))
        return replace(
            self,
            sequences=self.sequences.take(self._sequences_of(indices)),
            labels=self._parts(self.labels, indices),
            row_of=self.row_of[indices],
            details=self._parts(self.details, indices),
        )

    def _sequences_of(self, indices: np.ndarray) -> np.ndarray:
        """The sequences of some examples (int64 [B]): int64 [B * num_choices]."""
        return (indices[:, None] * self.num_choices + np.arange(self.num_choices)).ravel()

    def _parts(self, arrays: Mapping[str, np.ndarray], indices: np.ndarray) -> dict[str, np.ndarray]:
        """What belongs to some examples."""
        tokens, _ = self.sequences.places(self._sequences_of(indices))
        return {name: array[tokens if name in self.per_token else indices] for name, array in arrays.items()}
