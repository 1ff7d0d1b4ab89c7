"""What a model said finds its example again."""

import numpy as np
import pytest

from bert_fast.training import Predictions


def test_any_order_of_batches() -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(0, 9, 40)
    rows = draw.normal(size=(40, 3))
    tokens = [draw.integers(0, 99, (length, 2)) for length in lengths]
    predictions = Predictions(lengths)
    for indices in np.array_split(draw.permutation(40), 7):
        predictions.add(indices, {"rows": rows[indices], "tokens": np.concatenate([tokens[i] for i in indices])})
    assert np.array_equal(predictions.rows("rows"), rows)
    values, boundaries = predictions.tokens("tokens")
    assert boundaries.tolist() == [0, *np.cumsum(lengths)]
    assert all(np.array_equal(values[boundaries[i] : boundaries[i + 1]], tokens[i]) for i in range(40))


def test_missing_examples_are_counted() -> None:
    predictions = Predictions(np.array([1, 2, 3]))
    predictions.add(np.array([2, 0]), {"a": np.zeros(2), "b": np.zeros(4)})
    with pytest.raises(ValueError, match="expected all 3 examples, 1 are missing"):
        predictions.rows("a")
    with pytest.raises(ValueError, match="1 are missing"):
        predictions.tokens("b")
    with pytest.raises(KeyError, match="nothing"):
        predictions.rows("nothing")
    with pytest.raises(ValueError, match=r"arrays\['a'\]: expected 1 entries \(examples\) or 2 \(tokens\), got 3"):
        predictions.add(np.array([1]), {"a": np.zeros(3)})


def test_no_examples() -> None:
    predictions = Predictions(np.zeros(0, dtype=np.int32))
    predictions.add(np.zeros(0, dtype=np.int64), {"a": np.zeros((0, 2)), "b": np.zeros(0)})
    assert predictions.rows("a").shape == (0, 2)
    assert predictions.tokens("b")[1].tolist() == [0]
