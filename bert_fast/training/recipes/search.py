"""Exact search: the vectors of an index nearest to queries, block by block.

Products of a block are made in fp32, with a bound of their error, and only say which vectors may be among the nearest.
The scores of these are then made again, each by itself in fp64 and in an order of additions that its length alone
decides, and rounded to fp32. So neither the size of blocks nor the library of the products has a say in the result.

The error of a product of n terms in fp32: Higham 2002, Accuracy and Stability of Numerical Algorithms, section 3.1.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from bert_fast.checks import check_choice, check_count
from bert_fast.files import path_name
from bert_fast.training.recipes.embedding import Embedder
from bert_fast.training.recipes.vector_files import ArrowVectors, NpyVectors, model_digests, read_info

__all__ = ["SIMILARITIES", "Index", "Similarity", "search"]

Similarity = Literal["cosine", "dot"]
SIMILARITIES: tuple[Similarity, ...] = ("cosine", "dot")
_READERS: dict[str, Any] = {".npy": NpyVectors, ".parquet": ArrowVectors, ".arrow": ArrowVectors}
_BLOCK_ROWS = 4096
_QUERIES_AT_ONCE = 256
_CANDIDATES_AT_ONCE = 1024
_FP32_PRODUCTS = 1e37  # vectors whose lengths multiply to more are multiplied in fp64: no partial sum may overflow
_EPSILON, _TINY = 2.0**-24, 2.0**-126  # of fp32: relative rounding error; what may be lost where results underflow


class Index:
    """Vectors that `embed_files` wrote, to be searched; they stay on the disk.

    Args:
        path: a name that ends in .npy (mapped into memory), .parquet or .arrow (read in pieces).
        similarity: "cosine" of the angle between two vectors, 0 where one of them is zero; or "dot", their product.

    Attributes:
        dimension, count: the vectors are float32 [count, dimension].
        info: what stands in the JSON file beside the vectors, a `VectorsInfo`; None if there is none.

    Raises:
        OSError: the file cannot be read. ImportError: pyarrow is needed and not there.
        ValueError: a wrong argument; the file, or the one beside it, is not what embed writes.
    """

    def __init__(self, path: str | os.PathLike[str], similarity: Similarity = "cosine") -> None:
        self.path = Path(path_name("path", path))
        check_choice("similarity", similarity, SIMILARITIES)
        self.similarity = similarity
        if self.path.suffix not in _READERS:
            raise ValueError(f"path: expected a name that ends in {', '.join(_READERS)}, got {self.path}")
        self._vectors = _READERS[self.path.suffix](self.path)
        self.count: int = self._vectors.rows
        self.dimension: int = self._vectors.width
        self.info = read_info(self.path)
        if self.info is not None and (self.info.count, self.info.dimension) != (self.count, self.dimension):
            raise ValueError(
                f"index: {self.path}: expected [{self.info.count}, {self.info.dimension}] by the JSON file beside it, "
                f"got [{self.count}, {self.dimension}]"
            )

    def check_model(self, embedder: Embedder) -> None:
        """Sees that the vectors are those of this model and its tokenizer, as far as files say whose they are.

        Raises:
            ValueError: they are of another model, or of another dimension.
        """
        name, info = embedder.checkpoint, self.info
        if info is not None and info.weights_sha256 is not None and name is not None:
            digests = model_digests(name, embedder.tokenizer)
            for key, value in digests.items():
                if getattr(info, key) != value:
                    raise ValueError(
                        f"index: expected vectors of MODEL {name}, got ones of another model, {info.model}: {key} is "
                        f"{getattr(info, key)}, not {value}"
                    )
        width = embedder.model.config.hidden_size
        if width != self.dimension:
            raise ValueError(f"index: expected vectors of {width} numbers, as {name} makes, got {self.dimension}")

    def fitted(self, embedder: Embedder) -> Embedder:
        """The embedder with the pooling, normalization and length that the vectors were made with, where it is known.

        Raises:
            ValueError: see `check_model`.
        """
        self.check_model(embedder)
        if self.info is None:
            return embedder
        pooling: Any = self.info.pooling  # checked by Embedder
        return replace(embedder, pooling=pooling, normalize=self.info.normalize, max_length=self.info.max_length)

    def vectors_of(self, rows: np.ndarray) -> np.ndarray:
        """The vectors of some rows (int64 [n], ascending), float32 [n, dimension]; the whole index is read once."""
        found = np.empty((len(rows), self.dimension), np.float32)
        for first, block in self.blocks(_BLOCK_ROWS):
            part = slice(*np.searchsorted(rows, [first, first + len(block)]))
            found[part] = block[rows[part] - first]
        return found

    def blocks(self, block_rows: int) -> Iterator[tuple[int, np.ndarray]]:
        """(the row of the first, some vectors [n, dimension], fp32), n up to `block_rows`."""
        first = 0
        for vectors in self._vectors.blocks(block_rows):
            yield first, vectors
            first += len(vectors)


def search(
    index: Index, queries: Any, top_k: int = 10, *, keep: np.ndarray | None = None, block_rows: int = _BLOCK_ROWS
) -> tuple[np.ndarray, np.ndarray]:
    """The vectors most similar to each query, best first; of equal scores the smaller row comes first.

    Args:
        index: what is searched, all of it.
        queries: vectors, floating-point array or Tensor [Q, dimension].
        top_k: how many; where the index has fewer, all.
        keep: which rows are searched, bool [index.count]; None: all.
        block_rows: vectors that are read at a time; the result is the same for all values.

    Returns: scores (float32 [Q, k]) and rows (int64 [Q, k]), with k = min(top_k, rows that are searched). A score is
        rounded from fp64; one beyond the range of fp32 is infinite.

    Raises:
        TypeError, ValueError: a wrong argument; a query or a vector with NaN or infinity, whose row is named.
    """
    if not isinstance(index, Index):
        raise TypeError(f"index: expected an Index, got {type(index).__name__}")
    top_k, block_rows = check_count("top_k", top_k, 1), check_count("block_rows", block_rows, 1)
    wanted = _checked_queries(queries, index.dimension)
    is_cosine = index.similarity == "cosine"
    k = min(top_k, index.count if keep is None else _checked_keep(keep, index.count))
    scores = np.full((len(wanted), k), -np.inf, np.float32)
    rows = np.full((len(wanted), k), np.iinfo(np.int64).max)  # behind all real rows
    lengths = _lengths("queries", wanted, 0)
    for first, block in index.blocks(block_rows):
        vector_lengths = _lengths(f"index: {index.path}", block, first)
        places = np.arange(first, first + len(block))
        if keep is not None:
            places = places[keep[places]]
            block, vector_lengths = block[places - first], vector_lengths[places - first]
        for start in range(0, len(wanted) if k else 0, _QUERIES_AT_ONCE):
            part = slice(start, start + _QUERIES_AT_ONCE)
            rough, margins = _rough_scores(wanted[part], lengths[part], block, vector_lengths, is_cosine)
            # No exact score is above its rough one by more than the margin.
            may_enter = rough >= (scores[part, -1] - margins)[:, None]
            for query in np.flatnonzero(may_enter.any(axis=1)):
                found = _candidates(rough[query], np.flatnonzero(may_enter[query]), margins[query], k)
                exact = _exact_scores(wanted[start + query], block, found, is_cosine)
                _merge(scores[start + query], rows[start + query], exact, places[found])
    return scores, rows


def _checked_keep(keep: Any, count: int) -> int:
    """How many rows are kept."""
    if not isinstance(keep, np.ndarray) or keep.dtype != bool:
        raise TypeError(f"keep: expected an array of bool, got {getattr(keep, 'dtype', type(keep).__name__)}")
    if keep.shape != (count,):
        raise ValueError(f"keep: expected shape [{count}], got {list(keep.shape)}")
    return int(keep.sum())


def _checked_queries(queries: Any, dimension: int) -> np.ndarray:
    """Float32 [Q, dimension]."""
    if isinstance(queries, torch.Tensor):
        queries = queries.detach().float().cpu().numpy() if queries.is_floating_point() else queries.cpu().numpy()
    if not isinstance(queries, np.ndarray) or queries.dtype.kind != "f":
        got = f"dtype {queries.dtype}" if isinstance(queries, np.ndarray) else type(queries).__name__
        raise TypeError(f"queries: expected an array or Tensor of floating-point numbers, got {got}")
    if queries.ndim != 2 or queries.shape[1] != dimension:
        raise ValueError(f"queries: expected shape [Q, {dimension}], got {list(queries.shape)}")
    with np.errstate(over="ignore"):  # what is too large for fp32 is infinite, and refused
        return np.ascontiguousarray(queries, np.float32)


def _lengths(name: str, vectors: np.ndarray, first_row: int) -> np.ndarray:
    """Euclidean lengths [n], fp64; raises ValueError where a number is not finite."""
    wide = vectors.astype(np.float64)
    squares = np.einsum("nh,nh->n", wide, wide)  # squares of fp32 do not overflow in fp64
    wrong = np.flatnonzero(~np.isfinite(squares))
    if len(wrong):
        row = vectors[wrong[0]]
        bad = row[~np.isfinite(row)][0]
        raise ValueError(f"{name}: row {first_row + wrong[0]}: expected finite numbers, got {bad}")
    return np.sqrt(squares)


def _rough_scores(
    queries: np.ndarray, lengths: np.ndarray, block: np.ndarray, block_lengths: np.ndarray, is_cosine: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Scores [Q, n] of one matrix product, and by how much any of a query may differ from the exact one [Q]."""
    if is_cosine:
        queries, block = _unit(queries, lengths), _unit(block, block_lengths)
        bounds = np.ones(len(queries))
    else:
        bounds = lengths * block_lengths.max(initial=0.0)
    if bounds.max(initial=0.0) > _FP32_PRODUCTS:
        queries, block = queries.astype(np.float64), block.astype(np.float64)
    # Scores that fp32 does not hold are equal, hence all candidates.
    most, terms = np.finfo(np.float32).max, queries.shape[1]
    rough = np.clip(queries @ block.T, -most, most)
    # Twice the bound: for the roundings of unit vectors and of both scores, and the term of second order.
    return rough, 2 * (terms + 8) * (_EPSILON * bounds + _TINY)


