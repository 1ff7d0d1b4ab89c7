"""The optimizer ops: every back-end, torch.library and torch.compile contracts, layouts, version counters, messages."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast import backend, ops
from bert_fast.errors import BackendError
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.optimizers import Hyper, Lists, random_lists, written_out_norm, written_out_step

BACKENDS = ["reference", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
KINDS = ["adamw", "lamb"]
SHAPES = [(5, 7), (40,), (1,), (0,)]
HYPERS = [
    Hyper(),
    Hyper(max_grad_norm=1.0, grad_scale=4.0),
    Hyper(weight_decay=0.0),
    Hyper(weight_decay=0.0, use_nvlamb=True, bias_correction=False, grad_averaging=False),
]
NUMBERS = {
    "adamw": (1e-2, None, 0.9, 0.999, 1e-6, 0.01),
    "lamb": (1e-2, None, 0.9, 0.999, 1e-6, 0.01, True, True, False),
}


def step(kind: str, lists: Lists, hyper: Hyper, name: str | None = None, **changed: Any) -> None:
    scale = None if hyper.grad_scale is None else torch.tensor([hyper.grad_scale])
    norm = None
    if hyper.max_grad_norm is not None:
        norm = ops.global_norm(lists.grads, grad_scale=scale, backend=name)
    switches = ("bias_correction", "grad_averaging", "use_nvlamb") if kind == "lamb" else ()
    keywords: dict[str, Any] = {
        "lr": hyper.lr,
        "betas": (hyper.beta1, hyper.beta2),
        "eps": hyper.eps,
        "weight_decay": hyper.weight_decay,
        "grad_norm": norm,
        "max_grad_norm": hyper.max_grad_norm,
        "grad_scale": scale,
        "backend": name,
        **{switch: getattr(hyper, switch) for switch in switches},
    }
    getattr(ops, f"{kind}_step")(*lists.all, **(keywords | changed))


def check(kind: str, lists: Lists, hyper: Hyper, name: str) -> None:
    truth = written_out_step(kind, lists.to(torch.float64), hyper)
    plain = written_out_step(
        kind, lists.to(torch.float64 if lists.params[0].dtype == torch.float64 else torch.float32), hyper
    )
    steps = [float(t) for t in lists.steps]
    grads = [g.clone() for g in lists.grads]
    step(kind, lists, hyper, name)
    for output, actual, theirs, exact in (
        ("param", lists.master_params or lists.params, plain.params, truth.params),
        ("exp_avg", lists.exp_avgs, plain.exp_avgs, truth.exp_avgs),
        ("exp_avg_sq", lists.exp_avg_sqs, plain.exp_avg_sqs, truth.exp_avg_sqs),
    ):
        for i, t in enumerate(actual):
            assert_close_to_truth("optimizer", output, t, theirs[i].to(t.dtype), exact[i])
    for p, master in zip(lists.params, lists.master_params, strict=False):
        if name != "triton" or p.dtype != torch.bfloat16:  # the interpreter truncates bf16
            assert torch.equal(p, master.to(p.dtype))
    assert [float(t) for t in lists.steps] == [t + 1 for t in steps]
    assert all(torch.equal(a, b) for a, b in zip(lists.grads, grads, strict=True)), "gradients must stay"


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hyper", HYPERS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "master"),
    [(torch.float32, False), (torch.float16, True), (torch.bfloat16, True), (torch.float16, False)],
)
def test_back_ends_agree_with_fp64(name: str, kind: str, hyper: Hyper, dtype: torch.dtype, master: bool) -> None:
    check(kind, random_lists(SHAPES, dtype, master=master), hyper, name)


@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hyper", HYPERS, ids=str)
def test_fp64(name: str, kind: str, hyper: Hyper) -> None:
    check(kind, random_lists(SHAPES, torch.float64), hyper, name)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_fp32_gradients_of_half_precision_parameters(name: str, kind: str) -> None:
    check(kind, random_lists(SHAPES, torch.float16, master=True, grad_dtype=torch.float32), HYPERS[1], name)


@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_large_tensors(name: str, kind: str, dtype: torch.dtype) -> None:
    """Larger than what the CPU treats at a time, by one element, beside small ones; one of them transposed."""
    lists = random_lists([(2**18 + 1,), (3,), (700, 800), (2**18,)], dtype, master=dtype == torch.float16)
    for column in (*lists.all[:4], lists.master_params):
        column[2:3] = [relaid(t, "transposed") for t in column[2:3]]
    check(kind, lists, HYPERS[1], name)


def relaid(t: Tensor, layout: str) -> Tensor:
    """The same values, otherwise in memory."""
    if layout == "transposed":
        return t.t().contiguous().t()
    if layout == "sliced":
        return torch.cat([t, t + 1], dim=1)[:, : t.shape[1]]
    return torch.cat([torch.zeros(1, dtype=t.dtype), t.flatten()])[1:].view(t.shape)  # "unaligned"


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["transposed", "sliced", "unaligned"])
@pytest.mark.parametrize(
    "what", [("params",), ("grads",), ("exp_avgs",), ("params", "grads", "exp_avgs", "exp_avg_sqs")]
)
def test_layouts(name: str, kind: str, layout: str, what: tuple[str, ...]) -> None:
    """Whatever lies how in memory, results are those of contiguous tensors, and nothing beside the views is touched."""
    expected = random_lists([(6, 10), (3, 4)])
    actual = expected.copy()
    for column in what:
        getattr(actual, column)[0] = relaid(getattr(actual, column)[0], layout)
    beside = [t._base.clone() if t._base is not None else None for t in actual.params]
    step(kind, expected, HYPERS[1], name)
    step(kind, actual, HYPERS[1], name)
    for one, other in zip(actual.all, expected.all, strict=True):
        for a, b in zip(one, other, strict=True):
            assert_close_to_truth("optimizer", "param", a.contiguous(), b, b.double())
    if layout == "sliced" and "params" in what:
        assert beside[0] is not None and torch.equal(actual.params[0]._base[:, 10:], beside[0][:, 10:])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_repeats_bit_for_bit(name: str, kind: str) -> None:
    first = random_lists(SHAPES)
    second = first.copy()
    for lists in (first, second):
        step(kind, lists, HYPERS[1], name)
    assert all(torch.equal(a, b) for x, y in zip(first.all, second.all, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_written_between_steps_take_the_place_of_masters(kind: str, name: str, dtype: torch.dtype) -> None:
    """Some elements of a tensor, all of another and none of a third: as if masters had been written, too."""
    actual = random_lists([(30, 32), (77,), (8193,)], dtype, master=True)
    expected = actual.copy()
    for lists in (actual, expected):
        torch.manual_seed(4)
        lists.params[0][3:9, ::3] += torch.randn(6, 11).to(dtype)
        lists.params[1].copy_(torch.randn(77))
    untouched = [m.to(dtype) == p for m, p in zip(expected.master_params, expected.params, strict=True)]
    assert [bool(t.all()) for t in untouched] == [False, False, True] and untouched[0].any()
    expected.master_params = [
        torch.where(same, m, p.float())
        for same, m, p in zip(untouched, expected.master_params, expected.params, strict=True)
    ]
    for lists in (actual, expected):
        step(kind, lists, Hyper(weight_decay=0.1), name)
    for one, other in zip(actual.all, expected.all, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stride", [(19, 1), (1, 1)])
def test_strides_of_single_elements_mean_nothing(kind: str, name: str, stride: tuple[int, int]) -> None:
    actual = random_lists([(1, 16)], torch.float16, master=True)
    expected = actual.copy()
    actual.master_params[0] = actual.master_params[0].as_strided((1, 16), stride)
    for lists in (actual, expected):
        step(kind, lists, HYPERS[1], name)
    for one, other in zip(actual.all, expected.all, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_moves_nothing_keeps_what_was_written(kind: str, name: str) -> None:
    """The least and the greatest numbers, too, and an infinity that the master rounds to."""
    lists = random_lists([(8,)], torch.float16, master=True)
    tiny = 2.0**-24
    lists.params[0].copy_(torch.tensor([0.0, -0.0, tiny, -tiny, 65504.0, -65504.0, 1.5, float("inf")]))
    lists.master_params[0].copy_(torch.tensor([1e-9, 1e-9, 2.0, tiny, 7e4, -6e4, 1.5001, 7e4]))
    written = lists.params[0].clone()
    kept = torch.tensor([True, True, False, False, False, False, True, True])
    masters = torch.where(kept, lists.master_params[0], written.float())
    step(kind, lists, Hyper(lr=0.0), name)
    assert torch.equal(lists.params[0], written)
    assert torch.equal(lists.master_params[0], masters)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_found_inf(name: str, kind: str) -> None:
    lists = random_lists(SHAPES)
    lists.grads[0].fill_(float("nan"))
    before = lists.copy()
    step(kind, lists, HYPERS[1], name, found_inf=torch.ones(1))
    for one, other in zip((lists.params, *lists.all[2:]), (before.params, *before.all[2:]), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_lr_may_be_a_tensor(name: str, kind: str) -> None:
    by_number, by_tensor = (random_lists(SHAPES) for _ in range(2))
    by_tensor = by_number.copy()
    step(kind, by_number, Hyper(), name, lr=0.03125)
    step(kind, by_tensor, Hyper(), name, lr=torch.tensor(0.03125))
    assert all(torch.equal(a, b) for a, b in zip(by_number.params, by_tensor.params, strict=True))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("size", [1e-25, 1.0, 1e30])
def test_global_norm(name: str, size: float) -> None:
    grads = [torch.randn(*shape) * size for shape in SHAPES]
    if size == 1.0:
        grads.append(torch.randn(9).bfloat16())
    norm = ops.global_norm(grads, grad_scale=torch.tensor(2.0), backend=name)
    truth = torch.tensor(written_out_norm(grads, 2.0), dtype=torch.float64) / size
    assert norm.dtype == torch.float32 and norm.shape == ()
    assert_close_to_truth("optimizer", "global_norm", norm / size, truth.float(), truth)
    assert ops.global_norm([torch.zeros(0)], backend=name) == 0


@pytest.mark.parametrize("name", BACKENDS)
def test_global_norm_of_many_elements(name: str) -> None:
    """Squares added one after another in fp32 would be off by 1e-5 and more."""
    grads = [torch.randn(300, 2047) if name == "triton" else torch.randn(3000, 2047)]
    truth = torch.tensor(written_out_norm(grads, None), dtype=torch.float64)
    norm = ops.global_norm(grads, backend=name)
    assert_close_to_truth("optimizer", "global_norm", norm / truth.float(), torch.ones(()), torch.ones(()).double())


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_version_counters_go_up(name: str, kind: str) -> None:
    """A weight that autograd saved for backward must not be stepped unnoticed."""
    lists = random_lists([(4, 4)])
    weight = lists.params[0].requires_grad_()
    x = torch.randn(2, 4, requires_grad=True)
    y = x @ weight.t()
    versions = [tensors[0]._version for tensors in lists.all[:5]]
    step(kind, lists, Hyper(), name)
    assert all(
        t[0]._version > v for t, v in zip((lists.params, *lists.all[2:5]), (versions[0], *versions[2:]), strict=True)
    )
    assert lists.grads[0]._version == versions[1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_under_inference_mode(kind: str) -> None:
    with torch.inference_mode():
        step(kind, random_lists(SHAPES), HYPERS[1])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_do(kind: str) -> None:
    step(kind, Lists([], [], [], [], []), Hyper())


@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lr", [None, 0.1])
def test_opcheck(name: str, kind: str, lr: float | None) -> None:
    lists = random_lists([(3, 2), (5,)], torch.float16, master=True)
    lr_value, _, *others = NUMBERS[kind]
    scalars = (torch.tensor(2.0), 1.0, torch.tensor(2.0), torch.zeros(1))
    arguments = (*lists.all, lr_value, None if lr is None else torch.tensor(lr), *others, *scalars, name)
    torch.library.opcheck(getattr(torch.ops.bert_fast, f"{kind}_step").default, arguments)
    torch.library.opcheck(torch.ops.bert_fast.global_norm.default, (lists.grads, torch.ones(1), name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "kinds"), [*(("aot_eager", [kind]) for kind in KINDS), ("inductor", KINDS)], ids=str
)
def test_full_graph_compile(compiler: str, kinds: list[str]) -> None:
    expected = random_lists(SHAPES)
    actual = expected.copy()

    def whole_step(lists: Lists) -> Tensor:
        norm = ops.global_norm(lists.grads)
        keywords = {"lr": 0.1, "grad_norm": norm, "max_grad_norm": 1.0}
        for kind in kinds:
            getattr(ops, f"{kind}_step")(*lists.all, **keywords)
        return norm

    torch._dynamo.reset()
    compiled = torch.compile(whole_step, fullgraph=True, backend=compiler)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(actual), whole_step(expected))
    assert all(
        torch.equal(a, b) for x, y in zip(actual.all, expected.all, strict=True) for a, b in zip(x, y, strict=True)
    )


def good(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    lists = random_lists([(3, 2), (4,)], dtype)
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "steps", "master_params")
    return dict(zip(names, lists.all, strict=True)) | {"lr": 0.1}


TWO = [torch.zeros(3, 2), torch.zeros(4)]
EXPANDED = torch.zeros(1, 2).expand(3, 2)
ZERO = torch.zeros(())


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"params": [[1.0], TWO[1]]}, TypeError, r"params\[0\]: expected a Tensor, got list"),
        ({"params": [TWO[0].long(), TWO[1]]}, TypeError, r"params\[0\]: expected dtype float32 or .*, got int64"),
        ({"params": [TWO[0], TWO[1].half()]}, TypeError, r"params\[1\]: expected dtype float32, got float16"),
        ({"params": [TWO[0], TWO[1].to("meta")]}, ValueError, r"params\[1\]: expected device cpu"),
        ({"grads": TWO[:1]}, ValueError, r"grads: expected 2 tensors \(as params\), got 1"),
        ({"grads": [TWO[0].t(), TWO[1]]}, ValueError, r"grads\[0\]: expected shape \[3, 2\], got \[2, 3\]"),
        ({"grads": [TWO[0].half(), TWO[1]]}, TypeError, r"grads\[0\]: expected dtype float32, got float16"),
        ({"grads": [TWO[0], TWO[1].to("meta")]}, ValueError, r"grads\[1\]: expected device cpu"),
        ({"exp_avgs": [t.double() for t in TWO]}, TypeError, r"exp_avgs\[0\]: expected dtype float32, got float64"),
        ({"exp_avg_sqs": [TWO[0], TWO[0]]}, ValueError, r"exp_avg_sqs\[1\]: expected shape \[4\], got \[3, 2\]"),
        ({"steps": [torch.zeros(1), torch.zeros(())]}, ValueError, r"steps\[0\]: expected shape \[\], got \[1\]"),
        ({"steps": [torch.tensor(1), torch.tensor(1)]}, TypeError, r"steps\[0\]: expected dtype float32, got int64"),
        ({"master_params": TWO}, ValueError, "master_params: expected none, since params are torch.float32, got 2"),
        ({"lr": -1.0}, ValueError, "lr: expected a finite number of at least 0, got -1.0"),
        ({"lr": float("nan")}, ValueError, "lr: expected a finite number of at least 0, got nan"),
        ({"lr": "1"}, TypeError, "lr: expected a number, got str"),
        ({"lr": torch.zeros(2)}, ValueError, r"lr: expected a number or a floating-point Tensor \[\], got .*\[2\]"),
        ({"lr": torch.zeros((), device="meta")}, ValueError, "lr: expected device cpu"),
        ({"betas": (0.9,)}, ValueError, r"betas: expected two numbers, got \(0.9,\)"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\]: expected a number in \[0, 1\), got 1.0"),
        ({"betas": (-0.1, 0.9)}, ValueError, r"betas\[0\]: expected a number in \[0, 1\), got -0.1"),
        ({"eps": -1e-8}, ValueError, "eps: expected a finite number of at least 0, got -1e-08"),
        ({"weight_decay": float("inf")}, ValueError, "weight_decay: expected a finite number of at least 0, got inf"),
        ({"max_grad_norm": 0.0, "grad_norm": TWO[0]}, ValueError, "max_grad_norm: expected a number above 0, .* got 0"),
        ({"max_grad_norm": 1.0}, ValueError, "^grad_norm: expected a value, since clipping"),
        ({"grad_norm": torch.ones(())}, ValueError, "max_grad_norm: expected a value, since clipping"),
        ({"max_grad_norm": 1.0, "grad_norm": TWO[0]}, ValueError, r"grad_norm: expected shape \[\] or \[1\]"),
        ({"grad_scale": torch.ones(()).half()}, TypeError, "grad_scale: expected dtype float32 or float64"),
        ({"found_inf": torch.ones((), device="meta")}, ValueError, "found_inf: expected device cpu"),
        ({"grads": [TWO[0].to_sparse(), TWO[1]]}, ValueError, r"grads\[0\]: expected a dense tensor, got layout"),
        ({"params": [EXPANDED, TWO[1]]}, ValueError, r"params\[0\]: expected one place per element"),
        ({"params": [TWO[0], TWO[0].view(-1)[:4]]}, ValueError, r"params\[1\]: expected memory .* that of params\[0\]"),
        ({"steps": [ZERO, ZERO]}, ValueError, r"steps\[1\]: expected memory of its own, got that of steps\[0\]"),
        ({"backend": "cuda"}, BackendError, "expected one of .*, got 'cuda'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_messages(kind: str, changed: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = good() | changed
    before = [t.clone() for t in arguments["params"] if isinstance(t, Tensor)]
    with pytest.raises(error, match=message):
        getattr(ops, f"{kind}_step")(**arguments)
    after = [t for t in arguments["params"] if isinstance(t, Tensor)]
    assert all(a.is_meta or torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("column", ["params", "grads", "exp_avgs", "exp_avg_sqs", "steps", "master_params"])
@pytest.mark.parametrize("kind", KINDS)
def test_registered_ops_check_too(kind: str, column: str) -> None:
    """Whoever calls them past `ops`: nothing fits, nothing is read or written."""
    lists = random_lists([(3, 2), (4,)], torch.float16, master=True)
    getattr(lists, column)[1] = torch.ones(1000, dtype=getattr(lists, column)[1].dtype)
    before = lists.copy()
    with pytest.raises(ValueError, match=r"\[1\]: expected shape"):
        getattr(torch.ops.bert_fast, f"{kind}_step")(*lists.all, *NUMBERS[kind], None, None, None, None, "torch")
    for one, other in zip(lists.all, before.all, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, torch.zeros(3), r"^grad_norm: expected shape \[\] or \[1\], got \[3\]"),
        (1, None, "max_grad_norm: expected a value, since clipping"),
        (3, torch.zeros(0), r"found_inf: expected shape \[\] or \[1\], got \[0\]"),
    ],
    ids=["norm", "no bound", "empty"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_registered_ops_check_scalars(kind: str, place: int, value: Tensor | None, message: str) -> None:
    scalars = [torch.ones(()), 1.0, torch.ones(()), torch.zeros(1)]
    scalars[place] = value
    with pytest.raises(ValueError, match=message):
        getattr(torch.ops.bert_fast, f"{kind}_step")(
            *random_lists([(3, 2)]).all, *NUMBERS[kind], *scalars, "torch"
        )  # fmt: skip
    with pytest.raises(ValueError, match="lr: expected a number or a floating-point"):
        getattr(torch.ops.bert_fast, f"{kind}_step")(
            *random_lists([(3, 2)]).all, 0.0, torch.zeros(2), *NUMBERS[kind][2:], None, None, None, None, "torch"
        )  # fmt: skip


def test_registered_norm_checks_too() -> None:
    for grads, scale in (([], None), ([torch.ones(2).to_sparse()], None), ([torch.ones(2)], torch.ones(2))):
        with pytest.raises(ValueError, match=r"^grads|^grad_scale"):
            torch.ops.bert_fast.global_norm(grads, scale, "torch")


@pytest.mark.parametrize(
    ("grads", "error", "message"),
    [
        ([], ValueError, "grads: expected at least one tensor, got an empty list"),
        ([1.0], TypeError, r"grads\[0\]: expected a Tensor, got float"),
        ([torch.zeros(2).long()], TypeError, r"grads\[0\]: expected dtype float32 or .*, got int64"),
        ([torch.zeros(2), torch.zeros(2, device="meta")], ValueError, r"grads\[1\]: expected device cpu"),
    ],
)
def test_messages_of_global_norm(grads: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ops.global_norm(grads)


def test_triton_says_why_it_cannot_run() -> None:
    with pytest.raises(BackendError, match=r"dtype torch\.float64 is none of"):
        ops.adamw_step(**good(torch.float64), backend="triton")

    class Hidden(Tensor):
        pass

    spec = backend.OpSpec.of(torch.zeros(1), tensor_class=Hidden)
    with pytest.raises(BackendError, match="tensors are of class Hidden, which hides its memory"):
        backend.resolve("optimizer", spec, "triton")
