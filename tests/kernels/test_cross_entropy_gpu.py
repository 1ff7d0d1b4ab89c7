"""The Triton kernels of cross entropy on a GPU, at BERT's vocabularies: values, gradients, repeatability, no sync."""

import pytest
import torch
from torch.nn import functional as F

from bert_fast import backend, ops
from bert_fast.reference.cross_entropy import CrossEntropy
from bert_fast.testing.compare import assert_close_to_truth

pytestmark = pytest.mark.gpu

IGNORE = -100


@pytest.fixture
def kernels():
    """The module under test, imported only where there is a GPU: importing triton costs a second."""
    return backend.resolve("cross_entropy", backend.OpSpec(torch.device("cuda"), torch.float32), "triton")


def _inputs(num_rows, num_classes, dtype, row_stride=None):
    memory = torch.randn(num_rows, row_stride or num_classes, device="cuda") * 4
    labels = torch.randint(0, num_classes, (num_rows,), device="cuda")
    labels[1::3] = IGNORE
    return memory.to(dtype)[:, :num_classes], labels


def _run(function, logits, labels):
    leaf = logits.detach().requires_grad_()
    loss = function(leaf, labels)
    loss.backward(torch.full_like(loss, float(len(labels))))  # undoes the mean: gradients of size 1
    return {"loss": loss.detach(), "dlogits": leaf.grad}


def _plain(smoothing):
    def function(logits, labels):
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide, labels, label_smoothing=smoothing)

    return function


@pytest.mark.parametrize(
    ("num_rows", "num_classes", "row_stride"),
    [
        (1, 30522, None), (4915, 30522, None), (4915, 30528, None), (600, 30522, 30528), (300, 28996, None),
        (130, 119547, None), (50, 2**17 + 3, None), (1000, 1003, None), (300, 130, 131), (32768, 9, None), (5, 2, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_and_gradients(num_rows, num_classes, row_stride, smoothing, dtype):
    logits, labels = _inputs(num_rows, num_classes, dtype, row_stride)

    def fast(logits, labels):
        return ops.cross_entropy(logits, labels, label_smoothing=smoothing, backend="triton")

    actual, stock = _run(fast, logits, labels), _run(_plain(smoothing), logits, labels)
    truth = _run(_plain(smoothing), logits.double(), labels)
    for name, kind in (("loss", "loss_on_gpu"), ("dlogits", "dlogits")):
        assert_close_to_truth("cross_entropy", kind, actual[name], stock[name], truth[name])
    assert not actual["dlogits"][labels == IGNORE].any()
    again = _run(fast, logits, labels)
    assert all(torch.equal(actual[name], again[name]) for name in actual), "two runs differ"


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_back_end_where_triton_is_missing(smoothing, dtype):
    """Rows in chunks; rows without a label are computed, whatever they hold, and overwritten."""
    logits, labels = _inputs(1200, 30522, dtype)
    logits[4], logits[1190] = float("nan"), float("inf")
    labels[4], labels[1190] = IGNORE, IGNORE

    def function(logits, labels):
        return ops.cross_entropy(logits, labels, label_smoothing=smoothing, backend="torch")

    actual, stock = _run(function, logits, labels), _run(_plain(smoothing), logits, labels)
    truth = _run(_plain(smoothing), logits.double(), labels)
    used = labels != IGNORE
    assert_close_to_truth("cross_entropy", "loss", actual["loss"], stock["loss"], truth["loss"])
    assert_close_to_truth("cross_entropy", "dlogits", *(run["dlogits"][used] for run in (actual, stock, truth)))
    assert not actual["dlogits"][~used].any()


def test_more_than_two_to_the_31_scores(kernels):
    logits, labels = _inputs(70400, 30522, torch.bfloat16)
    assert logits.numel() > 2**31
    _, lse = kernels.cross_entropy_fwd(CrossEntropy(logits, labels))
    last = slice(-40, None)
    wanted = labels[last] != IGNORE
    truth, plain = (logits[last].to(t).logsumexp(1)[wanted] for t in (torch.float64, torch.float32))
    assert_close_to_truth("cross_entropy", "lse", lse[last][wanted], plain, truth)
    scale = torch.ones((), device="cuda")
    dlogits = kernels.cross_entropy_rows_bwd(scale, logits, labels, lse, IGNORE, 0.0, torch.empty_like(logits))
    part = torch.empty_like(logits[last])
    kernels.cross_entropy_rows_bwd(scale, logits[last].clone(), labels[last], lse[last], IGNORE, 0.0, part)
    assert torch.equal(dlogits[last], part)


@pytest.mark.parametrize("num_classes", [9, 30522])
def test_forward_and_backward_never_wait_for_the_device(num_classes):
    logits, labels = _inputs(64, num_classes, torch.bfloat16)
    logits.requires_grad_()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.cross_entropy(logits, labels).backward()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("num_classes", [9, 30522])
def test_labels_out_of_range_are_no_device_assert(kernels, num_classes):
    logits, labels = _inputs(6, num_classes, torch.bfloat16)
    labels[2], labels[3] = num_classes, -1
    losses, lse = kernels.cross_entropy_rows_fwd(logits, labels, IGNORE, 0.0)
    torch.cuda.synchronize()
    assert losses.isnan().tolist() == [False, False, True, True, False, False]
    dlogits = kernels.cross_entropy_bwd(CrossEntropy(logits, labels), torch.ones((), device="cuda"), lse)["logits"]
    assert dlogits.isnan().any(1).tolist() == losses.isnan().tolist()
