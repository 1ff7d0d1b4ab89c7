"""Cross entropy behind a linear layer: gradcheck, against torch, gradients of the sum, what is not wanted."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bert_fast.reference.linear_cross_entropy import (
    LinearCrossEntropy,
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
)
from bert_fast.testing.explicit import explicit_function
from tests.wants import parametrize_wants

LABELS = torch.tensor([0, -100, 4, 2, -100, 4])


def _inputs(num_rows: int = 6) -> list[Tensor]:
    return [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((num_rows, 3), (5, 3), (5,))]


@pytest.mark.parametrize("smoothing", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("ignore_index", [-100, 4])
def test_explicit_gradients(smoothing: float, has_bias: bool, ignore_index: int) -> None:
    labels = LABELS.clamp(min=0) if ignore_index == 4 else LABELS

    def forward(x, weight, bias):
        a = LinearCrossEntropy(x, weight, bias, labels, ignore_index, smoothing)
        loss, sums = linear_cross_entropy_fwd(a)
        return (loss,), (x.detach(), weight.detach(), sums)

    def backward(saved, dloss):
        x, weight, sums = saved
        a = LinearCrossEntropy(x, weight, None, labels, ignore_index, None)
        made = linear_cross_entropy_bwd(a, dloss, sums)
        return made["x"], made["weight"], made.get("bias")

    x, weight, bias = _inputs()
    inputs = x, weight, bias if has_bias else None
    assert torch.autograd.gradcheck(explicit_function(forward, backward), inputs)
    loss, _ = linear_cross_entropy_fwd(LinearCrossEntropy(*inputs, labels, ignore_index, smoothing))
    expected = F.cross_entropy(F.linear(*inputs), labels, ignore_index=ignore_index, label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected)


def test_forward_holds_the_gradients_of_the_sum() -> None:
    x, weight, bias = _inputs()
    F.cross_entropy(F.linear(x, weight, bias), LABELS, reduction="sum").backward()
    _, sums = linear_cross_entropy_fwd(LinearCrossEntropy(x, weight, bias, LABELS, -100, 0.0))
    for name, leaf in {"x": x, "weight": weight, "bias": bias}.items():
        assert not sums[name].requires_grad
        torch.testing.assert_close(sums[name], leaf.grad)


@parametrize_wants("x", "weight", "bias")
def test_only_what_is_wanted_is_made(wants: frozenset[str]) -> None:
    a = LinearCrossEntropy(*_inputs(), LABELS, -100, 0.1)
    _, sums = linear_cross_entropy_fwd(a, wants)
    assert sums.keys() == linear_cross_entropy_bwd(a, torch.tensor(3.0), sums).keys() == wants


@pytest.mark.parametrize("labels", [torch.full((6,), -100), torch.zeros(0, dtype=torch.long)], ids=["ignored", "none"])
def test_nothing_labelled(labels: Tensor) -> None:
    a = LinearCrossEntropy(*_inputs(len(labels)), labels, -100, 0.1)
    loss, sums = linear_cross_entropy_fwd(a)
    assert loss.item() == 0.0
    for name in ("x", "weight", "bias"):
        assert sums[name].shape == getattr(a, name).shape and not sums[name].any()
    made = linear_cross_entropy_bwd(a, torch.tensor(1.0), sums)
    assert len(made) == 3 and not any(g.any() for g in made.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    """Loss and gradients of the sum are fp32; scaled ones have the dtypes of x and weight, whichever these are."""
    x, weight, bias = (t.detach().to(dtype) for t in _inputs())
    a = LinearCrossEntropy(x, weight.float(), bias.float(), LABELS, -100, 0.0)
    loss, sums = linear_cross_entropy_fwd(a)
    assert {t.dtype for t in (loss, *sums.values())} == {torch.float32}
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(x.float(), weight.float(), bias.float()), LABELS))
    for wide in (dtype, torch.float32):
        made = linear_cross_entropy_bwd(a._replace(weight=weight.to(wide)), loss, sums)
        assert {name: g.dtype for name, g in made.items()} == dict(x=dtype, weight=wide, bias=wide)
