"""Scores of relative positions without a tensor [Sq, Sk, D], on one sequence and all its heads.

`reference/relative_positions.py` says what they are. Here queries are multiplied with the table's rows from the nearest
to the farthest distance that occurs, R of them: products [A, Sq, R], of which the (i, j)-th score is the element of its
distance. With the key term keys are multiplied too. Heads are taken as many at a time as keep these products within
[A, Sq, Sk] elements. Backward puts the scores' gradients where their products stood and multiplies back: in a row every
distance occurs at most once, so nothing is added up there and results repeat bit for bit.
"""

from typing import NamedTuple

from torch import Tensor


class _Term(NamedTuple):
    """x's products with the table: score (i, j) of x = q is element `columns[i, j]` of row i; of x = k, of row j."""

    x: Tensor  # [A, S, D]
    dx: Tensor | None  # its gradient, added to in place
    columns: Tensor  # int64 [S, the other's S], into the window
    is_keys: bool


class RelativePositions:
    """The distances of one sequence's queries and keys, and the rows of the table that hold them."""

    def __init__(self, distance_table: Tensor, positions_q: Tensor, positions_k: Tensor, key_term: bool) -> None:
        """distance_table [2M-1, D]; positions_q [Sq], positions_k [Sk], neither empty, ascending, less than M apart."""
        farthest = (distance_table.shape[0] - 1) // 2
        rows = positions_q[:, None].long() - positions_k[None, :].long() + farthest  # [Sq, Sk]
        # Positions ascend, so the extremes stand in the corners.
        self._low, high = rows[0, -1].item(), rows[-1, 0].item() + 1
        self._window = distance_table[self._low : high]  # [R, D]
        self._columns = rows - self._low
        self._key_term = key_term

    def add_scores(self, scores: Tensor, q: Tensor, k: Tensor) -> None:
        """Adds to scores [A, Sq, Sk], not yet scaled, in place; q [A, Sq, D], k [A, Sk, D]."""
        for term in self._terms(q, k, None, None):
            for heads in self._chunks(scores, term):
                products = _times(term.x[heads], self._window.T)  # [heads, S, R]
                columns = term.columns.expand(len(products), -1, -1)
                found = products.gather(2, columns)
                scores[heads] += found.transpose(1, 2) if term.is_keys else found

    def add_gradients(
        self, dscores: Tensor, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, ddistance_table: Tensor | None
    ) -> None:
        """Adds the gradients that dscores [A, Sq, Sk] causes to dq [A, Sq, D], dk [A, Sk, D] and the table's."""
        for term in self._terms(q, k, dq, dk):
            for heads in self._chunks(dscores, term):
                of_rows = dscores[heads].transpose(1, 2) if term.is_keys else dscores[heads]
                dproducts = of_rows.new_zeros((*of_rows.shape[:2], len(self._window)))
                dproducts.scatter_(2, term.columns.expand(len(of_rows), -1, -1), of_rows)
                assert term.dx is not None
                term.dx[heads] += _times(dproducts, self._window)
                if ddistance_table is not None:
                    dwindow = dproducts.flatten(0, 1).T @ term.x[heads].flatten(0, 1)
                    ddistance_table[self._low : self._low + len(self._window)] += dwindow

    def _terms(self, q: Tensor, k: Tensor, dq: Tensor | None, dk: Tensor | None) -> list[_Term]:
        terms = [_Term(q, dq, self._columns, is_keys=False)]
        return [*terms, _Term(k, dk, self._columns.T, is_keys=True)] if self._key_term else terms

    def _chunks(self, scores: Tensor, term: _Term) -> list[slice]:
        """Heads, as many at a time as keep [heads, S, R] within the size of the scores."""
        num_heads = len(scores)
        step = max(1, scores.numel() // (term.x.shape[1] * len(self._window)))
        return [slice(start, start + step) for start in range(0, num_heads, step)]


def _times(x: Tensor, matrix: Tensor) -> Tensor:
    """x [A, S, N] times matrix [N, M], in x's dtype.

    `torch.matmul` would choose how to multiply by what requires gradients, and an op's bits would depend on its caller.
    """
    return x.bmm(matrix.to(x.dtype).expand(len(x), -1, -1))
