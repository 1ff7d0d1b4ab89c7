"""The reference's optimizer steps against formulas written out a second time, and against torch.optim, in fp64."""

from dataclasses import replace

import pytest
import torch

from bert_fast.reference import optimizer as reference
from bert_fast.testing.optimizers import Hyper, Lists, random_lists, written_out_norm, written_out_step
from bert_fast.testing.tolerances import RELATIVE

SHAPES = [(3, 5), (1,), (0,), (7,), (2, 3, 4)]
HYPERS = [
    Hyper(),
    Hyper(weight_decay=0.0),
    Hyper(weight_decay=0.0, use_nvlamb=True),
    Hyper(max_grad_norm=0.5),
    Hyper(max_grad_norm=1e6),
    Hyper(max_grad_norm=0.5, grad_scale=1024.0),
    Hyper(grad_scale=8.0),
    Hyper(bias_correction=False),
    Hyper(grad_averaging=False),
    Hyper(beta1=0.0, beta2=0.0),
    Hyper(eps=0.1, lr=0.3),
]


def assert_same(actual: Lists, expected: Lists) -> None:
    for ours, theirs in zip(actual.all, expected.all, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=RELATIVE["two_fp64_formulas"], atol=0)


def step(kind: str, lists: Lists, hyper: Hyper, found_inf: torch.Tensor | None = None) -> None:
    scale = None if hyper.grad_scale is None else torch.tensor([hyper.grad_scale])
    norm = None if hyper.max_grad_norm is None else reference.global_norm(lists.grads, scale)
    function = {"adamw": reference.adamw_step, "lamb": reference.lamb_step}[kind]
    function(lists.all, hyper.options(norm, scale, found_inf))


@pytest.mark.parametrize("hyper", HYPERS, ids=str)
@pytest.mark.parametrize("kind", ["adamw", "lamb"])
def test_steps_against_written_out_formulas(kind: str, hyper: Hyper) -> None:
    actual = random_lists(SHAPES, torch.float64)
    expected = actual.copy()
    for _ in range(20):
        grads = [torch.randn_like(p) for p in actual.params]
        actual, expected = replace(actual, grads=grads), replace(expected, grads=grads)
        expected = written_out_step(kind, expected, hyper)
        step(kind, actual, hyper)
        assert_same(actual, expected)


@pytest.mark.parametrize("kind", ["adamw", "lamb"])
@pytest.mark.parametrize("zero", ["params", "grads", "both"])
def test_zeros(kind: str, zero: str) -> None:
    """Where a norm is 0 the ratio is 1: weights of 0 still move, gradients of 0 only decay."""
    actual = random_lists(SHAPES, torch.float64)
    for tensors in [getattr(actual, zero)] if zero != "both" else [actual.params, actual.grads]:
        for t in tensors:
            t.zero_()
    for t in (*actual.exp_avgs, *actual.exp_avg_sqs, *actual.steps):
        t.zero_()
    before = actual.copy()
    expected = written_out_step(kind, actual, Hyper())
    step(kind, actual, Hyper())
    assert_same(actual, expected)
    moved = [not torch.equal(a, b) for a, b in zip(actual.params, before.params, strict=True) if a.numel()]
    assert all(moved) if zero != "both" else not any(moved)


def test_adamw_is_that_of_torch() -> None:
    lists = random_lists(SHAPES, torch.float64)
    for t in (*lists.exp_avgs, *lists.exp_avg_sqs, *lists.steps):
        t.zero_()
    params = [p.clone().requires_grad_() for p in lists.params]
    stock = torch.optim.AdamW(params, lr=0.01, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.1, foreach=False)
    for _ in range(30):
        for p, g in zip(params, lists.grads, strict=True):
            g.normal_()
            p.grad = g
        stock.step()
        step("adamw", lists, Hyper(lr=0.01, beta1=0.8, beta2=0.99, eps=1e-3, weight_decay=0.1))
    for p, ours in zip(params, lists.params, strict=True):
        torch.testing.assert_close(ours, p.detach(), rtol=RELATIVE["two_fp64_formulas"], atol=0)


