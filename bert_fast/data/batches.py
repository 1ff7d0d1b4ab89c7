"""`Source`: numbered sequences of known lengths. `Batches`: which of them go together, shuffled anew in every epoch,
packed into a budget of tokens.

    batches = Batches(source, max_tokens=16384)
    plan = batches.plan(epoch)           # all batches of an epoch: which examples, in which order
    batch = batches.batch(epoch, 3)      # one of them, as a model takes it
    loader = DataLoader(batches.epoch(epoch), batch_size=None, num_workers=2)

Everything is a pure function of (seed, epoch): batch m is the same whatever process, worker or thread makes it.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch.utils.data import Dataset

from bert_fast.checks import check_count, check_flag, check_integer
from bert_fast.data.arguments import whole_numbers
from bert_fast.data.counter_random import CounterRandom
from bert_fast.graphs import Budget
from bert_fast.tokenization.pack import PackedBatch

_GOOD_FILL = 0.98  # below, examples of like lengths are put together,
_WORTH_SORTING = 0.995  # if that leaves no more than this share of the batches
_MAX_OPEN = 512  # batches that wait for examples
_WINDOW = 1024  # examples that are sorted by length where that is needed
_CHUNK = 1 << 16  # examples whose lengths are Python integers at a time
_NUMBER_BITS = 40  # of a batch's number, below the room that it has


@runtime_checkable
class Source(Protocol):
    """Examples 0 to n - 1 of every epoch, of known lengths; a batch of them is a pure function of its arguments.

    So any process, worker or thread may make any batch, in any order, and a run can resume in the middle of an epoch.
    An example is one sequence, or all of them if a task joins several (the choices of a question).

    A source may have a length, too, the examples of the first epoch; without one a Trainer trains by max_steps only.

    Example:
        >>> class Numbers:  # three examples of two tokens each
        ...     lengths = staticmethod(lambda epoch: torch.full((3,), 2, dtype=torch.int32).numpy())
        ...     batch = staticmethod(lambda epoch, indices: {"input_ids": torch.tensor(indices).repeat_interleave(2)})
        >>> batches = data.Batches(Numbers(), batch_size=2, shuffle=False).epoch(0)
        >>> [batch["input_ids"].tolist() for batch in batches]
        [[0, 0, 1, 1], [2, 2]]
    """

    def lengths(self, epoch: int) -> np.ndarray:
        """Tokens of every example of this epoch, special tokens counted: int32 [n]."""
        ...

    def batch(self, epoch: int, indices: np.ndarray) -> PackedBatch:
        """The examples `indices` (int64 [B], each from 0 to n - 1) as what a model takes: CPU tensors, with labels.

        Entries: input_ids, token_type_ids, position_ids (int64 [T]), cu_seqlens (int32), max_seqlen (int), and the
        labels under the names of the model's arguments. No position_ids of tokenizers as XLM-R's: the model counts.
        """
        ...


@dataclass(frozen=True)
class BatchPlan:
    """All batches of an epoch.

    order (int64 [n]): every example once.
    cu_batches (int64 [b + 1]): batch m has order[cu_batches[m]:cu_batches[m + 1]].
    fill: share of the tokens that the batches have room for and that are used; 1 where there is no budget of tokens.
    """

    order: np.ndarray
    cu_batches: np.ndarray
    fill: float

    def __len__(self) -> int:
        return len(self.cu_batches) - 1

    def indices(self, number: int) -> np.ndarray:
        """The examples of a batch: int64 [B]. Raises IndexError for a number that is none of 0 to b - 1."""
        if not 0 <= check_integer("number", number) < len(self):
            raise IndexError(f"number: expected 0 to {len(self) - 1}, got {number}")
        return self.order[self.cu_batches[number] : self.cu_batches[number + 1]]


class Batches:
    """The batches of a source, epoch by epoch. Each example is in exactly one batch of an epoch; none is cut.

    With batch_size alone, batches have that many examples; the last of an epoch has what is left. With max_tokens,
    batches hold up to so many tokens, and examples are packed so that little room is left: in random order, each goes
    to the fullest batch that has room for it (best fit). Where lengths are such that this fills less than 98 %, windows
    of 1,024 random examples are packed from the longest to the shortest, if that saves 0.5 % of the batches.

    Args:
        source: the examples.
        batch_size: examples of a batch; beside max_tokens: at most so many.
        max_tokens: of a batch, special tokens counted.
        shuffle: False: examples in their order, each batch with the next ones that fit.
        seed: decides the order, with the epoch.

    Pickles without plans: workers plan for themselves.

    Raises:
        TypeError, ValueError: the message names the argument. When an epoch is planned: a length is none, or an example
            is longer than max_tokens.

    Source: Johnson et al. 1974 (doi:10.1137/0203025), best fit.

    Example:
        >>> words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text"]
        >>> tokenizer = bert_fast.BertTokenizer(words)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "x.txt").write_text("a text a text " * 4)
        ...     store = data.tokenize_files([f"{folder}/x.txt"], f"{folder}/store", tokenizer)
        ...     source = data.PretrainingSource(store, tokenizer, max_length=18, next_sentence=False)
        ...     [sorted(batch)[:2] for batch in data.Batches(source, batch_size=4).epoch(0)]
        [['cu_seqlens', 'input_ids']]
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if batch_size is None and max_tokens is None:
            raise ValueError("batch_size, max_tokens: expected at least one of them, got neither")
        self.batch_size = None if batch_size is None else check_count("batch_size", batch_size, 1)
        self.max_tokens = None if max_tokens is None else check_count("max_tokens", max_tokens, 1)
        check_flag("shuffle", shuffle)
        self.shuffle = shuffle
        self.seed = check_integer("seed", seed)
        if isinstance(source, type) or not isinstance(source, Source):
            raise TypeError(f"source: expected a source of examples (lengths, batch), got {type(source).__name__}")
        self.source = source
        self._planned: tuple[int, BatchPlan] | None = None
        self._ends = [0]  # batches up to the end of each epoch that was counted

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_planned": None}

    def plan(self, epoch: int) -> BatchPlan:
        """All batches of an epoch; the last one asked for is kept. About 1 µs an example."""
        epoch, planned = check_integer("epoch", epoch), self._planned
        if planned is None or planned[0] != epoch:
            planned = self._planned = (epoch, self._make_plan(epoch))
        return planned[1]

    def batch(self, epoch: int, number: int) -> PackedBatch:
        """Batch `number` of an epoch, made by the source. Raises IndexError for a number that is none."""
        return self.source.batch(epoch, self.plan(epoch).indices(number))

    def locate(self, index: int) -> tuple[int, int]:
        """(epoch, number in it) of batch `index` of all epochs, one behind the other.

        Plans the epochs up to that one, once. Raises ValueError for an epoch without examples.
        """
        index = check_count("index", index, 0)
        while index >= self._ends[-1]:
            epoch = len(self._ends) - 1
            count = len(self.plan(epoch))
            if not count:
                raise ValueError(f"source: expected examples in every epoch, epoch {epoch} has none")
            self._ends.append(self._ends[-1] + count)
        epoch = bisect_right(self._ends, index) - 1
        return epoch, index - self._ends[epoch]

    def epoch(self, epoch: int) -> "EpochBatches":
        """The batches of one epoch as a dataset."""
        return EpochBatches(self, epoch)

    def budget(self) -> Budget:
        """What every batch of every epoch fits into, for CUDA graphs (`graphs.CapturedStep`).

        batch_size keeps it small: without, there may be a sequence for every two tokens. Of a source that has them,
        `max_length` (tokens of an example, in any epoch), `num_choices` (sequences of an example) and
        `max_labels(max_tokens, max_sequences)` (entries of masked_lm_positions) count; without max_length, the lengths
        of epoch 0 must be those of all.
        """
        longest = int(max(self.source.lengths(0).max(initial=1), getattr(self.source, "max_length", 1)))
        max_tokens, max_sequences = self.max_tokens, None
        if self.batch_size is not None:
            max_sequences = self.batch_size * getattr(self.source, "num_choices", 1)
            max_tokens = max_tokens or self.batch_size * longest
        assert max_tokens is not None
        max_labels = getattr(self.source, "max_labels", None)
        return Budget(
            max_tokens=max_tokens,
            max_sequences=max_sequences or max(1, max_tokens // 2),
            max_seqlen=min(longest, max_tokens),
            max_labels=None if max_labels is None else max_labels(max_tokens, max_sequences),
        )

    def sizes(self, epoch: int, most: int | None = None) -> list[tuple[int, ...]]:
        """(tokens, sequences) of the batches of an epoch, for `graphs.budgets_for`; most: of the first so many.

        Of a source with `max_labels` (see `budget`) also the most entries of masked_lm_positions.
        """
        plan, lengths = self.plan(epoch), self._lengths(epoch)
        cu_batches = plan.cu_batches[: None if most is None else check_count("most", most, 0) + 1]
        ends = np.concatenate([[0], np.cumsum(lengths[plan.order], dtype=np.int64)])[cu_batches]
        sequences = np.diff(cu_batches) * getattr(self.source, "num_choices", 1)
        max_labels = getattr(self.source, "max_labels", None)
        return [
            (tokens, count) if max_labels is None else (tokens, count, max_labels(tokens, count))
            for tokens, count in zip(np.diff(ends).tolist(), sequences.tolist(), strict=True)
        ]

    def _make_plan(self, epoch: int) -> BatchPlan:
        lengths = self._lengths(epoch)
        order = np.arange(len(lengths))
        if self.shuffle:
            order = CounterRandom(self.seed, epoch, "order of examples").permutation(len(lengths))
        if self.max_tokens is None:
            assert self.batch_size is not None
            cu_batches = np.append(np.arange(0, len(order), self.batch_size), len(order))
            return BatchPlan(order, cu_batches, 1.0)
        if self.shuffle:
            order, cu_batches = self._packed(order, lengths, epoch)
        else:
            cu_batches = _in_order(lengths, self.max_tokens, self.batch_size)
        return BatchPlan(order, cu_batches, self._fill(lengths, len(cu_batches) - 1))

    def _packed(self, order: np.ndarray, lengths: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(order, cu_batches) of batches that are well filled, in random order."""
        assert self.max_tokens is not None
        batch_of, count = _best_fit(lengths[order], self.max_tokens, self.batch_size)
        if self._fill(lengths, count) < _GOOD_FILL:
            window = np.arange(len(order)) // _WINDOW
            by_length = order[np.lexsort((-lengths[order].astype(np.int64), window))]
            alternative, fewer = _best_fit(lengths[by_length], self.max_tokens, self.batch_size)
            if fewer < _WORTH_SORTING * count:
                order, batch_of, count = by_length, alternative, fewer
        place = CounterRandom(self.seed, epoch, "order of batches").permutation(count)
        batch_of = place[batch_of]
        cu_batches = np.concatenate([[0], np.cumsum(np.bincount(batch_of, minlength=count))])
        return order[np.argsort(batch_of, kind="stable")], cu_batches

    def _fill(self, lengths: np.ndarray, num_batches: int) -> float:
        assert self.max_tokens is not None
        return int(lengths.sum(dtype=np.int64)) / max(1, num_batches * self.max_tokens)

    def _lengths(self, epoch: int) -> np.ndarray:
        lengths = whole_numbers("source: lengths", self.source.lengths(epoch))
        if lengths.min(initial=0) < 0:
            raise ValueError(f"source: expected lengths from 0 on, got {lengths.min()}")
        if self.max_tokens is None or not len(lengths):
            return lengths
        longest = int(lengths.argmax())
        if lengths[longest] > self.max_tokens:
            raise ValueError(
                f"max_tokens: example {longest} of epoch {epoch} has {lengths[longest]} tokens, more than "
                f"{self.max_tokens}"
            )
        return lengths


class EpochBatches(Dataset[PackedBatch]):
    """The batches of one epoch as a map-style dataset: `DataLoader(..., batch_size=None)` gives them as they are.

    For loaders that insist on putting items together (Hugging Face's Trainer), let them take one at a time and unwrap
    it: per_device_train_batch_size=1, `data_collator=bert_fast.data.batches.only`.
    """

    def __init__(self, batches: Batches, epoch: int) -> None:
        self.batches = batches
        self.number = check_integer("epoch", epoch)

    def __len__(self) -> int:
        return len(self.batches.plan(self.number))

    def __getitem__(self, number: int) -> PackedBatch:
        return self.batches.batch(self.number, number)


def only(batches: Sequence[PackedBatch]) -> PackedBatch:
    """The collate function for a list of one batch: the batch. Raises TypeError, ValueError if it is none."""
    if not isinstance(batches, Sequence):
        raise TypeError(f"batches: expected a list of one batch, got {type(batches).__name__}")
    if len(batches) != 1:
        raise ValueError(f"batches: expected one batch, got {len(batches)}")
    return batches[0]


def _best_fit(lengths: np.ndarray, max_tokens: int, batch_size: int | None) -> tuple[np.ndarray, int]:
    """(the batch of each example (int64 [n]), number of batches); each goes to the fullest batch with room for it.

    Open batches are sorted by room, each one integer: room * 2^40 + number. The fullest is closed where there are many.
    """
    batch_of = np.empty(len(lengths), dtype=np.int64)
    open_batches: list[int] = []
    sizes: list[int] = []  # examples of each batch
    number_mask = (1 << _NUMBER_BITS) - 1
    limit = len(lengths) if batch_size is None else batch_size
    for start in range(0, len(lengths), _CHUNK):
        chosen = []
        for length in lengths[start : start + _CHUNK].tolist():
            needed = length << _NUMBER_BITS
            place = bisect_left(open_batches, needed)
            if place < len(open_batches):
                batch = open_batches.pop(place)
                number = batch & number_mask
                sizes[number] += 1
            else:
                number = len(sizes)
                batch = (max_tokens << _NUMBER_BITS) | number
                sizes.append(1)
                if len(open_batches) == _MAX_OPEN:
                    del open_batches[0]
            chosen.append(number)
            if sizes[number] < limit:
                insort(open_batches, batch - needed)
        batch_of[start : start + _CHUNK] = chosen
    return batch_of, len(sizes)


def _in_order(lengths: np.ndarray, max_tokens: int, batch_size: int | None) -> np.ndarray:
    """Boundaries of batches of consecutive examples, each with as many as fit: int64 [b + 1]."""
    ends = np.cumsum(lengths, dtype=np.int64)
    # The batch that begins at example i ends before example stop[i].
    stop = np.searchsorted(ends, ends - lengths + min(max_tokens, int(ends[-1:].sum())), side="right")
    if batch_size is not None:
        stop = np.minimum(stop, np.arange(len(lengths)) + min(batch_size, len(lengths)))
    boundaries = [0]
    while boundaries[-1] < len(lengths):
        boundaries.append(int(stop[boundaries[-1]]))
    return np.array(boundaries)
