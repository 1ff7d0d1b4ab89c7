"""A layer on the Triton back-end, in the interpreter: the bits of its ops, and the fp64 reference."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bert_fast import backend
from bert_fast.reference import encoder_layer as reference
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.traffic import traffic
from bert_fast.torch import encoder_layer as aten

pytestmark = pytest.mark.interpreter

HIDDEN, WIDE, HEADS, LENGTHS = 32, 48, 2, (6, 1, 5)
ALL = frozenset(
    {"x", "qkv_weight", "qkv_bias", "attention_output_weight", "attention_output_bias", "attention_norm_weight",
     "attention_norm_bias", "up_weight", "up_bias", "down_weight"}
)  # fmt: skip


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    return backend.resolve("encoder_layer", backend.OpSpec(torch.device("cpu"), torch.float32), "triton")


def arguments(
    dtype: torch.dtype, *, rows: bool = False, dropout_p: float = 0.2, of_parameters: torch.dtype | None = None
) -> reference.EncoderLayer:
    num_tokens, wide = sum(LENGTHS), of_parameters or dtype

    def matrix(num_rows: int, num_columns: int) -> Tensor:
        return (torch.randn(num_rows, num_columns) * num_columns**-0.5).to(wide)

    def vector(size: int, centre: float = 0.0) -> Tensor:
        return (centre + 0.1 * torch.randn(size)).to(wide)

    lengths = torch.tensor(LENGTHS)
    coords = torch.cat([torch.stack((torch.full((n,), row), torch.arange(n)), 1) for row, n in enumerate(LENGTHS)])
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    chosen = torch.tensor([0, 2, 6, 11]) if rows else None
    queries = cu_seqlens if chosen is None else torch.searchsorted(chosen, cu_seqlens.long(), out_int32=True)
    projections = [t for _ in range(3) for t in (matrix(HIDDEN, HIDDEN), vector(HIDDEN))]
    return reference.EncoderLayer(
        torch.randn(num_tokens, HIDDEN).to(dtype), *projections, matrix(HIDDEN, HIDDEN), vector(HIDDEN),
        vector(HIDDEN, 1.0), vector(HIDDEN), matrix(WIDE, HIDDEN), vector(WIDE), matrix(HIDDEN, WIDE), vector(HIDDEN),
        vector(HIDDEN, 1.0), vector(HIDDEN), chosen, queries, cu_seqlens, max(LENGTHS), max(LENGTHS),
        coords.int() if chosen is None else coords.int()[chosen], coords.int(), None, HEADS, False, "gelu",
        dropout_p, dropout_p, dropout_p, torch.tensor([9]), 1, 2, 3, 1e-12, 1e-12, "output", "output", True,
    )  # fmt: skip


def upstream(a: reference.EncoderLayer) -> Tensor:
    shape = (a.coords_q.shape[0], HIDDEN)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(a.x.dtype)


def run(back_end: Any, a: reference.EncoderLayer) -> dict[str, Tensor]:
    y, *saved = back_end.encoder_layer_fwd(a)
    made = back_end.encoder_layer_bwd(a, upstream(a), y, *saved, ALL)
    return {"y": y} | {f"d{name}": gradient for name, gradient in made.items()}


def in_fp64(a: reference.EncoderLayer) -> reference.EncoderLayer:
    return a._make([t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in a])


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_and_gradients(kernels, dtype, dropout_p, rows):  # type: ignore[no-untyped-def]
    a = arguments(dtype, rows=rows, dropout_p=dropout_p)
    actual, plain, truth = run(kernels, a), run(aten, a), run(reference, in_fp64(a))
    assert actual.keys() == plain.keys() == truth.keys() == {"y"} | {f"d{n}" for n in ALL} | {
        "ddown_bias", "dnorm_weight", "dnorm_bias"
    }  # fmt: skip
    for name in actual:
        assert_close_to_truth("encoder_layer", name, actual[name], plain[name], truth[name])


def test_fp32_parameters_beside_half_precision(kernels):  # type: ignore[no-untyped-def]
    a = arguments(torch.float16, of_parameters=torch.float32)
    actual, plain, truth = run(kernels, a), run(aten, a), run(reference, in_fp64(a))
    for name in actual:
        assert_close_to_truth("encoder_layer", name, actual[name], plain[name], truth[name])
        assert actual[name].dtype == (torch.float16 if name in ("y", "dx") else torch.float32), name


def test_runs_repeat_bit_for_bit(kernels):  # type: ignore[no-untyped-def]
    a = arguments(torch.float16)
    first, second = run(kernels, a), run(kernels, a)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(
    ("wants", "num_sums"), [(ALL, 8), (ALL - {"up_bias"}, 7), (ALL - {"qkv_bias"}, 7), (frozenset(), 3)]
)
def test_sums_over_rows_share_a_launch(kernels, monkeypatch, wants, num_sums, rows):  # type: ignore[no-untyped-def]
    """Of biases and of LayerNorms, at the end: what a step of backward read before would be NaN."""
    from bert_fast.triton import _column_sums

    launched: list[int] = []
    launch = _column_sums._launch_together
    monkeypatch.setattr(
        _column_sums,
        "_launch_together",
        lambda several, rows=None: (
            launched.append(sum(len(sums) for _, sums in several) + (rows is not None)) or launch(several, rows)
        ),
    )
    if rows and "qkv_bias" in wants:
        num_sums -= 1  # of two products' gradients, which have no rows in common
    a = arguments(torch.float16, rows=rows)
    y, *saved = kernels.encoder_layer_fwd(a)
    kernels._backward.forget()  # a program would not ask for them again
    made = kernels.encoder_layer_bwd(a, upstream(a), y, *saved, wants)
    assert launched == [num_sums]
    alone = kernels.OPS.backward(a, upstream(a), y, *saved, wants=wants)
    assert launched == [num_sums] + [1] * ("qkv_bias" in wants and not rows) and made.keys() == alone.keys()
    assert all(torch.equal(made[name], alone[name]) for name in made)


class _KeepsAll(TorchDispatchMode):
    """Keeps every tensor alive, so that no memory is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append(func(*args, **(kwargs or {})))
        return self.made[-1]


def test_nothing_is_written_beside_what_is_kept(kernels):  # type: ignore[no-untyped-def]
    """Forward writes what it returns, the two products before a LayerNorm, and the activation; each once."""
    a = arguments(torch.float16)
    with traffic() as forward, _KeepsAll():
        y, *saved = kernels.encoder_layer_fwd(a)
    kept = reference.Saved(*saved)
    assert all(forward.times_stored(t) == {1} for t in (y, kept.qkv, kept.out, kept.z, kept.pre))
    returned = sum(t.nbytes for t in (y, *saved) if t is not None)
    assert forward.stored_bytes <= returned + 2 * y.nbytes + kept.pre.nbytes
