"""The Triton kernels of linear_cross_entropy, in the interpreter, against the fp64 reference."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bert_fast import backend
from bert_fast.reference import linear_cross_entropy as reference
from bert_fast.reference.cross_entropy import CrossEntropy, cross_entropy_bwd, cross_entropy_fwd
from bert_fast.reference.linear_cross_entropy import LinearCrossEntropy
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.traffic import assert_traffic, traffic
from tests.wants import parametrize_wants

pytestmark = [
    pytest.mark.interpreter,
    # Infinite scores and masked lanes, whose results are selected away: NumPy says so, a GPU does not.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning"),
]

OP = "linear_cross_entropy"
IGNORE = -100
OUTPUTS = ("loss", "dx", "dweight", "dbias")


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    return backend.resolve(OP, backend.OpSpec(torch.device("cpu"), torch.float32), "triton")


def make(
    num_rows: int, num_words: int, hidden_size: int = 24, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias, labels: logits a few units apart, every third row without a label, the outermost words used."""
    x = torch.randn(num_rows, hidden_size).to(dtype)
    weight = (torch.randn(num_words, hidden_size) * 3 / hidden_size**0.5).to(dtype)
    labels = torch.randint(0, num_words, (num_rows,))
    labels[:1], labels[-1:] = num_words - 1, 0
    labels[1::3] = IGNORE
    return x, weight, torch.randn(num_words).to(dtype), labels


