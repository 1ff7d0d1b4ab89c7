"""What is compared: the cases that README draws, with the names under which their results are stored."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Size:
    """A BERT. lengths: tokens of each text of a padded batch; as many are in a batch without padding.

    Lengths are those of sentences of novels: the i-th of n is the length below which (i + 0.5) / n of them lie.
    """

    name: str
    title: str
    config: Mapping[str, int]
    lengths: tuple[int, ...]
    full_length: int = 128


def _config(hidden: int, layers: int, heads: int) -> dict[str, int]:
    return dict(
        hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=heads
    )  # fmt: skip


SIZES = (
    Size("base", "BERT-base: 12 layers, hidden size 768", _config(768, 12, 12), (8, 12, 17, 21, 27, 34, 44, 63)),
    Size(
        "minilm", "MiniLM: 6 layers, hidden size 384", _config(384, 6, 12),
        (6, 9, 11, 13, 15, 18, 20, 22, 26, 29, 32, 36, 41, 47, 56, 72),
    ),
)  # fmt: skip
TINY = Size("tiny", "a toy: 2 layers, hidden size 32", _config(32, 2, 2), (3, 9), 8)


@dataclass(frozen=True)
class Case:
    """One comparison. is_padded: texts of several lengths, padded to the longest; else all have the same length."""

    size: Size
    is_padded: bool
    is_training: bool

    @property
    def mode(self) -> str:
        """training: forward and backward with dropout 0.1, no optimizer; inference: forward without gradients."""
        return "training" if self.is_training else "inference"

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.mode}, {'padded batch' if self.is_padded else 'no padding'}"

    @property
    def stored(self) -> str:
        """The name of this comparison in benchmarks/results/cpu.jsonl."""
        lengths = "single_books@512" if self.is_padded else f"full@{self.size.full_length}"
        return f"fuse/{self.size.name}/{lengths}/random/{self.mode}"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each text of the batch."""
        return self.size.lengths if self.is_padded else (self.size.full_length,) * len(self.size.lengths)


def cases_of(sizes: tuple[Size, ...]) -> tuple[Case, ...]:
    """All comparisons of some sizes."""
    return tuple(
        Case(size, padded, training) for size in sizes for padded in (True, False) for training in (True, False)
    )


CASES = cases_of(SIZES)
