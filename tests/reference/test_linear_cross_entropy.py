"""Cross entropy behind a linear layer: gradcheck, against torch, gradients of the sum, what is not wanted."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bert_fast.reference.linear_cross_entropy import linear_cross_entropy_bwd, linear_cross_entropy_fwd
from bert_fast.testing.explicit import explicit_function

LABELS = torch.tensor([0, -100, 4, 2, -100, 4])


def _inputs(num_rows: int = 6) -> list[Tensor]:
    return [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((num_rows, 3), (5, 3), (5,))]


@pytest.mark.parametrize("smoothing", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("ignore_index", [-100, 4])
def test_explicit_gradients(smoothing: float, has_bias: bool, ignore_index: int) -> None:
    labels = LABELS.clamp(min=0) if ignore_index == 4 else LABELS

    def forward(x, weight, bias):
        loss, *gradients = linear_cross_entropy_fwd(
            x, weight, bias, labels, ignore_index, smoothing, True, True, has_bias
        )
        return (loss,), (labels, *gradients, x.detach(), weight.detach())

    def backward(saved, dloss):
        return linear_cross_entropy_bwd(dloss, *saved, ignore_index)

    x, weight, bias = _inputs()
    inputs = x, weight, bias if has_bias else None
    assert torch.autograd.gradcheck(explicit_function(forward, backward), inputs)
    loss, *_ = linear_cross_entropy_fwd(*inputs, labels, ignore_index, smoothing)
    expected = F.cross_entropy(F.linear(*inputs), labels, ignore_index=ignore_index, label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected)


def test_forward_holds_the_gradients_of_the_sum() -> None:
    x, weight, bias = _inputs()
    F.cross_entropy(F.linear(x, weight, bias), LABELS, reduction="sum").backward()
    _, *gradients = linear_cross_entropy_fwd(x, weight, bias, LABELS, -100, 0.0, True, True, True)
    for gradient, leaf in zip(gradients, (x, weight, bias), strict=True):
        assert gradient is not None and not gradient.requires_grad
        torch.testing.assert_close(gradient, leaf.grad)


@pytest.mark.parametrize("wants", list(itertools.product([False, True], repeat=3)))
def test_only_what_is_wanted_is_made(wants: tuple[bool, bool, bool]) -> None:
    x, weight, bias = _inputs()
    _, *gradients = linear_cross_entropy_fwd(x, weight, bias, LABELS, -100, 0.1, *wants)
    scaled = linear_cross_entropy_bwd(torch.tensor(3.0), LABELS, *gradients, x, weight)
    assert [g is not None for g in gradients] == [g is not None for g in scaled] == list(wants)


@pytest.mark.parametrize("labels", [torch.full((6,), -100), torch.zeros(0, dtype=torch.long)], ids=["ignored", "none"])
def test_nothing_labelled(labels: Tensor) -> None:
    x, weight, bias = _inputs(len(labels))
    loss, *gradients = linear_cross_entropy_fwd(x, weight, bias, labels, -100, 0.1, True, True, True)
    assert loss.item() == 0.0
    for gradient, leaf in zip(gradients, (x, weight, bias), strict=True):
        assert gradient is not None and gradient.shape == leaf.shape and not gradient.any()
    assert not any(g.any() for g in linear_cross_entropy_bwd(torch.tensor(1.0), labels, *gradients, x, weight))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    """Loss and gradients of the sum are fp32; scaled ones have the dtypes of x and weight, whichever these are."""
    x, weight, bias = (t.detach().to(dtype) for t in _inputs())
    loss, *gradients = linear_cross_entropy_fwd(x, weight.float(), bias.float(), LABELS, -100, 0.0, True, True, True)
    assert {t.dtype for t in (loss, *gradients)} == {torch.float32}
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(x.float(), weight.float(), bias.float()), LABELS))
    for weight_dtype in (dtype, torch.float32):
        scaled = linear_cross_entropy_bwd(loss, LABELS, *gradients, x, weight.to(weight_dtype))
        assert [g.dtype for g in scaled] == [dtype, weight_dtype, weight_dtype]