def run_plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, dloss: Tensor, smoothing: float, ignore_index: int
) -> list[Tensor]:
    """(loss, dx, dweight, dbias) of PyTorch's own operators, the loss in fp32 as Hugging Face takes it."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    narrow = [leaf.to(x.dtype) for leaf in leaves]
    logits = F.linear(narrow[0], narrow[1], narrow[2] if bias is not None else None).float()
    total = F.cross_entropy(
        logits, labels.long(), ignore_index=ignore_index, label_smoothing=smoothing, reduction="sum"
    )
    loss = total / (labels != ignore_index).sum().clamp(min=1)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, dloss)]


def check(
    kernels,  # type: ignore[no-untyped-def]
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    smoothing: float = 0.0,
    ignore_index: int = IGNORE,
    suffix: str = "",
) -> None:
    """Compares loss and gradients with the fp64 reference on the same rounded inputs, which must stay as they were."""
    before = [t.clone() for t in (x, weight, labels)]
    dloss = torch.tensor(-1.25 * max(1, int((labels != ignore_index).sum())))  # undoes the mean: gradients of size 1
    a = LinearCrossEntropy(x, weight, bias, labels, ignore_index, smoothing)
    loss, sums = kernels.linear_cross_entropy_fwd(a)
    gradients = list(kernels.linear_cross_entropy_bwd(a, dloss, sums).values())
    wide = a._replace(**{n: getattr(a, n).double() for n in ("x", "weight", "bias") if getattr(a, n) is not None})
    true_loss, true_sums = reference.linear_cross_entropy_fwd(wide)
    truth = reference.linear_cross_entropy_bwd(wide, dloss.double(), true_sums).values()
    plain = run_plain(x, weight, bias, labels, dloss, smoothing, ignore_index)
    for name, actual, stock, true in zip(OUTPUTS, (loss, *gradients), plain, (true_loss, *truth), strict=False):
        assert_close_to_truth(OP, name + suffix, actual, stock, true)
    assert not gradients[0][labels == ignore_index].any()
    for tensor, copy in zip((x, weight, labels), before, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_words", [1, 2, 30, 63, 64, 65, 257, 1031])
def test_numbers_of_words(kernels, num_words: int, dtype: torch.dtype, smoothing: float) -> None:  # type: ignore[no-untyped-def]
    check(kernels, *make(7, num_words, dtype=dtype), smoothing)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_words", [8191, 8192, 8193, 30522, 30528])
def test_rows_of_several_steps(kernels, num_words: int, dtype: torch.dtype, smoothing: float) -> None:  # type: ignore[no-untyped-def]
    """The kernel of a chunk's rows alone: programs of eight warps, several steps, the last one partly filled."""
    assert kernels.row_warps(30522, dtype) == 8
    memory = torch.randn(3, kernels.padded_words(num_words)).mul(3).to(dtype)
    memory[:, num_words:] = torch.nan
    logits = memory[:, :num_words].clone()
    labels = torch.tensor([num_words - 1, IGNORE, 0])
    losses = torch.empty(3)
    kernels._rows(memory, num_words, labels, IGNORE, smoothing, True, losses)
    dloss = torch.tensor(2.0)  # undoes the mean over two rows
    leaf = logits.clone().requires_grad_()
    stock = F.cross_entropy(leaf.float(), labels, label_smoothing=smoothing)
    stock.backward(dloss)
    a = CrossEntropy(logits.double(), labels, IGNORE, smoothing)
    true_loss, lse = cross_entropy_fwd(a)
    truth = cross_entropy_bwd(a, dloss.double(), lse)["logits"]
    assert_close_to_truth("cross_entropy", "loss", losses.sum() / 2, stock.detach(), true_loss)
    assert_close_to_truth("cross_entropy", "dlogits", memory[:, :num_words], leaf.grad, truth)
    assert losses[1] == 0 and not memory[1, :num_words].any() and memory[:, num_words:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_words", [7, 8193, 30522])
def test_rows_of_several_steps_with_groups(kernels, num_words: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """Every place of a vector, of a step and of the tail is left out by one row or another, and so is the maximum."""
    memory = torch.randn(3, kernels.padded_words(num_words)).mul(3).to(dtype)
    memory[:, num_words:] = torch.nan
    logits, row_groups, class_groups = memory[:, :num_words].clone(), torch.arange(3), torch.arange(num_words) % 3
    labels = torch.tensor([num_words - 1, 3, 2])  # two of the row's own group, or of another
    is_out = (row_groups[:, None] == class_groups) & (torch.arange(num_words) != labels[:, None])
    memory[:, :num_words][is_out] = 60.0
    losses = torch.empty(3)
    kernels._rows(memory, num_words, labels, IGNORE, 0.0, True, losses, row_groups, class_groups)
    leaf = logits.clone().requires_grad_()
    stock = F.cross_entropy(leaf.float().masked_fill(is_out, -torch.inf), labels)
    dloss = torch.tensor(3.0)  # undoes the mean over the rows
    stock.backward(dloss)
    wide = CrossEntropy(logits.double().masked_fill(is_out, -torch.inf), labels, IGNORE, 0.0)
    true_loss, lse = cross_entropy_fwd(wide)
    truth = cross_entropy_bwd(wide, dloss.double(), lse)["logits"]
    assert_close_to_truth("cross_entropy", "loss", losses.sum() / 3, stock.detach(), true_loss)
    assert_close_to_truth("cross_entropy", "dlogits", memory[:, :num_words], leaf.grad, truth)
    assert not memory[:, :num_words][is_out].any()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "hidden_size"), [(1, 16), (2, 7), (17, 64), (33, 1), (40, 33)])
