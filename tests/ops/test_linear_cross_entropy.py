"""The op linear_cross_entropy: every back-end, autograd's states, autocast, underflow, torch.library, messages."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bert_fast import backend
from bert_fast.errors import BackendError
from bert_fast.ops.linear_cross_entropy import linear_cross_entropy
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.tolerances import RELATIVE

# Infinite scores and masked lanes, whose results are selected away: NumPy says so, a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

TRITON = pytest.param("triton", marks=pytest.mark.interpreter)
BACKENDS = ["reference", "torch", TRITON]
OP = "linear_cross_entropy"
IGNORE = -100
NAMES = ("x", "weight", "bias")
_fwd = torch.ops.bert_fast.linear_cross_entropy_fwd.default
_bwd = torch.ops.bert_fast.linear_cross_entropy_bwd.default


def leaves(
    num_rows: int = 7, num_words: int = 70, hidden_size: int = 16, dtype: torch.dtype = torch.float32,
    parameter_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x, weight, bias, labels; every third row without a label."""
    x, weight, bias = (
        torch.randn(num_rows, hidden_size), torch.randn(num_words, hidden_size) / 2, torch.randn(num_words)
    )  # fmt: skip
    labels = torch.randint(0, num_words, (num_rows,))
    labels[1::3] = IGNORE
    parameters = (t.to(dtype).to(parameter_dtype or dtype).requires_grad_() for t in (weight, bias))
    return x.to(dtype).requires_grad_(), *parameters, labels


