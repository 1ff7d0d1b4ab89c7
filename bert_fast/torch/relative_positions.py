"""Scores of relative positions without a tensor [Sq, Sk, D], on one sequence and all its heads.

`reference/relative_positions.py` says what they are. Here queries are multiplied with the rows of relative_keys from
the nearest to the farthest distance that occurs, R of them: products [A, Sq, R], of which the (i, j)-th score is the
element of its distance. Keys are multiplied with relative_queries alike. Heads are taken as many at a time as keep
these products within [A, Sq, Sk] elements. Backward puts the scores' gradients where their products stood and
multiplies back: in a row every distance occurs at most once, so nothing is added up there and results repeat bit for
bit.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor


class _Term(NamedTuple):
    """x's products with a table: score (i, j) of x = q is element `columns[i, j]` of row i; of x = k, of row j."""

    name: str  # the table's
    window: Tensor  # [R, A, D], its rows that occur
    columns: Tensor  # int64 [S, the other's S], into the window
    is_of_keys: bool  # x = k


class RelativePositions:
    """The distances of one sequence's queries and keys, and the rows of the tables that hold them."""

    def __init__(
        self, relative_keys: Tensor | None, relative_queries: Tensor | None, positions_q: Tensor, positions_k: Tensor
    ) -> None:
        """Tables [2M-1, A, D]; positions_q [Sq], positions_k [Sk], neither empty, ascending, less than M apart."""
        distances = positions_q[:, None].long() - positions_k[None, :].long()  # [Sq, Sk]
        # Positions ascend, so the extremes stand in the corners.
        nearest, farthest = distances[0, -1].item(), distances[-1, 0].item()
        columns = distances - nearest
        self._terms = []
        for name, table in (("relative_keys", relative_keys), ("relative_queries", relative_queries)):
            if table is not None:
                middle, is_of_keys = (table.shape[0] - 1) // 2, name == "relative_queries"
                self._rows = slice(middle + nearest, middle + farthest + 1)
                self._terms.append(_Term(name, table[self._rows], columns.T if is_of_keys else columns, is_of_keys))

    def add_scores(self, scores: Tensor, q: Tensor, k: Tensor) -> None:
        """Adds to scores [A, Sq, Sk], not yet scaled, in place; q [A, Sq, D], k [A, Sk, D]."""
        for term in self._terms:
            x = k if term.is_of_keys else q
            for heads in _chunks(scores, term):
                products = x[heads].bmm(_window(term, heads, x).transpose(1, 2))  # [heads, S, R]
                found = products.gather(2, term.columns.expand(len(products), -1, -1))
                scores[heads] += found.transpose(1, 2) if term.is_of_keys else found

    def add_gradients(
        self, dscores: Tensor, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, totals: Mapping[str, Tensor]
    ) -> None:
        """Adds the gradients that dscores [A, Sq, Sk] causes to dq [A, Sq, D], dk [A, Sk, D] and the tables' in totals.

        totals: gradients [2M-1, A, D] by name, of the tables whose are wanted.
        """
        for term in self._terms:
            x, dx = (k, dk) if term.is_of_keys else (q, dq)
            for heads in _chunks(dscores, term):
                of_rows = dscores[heads].transpose(1, 2) if term.is_of_keys else dscores[heads]
                dproducts = of_rows.new_zeros((*of_rows.shape[:2], len(term.window)))
                dproducts.scatter_(2, term.columns.expand(len(of_rows), -1, -1), of_rows)
                dx[heads] += dproducts.bmm(_window(term, heads, x))
                if term.name in totals:
                    dwindow = dproducts.transpose(1, 2).bmm(x[heads])  # [heads, R, D]
                    totals[term.name][self._rows, heads] += dwindow.transpose(0, 1)


def _chunks(scores: Tensor, term: _Term) -> list[slice]:
    """Heads, as many at a time as keep [heads, S, R] within the size of the scores."""
    num_heads = len(scores)
    step = max(1, scores.numel() // (len(term.columns) * len(term.window)))
    return [slice(start, start + step) for start in range(0, num_heads, step)]


def _window(term: _Term, heads: slice, x: Tensor) -> Tensor:
    """[heads, R, D] in x's dtype."""
    return term.window[:, heads].transpose(0, 1).to(x.dtype)
