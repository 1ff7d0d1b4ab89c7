"""Rows whose offset passes 2^31 elements because there are so many: sparse memory, the last program alone.

The tests of single families reach such offsets by a huge stride, which is 64 bits wide from the start. Here strides and
row numbers fit 32 bits and their product does not: a kernel that multiplies before it widens fails.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast import backend
from bert_fast.reference.bias_gelu import BiasGelu
from bert_fast.reference.dropout_add_layer_norm import DropoutAddLayerNorm
from bert_fast.reference.embedding import Embedding
from bert_fast.reference.layer_norm import LayerNorm
from bert_fast.testing.interpreter import last_programs
from tests.attention_records import plain_attention

pytestmark = pytest.mark.interpreter

COLS = 8192
ROWS = 2**31 // COLS + 3
LOGIT_ROWS, CLASSES = 2**31 // 30_522 + 3, 30_522
TAIL = 2  # rows that are compared: every family's last program treats at least one
DTYPE = torch.float16
SPARSE_BYTES = 2**30


@pytest.fixture
def sparse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """Makes large tensors of zeros that take no memory until written; `torch.empty` and its like do so as well."""
    count = iter(range(100))
    empty = torch.empty

    def make(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
        size = torch.Size(shape).numel()
        return torch.from_file(str(tmp_path / str(next(count))), shared=True, size=size, dtype=dtype).view(shape)

    def sparse_empty(*shape: Any, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        sizes = torch.Size(shape if isinstance(shape[0], int) else shape[0])
        if sizes.numel() * dtype.itemsize > SPARSE_BYTES:
            return make(*sizes, dtype=dtype)
        return empty(sizes, dtype=dtype)

    monkeypatch.setattr(torch, "empty", sparse_empty)
    monkeypatch.setattr(torch, "empty_like", lambda t, **_: sparse_empty(t.shape, dtype=t.dtype))
    new_empty = Tensor.new_empty

    def sparse_new_empty(t: Tensor, *shape: Any, dtype: torch.dtype | None = None, **others: Any) -> Tensor:
        sizes = torch.Size(shape if isinstance(shape[0], int) else shape[0])
        if sizes.numel() * (dtype or t.dtype).itemsize > SPARSE_BYTES:
            return make(*sizes, dtype=dtype or t.dtype)
        return new_empty(t, sizes, dtype=dtype or t.dtype, **others)

    monkeypatch.setattr(Tensor, "new_empty", sparse_new_empty)
    return make


@pytest.fixture(autouse=True)
def _one_group_of_rows_per_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Persistent kernels get a program for every group of rows; sums over all programs are left out."""
    from bert_fast.triton import _launch, bias_gelu, dropout_add_layer_norm, embedding, layer_norm

    monkeypatch.setattr(_launch, "num_multiprocessors", lambda device: 2**30)
    for module in (embedding, bias_gelu, dropout_add_layer_norm, layer_norm):
        monkeypatch.setattr(module, "column_sums", lambda partial, dtype: partial[0].to(dtype).unbind())


def kernels(op: str) -> Any:
    return backend.resolve(op, backend.OpSpec(torch.device("cpu"), DTYPE, hidden_size=COLS), "triton")


def tail(values: Tensor, big: Tensor) -> Tensor:
    """big, with its last rows set."""
    big[-len(values) :] = values
    return big


def assert_same_last_rows(far: Tensor, near: Tensor) -> None:
    assert near[-1].any()
    assert torch.equal(far[-1], near[-1])
    assert not far[: 2 * TAIL].any(), "rows at the beginning were written"


