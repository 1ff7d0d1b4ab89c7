"""Layers of models by programs: the bits of their ops, however tensors lie and whoever makes queries, keys, values."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast import backend
from bert_fast.ops._layer_programs import arguments as record_of
from bert_fast.ops._layer_programs import of_call
from bert_fast.reference.encoder_layer import (
    NOT_PROJECTED,
    PROJECTED,
    TENSORS,
    EncoderLayer,
    OfLayer,
    Options,
    Saved,
    in_places,
)
from tests.kernels.test_encoder_layer import ALL, HEADS, HIDDEN, LENGTHS, arguments, upstream

pytestmark = pytest.mark.interpreter
KEPT = ("y", *Saved._fields, *TENSORS, "x", *EncoderLayer._fields[1:17], *PROJECTED)


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    found = backend.resolve("encoder_layer", backend.OpSpec(torch.device("cpu"), torch.float32), "triton")
    found._of_model.forget()
    return found


def run(kernels: Any, x: Tensor, projected: Any) -> tuple[list[Any], list[Any]]:
    """y, what is saved and gradients of a layer: by programs, or by ops where there is none, and by ops alone."""
    a, is_projected = arguments(torch.float32, dropout_p=0.0), projected[0] is not None
    call = of_call(tuple(getattr(a, name) for name in TENSORS), a.max_seqlen_q, a.max_seqlen_k, False)
    parameters = (None,) * 6 + a[7:17] if is_projected else a[1:17]
    layer = OfLayer(parameters, HEADS, "gelu", (0.0, 0.0, 0.0), (1, 2, 3), (1e-12, 1e-12))
    options = Options.of(layer, call, ("output", "output"), True)
    record, given = record_of(x, layer, call, options), projected if is_projected else None
    wants = ALL - {"qkv_weight", "qkv_bias"} if is_projected else ALL
    needs = (True, *[is_projected] * 3, *[not is_projected] * 6, *[True] * 10)
    dy = upstream(a)

    expected = list(kernels.OPS.forward(record, given))
    forward = kernels.find_layer(x, projected, layer, call, options)
    found = list(kernels.layer_of_model(forward, x, projected, layer, call, options) or expected)
    gradients = in_places(kernels.OPS.backward(record, dy, *expected, wants=wants, projected=given), needs)
    kept = (*found, *call.tensors, x, *parameters, *projected)
    backward = kernels.find_layer_bwd(dy, kept, KEPT, layer, call, options, needs)
    made = kernels.layer_of_model_bwd(backward, dy, kept, KEPT, layer, call, options, wants, needs)
    return [*found, *(made or gradients)], [*expected, *gradients]


def strided(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, 3 * columns)[:, columns : 2 * columns]


def unaligned(rows: int, columns: int) -> Tensor:
    return torch.randn(rows * columns + 1)[1:].view(rows, columns)


@pytest.mark.parametrize("is_projected", [False, True], ids=["one op", "projected by others"])
@pytest.mark.parametrize("first", [torch.randn, strided, unaligned], ids=["contiguous", "strided", "unaligned"])
def test_a_program_is_for_tensors_that_lie_alike(kernels, is_projected, first):  # type: ignore[no-untyped-def]
    rows = sum(LENGTHS)
    with torch.no_grad():
        for make in (first, torch.randn, strided, unaligned):
            x = torch.randn(rows, HIDDEN) if is_projected else make(rows, HIDDEN)
            projected = tuple(make(rows, HIDDEN) for _ in range(3)) if is_projected else NOT_PROJECTED
            found, expected = run(kernels, x, projected)
            for one, other in zip(found, expected, strict=True):
                assert one is other is None or torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)), make


def test_nothing_needs_a_gradient_of_what_others_project(kernels):  # type: ignore[no-untyped-def]
    """With gradients enabled, as a frozen model runs outside of `no_grad`."""
    projected = tuple(torch.randn(sum(LENGTHS), HIDDEN) for _ in range(3))
    found, expected = run(kernels, torch.randn(sum(LENGTHS), HIDDEN), projected)
    assert all(one is other is None or torch.equal(one, other) for one, other in zip(found, expected, strict=True))
