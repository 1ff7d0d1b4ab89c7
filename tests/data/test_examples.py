"""Examples: batches and subsets of what was tokenized."""

import pickle

import numpy as np
import pytest
import torch

from bert_fast.data.batches import Batches, Source
from bert_fast.data.examples import Examples
from bert_fast.data.sequences import Sequences
from bert_fast.tokenization import BertTokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
TEXTS = ["a", "b c", "", "c a b", "a a", "b"]


@pytest.fixture
def sequences() -> Sequences:
    return Sequences.joined(BertTokenizer(WORDS), TEXTS)


def test_labels_of_examples_and_of_tokens(sequences: Sequences) -> None:
    tokens = np.arange(len(sequences.ids), dtype=np.int32)
    labels: dict[str, np.ndarray] = {"labels": tokens, "score": np.arange(6) / 2}
    examples = Examples(sequences, labels, per_token=("labels",))
    assert isinstance(examples, Source) and len(examples) == 6
    assert examples.lengths(3).tolist() == [3, 4, 2, 5, 4, 3] and examples.lengths(3).dtype == np.int32
    batch = examples.batch(1, np.array([3, 0]))
    assert batch.input_ids.tolist() == [2, 7, 5, 6, 3, 2, 5, 3]
    assert (batch.labels.tolist(), batch.labels.dtype) == ([9, 10, 11, 12, 13, 0, 1, 2], torch.int64)
    assert (batch.score.tolist(), batch.score.dtype) == ([1.5, 0.0], torch.float32)
    assert batch.cu_seqlens.tolist() == [0, 5, 8] and "num_choices" not in batch


def test_examples_of_several_sequences(sequences: Sequences) -> None:
    examples = Examples(sequences, {"labels": np.array([1, 0, 2])}, num_choices=2)
    assert examples.lengths(0).tolist() == [7, 7, 7]
    batch = examples.batch(0, np.array([2, 0]))
    assert batch.cu_seqlens.diff().tolist() == [4, 3, 3, 4]
    assert (batch.labels.tolist(), batch.num_choices) == ([2, 1], 2)
    assert Batches(examples, batch_size=2, max_tokens=14).budget().max_sequences == 4


def test_take_keeps_labels_details_and_rows(sequences: Sequences) -> None:
    details = {"place": np.arange(len(sequences.ids)), "window": np.arange(6)}
    given = Examples(
        sequences, {"labels": np.arange(6)}, rows=["x", "y"], row_of=np.array([0, 0, 0, 1, 1, 1]), details=details,
        per_token=("place",),
    )  # fmt: skip
    taken = pickle.loads(pickle.dumps(given.take(np.array([4, 1, 4]))))
    assert len(taken) == 3 and taken.rows == ["x", "y"] and taken.row_of.tolist() == [1, 0, 1]
    assert taken.details["place"].tolist() == [14, 15, 16, 17, 3, 4, 5, 6, 14, 15, 16, 17]
    assert taken.details["window"].tolist() == taken.labels["labels"].tolist() == [4, 1, 4]
    for name in ("input_ids", "labels", "cu_seqlens", "position_ids"):
        assert torch.equal(taken.batch(0, np.arange(3))[name], given.batch(0, np.array([4, 1, 4]))[name])
    choices = Examples(sequences, {}, num_choices=3).take(np.array([1]))
    assert len(choices) == 1 and choices.row_of.tolist() == [1]
    assert choices.batch(0, np.array([0])).cu_seqlens.diff().tolist() == [5, 4, 3]


def test_what_does_not_fit(sequences: Sequences) -> None:
    with pytest.raises(ValueError, match="labels: expected 6 entries, got 5"):
        Examples(sequences, {"labels": np.arange(5)})
    with pytest.raises(ValueError, match="labels: expected 21 entries, got 6"):
        Examples(sequences, {"labels": np.arange(6)}, per_token=("labels",))
    with pytest.raises(ValueError, match="num_choices: expected a divisor of 6, got 4"):
        Examples(sequences, num_choices=4)
    for wrong in ([6], [-1]):
        with pytest.raises(IndexError, match="indices: expected 0 to 5"):
            Examples(sequences).batch(0, np.array(wrong))
