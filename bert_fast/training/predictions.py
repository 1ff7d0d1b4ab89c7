"""`Predictions`: what a model says about the examples of a source, gathered batch by batch in any order."""

from collections.abc import Mapping

import numpy as np

from bert_fast.data.arguments import row_indices, whole_numbers

__all__ = ["Predictions"]


class Predictions:
    """Arrays by name, for all examples 0 to n - 1, whatever batches and processes they came from.

    lengths (int [n]): tokens of every example, so that what belongs to tokens finds its example again.
    """

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = whole_numbers("lengths", lengths).astype(np.int64, copy=False)
        self._batches: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def add(self, indices: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        """Takes what the model said about the examples `indices` (int [B]): arrays [B, ...] or [T, ...], in that order.

        Raises:
            TypeError: something else. IndexError: there is no such example.
            ValueError: an array has an entry neither per example nor per token.
        """
        indices = row_indices(indices, len(self))
        if not isinstance(arrays, Mapping):
            raise TypeError(f"arrays: expected a mapping, got {type(arrays).__name__}")
        tokens = int(self.lengths[indices].sum())
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray) or not array.ndim:
                raise TypeError(f"arrays[{name!r}]: expected an array [B, ...] or [T, ...], got {type(array).__name__}")
            if len(array) not in (len(indices), tokens):
                expected = f"{len(indices)} entries (examples) or {tokens} (tokens)"
                raise ValueError(f"arrays[{name!r}]: expected {expected}, got {len(array)}")
        self._batches.append((indices, dict(arrays)))

    def batches(self) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """What was added, to be sent to another process and added there."""
        return self._batches

    def rows(self, name: str) -> np.ndarray:
        """An array with an entry per example, in the order of the examples: [n, ...].

        Raises:
            KeyError: nothing of that name was added.
            ValueError: examples are missing.
        """
        found = [(indices, arrays[name]) for indices, arrays in self._batches]
        if not found:
            raise KeyError(name)
        indices = np.concatenate([one for one, _ in found])
        self._check_complete(indices)
        values = np.concatenate([array for _, array in found])
        ordered = np.empty((len(self), *values.shape[1:]), values.dtype)
        ordered[indices] = values
        return ordered

    def tokens(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """An array with an entry per token, in the order of the examples: (values [T, ...], boundaries int64 [n + 1]).

        Those of example i are values[boundaries[i]:boundaries[i + 1]]. Raises as `rows`.
        """
        boundaries = np.concatenate([[0], np.cumsum(self.lengths)])
        ordered: np.ndarray | None = None
        seen = []
        for indices, arrays in self._batches:
            values, lengths = arrays[name], self.lengths[indices]
            if ordered is None:
                ordered = np.empty((int(boundaries[-1]), *values.shape[1:]), values.dtype)
            starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
            places = np.arange(int(lengths.sum())) + np.repeat(boundaries[indices] - starts, lengths)
            ordered[places] = values
            seen.append(indices)
        if ordered is None:
            raise KeyError(name)
        self._check_complete(np.concatenate(seen))
        return ordered, boundaries

    def _check_complete(self, indices: np.ndarray) -> None:
        missing = np.setdiff1d(np.arange(len(self)), indices)
        if len(missing):
            raise ValueError(
                f"predictions: expected all {len(self)} examples, {len(missing)} are missing: {missing[:5]}"
            )