def with_groups(num_rows: int, num_words: int) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments of a few groups, and the scores [M, V] that they leave out."""
    groups = {"row_groups": torch.randint(0, 5, (num_rows,)), "class_groups": torch.randint(0, 5, (num_words,))}
    return groups, groups["row_groups"][:, None] == groups["class_groups"]


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, **arguments: Any) -> Tensor:
    narrow = None if bias is None else bias.to(x.dtype)
    logits = F.linear(x, weight.to(x.dtype), narrow)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, labels.long(), **arguments)


def results(loss: Tensor, inputs: tuple[Tensor | None, ...], dloss: float = 1.0, **arguments: Any) -> dict[str, Tensor]:
    given = {name: t for name, t in zip(NAMES, inputs, strict=True) if t is not None}
    gradients = torch.autograd.grad(loss, tuple(given.values()), torch.full_like(loss, dloss), **arguments)
    return {"loss": loss.detach(), **{f"d{name}": g for name, g in zip(given, gradients, strict=True)}}


def compare(name: str, *inputs: Any, dloss: float = 1.0, **arguments: Any) -> None:
    *tensors, labels = inputs
    doubles = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    truth = results(linear_cross_entropy(*doubles, labels, backend="reference", **arguments), doubles, dloss)
    stock = results(plain(*inputs, **arguments), tensors, dloss)
    for key, actual in results(linear_cross_entropy(*inputs, backend=name, **arguments), tensors, dloss).items():
        assert actual.is_contiguous()
        is_mixed = key in ("dweight", "dbias") and tensors[0].dtype != tensors[1].dtype
        assert_close_to_truth(OP, f"{key}_of_half" if is_mixed else key, actual, stock[key], truth[key])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "parameter_dtype"),
    [(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float16, torch.float32)],
)
def test_back_ends_agree_with_fp64(
    name: str, has_bias: bool, smoothing: float, dtype: torch.dtype, parameter_dtype: torch.dtype
) -> None:
    """An upstream gradient of -5 undoes the mean."""
    x, weight, bias, labels = leaves(dtype=dtype, parameter_dtype=parameter_dtype)
    compare(name, x, weight, bias if has_bias else None, labels, dloss=-5.0, label_smoothing=smoothing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_words", [1, 2, 300, 5000])
def test_torch_back_end_in_several_chunks(monkeypatch: pytest.MonkeyPatch, num_words: int, dtype: torch.dtype) -> None:
    """With rows picked out and without, softmax of one and of all rows at a time, weights in one and in two pieces."""
    module = backend.resolve(OP, backend.OpSpec(torch.device("cpu"), dtype), "torch")
    for ignored in (True, False):
        x, weight, bias, labels = leaves(11, num_words, dtype=dtype, parameter_dtype=torch.float32)
        groups, _ = with_groups(11, num_words)
        whole = linear_cross_entropy(x, weight, bias, labels, backend="torch", **groups)
        labels = labels if ignored else labels.clamp(min=0)
        for chunk_bytes, scores in ((3 * num_words * dtype.itemsize, 1), (2**25, 2 * num_words), (1, 2**20)):
            monkeypatch.setattr(module, "_CPU_CHUNK_BYTES", chunk_bytes)
            monkeypatch.setattr(module, "_CPU_SCORES", scores)
            compare("torch", x, weight, bias, labels, dloss=7.0, label_smoothing=0.1)
            cut = linear_cross_entropy(x, weight, bias, labels, backend="torch", **groups)
            assert not ignored or torch.isclose(cut, whole)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced"])
def test_layouts(name: str, layout: str) -> None:
    x, weight, bias, labels = leaves(6, 37)
    relaid = []
    for t in (x.detach(), weight.detach()):
        moved = {
            "transposed": t.t().contiguous().t(),
            "expanded": t[:1].expand_as(t),
            "sliced": torch.cat([t, t], dim=1)[:, t.shape[1] :],
        }[layout]
        relaid.append(moved.requires_grad_())
    compare(name, *relaid, bias, labels.repeat_interleave(2)[::2])


@pytest.mark.parametrize("name", BACKENDS)
def test_int32_labels_and_another_ignored_class(name: str) -> None:
    x, weight, bias, labels = leaves(8, 9)
    compare(name, x, weight, bias, labels.clamp(min=0).int(), ignore_index=0)


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_fp64(name: str) -> None:
    x, weight, bias, labels = leaves(5, 9, 3, dtype=torch.float64)
    assert linear_cross_entropy(x, weight, bias, labels, backend=name).dtype == torch.float64

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, bias, labels, label_smoothing=0.2, backend=name)

    assert torch.autograd.gradcheck(function, (x, weight, bias))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("num_rows", [0, 4])
def test_nothing_labelled(name: str, num_rows: int) -> None:
    x, weight, bias, _ = leaves(num_rows)
    loss = linear_cross_entropy(x, weight, bias, torch.full((num_rows,), IGNORE), backend=name)
    loss.backward()
    assert loss == 0
    for leaf in (x, weight, bias):
        assert leaf.grad is not None and leaf.grad.shape == leaf.shape and not leaf.grad.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_without_a_label_have_no_influence_on_the_cpu(value: float) -> None:
    x, weight, bias, labels = leaves()
    expected = results(linear_cross_entropy(x, weight, bias, labels, backend="torch"), (x, weight, bias))
    spoilt = x.detach().clone()
    spoilt[labels == IGNORE] = value
    loss = linear_cross_entropy(spoilt.requires_grad_(), weight, bias, labels, backend="torch")
    for key, actual in results(loss, (spoilt, weight, bias)).items():
        assert torch.equal(actual, expected[key])


@pytest.mark.parametrize("name", ["torch", TRITON])
def test_a_label_out_of_range_that_nobody_looked_at_shows(name: str) -> None:
    """As from a compiled graph: the op itself, without the checks before it."""
    x, weight, bias, labels = (t.detach() for t in leaves())
    labels[2] = 70
    loss, dx, dweight, dbias = _fwd(x, weight, bias, labels, IGNORE, 0.0, None, None, True, True, True, name)
    assert loss.isnan() and dweight.isnan().all() and dbias.isnan().all()
    assert torch.equal(dx.isnan().any(1), torch.arange(7) == 2)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("wanted", [(), ("x",), ("weight",), ("bias",), ("x", "bias"), ("x", "weight", "bias")])
def test_only_wanted_gradients_are_made_and_saved(name: str, wanted: tuple[str, ...]) -> None:
    *tensors, labels = leaves(dtype=torch.bfloat16 if name != "triton" else torch.float16)
    for key, t in zip(NAMES, tensors, strict=True):
        t.requires_grad_(key in wanted)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = linear_cross_entropy(*tensors, labels, backend=name)
    made = sum(t.numel() * 4 for key, t in zip(NAMES, tensors, strict=True) if key in wanted)
    assert sum(t.nbytes for t in kept if t.data_ptr() not in {a.data_ptr() for a in (*tensors, labels)}) == made
    assert loss.requires_grad == bool(wanted)
    if wanted:
        loss.backward()
    assert {key for key, t in zip(NAMES, tensors, strict=True) if t.grad is not None} == set(wanted)


def test_nothing_is_saved_without_gradients() -> None:
    x, weight, bias, labels = leaves()
    kept: list[Tensor] = []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = linear_cross_entropy(x, weight, bias, labels)
    assert not kept and not loss.requires_grad


@pytest.mark.parametrize("name", BACKENDS)
def test_backward_twice_and_with_other_upstream_gradients(name: str) -> None:
    """The graph kept: what forward made must be there again. The last time it may be overwritten, and is."""
    *tensors, labels = leaves()
    inputs = tuple(tensors)
    loss = linear_cross_entropy(*inputs, labels, backend=name)
    first = results(loss, inputs, retain_graph=True)
    second = results(loss, inputs, dloss=-4.0, retain_graph=True)
    third = results(loss, inputs)
    for key in ("dx", "dweight", "dbias"):
        assert torch.equal(first[key], third[key])
        assert torch.equal(second[key], first[key] * -4.0)
        assert first[key].data_ptr() != second[key].data_ptr() != third[key].data_ptr()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        results(loss, inputs)


def test_the_last_backward_takes_no_second_tensor_of_the_size_of_weight() -> None:
    *tensors, labels = leaves()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = linear_cross_entropy(*tensors, labels)
    gradients = results(loss, tuple(tensors))
    assert gradients["dweight"].data_ptr() in {t.data_ptr() for t in kept}


def test_gradients_accumulate_in_what_the_first_backward_left() -> None:
    *tensors, labels = leaves()
    linear_cross_entropy(*tensors, labels).backward()
    once = [t.grad.clone() for t in tensors]
    kept = linear_cross_entropy(*tensors, labels)
    kept.backward()
    for leaf, gradient in zip(tensors, once, strict=True):
        assert torch.equal(leaf.grad, gradient * 2)


def test_without_a_word_from_pytorch_no_backward_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    *tensors, labels = leaves()
    inputs = tuple(tensors)
    expected = results(linear_cross_entropy(*inputs, labels), inputs)
    monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = linear_cross_entropy(*inputs, labels)
    actual = results(loss, inputs)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    assert actual["dweight"].data_ptr() not in {t.data_ptr() for t in kept}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("wanted", NAMES[:2])
def test_second_derivatives_are_refused(name: str, wanted: str) -> None:
    *tensors, labels = leaves()
    for key, t in zip(NAMES, tensors, strict=True):
        t.requires_grad_(key == wanted)
    leaf = tensors[NAMES.index(wanted)]
    (gradient,) = torch.autograd.grad(linear_cross_entropy(*tensors, labels, backend=name), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
        gradient.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant: bool) -> None:
    *tensors, labels = leaves()
    inputs = tuple(tensors)
    expected = results(linear_cross_entropy(*(t * 2 for t in inputs), labels), inputs)

    def function(*inputs: Tensor) -> Tensor:
        return linear_cross_entropy(*(t * 2 for t in inputs), labels)

    loss = checkpoint(function, *inputs, use_reentrant=use_reentrant)
    loss.backward()
    assert torch.equal(loss, expected["loss"])
    for key, leaf in zip(NAMES, inputs, strict=True):
        assert leaf.grad is not None and torch.equal(leaf.grad, expected[f"d{key}"])


@pytest.mark.parametrize("name", BACKENDS)
def test_a_weight_used_twice_gets_both_gradients(name: str) -> None:
    """As a word table that is embedding and decoder at once."""
    _, weight, bias, labels = leaves()
    ids = torch.arange(7)
    gradients = []
    for function in (linear_cross_entropy, plain):
        arguments = {"backend": name} if function is linear_cross_entropy else {}
        gradients.append(torch.autograd.grad(function(weight[ids] * 2, weight, bias, labels, **arguments), weight)[0])
    exact = torch.autograd.grad(
        plain((w := weight.detach().double().requires_grad_())[ids] * 2, w, bias.double(), labels), w
    )
    assert_close_to_truth(OP, "dweight", *gradients, exact[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """x is cast, parameters are not: gradients have the dtypes of what they belong to."""
    x, weight, bias, labels = leaves()
    direct = results(linear_cross_entropy(x.to(dtype), weight, bias, labels), (x, weight, bias))
    kept: list[Tensor] = []
    with (
        torch.autocast("cpu", dtype),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        loss = linear_cross_entropy(x, weight, bias, labels)
        autocast = results(loss, (x, weight, bias))
    assert loss.dtype == torch.float32
    for key, actual in autocast.items():
        assert actual.dtype == torch.float32 and torch.equal(actual, direct[key])
    assert not any(t.dtype == dtype and t.shape == weight.shape for t in kept)


@pytest.mark.parametrize(
    ("name", "num_rows", "num_words", "dloss"),
    [("torch", 2000, 4000, 0.5), pytest.param("triton", 40, 70, 2.0**-13, marks=pytest.mark.interpreter)],
)
def test_fp16_gradients_do_not_underflow(name: str, num_rows: int, num_words: int, dloss: float) -> None:
    """Most probabilities, divided by the number of rows as the mean asks, are below the smallest number of fp16.

    So plain torch, whose logits take their gradients after the division, loses most of dweight. With a factor like a
    GradScaler's dx, which is fp16 itself, is right too.
    """
    x, weight, bias, labels = leaves(num_rows, num_words, dtype=torch.float16, parameter_dtype=torch.float32)
    with torch.no_grad():
        weight.mul_(2.0**-6), bias.mul_(2.0**-6)  # as in a new model, whose probabilities are all alike
    inputs = x, weight, bias
    doubles = x.detach().double(), weight.detach().half().double(), bias.detach().half().double()
    doubles = tuple(t.requires_grad_() for t in doubles)

    never_a_label = torch.ones(num_words, dtype=torch.bool).index_fill_(0, labels[labels != IGNORE], False)

    def errors(function: Any, factor: float) -> dict[str, float]:
        """Of words that no row is labelled with: their gradients are probabilities alone."""
        truth = results(plain(*doubles, labels), doubles, factor)
        actual = results(function(*inputs, labels), inputs, factor)
        for gradients in (truth, actual):
            gradients.update({key: gradients[key][never_a_label] for key in ("dweight", "dbias")})
        return {key: ((actual[key].double() - t).norm() / t.norm()).item() for key, t in truth.items()}

    bound = RELATIVE["fp16_gradients_of_sums"]
    unscaled, theirs = (errors(f, dloss) for f in (partial(linear_cross_entropy, backend=name), plain))
    assert max(unscaled["dweight"], unscaled["dbias"]) < bound
    assert min(theirs["dweight"], theirs["dbias"]) > 10 * bound, "nothing underflows: the test shows nothing"
    scaled = errors(partial(linear_cross_entropy, backend=name), dloss * 2.0**14)
    assert max(scaled[key] for key in ("dx", "dweight", "dbias")) < bound


@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    x, weight, bias, labels = leaves(dtype=dtype)
    weight, bias = (t.detach().float().requires_grad_() for t in (weight, bias))
    for wants in ((True, True, True), (True, False, True)):
        inputs = [t.detach().requires_grad_(want) for t, want in zip((x, weight, bias), wants, strict=True)]
        torch.library.opcheck(_fwd, (*inputs, labels, IGNORE, 0.1, None, None, *wants, name))
        groups, _ = with_groups(len(labels), len(weight))
        torch.library.opcheck(_fwd, (*inputs, labels, IGNORE, 0.0, *groups.values(), *wants, name))
    _, *sums = (t.detach() for t in _fwd(x, weight, bias, labels, IGNORE, 0.1, None, None, True, True, True, name))
    for made in (sums, [None, sums[1], None]):
        arguments = torch.tensor(2.0), labels, *made, x.detach(), weight.detach(), IGNORE, name
        torch.library.opcheck(_bwd, arguments)


@pytest.mark.parametrize("name", BACKENDS)
def test_outputs_alias_nothing(name: str) -> None:
    x, weight, bias, labels = (t.detach() for t in leaves())
    made = _fwd(x, weight, bias, labels, IGNORE, 0.0, None, None, True, True, True, name)
    scaled = _bwd(torch.tensor(1.0), labels, *made[1:], x, weight, IGNORE, name)
    addresses = [t.data_ptr() for t in (*made, *scaled, x, weight, bias, labels)]
    assert len(set(addresses)) == len(addresses)


def test_backward_runs_where_forward_was_asked_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    *tensors, labels = leaves()
    with backend.use_backend("reference"):
        loss = linear_cross_entropy(*tensors, labels)
    module = backend.resolve(OP, backend.OpSpec(torch.device("cpu"), torch.float32), "torch")
    monkeypatch.setattr(module, "linear_cross_entropy_bwd", None)
    loss.backward()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": [[1.0]]}, TypeError, "x: expected a Tensor, got list"),
        ({"x": torch.zeros(7)}, ValueError, r"x: expected shape \[T, K\], got \[7\]"),
        ({"x": torch.zeros(7, 16).long()}, TypeError, "x: expected a floating-point dtype, got int64"),
        ({"weight": torch.zeros(70, 15)}, ValueError, r"weight: expected shape \[V, 16\], got \[70, 15\]"),
        ({"weight": torch.zeros(70, 16).half()}, TypeError, r"weight: expected dtype float32 .*, got float16"),
        ({"weight": torch.zeros(0, 16), "bias": None}, ValueError, "weight: expected at least one row"),
        ({"weight": torch.zeros(70, 16, device="meta")}, ValueError, "weight: expected device cpu"),
        ({"bias": torch.zeros(16)}, ValueError, r"bias: expected shape \[70\], got \[16\]"),
        ({"bias": torch.zeros(70).half()}, TypeError, r"bias: expected dtype float32 \(that of weight\), got float16"),
        ({"labels": 3}, TypeError, "labels: expected a Tensor, got int"),
        ({"labels": torch.zeros(6).long()}, ValueError, r"labels: expected shape \[7\], got \[6\]"),
        ({"labels": torch.zeros(7)}, TypeError, "labels: expected dtype int64 or int32, got float32"),
        ({"labels": torch.zeros(7, device="meta").long()}, ValueError, r"labels: expected device cpu \(that of x\)"),
        ({"labels": torch.full((7,), 70)}, ValueError, r"labels: expected -100 or a class in \[0, 70\), got 70"),
        ({"labels": torch.full((7,), -1)}, ValueError, r"labels: expected -100 or a class in \[0, 70\), got -1"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index: expected an int, got float"),
        ({"label_smoothing": "a"}, TypeError, "label_smoothing: expected a number, got str"),
        ({"label_smoothing": 1.5}, ValueError, r"label_smoothing: expected a number in \[0, 1\], got 1.5"),
        ({"backend": "cuda"}, BackendError, "expected one of .*, got 'cuda'"),
    ],
)  # fmt: skip
def test_messages(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    x, weight, bias, labels = leaves()
    with pytest.raises(error, match=message):
        linear_cross_entropy(**({"x": x, "weight": weight, "bias": bias, "labels": labels} | changed))


def test_triton_says_why_it_cannot_run() -> None:
    with pytest.raises(BackendError, match=r"dtype torch\.float64 is none of"):
        linear_cross_entropy(*leaves(dtype=torch.float64), backend="triton")


def test_zeros_without_memory() -> None:
    """Forward writes over its logits, which would be such zeros, too."""
    x, weight = torch._efficientzerotensor(9, 4), torch.randn(3, 4, requires_grad=True)
    loss = linear_cross_entropy(x, weight, None, torch.arange(9) % 3)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(3)) and not weight.grad.any()
