"""The Triton kernels of cross entropy, in the interpreter, against the fp64 reference."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bert_fast import backend
from bert_fast.reference import cross_entropy as reference
from bert_fast.reference.cross_entropy import CrossEntropy
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.tolerances import RELATIVE
from bert_fast.testing.traffic import assert_traffic, traffic

pytestmark = [
    pytest.mark.interpreter,
    # Infinite scores and masked lanes, whose results are selected away: NumPy says so, a GPU does not.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning"),
]

OP = "cross_entropy"
IGNORE = -100


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    return backend.resolve(OP, backend.OpSpec(torch.device("cpu"), torch.float32), "triton")


def make_logits(num_rows: int, num_classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Scores wide enough apart for a few classes to matter."""
    return (torch.randn(num_rows, num_classes) * 3).to(dtype)


def make_labels(num_rows: int, num_classes: int) -> Tensor:
    """Every third row without a label; the first and the last class among the labels."""
    labels = torch.randint(0, num_classes, (num_rows,))
    labels[:1], labels[-1:] = num_classes - 1, 0
    labels[1::3] = IGNORE
    return labels


def run_plain(logits: Tensor, labels: Tensor, dloss: Tensor, smoothing: float, ignore_index: int) -> tuple[Tensor, ...]:
    """(loss, lse, dlogits) of PyTorch's own operators, in fp32 as Hugging Face takes its losses."""
    leaf = logits.detach().clone().requires_grad_()
    wide = leaf.float()
    total = F.cross_entropy(wide, labels.long(), ignore_index=ignore_index, label_smoothing=smoothing, reduction="sum")
    loss = total / (labels != ignore_index).sum().clamp(min=1)
    loss.backward(dloss)
    assert leaf.grad is not None
    return loss.detach(), wide.detach().logsumexp(1), leaf.grad


def check(
    kernels,  # type: ignore[no-untyped-def]
    logits: Tensor,
    labels: Tensor,
    smoothing: float = 0.0,
    ignore_index: int = IGNORE,
    dlogits_name: str = "dlogits",
) -> None:
    """Compares every output with the fp64 reference on the same rounded inputs; inputs must stay as they were."""
    before = [logits.clone(), labels.clone()]
    is_labelled = labels != ignore_index
    dloss = torch.tensor(-1.25 * max(1, len(labels)))  # undoes the mean: gradients of size 1
    a = CrossEntropy(logits, labels, ignore_index, smoothing)
    loss, lse = kernels.cross_entropy_fwd(a)
    dlogits = kernels.cross_entropy_bwd(a, dloss, lse)["logits"]
    plain = run_plain(logits, labels, dloss, smoothing, ignore_index)
    exact = a._replace(logits=logits.double())
    true_loss, true_lse = reference.cross_entropy_fwd(exact)
    truth = reference.cross_entropy_bwd(exact, dloss.double(), true_lse)["logits"]
    assert_close_to_truth(OP, "loss", loss, plain[0], true_loss)
    assert_close_to_truth(OP, "lse", lse[is_labelled], plain[1][is_labelled], true_lse[is_labelled])
    assert_close_to_truth(OP, dlogits_name, dlogits, plain[2], truth)
    assert dlogits.is_contiguous() and not lse[~is_labelled].any() and not dlogits[~is_labelled].any()
    for tensor, copy in zip((logits, labels), before, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_classes", [1, 2, 3, 9, 64, 127, 128, 129, 130, 257, 1000, 1031, 2048])
def test_numbers_of_classes(kernels, num_classes: int, dtype: torch.dtype, smoothing: float) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make_logits(5, num_classes, dtype), make_labels(5, num_classes), smoothing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_classes", [28996, 30522, 30528, pytest.param(2**17 + 3, marks=pytest.mark.slow)])
def test_vocabularies(kernels, num_classes: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make_logits(4, num_classes, dtype), make_labels(4, num_classes), 0.1)
    check(kernels, make_logits(3, num_classes, dtype), make_labels(3, num_classes))


@pytest.mark.parametrize("num_classes", [2, 300])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 17, 600])
def test_numbers_of_rows(kernels, num_rows: int, num_classes: int) -> None:  # type: ignore[no-untyped-def]
    if (num_rows, num_classes) == (600, 300):
        num_rows = 70  # enough: a program per row
    check(kernels, make_logits(num_rows, num_classes), make_labels(num_rows, num_classes))


