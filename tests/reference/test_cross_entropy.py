"""Cross entropy: gradcheck, against torch, ignored labels, huge scores."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bert_fast.reference.cross_entropy import CrossEntropy, cross_entropy_bwd, cross_entropy_fwd
from bert_fast.testing.explicit import explicit_function

LABELS = torch.tensor([0, -100, 4, 2, -100, 4])


def _logits() -> Tensor:
    return torch.randn(len(LABELS), 5, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignore_index", [-100, 4])
def test_cross_entropy(smoothing: float, ignore_index: int) -> None:
    labels = LABELS.clamp(min=0) if ignore_index == 4 else LABELS

    def forward(logits):
        a = CrossEntropy(logits, labels, ignore_index, smoothing)
        loss, lse = cross_entropy_fwd(a)
        return (loss,), (a._replace(logits=logits.detach()), lse.detach())

    def backward(saved, dloss):
        a, lse = saved
        return (cross_entropy_bwd(a, dloss, lse)["logits"],)

    logits = _logits()
    assert torch.autograd.gradcheck(explicit_function(forward, backward), (logits,))
    loss, lse = cross_entropy_fwd(CrossEntropy(logits, labels, ignore_index, smoothing))
    expected = F.cross_entropy(logits, labels, ignore_index=ignore_index, label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(lse, logits.logsumexp(1))


@pytest.mark.parametrize("labels", [torch.full((6,), -100), torch.zeros(0, dtype=torch.long)], ids=["ignored", "none"])
def test_nothing_labelled(labels: Tensor) -> None:
    logits = torch.randn(len(labels), 5, requires_grad=True)
    loss, lse = cross_entropy_fwd(CrossEntropy(logits, labels))
    loss.backward()
    assert loss.item() == 0.0 and lse.shape == labels.shape and not logits.grad.any()
    assert not cross_entropy_bwd(CrossEntropy(logits.detach(), labels), torch.tensor(1.0), lse.detach())["logits"].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_loss_is_fp32(dtype: torch.dtype) -> None:
    logits = _logits().detach().to(dtype)
    a = CrossEntropy(logits, LABELS)
    loss, lse = cross_entropy_fwd(a)
    assert loss.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), LABELS))
    assert cross_entropy_bwd(a, torch.ones(()), lse)["logits"].dtype == dtype


def test_scores_of_any_size() -> None:
    logits = torch.tensor([[3e4, -3e4, 0.0], [torch.finfo(torch.float32).min, 1.0, 2.0]], requires_grad=True)
    loss, _ = cross_entropy_fwd(CrossEntropy(logits, torch.tensor([0, 2])))
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()
