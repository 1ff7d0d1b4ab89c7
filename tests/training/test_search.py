"""Exact search, against the whole matrix of products in fp64 and a stable sort."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bert_fast.training.recipes.search import Index, Similarity, search
from bert_fast.training.recipes.vector_files import WRITERS

ENDINGS = ["npy", "parquet", "arrow"]


def write(path: Path, vectors: np.ndarray, at_once: int = 50) -> Path:
    """As embed writes them; several row groups."""
    writer = WRITERS[path.suffix]
    if writer is None:
        np.save(path, vectors)
        return path
    pytest.importorskip("pyarrow")
    with writer(path, vectors.shape[1]) as opened:
        for first in range(0, len(vectors), at_once):
            opened.add(vectors[first : first + at_once])
    return path


def whole(vectors: np.ndarray, queries: np.ndarray, k: int, similarity: str) -> tuple[np.ndarray, np.ndarray]:
    """Scores rounded to fp32, best first, then by row."""
    scores = queries.astype(np.float64) @ vectors.astype(np.float64).T
    if similarity == "cosine":
        lengths = [np.linalg.norm(one.astype(np.float64), axis=1) for one in (queries, vectors)]
        product = lengths[0][:, None] * lengths[1]
        scores = np.divide(scores, product, out=np.zeros_like(scores), where=product > 0)
    scores = scores.astype(np.float32)
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, rows, 1), rows


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_against_the_whole_matrix(tmp_path: Path, ending: str, similarity: Similarity) -> None:
    draw = np.random.default_rng(0)
    vectors = draw.standard_normal((331, 37)).astype(np.float32) * draw.uniform(0.1, 9, (331, 1)).astype(np.float32)
    queries = draw.standard_normal((300, 37)).astype(np.float32)  # more than are scored at once
    index = Index(write(tmp_path / f"x.{ending}", vectors), similarity)
    assert (index.count, index.dimension, index.info) == (331, 37, None)
    expected_scores, expected_rows = whole(vectors, queries, 13, similarity)
    for block_rows in (1, 7, 64, 330, 331, 5000):
        scores, rows = search(index, queries, 13, block_rows=block_rows)
        assert scores.dtype == np.float32 and rows.dtype == np.int64
        assert np.array_equal(rows, expected_rows)
        assert np.array_equal(scores, expected_scores)


@pytest.mark.parametrize("ending", ENDINGS)
def test_some_rows_only(tmp_path: Path, ending: str) -> None:
    draw = np.random.default_rng(5)
    vectors, queries = (draw.standard_normal((count, 9)).astype(np.float32) for count in (211, 11))
    index = Index(write(tmp_path / f"x.{ending}", vectors))
    for kept in (range(0, 211, 3), range(100, 107), [210], []):
        keep = np.isin(np.arange(211), kept)
        expected_scores, expected_rows = whole(vectors[keep], queries, 10, "cosine")
        for block_rows in (1, 100, 500):
            scores, rows = search(index, queries, 10, keep=keep, block_rows=block_rows)
            assert np.array_equal(scores, expected_scores)
            assert np.array_equal(rows, np.flatnonzero(keep)[expected_rows])
        assert np.array_equal(index.vectors_of(np.array(kept, np.int64)), vectors[keep])
    with pytest.raises(ValueError, match=r"keep: expected shape \[211\], got \[210\]"):
        search(index, queries, keep=np.ones(210, bool))
    with pytest.raises(TypeError, match="keep: expected an array of bool, got int64"):
        search(index, queries, keep=np.arange(211))


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_ties_go_by_row(tmp_path: Path, similarity: Similarity) -> None:
    """Whole numbers, many of them equal: every sum is exact."""
    draw = np.random.default_rng(1)
    vectors = draw.integers(-1, 2, (200, 3)).astype(np.float32)
    queries = np.concatenate([draw.integers(-1, 2, (9, 3)), np.zeros((1, 3))]).astype(np.float32)
    index = Index(write(tmp_path / "x.npy", vectors), similarity)
    found = [search(index, queries, 50, block_rows=size) for size in (1, 3, 17, 199, 200)]
    for scores, rows in found:
        assert np.array_equal(scores, found[0][0]) and np.array_equal(rows, found[0][1])
        same = scores[:, 1:] == scores[:, :-1]
        assert same.any() and (np.diff(rows)[same] > 0).all()
        assert (np.diff(scores) <= 0).all()
    if similarity == "dot":
        assert np.array_equal(found[0][1], whole(vectors, queries, 50, "dot")[1])
    assert np.array_equal(found[0][1][-1], np.arange(50))  # the query of zeros


def test_near_ties_do_not_depend_on_blocks(tmp_path: Path) -> None:
    """Scores that differ in the last bits of fp32 alone, where its products are wrong by more."""
    draw = np.random.default_rng(2)
    base = draw.standard_normal(257)
    noise = draw.standard_normal((400, 257)) * 2.0**-24
    vectors = (base * (1 + noise)).astype(np.float32)
    query = draw.standard_normal((1, 257)).astype(np.float32)
    index = Index(write(tmp_path / "x.npy", vectors), "dot")
    expected = whole(vectors, query, 20, "dot")
    for block_rows in (1, 6, 89, 400):
        scores, rows = search(index, query, 20, block_rows=block_rows)
        assert np.array_equal(scores, expected[0]) and np.array_equal(rows, expected[1])


@pytest.mark.parametrize("ending", ENDINGS)
def test_few_rows(tmp_path: Path, ending: str) -> None:
    one = Index(write(tmp_path / f"one.{ending}", np.array([[3.0, 4.0]], np.float32)))
    scores, rows = search(one, torch.tensor([[3.0, 4.0], [-6.0, -8.0]], dtype=torch.float16), 5)
    assert scores.tolist() == [[1.0], [-1.0]] and rows.tolist() == [[0], [0]]
    empty = Index(write(tmp_path / f"empty.{ending}", np.empty((0, 2), np.float32)))
    scores, rows = search(empty, np.ones((3, 2)), 5)
    assert scores.shape == rows.shape == (3, 0)
    scores, rows = search(one, np.empty((0, 2)), 5)
    assert scores.shape == rows.shape == (0, 1)


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-20, 1e18, 1e30])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_tiny_and_huge_values(tmp_path: Path, scale: float, similarity: Similarity) -> None:
    draw = np.random.default_rng(3)
    vectors = (draw.standard_normal((40, 8)) * scale).astype(np.float32)
    queries = (draw.standard_normal((5, 8)) * scale).astype(np.float32)
    index = Index(write(tmp_path / "x.npy", vectors), similarity)
    with np.errstate(over="ignore"):
        expected = whole(vectors, queries, 4, similarity)
    for block_rows in (1, 9, 40):
        scores, rows = search(index, queries, 4, block_rows=block_rows)
        assert np.array_equal(scores, expected[0]) and np.array_equal(rows, expected[1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(tmp_path: Path, bad: float) -> None:
    vectors = np.ones((20, 3), np.float32)
    vectors[17, 1] = bad
    with pytest.raises(ValueError, match=rf"row 17: expected finite numbers, got {bad}"):
        search(Index(write(tmp_path / "x.npy", vectors)), np.ones((1, 3)), block_rows=4)
    good = Index(write(tmp_path / "y.npy", vectors[:5]))
    with pytest.raises(ValueError, match="queries: row 1: expected finite numbers"):
        search(good, vectors[16:18])


def test_wrong_arguments(tmp_path: Path) -> None:
    index = Index(write(tmp_path / "x.npy", np.ones((2, 3), np.float32)))
    with pytest.raises(ValueError, match=r"queries: expected shape \[Q, 3\], got \[1, 4\]"):
        search(index, np.ones((1, 4)))
    with pytest.raises(
        TypeError, match="queries: expected an array or Tensor of floating-point numbers, got dtype int64"
    ):
        search(index, np.ones((1, 3), np.int64))
    with pytest.raises(TypeError, match="queries: expected an array or Tensor of floating-point numbers, got list"):
        search(index, [[1.0, 2.0, 3.0]])
    with pytest.raises(ValueError, match="top_k: expected at least 1, got 0"):
        search(index, np.ones((1, 3)), 0)
    with pytest.raises(ValueError, match="block_rows: expected at least 1, got 0"):
        search(index, np.ones((1, 3)), block_rows=0)
    with pytest.raises(ValueError, match="similarity: expected one of cosine, dot, got 'l2'"):
        Index(tmp_path / "x.npy", "l2")  # type: ignore[arg-type]
    transposed = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3).repeat(2, 1))[:, ::2]
    assert np.array_equal(search(index, transposed)[1], [[0, 1], [0, 1]])


@pytest.mark.parametrize("ending", ENDINGS)
def test_files_that_are_no_index(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / f"x.{ending}", np.ones((60, 8), np.float32))
    for content in (b"", b"nothing", path.read_bytes()[:-40]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"index: .*x\.{ending}"):
            Index(path)
    with pytest.raises(FileNotFoundError):
        Index(tmp_path / f"none.{ending}")
    if ending == "npy":
        for wrong in (np.ones(3, np.float32), np.ones((2, 2)), np.ones((2, 3), np.float32, "F")):
            np.save(path, wrong)
            with pytest.raises(ValueError, match=r"expected float32 \[n, H\]"):
                Index(path)