def test_more_rows_than_one_step_of_the_mean(kernels) -> None:  # type: ignore[no-untyped-def]
    check(kernels, make_logits(9001, 2), make_labels(9001, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_classes", [5, 259])
@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("gap", [0, 1, 2, 6, 8])
def test_any_address_and_row_stride(kernels, num_classes: int, offset: int, gap: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    memory = make_logits(3, num_classes + 16, dtype).flatten()
    logits = memory.as_strided((3, num_classes), (num_classes + gap, 1), offset)
    check(kernels, logits, torch.tensor([num_classes - 1, 0, IGNORE]))


@pytest.mark.parametrize("num_classes", [5, 259])
@pytest.mark.parametrize("layout", ["transposed", "expanded", "reversed"])
def test_layouts(kernels, layout: str, num_classes: int) -> None:  # type: ignore[no-untyped-def]
    logits, labels = make_logits(4, num_classes), make_labels(8, num_classes)[::2]
    relaid = {
        "transposed": lambda: logits.t().contiguous().t(),
        "expanded": lambda: logits[:1].expand_as(logits),
        "reversed": lambda: torch.cat([logits, logits], dim=1)[:, num_classes:],
    }[layout]()
    check(kernels, relaid, labels)


@pytest.mark.parametrize("num_classes", [9, 300])
def test_labels_of_32_bits_and_ignored_class(kernels, num_classes: int) -> None:  # type: ignore[no-untyped-def]
    labels = make_labels(6, num_classes).clamp(min=0).int()
    check(kernels, make_logits(6, num_classes), labels, ignore_index=0)


@pytest.mark.parametrize("num_classes", [9, 300])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_scores_near_10000(kernels, num_classes: int, smoothing: float) -> None:  # type: ignore[no-untyped-def]
    labels = make_labels(6, num_classes)
    for logits in (make_logits(6, num_classes) + 1e4, make_logits(6, num_classes) * 1e4):
        check(kernels, logits, labels, smoothing, dlogits_name="dlogits_of_large")


@pytest.mark.parametrize("num_classes", [3, 300, 303])
def test_scores_as_low_as_fp32_goes(kernels, num_classes: int) -> None:  # type: ignore[no-untyped-def]
    logits = make_logits(3, num_classes)
    logits[0], logits[1, 1:], logits[2, 1] = torch.finfo(torch.float32).min, -3e38, torch.finfo(torch.float32).min
    check(kernels, logits, torch.tensor([1, 0, 2]))


@pytest.mark.parametrize("num_classes", [4, 300])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("column", [0, 1, slice(None)])
def test_infinities_are_those_of_torch(kernels, num_classes: int, value: float, column: int | slice) -> None:  # type: ignore[no-untyped-def]
    """In rows with a label; the label is column 1."""
    logits, labels = make_logits(2, num_classes), torch.tensor([1, 1])
    logits[1, column] = value
    losses, lse = kernels.cross_entropy_rows_fwd(logits, labels, IGNORE, 0.0)
    assert torch.equal(torch.isfinite(losses), torch.isfinite(F.cross_entropy(logits, labels, reduction="none")))
    dlogits = kernels.cross_entropy_bwd(CrossEntropy(logits, labels), torch.tensor(1.0), lse)["logits"]
    leaf = logits.clone().requires_grad_()
    F.cross_entropy(leaf, labels).backward()
    assert torch.equal(torch.isfinite(dlogits), torch.isfinite(leaf.grad))


@pytest.mark.parametrize("num_classes", [4, 300])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_rows_without_a_label_are_not_read(kernels, num_classes: int, value: float) -> None:  # type: ignore[no-untyped-def]
    logits, labels = make_logits(5, num_classes), make_labels(5, num_classes)
    expected = kernels.cross_entropy_fwd(CrossEntropy(logits, labels))
    spoilt = logits.clone()
    spoilt[labels == IGNORE] = value
    a = CrossEntropy(spoilt, labels)
    with traffic() as counts:
        loss, lse = kernels.cross_entropy_fwd(a)
        dlogits = kernels.cross_entropy_bwd(a, torch.tensor(2.0), lse)["logits"]
    assert torch.equal(loss, expected[0]) and torch.equal(lse, expected[1])
    assert torch.isfinite(dlogits).all() and not dlogits[labels == IGNORE].any()
    assert counts.times_loaded(spoilt[1]) == {0}


@pytest.mark.parametrize("num_classes", [4, 300])
def test_nothing_labelled(kernels, num_classes: int) -> None:  # type: ignore[no-untyped-def]
    a = CrossEntropy(make_logits(5, num_classes), torch.full((5,), IGNORE))
    loss, lse = kernels.cross_entropy_fwd(a)
    assert loss == 0 and not lse.any()
    assert not kernels.cross_entropy_bwd(a, torch.tensor(float("inf")), lse)["logits"].any()


@pytest.mark.parametrize("num_classes", [4, 300])
@pytest.mark.parametrize("bad", [-1, -(2**40), "C", 2**31, 2**62])
def test_labels_out_of_range_show_and_read_nothing(kernels, num_classes: int, bad: int | str) -> None:  # type: ignore[no-untyped-def]
    logits, labels = make_logits(5, num_classes), make_labels(5, num_classes)
    labels[2] = num_classes if bad == "C" else bad
    with traffic() as counts:
        losses, lse = kernels.cross_entropy_rows_fwd(logits, labels, IGNORE, 0.0)
    assert torch.equal(losses.isnan(), torch.arange(5) == 2) and torch.equal(lse.isnan(), losses.isnan())
    addresses = range(logits.data_ptr(), logits.data_ptr() + logits.nbytes)
    others = [a for a in counts.loads if a not in addresses]
    assert len(others) == len(labels)
    a = CrossEntropy(logits, labels)
    assert kernels.cross_entropy_fwd(a)[0].isnan()
    dlogits = kernels.cross_entropy_bwd(a, torch.tensor(1.0), lse)["logits"]
    assert dlogits[2].isnan().all() and torch.isfinite(dlogits[[0, 1, 3, 4]]).all()


@pytest.mark.parametrize("num_classes", [9, 1031])
def test_runs_repeat_bit_for_bit(kernels, num_classes: int) -> None:  # type: ignore[no-untyped-def]
    a = CrossEntropy(make_logits(7, num_classes, torch.float16), make_labels(7, num_classes), IGNORE, 0.1)

    def run() -> tuple[Tensor, ...]:
        loss, lse = kernels.cross_entropy_fwd(a)
        return loss, lse, kernels.cross_entropy_bwd(a, torch.tensor(3.0), lse)["logits"]

    assert all(torch.equal(first, second) for first, second in zip(run(), run(), strict=True))


@pytest.mark.parametrize("num_classes", [9, 1031])
def test_rows_in_chunks_with_gradients_in_place(kernels, num_classes: int) -> None:  # type: ignore[no-untyped-def]
    """What a caller does that makes its logits chunk by chunk and turns each into its gradient."""
    logits, labels = make_logits(7, num_classes), make_labels(7, num_classes)
    a = CrossEntropy(logits, labels)
    loss, lse = kernels.cross_entropy_fwd(a)
    dlogits = kernels.cross_entropy_bwd(a, torch.tensor(3.0), lse)["logits"]
    scale = kernels.divide_by_labelled(torch.tensor(3.0), labels, IGNORE)
    all_losses, gradients = [], []
    for z, label in zip(logits.split(3), labels.split(3), strict=True):
        losses, rows_lse = kernels.cross_entropy_rows_fwd(z, label, IGNORE, 0.0)
        all_losses.append(losses)
        z = z.clone()
        assert kernels.cross_entropy_rows_bwd(scale, z, label, rows_lse, IGNORE, 0.0, z) is z
        gradients.append(z)
    assert torch.equal(kernels.mean_of_labelled(torch.cat(all_losses), labels, IGNORE), loss)
    assert torch.equal(torch.cat(gradients), dlogits)


@pytest.mark.parametrize("num_classes", [9, 1031])
def test_gradients_leave_what_lies_between_rows(kernels, num_classes: int) -> None:  # type: ignore[no-untyped-def]
    logits, labels = make_logits(4, num_classes, torch.float16), make_labels(4, num_classes)
    _, lse = kernels.cross_entropy_fwd(CrossEntropy(logits, labels))
    scale = torch.tensor(0.5)
    expected = kernels.cross_entropy_rows_bwd(scale, logits, labels, lse, IGNORE, 0.0, torch.empty_like(logits))
    for gap in (1, 5, 8):
        memory = torch.full((4, num_classes + gap), 7.0, dtype=torch.float16)
        out = memory[:, :num_classes]
        assert torch.equal(kernels.cross_entropy_rows_bwd(scale, logits, labels, lse, IGNORE, 0.0, out), expected)
        assert (memory[:, num_classes:] == 7.0).all()


@pytest.mark.parametrize("num_classes", [9, 1031])
def test_bf16_stays_within_a_unit_of_the_reference(kernels, num_classes: int) -> None:  # type: ignore[no-untyped-def]
    logits, labels = make_logits(5, num_classes, torch.bfloat16), make_labels(5, num_classes)
    a = CrossEntropy(logits, labels)
    loss, lse = kernels.cross_entropy_fwd(a)
    plain, truth = (reference.cross_entropy_fwd(CrossEntropy(t, labels))[0] for t in (logits, logits.double()))
    assert_close_to_truth(OP, "loss", loss, plain, truth)
    dlogits = kernels.cross_entropy_bwd(a, torch.tensor(4.0), lse)["logits"].float()
    expected = reference.cross_entropy_bwd(a._replace(logits=logits.float()), torch.tensor(4.0), lse)["logits"]
    assert ((dlogits - expected).abs() <= expected.abs() * RELATIVE["bf16_stored_by_interpreter"]).all()


@pytest.mark.parametrize("num_classes", [9, 259])
def test_offsets_beyond_two_to_the_31(kernels, tmp_path: Path, num_classes: int) -> None:  # type: ignore[no-untyped-def]
    """The second row lies 2^31 + 9 elements behind the first, in a sparse file that takes no space."""
    stride = 2**31 + 9
    logits, labels = make_logits(2, num_classes, torch.float16), torch.tensor([1, num_classes - 1])
    size = stride + num_classes
    storage = torch.from_file(str(tmp_path / "logits"), shared=True, size=size, dtype=torch.float16)
    far = storage.as_strided((2, num_classes), (stride, 1)).copy_(logits)
    arguments = [CrossEntropy(t, labels) for t in (logits, far)]
    near, distant = map(kernels.cross_entropy_fwd, arguments)
    assert all(torch.equal(a, b) for a, b in zip(near, distant, strict=True))
    expected, got = (kernels.cross_entropy_bwd(a, torch.tensor(2.0), near[1])["logits"] for a in arguments)
    assert torch.equal(got, expected)
    kernels.cross_entropy_rows_bwd(torch.tensor(1.0), far, labels, near[1], IGNORE, 0.0, far)
    assert torch.equal(far, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_number_of_classes_has_a_configuration(kernels, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    for num_classes in [*range(1, 10_000), 30522, 2**17, 2**20]:
        config = kernels.launch_config(num_classes, dtype)
        assert config.vector * dtype.itemsize == 16
        assert config.is_short == (num_classes <= 128)
        for size in (config.rows, config.cols, config.num_warps):
            assert size & (size - 1) == 0
        if config.is_short:
            assert num_classes <= config.cols < 8 * num_classes
        else:  # no fewer elements than two edges, and no more idle warps than busy ones
            assert num_classes >= 2 * config.vector
            assert config.num_warps == 1 or num_classes > config.cols // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_many_lengths_share_a_kernel(kernels, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """As scores of a text's tokens are: another number in each batch."""
    configs = {kernels.launch_config(length, dtype) for length in range(1, 513)}
    assert len(configs) == 5
    assert len({kernels.launch_config(length, dtype) for length in range(33, 513)}) == 2
    assert {kernels._has_edges(length, 0, length, 8) for length in range(129, 513)} == {True}
    assert not kernels._has_edges(30528, 0, 30528, 8)
    assert kernels._has_edges(30522, 0, 30522, 8)


@pytest.mark.parametrize("num_classes", [2, 9, 259, 1003, 1024])
@pytest.mark.parametrize("label_dtype", [torch.int64, torch.int32])
def test_bytes_are_those_of_the_docstring(kernels, num_classes: int, label_dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """Rows of 259 and 1,003 fp16 scores start anywhere. Only the score of the label may be read twice, by forward."""
    num_rows = 7
    logits, labels = make_logits(num_rows, num_classes, torch.float16), make_labels(num_rows, num_classes)
    labels = labels.to(label_dtype)
    is_labelled = labels != IGNORE
    num_labelled, e, b = int(is_labelled.sum()), 2, labels.element_size()
    z_label = 0 if kernels.launch_config(num_classes, logits.dtype).is_short else e
    with traffic() as forward:
        losses, lse = kernels.cross_entropy_rows_fwd(logits, labels, IGNORE, 0.1)
    assert_traffic(forward, num_labelled * (num_classes * e + z_label) + num_rows * (b + 8))
    rows = [z for z, label in zip(logits, labels, strict=True) if label != IGNORE]
    assert all(forward.times_loaded(z) <= {1, 2} for z in rows)
    assert forward.times_stored(losses) == forward.times_stored(lse) == {1}
    with traffic() as mean:
        loss = kernels.mean_of_labelled(losses, labels, IGNORE)
    assert_traffic(mean, num_rows * (4 + b) + 4)
    with traffic() as count:
        scale = kernels.divide_by_labelled(loss, labels, IGNORE)
    assert_traffic(count, num_rows * b + 8)
    with traffic() as backward:
        dlogits = torch.empty_like(logits)
        kernels.cross_entropy_rows_bwd(scale, logits, labels, lse, IGNORE, 0.1, dlogits)
    floor = num_labelled * (num_classes * e + 4) + num_rows * (b + num_classes * e) + 4
    assert_traffic(backward, floor, cached=[scale])
    assert all(backward.times_loaded(z) == {1} for z in rows)
    assert backward.times_stored(dlogits) == {1}
