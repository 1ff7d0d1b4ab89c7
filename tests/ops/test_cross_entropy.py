"""The op cross_entropy: every back-end, autograd, torch.library and torch.compile contracts, messages."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bert_fast import backend
from bert_fast.errors import BackendError
from bert_fast.ops.cross_entropy import cross_entropy
from bert_fast.reference import cross_entropy as reference
from bert_fast.reference.cross_entropy import CrossEntropy
from bert_fast.testing.compare import assert_close_to_truth

# Infinite scores and masked lanes, whose results are selected away: NumPy says so, a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

BACKENDS = ["reference", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
IGNORE = -100
_fwd = torch.ops.bert_fast.cross_entropy_fwd.default
_bwd = torch.ops.bert_fast.cross_entropy_bwd.default


def leaves(num_rows: int = 7, num_classes: int = 300, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    logits = (torch.randn(num_rows, num_classes) * 3).to(dtype).requires_grad_()
    labels = torch.randint(0, num_classes, (num_rows,))
    labels[1::3] = IGNORE
    return logits, labels


def outputs(name: str, logits: Tensor, labels: Tensor, **arguments: Any) -> dict[str, Tensor]:
    loss = cross_entropy(logits, labels, backend=name, **arguments)
    return {"loss": loss, "dlogits": torch.autograd.grad(loss, logits, torch.full_like(loss, -5.0))[0]}


def plain(
    logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, ignore_index: int = IGNORE
) -> dict[str, Tensor]:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(wide, labels.long(), ignore_index=ignore_index, label_smoothing=label_smoothing)
    return {"loss": loss, "dlogits": torch.autograd.grad(loss, logits, torch.full_like(loss, -5.0))[0]}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("num_classes", [1, 2, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_back_ends_agree_with_fp64(name: str, smoothing: float, num_classes: int, dtype: torch.dtype) -> None:
    logits, labels = leaves(num_classes=num_classes, dtype=dtype)
    truth = outputs("reference", logits.detach().double().requires_grad_(), labels, label_smoothing=smoothing)
    stock = plain(logits, labels, smoothing)
    for key, actual in outputs(name, logits, labels, label_smoothing=smoothing).items():
        assert_close_to_truth("cross_entropy", key, actual, stock[key], truth[key])


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_fp64(name: str) -> None:
    logits, labels = leaves(num_classes=9, dtype=torch.float64)
    assert cross_entropy(logits, labels, backend=name).dtype == torch.float64
    assert torch.autograd.gradcheck(lambda z: cross_entropy(z, labels, label_smoothing=0.2, backend=name), logits)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_are_fp32_and_gradients_are_not(name: str, dtype: torch.dtype) -> None:
    logits, labels = leaves(dtype=dtype)
    got = outputs(name, logits, labels)
    assert got["loss"].dtype == torch.float32 and got["dlogits"].dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cross_entropy(logits, labels, backend=name), got["loss"])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("num_rows", [0, 4])
def test_nothing_labelled(name: str, num_rows: int) -> None:
    logits, _ = leaves(num_rows)
    loss = cross_entropy(logits, torch.full((num_rows,), IGNORE), backend=name)
    loss.backward()
    assert loss == 0 and logits.grad is not None and logits.grad.shape == logits.shape and not logits.grad.any()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_without_a_label_have_no_influence(name: str, value: float) -> None:
    logits, labels = leaves()
    expected = outputs(name, logits, labels)
    spoilt = logits.detach().clone()
    spoilt[labels == IGNORE] = value
    for key, actual in outputs(name, spoilt.requires_grad_(), labels).items():
        assert torch.equal(actual, expected[key])


@pytest.mark.parametrize("name", BACKENDS)
def test_int32_labels_that_are_no_neighbours_and_another_ignored_class(name: str) -> None:
    logits, labels = leaves(8, 9)
    labels = labels.clamp(min=0).int().repeat_interleave(2)[::2]
    truth = outputs("reference", logits.detach().double().requires_grad_(), labels, ignore_index=0)
    stock = plain(logits, labels, ignore_index=0)
    for key, actual in outputs(name, logits, labels, ignore_index=0).items():
        assert_close_to_truth("cross_entropy", key, actual, stock[key], truth[key])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced"])
def test_layouts(name: str, layout: str) -> None:
    logits, labels = leaves(6, 37)
    logits = logits.detach()
    relaid = {
        "transposed": logits.t().contiguous().t(),
        "expanded": logits[:1].expand_as(logits),
        "sliced": torch.cat([logits, logits], dim=1)[:, 37:],
    }[layout]
    stock = plain(relaid.contiguous().requires_grad_(), labels)
    truth = outputs("reference", relaid.contiguous().double().requires_grad_(), labels)
    for key, actual in outputs(name, relaid.requires_grad_(), labels).items():
        assert actual.is_contiguous()
        assert_close_to_truth("cross_entropy", key, actual, stock[key], truth[key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_ignored", [False, True])
def test_torch_back_end_in_several_chunks(
    monkeypatch: pytest.MonkeyPatch, has_ignored: bool, dtype: torch.dtype
) -> None:
    """With rows picked out and without, in chunks of two and one at the end; scores of -inf under a label too."""
    module = backend.resolve("cross_entropy", backend.OpSpec(torch.device("cpu"), dtype), "torch")
    logits, labels = leaves(9, 30, dtype)
    labels = labels if has_ignored else labels.clamp(min=0)
    whole = outputs("torch", logits, labels, label_smoothing=0.1)
    monkeypatch.setattr(module, "_CPU_SCORES", 60)
    for key, actual in outputs("torch", logits, labels, label_smoothing=0.1).items():
        assert_close_to_truth("cross_entropy", key, actual, whole[key], whole[key].double())
    z = logits.detach().clone()
    z[0, labels[0]] = -torch.inf
    loss, lse = module.cross_entropy_fwd(CrossEntropy(z, labels))
    assert loss == torch.inf
    assert_close_to_truth("cross_entropy", "lse", lse[:1], z[:1].float().logsumexp(1), z[:1].double().logsumexp(1))


@pytest.mark.parametrize("name", ["torch", pytest.param("triton", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("num_classes", [9, 300])
def test_a_label_out_of_range_that_nobody_looked_at_shows(name: str, num_classes: int) -> None:
    """As from a compiled graph: the op itself, without the checks before it."""
    logits, labels = leaves(num_classes=num_classes)
    labels[2] = num_classes
    loss, lse = _fwd(logits, labels, IGNORE, 0.0, name)
    dlogits = _bwd(torch.tensor(1.0), logits.detach(), labels, lse, IGNORE, 0.0, name)
    assert loss.isnan() and torch.equal(dlogits.isnan().any(1), torch.arange(7) == 2)


@pytest.mark.parametrize("name", BACKENDS)
def test_outputs_alias_nothing(name: str) -> None:
    logits, labels = leaves()
    logits = logits.detach()
    loss, lse = _fwd(logits, labels, IGNORE, 0.0, name)
    dlogits = _bwd(loss, logits, labels, lse, IGNORE, 0.0, name)
    addresses = [t.data_ptr() for t in (loss, lse, dlogits, logits, labels)]
    assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    logits, labels = leaves(dtype=dtype)
    torch.library.opcheck(_fwd, (logits, labels, IGNORE, 0.1, name))
    loss, lse = (t.detach() for t in _fwd(logits, labels, IGNORE, 0.1, name))
    torch.library.opcheck(_bwd, (loss, logits.detach(), labels, lse, IGNORE, 0.1, name))


def saved(logits: Tensor, labels: Tensor) -> list[Tensor]:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        cross_entropy(logits, labels, backend="torch")
    return kept


def test_saves_the_logits_themselves_and_one_number_per_row() -> None:
    logits, labels = leaves(dtype=torch.bfloat16)
    kept = saved(logits, labels)
    assert sorted(t.numel() for t in kept) == [7, 7, 7 * 300]
    assert logits.data_ptr() in {t.data_ptr() for t in kept}
    with torch.no_grad():
        assert saved(logits, labels) == []


def test_backward_runs_where_forward_was_asked_to_run() -> None:
    logits, labels = leaves()
    with backend.use_backend("reference"):
        loss = cross_entropy(logits, labels)
    a = CrossEntropy(logits.detach(), labels)
    expected = reference.cross_entropy_bwd(a, torch.tensor(1.0), reference.cross_entropy_fwd(a)[1])
    assert torch.equal(torch.autograd.grad(loss, logits)[0], expected["logits"])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"logits": [[1.0]]}, TypeError, "logits: expected a Tensor, got list"),
        ({"logits": torch.zeros(7)}, ValueError, r"logits: expected shape \[N, C\], got \[7\]"),
        ({"logits": torch.zeros(7, 0)}, ValueError, r"logits: expected at least one column, got shape \[N, 0\]"),
        ({"logits": torch.zeros(7, 3).long()}, TypeError, "logits: expected dtype float32 or .*, got int64"),
        ({"labels": 3}, TypeError, "labels: expected a Tensor, got int"),
        ({"labels": torch.zeros(6).long()}, ValueError, r"labels: expected shape \[7\], got \[6\]"),
        ({"labels": torch.zeros(7)}, TypeError, "labels: expected dtype int64 or int32, got float32"),
        ({"labels": torch.zeros(7, device="meta").long()}, ValueError, "labels: expected device cpu"),
        ({"labels": torch.full((7,), 300)}, ValueError, r"labels: expected -100 or a class in \[0, 300\), got 300"),
        ({"labels": torch.full((7,), -1)}, ValueError, r"labels: expected -100 or a class in \[0, 300\), got -1"),
        ({"labels": torch.tensor([-100] * 6 + [-2])}, ValueError, r"labels: expected -100 or a class .*, got -2"),
        ({"labels": torch.full((7,), -100), "ignore_index": -1}, ValueError, r"labels: expected -1 or .*, got -100"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index: expected an int, got float"),
        ({"label_smoothing": "a"}, TypeError, "label_smoothing: expected a number, got str"),
        ({"label_smoothing": -0.1}, ValueError, r"label_smoothing: expected a number in \[0, 1\], got -0.1"),
        ({"label_smoothing": 1.5}, ValueError, r"label_smoothing: expected a number in \[0, 1\], got 1.5"),
        ({"label_smoothing": float("nan")}, ValueError, r"label_smoothing: expected a number in \[0, 1\], got nan"),
        ({"backend": "cuda"}, BackendError, "expected one of .*, got 'cuda'"),
    ],
)  # fmt: skip
def test_messages(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    logits, labels = leaves()
    with pytest.raises(error, match=message):
        cross_entropy(**({"logits": logits, "labels": labels} | changed))


def test_an_ignored_label_may_be_any_number() -> None:
    logits, labels = leaves()
    expected = cross_entropy(logits, labels)
    assert torch.equal(cross_entropy(logits, labels.where(labels != IGNORE, 10**12), ignore_index=10**12), expected)


def test_triton_says_why_it_cannot_run() -> None:
    logits, labels = leaves(dtype=torch.float64)
    with pytest.raises(BackendError, match=r"dtype torch\.float64 is none of"):
        cross_entropy(logits, labels, backend="triton")
