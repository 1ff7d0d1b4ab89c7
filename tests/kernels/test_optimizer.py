"""The Triton kernels of the optimizer, in the interpreter, against formulas written out in fp64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast import backend
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.optimizers import Hyper, Lists, random_lists, written_out_norm, written_out_step
from bert_fast.testing.tolerances import RELATIVE
from bert_fast.testing.traffic import assert_traffic, traffic

pytestmark = pytest.mark.interpreter

OP = "optimizer"
KINDS = ["adamw", "lamb"]
# One element, none, odd ones, whole vectors with and without rest, one chunk exactly and one element more.
SHAPES = [(3,), (0,), (1,), (768,), (30, 32), (77, 131), (8192,), (8193,)]
FEW = [(5, 7), (40,), (1,)]
DTYPES = [(torch.float32, False), (torch.float16, True), (torch.float16, False)]


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    return backend.resolve(OP, backend.OpSpec(torch.device("cpu"), torch.float32), "triton")


def step(kernels: Any, kind: str, lists: Lists, hyper: Hyper, found_inf: Tensor | None = None) -> None:
    scale = None if hyper.grad_scale is None else torch.tensor([hyper.grad_scale])
    norm = None if hyper.max_grad_norm is None else kernels.global_norm(lists.grads, scale)
    function = {"adamw": kernels.adamw_step, "lamb": kernels.lamb_step}[kind]
    function(lists.all, hyper.options(norm, scale, found_inf))


def check(kernels: Any, kind: str, lists: Lists, hyper: Hyper) -> None:
    """One step against the formula in fp64, allowed to err as the formula in fp32 does; gradients must stay."""
    before = lists.copy()
    truth = written_out_step(kind, lists.to(torch.float64), hyper)
    plain = written_out_step(kind, lists.to(torch.float32), hyper)
    step(kernels, kind, lists, hyper)
    weights = lists.master_params or lists.params
    for name, actual, theirs, exact in (
        ("param", weights, plain.params, truth.params),
        ("exp_avg", lists.exp_avgs, plain.exp_avgs, truth.exp_avgs),
        ("exp_avg_sq", lists.exp_avg_sqs, plain.exp_avg_sqs, truth.exp_avg_sqs),
    ):
        for i, t in enumerate(actual):
            assert_close_to_truth(OP, name, t, theirs[i].to(t.dtype), exact[i])
    for p, master in zip(lists.params, lists.master_params, strict=False):
        assert torch.equal(p, master.to(p.dtype))
    assert all(torch.equal(a, b + 1) for a, b in zip(lists.steps, before.steps, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(lists.grads, before.grads, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_sizes(kernels, kind: str, dtype: tuple[torch.dtype, bool]) -> None:  # type: ignore[no-untyped-def]
    check(kernels, kind, random_lists(SHAPES, dtype[0], master=dtype[1]), Hyper(max_grad_norm=1.0, grad_scale=4.0))


@pytest.mark.parametrize("hyper", [
    Hyper(weight_decay=0.0),
    Hyper(weight_decay=0.0, use_nvlamb=True),
    Hyper(max_grad_norm=1e6),
    Hyper(grad_scale=65536.0),
    Hyper(bias_correction=False),
    Hyper(grad_averaging=False),
    Hyper(beta1=0.0, beta2=0.0),
    Hyper(eps=0.1, lr=0.3),
    Hyper(lr=0.0),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_hyperparameters(kernels, kind: str, hyper: Hyper) -> None:  # type: ignore[no-untyped-def]
    check(kernels, kind, random_lists(FEW), hyper)


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_gradients_of_half_precision_parameters(kernels, kind: str) -> None:  # type: ignore[no-untyped-def]
    check(kernels, kind, random_lists(FEW, torch.float16, master=True, grad_dtype=torch.float32), Hyper())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_vocabulary_and_many_tensors(kernels, kind: str) -> None:  # type: ignore[no-untyped-def]
    """More tensors than one launch uploads addresses for, more than one program of scalars, 60 chunks of one tensor."""
    shapes = [(30522, 16), *[(1 + i % 5,) for i in range(140)]]
    check(kernels, kind, random_lists(shapes), Hyper(max_grad_norm=1.0))


@pytest.mark.parametrize("kind", KINDS)
def test_many_steps_stay_close(kernels, kind: str) -> None:  # type: ignore[no-untyped-def]
    hyper = Hyper(max_grad_norm=1.0)
    actual = random_lists(FEW)
    for t in (*actual.exp_avgs, *actual.exp_avg_sqs, *actual.steps):
        t.zero_()
    truth, plain = actual.to(torch.float64), actual.to(torch.float32)
    for _ in range(25):
        for i, g in enumerate(actual.grads):
            g.normal_()
            truth.grads[i], plain.grads[i] = g.double(), g
        step(kernels, kind, actual, hyper)
        truth, plain = written_out_step(kind, truth, hyper), written_out_step(kind, plain, hyper)
    for i, p in enumerate(actual.params):
        assert_close_to_truth(OP, "param_after_25_steps", p, plain.params[i], truth.params[i])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["params", "grads"])
def test_zeros(kernels, kind: str, what: str) -> None:  # type: ignore[no-untyped-def]
    lists = random_lists(FEW)
    for t in (*getattr(lists, what), *lists.exp_avgs, *lists.exp_avg_sqs, *lists.steps):
        t.zero_()
    check(kernels, kind, lists, Hyper())


@pytest.mark.parametrize("kind", KINDS)
def test_no_eps(kernels, kind: str) -> None:  # type: ignore[no-untyped-def]
    """Where eps is 0, what lies behind the end of a tensor is 0 / 0 and must not reach its norm."""
    lists = random_lists([(9,), (13,)])
    check(kernels, kind, lists, Hyper(eps=0.0))


@pytest.mark.parametrize("size", [1e-30, 1e-18, 1e17])
@pytest.mark.parametrize("kind", KINDS)
def test_tiny_and_huge_gradients(kernels, kind: str, size: float) -> None:  # type: ignore[no-untyped-def]
    """As far as m and v are numbers in fp32, p is right: norms neither overflow nor vanish."""
    lists = random_lists(FEW)
    for t in (*lists.exp_avgs, *lists.exp_avg_sqs, *lists.steps):
        t.zero_()
    for g in lists.grads:
        g.mul_(size)
    truth = written_out_step(kind, lists.to(torch.float64), Hyper(max_grad_norm=1.0))
    step(kernels, kind, lists, Hyper(max_grad_norm=1.0))
    for p, exact in zip(lists.params, truth.params, strict=True):
        assert_close_to_truth(OP, "param", p, exact.float(), exact)


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e30])
@pytest.mark.parametrize("grad_scale", [None, 3.0])
def test_global_norm(kernels, size: float, grad_scale: float | None) -> None:  # type: ignore[no-untyped-def]
    half = [torch.randn(33).half(), torch.randn(8192 + 5).half()] if size == 1.0 else []
    grads = [torch.randn(*shape) * size for shape in SHAPES] + half
    norm = kernels.global_norm(grads, None if grad_scale is None else torch.tensor([grad_scale]))
    truth = torch.tensor(written_out_norm(grads, grad_scale), dtype=torch.float64)
    assert norm.dtype == torch.float32 and norm.shape == ()
    assert_close_to_truth(OP, "global_norm", norm / size, (truth / size).float(), truth / size)


def test_global_norm_of_nothing_but_empty_tensors(kernels) -> None:  # type: ignore[no-untyped-def]
    assert kernels.global_norm([torch.zeros(0)], None) == 0


def shifted(t: Tensor) -> Tensor:
    """The same values at an address that is no multiple of 16."""
    storage = torch.zeros(t.numel() + 1, dtype=t.dtype)
    view = storage[1:].view(t.shape)
    assert view.data_ptr() % 16
    return view.copy_(t)


@pytest.mark.parametrize("what", ["params", "grads", "exp_avgs", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_unaligned_views(kernels, kind: str, what: str) -> None:  # type: ignore[no-untyped-def]
    aligned = random_lists([(40,), (3, 11), (8192 + 3,)])
    moved = aligned.copy()
    for name in ("params", "grads", "exp_avgs", "exp_avg_sqs") if what == "all" else (what,):
        setattr(moved, name, [shifted(t) if i != 1 else t for i, t in enumerate(getattr(moved, name))])
    for lists in (aligned, moved):
        step(kernels, kind, lists, Hyper(max_grad_norm=1.0))
    for one, other in zip(aligned.all, moved.all, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kernel", ["adamw_step_kernel", "lamb_moments_kernel", "lamb_update_kernel"])
def test_alignment_is_promised_where_it_holds(kernels, kernel: str, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The interpreter would not mind a broken promise; a GPU would."""
    promises = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **constants: promises.append((constants["ALIGNED"], *grid))

    monkeypatch.setattr(kernels, kernel, Recorder())
    lists = random_lists([(40,), (8193,), (3,), (5,)])
    lists.exp_avgs[1] = shifted(lists.exp_avgs[1])
    step(kernels, kernel.split("_")[0], lists, Hyper())
    assert promises == [(True, 3), (False, 2)], "three tensors of one chunk, and the moved one of two"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_runs_repeat_bit_for_bit(kernels, kind: str, dtype: tuple[torch.dtype, bool]) -> None:  # type: ignore[no-untyped-def]
    first = random_lists(SHAPES, dtype[0], master=dtype[1])
    second = first.copy()
    for lists in (first, second):
        for _ in range(2):
            step(kernels, kind, lists, Hyper(max_grad_norm=1.0))
    for one, other in zip(first.all, second.all, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_found_inf_changes_nothing(kernels, kind: str) -> None:  # type: ignore[no-untyped-def]
    lists = random_lists(FEW, torch.float16, master=True)
    lists.grads[0].fill_(float("inf"))
    lists.grads[1].fill_(float("nan"))
    before = lists.copy()
    step(kernels, kind, lists, Hyper(max_grad_norm=1.0, grad_scale=2.0), torch.ones(1))
    for one, other in zip(lists.all, before.all, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    step(kernels, kind, lists, Hyper(), torch.zeros(()))
    assert all(a == b + 1 for a, b in zip(lists.steps, before.steps, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_lr_may_be_a_tensor(kernels, kind: str, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    by_number, by_tensor = (random_lists(FEW) for _ in range(2))
    by_tensor = by_number.copy()
    step(kernels, kind, by_number, Hyper(lr=0.03))
    step(kernels, kind, by_tensor, Hyper(lr=torch.tensor(0.03, dtype=dtype)))  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(by_number.params, by_tensor.params, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_stays_within_a_unit(kernels, kind: str) -> None:  # type: ignore[no-untyped-def]
    lists = random_lists(FEW, torch.bfloat16, master=True)
    truth = written_out_step(kind, lists.to(torch.float64), Hyper())
    step(kernels, kind, lists, Hyper())
    for p, exact in zip(lists.params, truth.params, strict=True):
        assert ((p.double() - exact).abs() <= exact.abs() * RELATIVE["bf16_stored_by_interpreter"]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_elements_beyond_two_to_the_31(kernels, kind: str, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The last chunk of tensors of 2^31 + 8,192 elements, in sparse files that take no space."""
    chunk = kernels.CONFIG.chunk
    size = 2**31 + chunk

    def far(name: str) -> Tensor:
        return torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=torch.float32)

    near = random_lists([(chunk,)])
    lists = Lists(*([far(f"{kind}{i}")] for i in range(4)), [near.steps[0].clone()])
    for big, small in zip(lists.all[:4], near.all[:4], strict=True):
        big[0][-chunk:] = small[0]
    last = kernels.chunks_of(lists.params, chunk)
    entries = torch.tensor([size // chunk - 1])
    only_last = replace(last, count=1, entries=entries, first=torch.tensor([0, 1], dtype=torch.int32))
    expected = written_out_step(kind, near.to(torch.float64), Hyper())
    plain = written_out_step(kind, near, Hyper())
    monkeypatch.setattr(kernels, "chunks_of", lambda tensors, chunk: only_last)
    step(kernels, kind, lists, Hyper())
    assert_close_to_truth(OP, "param", lists.params[0][-chunk:], plain.params[0], expected.params[0])
    assert not lists.params[0][: 2 * chunk].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_docstring(kernels, kind: str, dtype: tuple[torch.dtype, bool]) -> None:  # type: ignore[no-untyped-def]
    """Each element is touched as often as the docstring says; with tables, at most 1.05 times the floor."""
    lists = random_lists([(200, 128), (3, 128)], dtype[0], master=dtype[1])
    elements, e = sum(p.numel() for p in lists.params), lists.grads[0].element_size()
    with traffic() as norm_pass:
        norm = kernels.global_norm(lists.grads, None)
    with traffic() as passes:
        function = {"adamw": kernels.adamw_step, "lamb": kernels.lamb_step}[kind]
        function(lists.all, Hyper(max_grad_norm=1.0).options(norm))
    weight, copy = (4, 2 * e) if lists.master_params else (lists.params[0].element_size(), 0)
    floor = {"adamw": 16 + e + 2 * weight + copy, "lamb": 16 + e + weight + 8 + 2 * weight + copy}[kind]
    assert_traffic(norm_pass, e * elements)
    assert_traffic(passes, floor * elements)
    if dtype[0] == torch.float32:
        assert floor == {"adamw": 28, "lamb": 40}[kind]
    twice = kind == "lamb"
    for t in lists.grads:
        assert norm_pass.times_loaded(t) == passes.times_loaded(t) == {1}
    for t in (*lists.exp_avgs, *lists.exp_avg_sqs):
        assert passes.times_loaded(t) == {1 + twice} and passes.times_stored(t) == {1}
    for t in lists.master_params or lists.params:
        assert passes.times_loaded(t) == {1 + twice} and passes.times_stored(t) == {1}
    for t in lists.params:
        assert passes.times_stored(t) == {1}
        assert not lists.master_params or passes.times_loaded(t) == {1}, "for whoever wrote to it"
    no_decay = random_lists([(200, 128)], dtype[0], master=dtype[1])
    with traffic() as passes:
        function(no_decay.all, Hyper(weight_decay=0.0).options())
    for t in no_decay.exp_avgs:
        assert passes.times_loaded(t) == {1}, "without a trust ratio one pass is enough"
