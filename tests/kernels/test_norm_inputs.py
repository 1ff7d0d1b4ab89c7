"""Inputs of a layer's LayerNorms, computed again where outputs do not suffice, in the interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast.reference import encoder_layer as reference
from bert_fast.reference.dropout_add_layer_norm import AGAIN, SAVES, output_suffices
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.traffic import traffic
from bert_fast.torch import encoder_layer as aten
from tests.kernels.test_encoder_layer import ALL, arguments, in_fp64, run, upstream
from tests.kernels.test_encoder_layer import kernels as kernels

pytestmark = pytest.mark.interpreter

# What one weight, or all, of a LayerNorm may be, with its bias: none of it can be divided by.
HOSTILE = {
    "zero": (0.0, 0.1), "1e-8": (1e-8, 0.1), "bias of 100": (0.5, 50.0), "inf": (float("inf"), 0.0),
    "nan": (float("nan"), 0.0),
}  # fmt: skip
NORMS = {"attention_h": "attention_norm", "h": "norm"}


def saving(a: reference.EncoderLayer, saves: str) -> reference.EncoderLayer:
    return a._replace(attention_saves=saves, saves=saves)


def spoil(a: reference.EncoderLayer, norms: Any, kind: str, columns: Any = 5) -> None:
    for norm in norms:
        weight, bias = HOSTILE[kind]
        getattr(a, f"{norm}_weight")[columns] = weight
        getattr(a, f"{norm}_bias")[columns] = bias


def kept(module: Any, a: reference.EncoderLayer) -> reference.Saved:
    return reference.Saved(*module.encoder_layer_fwd(a)[1:])


def inputs(module: Any, a: reference.EncoderLayer, wants_attention: bool = True) -> tuple[Tensor | None, ...]:
    """What the Triton back-end computes again, as the names of `NORMS` are ordered."""
    return module.OPS.norm_inputs(a, kept(module, a), wants_attention)


ONE, ALL_COLUMNS = 5, slice(None)


@pytest.mark.parametrize(
    ("kind", "columns", "dropout_p", "of_parameters"),
    [
        ("zero", ONE, 0.2, None), ("zero", ALL_COLUMNS, 0.0, None), ("1e-8", ONE, 0.0, torch.float32),
        ("1e-8", ALL_COLUMNS, 0.2, torch.float32), ("bias of 100", ALL_COLUMNS, 0.2, None),
    ],
    ids=["a weight of 0", "weights of 0", "a small weight", "small weights", "large biases"],
)  # fmt: skip
def test_gradients_with_weights_that_hide_the_input(kernels, kind, columns, dropout_p, of_parameters):  # type: ignore[no-untyped-def]
    """Beside the fp64 reference, as plain PyTorch with stored inputs; outputs have the bits that these have."""
    a = saving(arguments(torch.float16, dropout_p=dropout_p, of_parameters=of_parameters), AGAIN)
    spoil(a, NORMS.values(), kind, columns)
    stored = saving(a, "input")
    actual, plain, truth = run(kernels, a), run(aten, stored), run(reference, in_fp64(stored))
    for name in actual:
        assert_close_to_truth("encoder_layer", name, actual[name], plain[name], truth[name])
    assert torch.equal(actual["y"], run(kernels, stored)["y"])


def test_weights_that_suffice_leave_the_bits_of_outputs(kernels):  # type: ignore[no-untyped-def]
    a = arguments(torch.float16)
    again, from_output = run(kernels, saving(a, AGAIN)), run(kernels, saving(a, "output"))
    assert all(torch.equal(again[name], from_output[name]) for name in again)


@pytest.mark.parametrize("hidden_act", ["gelu", "relu"])
def test_inputs_are_those_that_forward_had(kernels, hidden_act):  # type: ignore[no-untyped-def]
    """To a unit in the last place of the product: the sum over K has another order, act another argument."""
    a = saving(arguments(torch.float16), AGAIN)._replace(hidden_act=hidden_act)
    spoil(a, NORMS.values(), "zero")
    stored = kept(kernels, saving(a, "input"))
    for made, name in zip(inputs(kernels, a), NORMS, strict=True):
        expected = getattr(stored, name)
        assert made.dtype == torch.float16 and made.shape == expected.shape
        unit = 2.0**-10 * expected.abs().float().clamp_min(1.0)
        assert ((made.float() - expected.float()).abs() <= 2 * unit).all(), name


@pytest.mark.parametrize(("spoilt", "kind"), [("h", "zero"), ("attention_h", "inf"), ("h", "nan")])
def test_one_is_computed_where_one_is_needed(kernels, spoilt, kind):  # type: ignore[no-untyped-def]
    """Memory of tests holds NaN until it is written."""
    a = saving(arguments(torch.float16), AGAIN)
    spoil(a, [NORMS[spoilt]], kind)
    saved = kept(kernels, saving(arguments_like(a), "output"))
    for made, (name, norm) in zip(kernels.OPS.norm_inputs(a, saved, True), NORMS.items(), strict=True):
        suffices = output_suffices(getattr(a, f"{norm}_weight"), getattr(a, f"{norm}_bias"), torch.float16)
        assert bool(suffices) == (name != spoilt)
        assert made.isnan().all() if suffices else not made.isnan().any(), name


def arguments_like(a: reference.EncoderLayer) -> reference.EncoderLayer:
    """With LayerNorms that leave no NaN or infinity behind."""
    return a._replace(**{
        f"{norm}_{one}": torch.full_like(getattr(a, f"{norm}_{one}"), value)
        for norm in NORMS.values() for one, value in (("weight", 1.0), ("bias", 0.0))
    })  # fmt: skip


def test_nothing_is_read_or_written_where_outputs_suffice(kernels):  # type: ignore[no-untyped-def]
    a = saving(arguments(torch.float16), AGAIN)
    saved = kept(kernels, a)
    with traffic() as moved:
        kernels.OPS.norm_inputs(a, saved, True)
    assert moved.stored_bytes == 0
    assert all(moved.times_loaded(t) == {0} for t in (a.x, saved.out, saved.z, saved.pre))


def test_attention_that_is_frozen_is_left_out(kernels):  # type: ignore[no-untyped-def]
    a = saving(arguments(torch.float16), AGAIN)
    attention_h, h = inputs(kernels, a, wants_attention=False)
    assert attention_h is None and h.shape == a.x.shape


@pytest.mark.parametrize("x", ["gaps between rows", "gaps between columns"])
def test_strides_of_x(kernels, x):  # type: ignore[no-untyped-def]
    a = saving(arguments(torch.float16), AGAIN)
    spoil(a, NORMS.values(), "zero")
    wide = torch.randn(a.x.shape[0], 2 * a.x.shape[1]).half()
    strided = wide[:, : a.x.shape[1]] if x == "gaps between rows" else wide[:, ::2]
    made = run(kernels, a._replace(x=strided))
    expected = run(kernels, a._replace(x=strided.contiguous()))
    assert all(torch.equal(made[name], expected[name]) for name in made)


@pytest.mark.parametrize("back_end", [aten, reference], ids=["torch", "reference"])
@pytest.mark.parametrize("rows", [False, True])
def test_other_back_ends_compute_them_from_their_ops(back_end, rows):  # type: ignore[no-untyped-def]
    a = saving(arguments(torch.float64, rows=rows), AGAIN)
    spoil(a, NORMS.values(), "zero")
    y, *saved = back_end.encoder_layer_fwd(a)
    assert reference.Saved(*saved).h is None and reference.Saved(*saved).attention_h is None
    made = back_end.encoder_layer_bwd(a, upstream(a), y, *saved, ALL)
    expected = run(reference, saving(a, "input"))
    for name, gradient in made.items():
        torch.testing.assert_close(gradient, expected[f"d{name}"])


def test_single_ops_do_not_offer_it() -> None:
    assert AGAIN not in SAVES