def _unit(vectors: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The vectors divided by their lengths, fp32; zero ones stay zero."""
    return (vectors / np.where(lengths > 0, lengths, 1.0)[:, None]).astype(np.float32)


def _candidates(rough: np.ndarray, found: np.ndarray, margin: float, k: int) -> np.ndarray:
    """Of the places `found`, those that may be among the k best of them."""
    if len(found) <= k:
        return found
    values = rough[found]
    least = np.partition(values, len(values) - k)[len(values) - k]
    return found[values >= least - 2 * margin]


def _exact_scores(query: np.ndarray, block: np.ndarray, found: np.ndarray, is_cosine: bool) -> np.ndarray:
    """The scores of some rows of a block, fp32; each a function of its two vectors alone."""
    wide, scores = query.astype(np.float64), np.empty(len(found), np.float32)
    for start in range(0, len(found), _CANDIDATES_AT_ONCE):
        part = found[start : start + _CANDIDATES_AT_ONCE]
        vectors = block[part].astype(np.float64)
        values = _sums(vectors * wide)
        if is_cosine:
            # Square roots first: the product of two squares may underflow.
            lengths = np.sqrt(_sums(vectors * vectors)) * np.sqrt(_sums((wide * wide)[None]))
            values = np.divide(values, lengths, out=np.zeros_like(values), where=lengths > 0)
        with np.errstate(over="ignore"):
            scores[start : start + len(part)] = values
    return scores


def _sums(terms: np.ndarray) -> np.ndarray:
    """Sums [n] of rows [n, H], by halves: additions of whole arrays, whose order no library chooses."""
    width = 1 << (terms.shape[1] - 1).bit_length()
    terms = np.pad(terms, ((0, 0), (0, width - terms.shape[1])))
    while width > 1:
        width //= 2
        terms = terms[:, :width] + terms[:, width:]
    return terms[:, 0]


def _merge(scores: np.ndarray, rows: np.ndarray, new_scores: np.ndarray, new_rows: np.ndarray) -> None:
    """Puts the best of both into `scores` and `rows` [k], best first."""
    all_scores, all_rows = np.concatenate([scores, new_scores]), np.concatenate([rows, new_rows])
    best = np.lexsort((all_rows, -all_scores))[: len(scores)]
    scores[:], rows[:] = all_scores[best], all_rows[best]