def test_sizes(kernels, num_rows: int, hidden_size: int, has_bias: bool) -> None:  # type: ignore[no-untyped-def]
    x, weight, bias, labels = make(num_rows, 70, hidden_size)
    check(kernels, x, weight, bias if has_bias else None, labels, 1.0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_words", [30, 257])
def test_several_chunks(kernels, monkeypatch, num_words: int, dtype: torch.dtype, smoothing: float) -> None:  # type: ignore[no-untyped-def]
    """23 rows in chunks of 8, 8 and 7."""
    monkeypatch.setattr(kernels, "_CHUNK_BYTES", 9 * kernels.padded_words(num_words) * dtype.itemsize)
    assert kernels.chunk_rows(23, num_words, dtype) == 8
    check(kernels, *make(23, num_words, dtype=dtype), smoothing)


@pytest.mark.parametrize("num_words", [30, 257])
def test_parameters_wider_than_activations(kernels, monkeypatch, num_words: int) -> None:  # type: ignore[no-untyped-def]
    """fp16 rows and fp32 weights: what is computed is that of rounded weights, and gradients come out in fp32."""
    monkeypatch.setattr(kernels, "_CHUNK_BYTES", 5 * kernels.padded_words(num_words) * 2)
    x, weight, bias, labels = make(9, num_words, dtype=torch.float16)
    check(kernels, x, weight.float(), bias.float(), labels, 0.1)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
def test_layouts(kernels, layout: str) -> None:  # type: ignore[no-untyped-def]
    def relay(t: Tensor) -> Tensor:
        if layout == "transposed":
            return t.t().contiguous().t()
        return torch.cat([t, t], dim=1)[:, t.shape[1] :] if layout == "sliced" else t[:1].expand_as(t)

    x, weight, bias, labels = make(8, 70)
    check(kernels, relay(x), relay(weight), bias.repeat_interleave(2)[::2], labels.repeat_interleave(2)[::2])


def test_labels_of_32_bits_and_ignored_class(kernels) -> None:  # type: ignore[no-untyped-def]
    x, weight, bias, labels = make(6, 30)
    check(kernels, x, weight, bias, labels.clamp(min=0).int(), ignore_index=0)


@pytest.mark.parametrize("num_words", [30, 300])
def test_scores_near_10000(kernels, num_words: int) -> None:  # type: ignore[no-untyped-def]
    x, weight, bias, labels = make(6, num_words)
    check(kernels, x, weight, bias + 1e4, labels, 0.1, suffix="_of_large")
    check(kernels, x, weight * 1e4, bias, labels, suffix="_of_large_weight")


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("column", [0, 1, slice(None)])
def test_infinities_are_those_of_torch(kernels, value: float, column: int | slice) -> None:  # type: ignore[no-untyped-def]
    """Scores that the bias makes infinite; the label is word 1."""
    x, weight, bias, _ = make(2, 70)
    bias[column] = value
    labels = torch.tensor([1, 1])
    loss, sums = kernels.linear_cross_entropy_fwd(LinearCrossEntropy(x, weight, bias, labels, IGNORE, 0.0))
    stock = run_plain(x, weight, bias, labels, torch.tensor(1.0), 0.0, IGNORE)
    for actual, expected in zip((loss, sums["x"], sums["bias"]), (stock[0], stock[1], stock[3]), strict=True):
        assert torch.equal(torch.isfinite(actual), torch.isfinite(expected))


@pytest.mark.parametrize("num_rows", [0, 5])
def test_nothing_labelled(kernels, num_rows: int) -> None:  # type: ignore[no-untyped-def]
    x, weight, bias, labels = make(num_rows, 70)
    a = LinearCrossEntropy(x, weight, bias, labels.fill_(IGNORE), IGNORE, 0.1)
    loss, sums = kernels.linear_cross_entropy_fwd(a)
    assert loss == 0 and not any(t.any() for t in sums.values())
    gradients = list(kernels.linear_cross_entropy_bwd(a, torch.tensor(3.0), sums).values())
    assert not any(t.any() for t in gradients) and [t.shape for t in gradients] == [x.shape, weight.shape, bias.shape]


@pytest.mark.parametrize("bad", [-1, 70, 2**31, 2**62, -(2**40)])
def test_labels_out_of_range_show_and_read_nothing(kernels, bad: int) -> None:  # type: ignore[no-untyped-def]
    """70 is a column of the memory that pads rows."""
    x, weight, bias, labels = make(5, 70)
    labels[2] = bad
    loss, sums = kernels.linear_cross_entropy_fwd(LinearCrossEntropy(x, weight, bias, labels, IGNORE, 0.0))
    assert loss.isnan() and sums["weight"].isnan().all() and sums["bias"].isnan().all()
    assert torch.equal(sums["x"].isnan().any(1), torch.arange(5) == 2)


@parametrize_wants("x", "weight", "bias")
def test_only_what_is_wanted_is_made(kernels, wants: frozenset[str]) -> None:  # type: ignore[no-untyped-def]
    a = LinearCrossEntropy(*make(5, 70), IGNORE, 0.1)
    (loss, everything), (same_loss, sums) = (
        kernels.linear_cross_entropy_fwd(a),
        kernels.linear_cross_entropy_fwd(a, wants),
    )
    assert torch.equal(loss, same_loss)
    assert sums.keys() == kernels.linear_cross_entropy_bwd(a, torch.tensor(2.0), sums).keys() == wants
    assert all(torch.equal(t, everything[name]) for name, t in sums.items())


def test_scaling_in_place_where_it_may(kernels) -> None:  # type: ignore[no-untyped-def]
    x, weight, bias, labels = make(6, 70, dtype=torch.float16)
    for w in (weight, weight.float()):
        a = LinearCrossEntropy(x, w, bias.to(w.dtype), labels, IGNORE, 0.0)
        _, sums = kernels.linear_cross_entropy_fwd(a)
        new = kernels.linear_cross_entropy_bwd(a, torch.tensor(3.0), sums)
        over = kernels.linear_cross_entropy_bwd(a, torch.tensor(3.0), sums, may_overwrite=True)
        assert all(torch.equal(new[name], over[name]) for name in new)
        assert [over[name] is sums[name] for name in ("x", "weight", "bias")] == [False] + [
            w.dtype == torch.float32
        ] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_runs_repeat_bit_for_bit(kernels, monkeypatch, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(kernels, "_CHUNK_BYTES", 4 * kernels.padded_words(70) * dtype.itemsize)
    inputs = make(9, 70, dtype=dtype)
    a = LinearCrossEntropy(*inputs, IGNORE, 0.1)
    (loss, sums), (same_loss, same_sums) = (kernels.linear_cross_entropy_fwd(a) for _ in range(2))
    assert torch.equal(loss, same_loss) and all(torch.equal(t, same_sums[name]) for name, t in sums.items())


def test_chunks_of_every_number_of_rows(kernels) -> None:  # type: ignore[no-untyped-def]
    for num_words, dtype in itertools.product((2, 30522, 119547, 2**27), (torch.float32, torch.bfloat16)):
        row = kernels.padded_words(num_words) * dtype.itemsize
        assert row % 128 == 0
        for num_rows in (1, 127, 128, 129, 614, 1099, 2198, 2458, 4915, 100_003):
            rows = kernels.chunk_rows(num_rows, num_words, dtype)
            assert 1 <= rows <= num_rows and (rows == 1 or rows * row <= kernels._CHUNK_BYTES)
            assert rows == num_rows or rows <= 128 or rows % 128 == 0
    assert [kernels.chunk_rows(n, 30522, torch.bfloat16) for n in (614, 2458, 4915)] == [614, 1280, 1664]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_words", [30, 257, 1031])
def test_bytes_are_those_of_the_docstring(kernels, num_words: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    x, weight, bias, labels = make(7, num_words, dtype=dtype)
    width, e, b = kernels.padded_words(num_words), dtype.itemsize, labels.element_size()
    is_labelled = labels != IGNORE
    num_labelled, num_rows = int(is_labelled.sum()), len(labels)
    logits = torch.nn.functional.pad(F.linear(x, weight, bias), (0, width - num_words))
    losses = torch.empty(num_rows)
    with traffic() as forward:
        kernels._rows(logits, num_words, labels, IGNORE, 0.1, False, losses)
    assert_traffic(forward, num_labelled * (num_words * e + e) + num_rows * (b + 4))
    assert forward.times_stored(logits) == {0}
    with traffic() as rows:
        kernels._rows(logits, num_words, labels, IGNORE, 0.1, True, losses)
    floor = num_labelled * (num_words + 1) * e + num_rows * (b + 4 + num_words * e)
    assert_traffic(rows, floor, cached=[logits])  # read a second time, when the sum is known
    for z, label in zip(logits, labels, strict=True):
        assert rows.times_loaded(z[:num_words]) <= ({0} if label == IGNORE else {1, 2, 3})
        assert rows.times_stored(z[:num_words]) <= {1, 2}  # the label's twice
        assert num_words == width or rows.times_stored(z[num_words:]) == rows.times_loaded(z[num_words:]) == {0}
    dbias = torch.empty(num_words)
    for accumulate in (False, True):
        with traffic() as sums:
            kernels._column_sums(logits, dbias, accumulate)
        assert_traffic(sums, logits.nbytes + (2 if accumulate else 1) * dbias.nbytes)
    gradient = torch.randn(num_words, 24)
    with traffic() as scaled:
        a = LinearCrossEntropy(x, weight, None, labels, IGNORE, None)
        kernels.linear_cross_entropy_bwd(a, torch.tensor(1.0), {"weight": gradient})
    count = num_rows * b + 8  # of labelled rows
    assert_traffic(scaled, gradient.nbytes + 4 + gradient.numel() * e + count)