def test_lamb_without_decay_is_adamw_without_decay() -> None:
    lamb = random_lists(SHAPES, torch.float64)
    adamw = lamb.copy()
    step("lamb", lamb, Hyper(weight_decay=0.0))
    step("adamw", adamw, Hyper(weight_decay=0.0))
    assert_same(lamb, adamw)


def test_trust_ratio_makes_steps_as_long_as_weights() -> None:
    """|change| = lr * |p| for every tensor, whatever its gradient."""
    lists = random_lists(SHAPES, torch.float64)
    before = lists.copy()
    step("lamb", lists, Hyper(lr=0.1))
    for new, old in zip(lists.params, before.params, strict=True):
        torch.testing.assert_close((new - old).norm(), 0.1 * old.norm(), rtol=RELATIVE["two_fp64_formulas"], atol=0)


@pytest.mark.parametrize("kind", ["adamw", "lamb"])
def test_found_inf_changes_nothing(kind: str) -> None:
    lists = random_lists(SHAPES)
    lists.grads[0].fill_(float("inf"))
    before = lists.copy()
    step(kind, lists, Hyper(), torch.ones(1))
    assert all(torch.equal(a, b) for x, y in zip(lists.all, before.all, strict=True) for a, b in zip(x, y, strict=True))
    step(kind, lists, Hyper(), torch.zeros(1))
    assert lists.steps[0] == 1


@pytest.mark.parametrize("kind", ["adamw", "lamb"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_master_weights_are_stepped_and_parameters_rounded(kind: str, dtype: torch.dtype) -> None:
    lists = random_lists(SHAPES, dtype, master=True)
    alone = replace(lists.to(torch.float32), grads=lists.grads)
    step(kind, lists, Hyper())
    step(kind, alone, Hyper())
    for master, p, expected in zip(lists.master_params, lists.params, alone.params, strict=True):
        assert torch.equal(master, expected)
        assert torch.equal(p, expected.to(dtype))


@pytest.mark.parametrize("grad_scale", [None, 64.0])
def test_global_norm(grad_scale: float | None) -> None:
    grads = [
        torch.randn(3, 5),
        torch.zeros(0),
        torch.randn(7).half(),
        torch.randn(2).double(),
        torch.randn(1).bfloat16(),
    ]
    scale = None if grad_scale is None else torch.tensor([grad_scale])
    norm = reference.global_norm(grads, scale)
    assert norm.dtype == torch.float32 and norm.shape == ()
    assert norm == torch.tensor(written_out_norm(grads, grad_scale), dtype=torch.float32)
    assert reference.global_norm([g.double() for g in grads], None).dtype == torch.float64
    assert reference.global_norm([torch.full((2,), 1e30)], None) == torch.tensor(2**0.5 * 1e30)


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4).t(), True),
        (torch.zeros(2, 3, 4).permute(2, 0, 1), True),
        (torch.zeros(3, 1, 4)[:, :, :].transpose(0, 2), True),
        (torch.zeros(()), True),
        (torch.zeros(0, 3), True),
        (torch.zeros(3, 4)[:, ::2], False),
        (torch.zeros(3, 4)[:, :3], False),
        (torch.zeros(3, 1).expand(3, 4), False),
    ],
)
def test_is_dense(tensor: torch.Tensor, dense: bool) -> None:
    assert reference.is_dense(tensor) == dense


@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.9, 0.999)], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "lamb"])
def test_counts_below_zero(kind: str, betas: tuple[float, float]) -> None:
    """What no step has counted is computed, as PyTorch's operators do, and not refused half-way."""
    lists = random_lists([(3,)], torch.float64)
    lists.steps[0].fill_(-1e30)
    step(kind, lists, Hyper(beta1=betas[0], beta2=betas[1]))
    assert lists.steps[0] == -1e30
