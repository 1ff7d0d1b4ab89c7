"""The reference of dropout-add-LayerNorm: against torch's own LayerNorm, fp64 gradcheck, and its documented edges."""

import pytest
import torch
from torch import Tensor

from bert_fast.reference.dropout import dropout_scale, keep_mask
from bert_fast.reference.dropout_add_layer_norm import (
    MAX_WEIGHT,
    MIN_WEIGHT,
    SAVES,
    DropoutAddLayerNorm,
    dropout_add_layer_norm_bwd,
    dropout_add_layer_norm_fwd,
    max_shift,
    output_suffices,
)
from bert_fast.testing.tolerances import tolerance

SEED = torch.tensor([0x1234_5678_9ABC_DEF], dtype=torch.int64)
SITE = 2


def _coords(num_tokens: int) -> Tensor:
    """Two sequences, so that rows and positions both vary."""
    index = torch.arange(num_tokens, dtype=torch.int32)
    return torch.stack([index // 3, index % 3], dim=1)


class _Explicit(torch.autograd.Function):
    """Forward and the explicit backward, as gradcheck wants them."""

    @staticmethod
    def forward(ctx, x, residual, x_bias, weight, bias, dropout_p, coords, saves):  # type: ignore[override]
        y, h, mean, rstd = dropout_add_layer_norm_fwd(
            DropoutAddLayerNorm(x, residual, x_bias, weight, bias, 1e-12, dropout_p, SEED, coords, SITE, saves)
        )
        kept = {"input": (None, h, mean), "output": (y, None, None), "device": (y, h, mean)}[saves]
        ctx.save_for_backward(*kept, rstd, weight, bias, coords)
        ctx.dropout_p, ctx.has_bias, ctx.saves = dropout_p, x_bias is not None, saves
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        y, h, mean, rstd, weight, bias, coords = ctx.saved_tensors
        a = DropoutAddLayerNorm(
            None,
            None,
            None,
            weight,
            bias,
            None,
            ctx.dropout_p,
            SEED,
            coords,
            SITE,
            ctx.saves,  # type: ignore[arg-type]
        )
        made = dropout_add_layer_norm_bwd(a, dy, y, h, mean, rstd)
        if not ctx.has_bias:
            made["x_bias"] = None
        return *(made[name] for name in ("x", "residual", "x_bias", "weight", "bias")), None, None, None


@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(
    ("saves", "suffices", "has_bias"),
    [
        ("input", False, False),
        ("input", True, True),
        ("output", True, True),
        ("device", False, True),
        ("device", True, False),
    ],
)
def test_gradcheck(dropout_p: float, saves: str, suffices: bool, has_bias: bool) -> None:
    x, residual = torch.randn(2, 5, 11, dtype=torch.float64).unbind()
    x_bias, weight, bias = torch.randn(3, 11, dtype=torch.float64).unbind()
    weight = weight.sign() * (weight.abs() + 0.5)
    if not suffices:
        weight[3] = 0.0
    assert output_suffices(weight, bias, weight.dtype) == suffices
    inputs = [t.clone().requires_grad_() for t in (x, residual, x_bias, weight, bias)]
    if not has_bias:
        inputs[2] = None
    assert torch.autograd.gradcheck(_Explicit.apply, (*inputs, dropout_p, _coords(5), saves))


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_forward_is_torch_layer_norm_of_the_masked_sum(dropout_p: float) -> None:
    x, residual = torch.randn(2, 7, 24, dtype=torch.float64).unbind()
    x_bias, weight, bias = torch.randn(3, 24, dtype=torch.float64).unbind()
    coords = _coords(7)
    y, h, mean, rstd = dropout_add_layer_norm_fwd(
        DropoutAddLayerNorm(x, residual, x_bias, weight, bias, 1e-5, dropout_p, SEED, coords, SITE, "input")
    )
    keep = keep_mask(SEED, SITE, coords, 24, dropout_p)
    expected_h = residual + (x + x_bias) * keep * dropout_scale(dropout_p)
    expected_y = torch.nn.functional.layer_norm(expected_h, (24,), weight, bias, 1e-5)
    floor = tolerance("dropout_add_layer_norm", "y", torch.float64).floor
    assert (h - expected_h).abs().max() <= floor
    assert (y - expected_y).abs().max() <= floor
    assert (mean - expected_h.mean(1)).abs().max() <= floor
    assert (rstd - (expected_h.var(1, unbiased=False) + 1e-5).rsqrt()).abs().max() <= floor
    assert (~keep).any() == (dropout_p > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("saves", SAVES)
def test_dtypes(dtype: torch.dtype, saves: str) -> None:
    x, residual, dy = torch.randn(3, 4, 16).to(dtype).unbind()
    weight, bias = torch.randn(2, 16).unbind()
    a = DropoutAddLayerNorm(x, residual, None, weight, bias, 1e-12, 0.1, SEED, _coords(4), SITE, saves)
    y, h, mean, rstd = dropout_add_layer_norm_fwd(a)
    assert (y.dtype, mean.dtype, rstd.dtype) == (dtype, torch.float32, torch.float32)
    assert h is None if saves == "output" else (h.dtype == dtype and h.shape == (4, 16))
    grads = dropout_add_layer_norm_bwd(a, dy, y, h, mean, rstd)
    wide = torch.float32
    assert {n: g.dtype for n, g in grads.items()} == dict(x=dtype, residual=dtype, x_bias=wide, weight=wide, bias=wide)


def test_without_dropout_dx_is_dresidual() -> None:
    h, dy = torch.randn(2, 4, 8).unbind()
    weight = torch.ones(8)
    a = DropoutAddLayerNorm(h, h, None, weight, weight, 1e-12, 0.0, None, None, SITE, "input")
    grads = dropout_add_layer_norm_bwd(a, dy, None, h, h.mean(1), h.std(1))
    assert grads["x"] is grads["residual"]


def test_everything_dropped_leaves_the_residual_but_where_x_is_not_finite() -> None:
    """A dropped inf or NaN, times 0, is NaN, as in PyTorch."""
    x = torch.tensor([[float("inf"), float("nan"), 1.0, 2.0]])
    residual = torch.randn(1, 4)
    weight, bias = torch.ones(4), torch.zeros(4)
    a = DropoutAddLayerNorm(x, residual, None, weight, bias, 1e-12, 1.0, SEED, _coords(1), SITE, "input")
    _, h, _, _ = dropout_add_layer_norm_fwd(a)
    assert h is not None and h[0, :2].isnan().all() and torch.equal(h[0, 2:], residual[0, 2:])


def test_no_rows() -> None:
    empty = torch.empty(0, 8)
    weight, bias = torch.ones(8), torch.zeros(8)
    a = DropoutAddLayerNorm(empty, empty, None, weight, bias, 1e-12, 0.1, SEED, _coords(0), SITE, "input")
    y, h, mean, rstd = dropout_add_layer_norm_fwd(a)
    assert y.shape == h.shape == (0, 8) and mean.shape == rstd.shape == (0,)
    grads = dropout_add_layer_norm_bwd(a, y, None, h, mean, rstd)
    assert len(grads) == 5 and all(not g.any() for g in grads.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_output_suffices(dtype: torch.dtype) -> None:
    """One column outside the limits, or not a number, is enough to say no."""

    def suffices(weight: float, bias: float) -> bool:
        weights, biases = torch.full((5,), 0.7), torch.full((5,), -0.2)
        weights[3], biases[3] = weight, bias
        return bool(output_suffices(weights, biases, dtype))

    shift, nan, inf = max_shift(dtype), float("nan"), float("inf")
    assert all(suffices(sign * w, 0.0) for sign in (1, -1) for w in (MIN_WEIGHT, 1.0, MAX_WEIGHT))
    assert not any(suffices(w, 0.0) for w in (0.0, -0.0, 0.99 * MIN_WEIGHT, 1.01 * MAX_WEIGHT, inf, -inf, nan))
    assert suffices(0.5, 0.5 * shift) and suffices(-0.5, 0.5 * shift) and suffices(0.5, -0.5 * shift)
    assert not any(suffices(0.5, b) for b in (0.501 * shift, -0.501 * shift, inf, -inf, nan))


def test_the_largest_output_is_finite_in_half_precision() -> None:
    """Within the limits no y of 8,192 columns overflows fp16: what backward reads is a number."""
    largest = MAX_WEIGHT * (8192**0.5 + max_shift(torch.float16))
    assert torch.isfinite(torch.tensor(largest).half())