def test_layer_norm(sparse) -> None:  # type: ignore[no-untyped-def]
    family = kernels("layer_norm")
    x, dy = torch.randn(2, TAIL, COLS).to(DTYPE).unbind()
    weight, bias = torch.randn(2, COLS).unbind()

    def run(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        a = LayerNorm(x, weight, bias, 1e-12)
        y, mean, rstd = family.layer_norm_fwd(a)
        return y, family.layer_norm_bwd(a, dy, mean, rstd)["x"]

    y, dx = run(x, dy)
    far_x, far_dy = tail(x, sparse(ROWS, COLS)), tail(dy, sparse(ROWS, COLS))
    with last_programs():
        far_y, far_dx = run(far_x, far_dy)
    assert_same_last_rows(far_y, y)
    assert_same_last_rows(far_dx, dx)


@pytest.mark.parametrize("saves", ["input", "output", "device"])
def test_dropout_add_layer_norm(sparse, saves: str) -> None:  # type: ignore[no-untyped-def]
    family = kernels("dropout_add_layer_norm")
    x, residual, dy = torch.randn(3, TAIL, COLS).to(DTYPE).unbind()
    weight, bias, x_bias = 1 + 0.1 * torch.rand(COLS), torch.randn(COLS), torch.randn(COLS)
    coords = torch.zeros(ROWS, 2, dtype=torch.int32)
    coords[-TAIL:] = torch.arange(2 * TAIL).view(TAIL, 2)
    seed = torch.tensor([5])

    def run(x: Tensor, residual: Tensor, dy: Tensor, coords: Tensor) -> tuple[Tensor, ...]:
        a = DropoutAddLayerNorm(x, residual, x_bias, weight, bias, 1e-12, 0.3, seed, coords, 3, saves)
        y, h, mean, rstd = family.dropout_add_layer_norm_fwd(a)
        made = family.dropout_add_layer_norm_bwd(a, dy, y, h, mean, rstd)
        return y, made["x"], made["residual"]

    near = run(x, residual, dy, coords[-TAIL:])
    far = [tail(t, sparse(ROWS, COLS)) for t in (x, residual, dy)]
    with last_programs():
        far_results = run(*far, coords)
    for one, other in zip(far_results, near, strict=True):
        assert_same_last_rows(one, other)


def test_bias_gelu(sparse) -> None:  # type: ignore[no-untyped-def]
    family = kernels("bias_gelu")
    x, dy = torch.randn(2, TAIL, COLS).to(DTYPE).unbind()
    bias = torch.randn(COLS)

    def run(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        a = BiasGelu(x, bias, "gelu")
        return family.bias_gelu_fwd(a), family.bias_gelu_bwd(a, dy)["x"]

    y, dx = run(x, dy)
    far_x, far_dy = tail(x, sparse(ROWS, COLS)), tail(dy, sparse(ROWS, COLS))
    with last_programs():
        far_y, far_dx = run(far_x, far_dy)
    # A program owns a block of columns: the last one of the last.
    cols = 128
    assert_same_last_rows(far_y[:, -cols:], y[:, -cols:])
    assert_same_last_rows(far_dx[:, -cols:], dx[:, -cols:])


def test_embedding(sparse) -> None:  # type: ignore[no-untyped-def]
    family = kernels("embedding")
    word_table, position_table, type_table = (torch.randn(n, COLS).to(DTYPE) for n in (7, 5, 2))
    weight, bias = torch.randn(2, COLS).unbind()
    ids = torch.zeros(3, ROWS, dtype=torch.int32)
    ids[:, -TAIL:] = torch.tensor([[6, 3], [1, 1], [2, 4]])
    seed, coords = torch.tensor([5]), torch.zeros(ROWS, 2, dtype=torch.int32)
    coords[-TAIL:] = torch.arange(2 * TAIL).view(TAIL, 2)
    dy = torch.randn(TAIL, COLS).to(DTYPE)

    def run(ids: Tensor, coords: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        words, types, positions = ids
        a = Embedding(
            words, types, positions, word_table, position_table, type_table, None, weight, bias, 1e-12, 0.3, seed,
            coords, 0, DTYPE,
        )  # fmt: skip
        y, mean, rstd = family.embedding_fwd(a)
        vectors = sparse(len(words), COLS) if len(words) == ROWS else torch.zeros(len(words), COLS, dtype=DTYPE)
        tail(word_table[words[-TAIL:].long()], vectors)
        of_vectors = a._replace(words=vectors, word_table=None)
        return y, family.embedding_bwd(of_vectors, dy, mean, rstd, {"words"})["words"]

    near = run(ids[:, -TAIL:], coords[-TAIL:], dy)
    far_dy = tail(dy, sparse(ROWS, COLS))
    with last_programs():
        far = run(ids, coords, far_dy)
    for one, other in zip(far, near, strict=True):
        assert_same_last_rows(one, other)


def test_cross_entropy(sparse) -> None:  # type: ignore[no-untyped-def]
    """Forward only: backward takes the last row first, so that its last program has no large offset."""
    family = kernels("cross_entropy")
    logits = torch.randn(TAIL, CLASSES).to(DTYPE)
    labels = torch.full((LOGIT_ROWS,), -100)
    labels[-TAIL:] = torch.tensor([17, CLASSES - 1])
    losses, lse = family.cross_entropy_rows_fwd(logits, labels[-TAIL:], -100, 0.1)
    far = tail(logits, sparse(LOGIT_ROWS, CLASSES))
    with last_programs():
        far_losses, far_lse = family.cross_entropy_rows_fwd(far, labels, -100, 0.1)
    assert torch.equal(far_losses[-1], losses[-1]) and torch.equal(far_lse[-1], lse[-1])


@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")  # of queries that do not exist
@pytest.mark.parametrize("head_dim", [64, 128], ids=["whole heads", "tiles"])
def test_attention(sparse, head_dim: int) -> None:  # type: ignore[no-untyped-def]
    """The last head of the last sequence; what stands before it is one sequence that no program works on."""
    family = kernels("attention")
    num_heads = COLS // head_dim
    q, k, v, dout = torch.randn(4, TAIL, num_heads, head_dim).to(DTYPE).unbind()
    seed, coords = torch.tensor([5]), torch.zeros(ROWS, 2, dtype=torch.int32)
    coords[-TAIL:] = torch.arange(2 * TAIL).view(TAIL, 2)

    def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, coords: Tensor, bounds: list[int]) -> tuple[Tensor, ...]:
        a = plain_attention(
            q, k, v, torch.tensor(bounds, dtype=torch.int32), TAIL, softmax_scale=0.1, dropout_p=0.3, seed=seed,
            coords_q=coords, coords_k=coords, site=3, causal=True,
        )  # fmt: skip
        out, lse, mask = family.attention_fwd(a)
        made = family.attention_bwd(a, dout, out, lse, mask, set())
        return out, made["q"], made["k"], made["v"]

    near = run(q, k, v, dout, coords[-TAIL:], [0, TAIL])
    far = [tail(t, sparse(ROWS, num_heads, head_dim)) for t in (q, k, v, dout)]
    with last_programs():
        far_results = run(*far, coords, [0, ROWS - TAIL, ROWS])
    for one, other in zip(far_results, near, strict=True):
        assert_same_last_rows(one[:, -1], other[:, -1])
