"""The Triton kernels of the optimizer on a GPU: BERT's shapes, repeatability, no syncs, CUDA graphs, several dtypes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from bert_fast import ops
from bert_fast.optim import AdamW, Lamb
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.optimizers import Hyper, Lists, random_lists, written_out_norm, written_out_step

pytestmark = pytest.mark.gpu

H = 768
# Embeddings, one layer, heads of BERT-base, and sizes that are no whole vectors or chunks.
SHAPES = [
    (30522, H), (512, H), (2, H), (H,), (H,), (H, H), (H,), (4 * H, H), (4 * H,), (H, 4 * H), (30522,), (2,), (0,),
    (8193,), (77, 131),
]  # fmt: skip
DTYPES = [
    (torch.float32, False), (torch.float16, True), (torch.bfloat16, True), (torch.float16, False),
    (torch.bfloat16, False),
]  # fmt: skip


def step(kind: str, lists: Lists, hyper: Hyper, found_inf: Tensor | None = None) -> Tensor:
    norm = ops.global_norm(lists.grads, backend="triton")
    getattr(ops, f"{kind}_step")(
        *lists.all, lr=hyper.lr, eps=hyper.eps, weight_decay=hyper.weight_decay, grad_norm=norm,
        max_grad_norm=hyper.max_grad_norm, found_inf=found_inf, backend="triton",
    )  # fmt: skip
    return norm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["adamw", "lamb"])
def test_values_and_repeatability(kind: str, dtype: tuple[torch.dtype, bool]) -> None:
    hyper = Hyper(lr=0.01, max_grad_norm=1.0)
    lists = random_lists(SHAPES, dtype[0], master=dtype[1], device="cuda")
    again = lists.copy()
    truth, plain = (written_out_step(kind, lists.to(one), hyper) for one in (torch.float64, torch.float32))
    exact_norm = torch.tensor(written_out_norm(lists.grads, None), dtype=torch.float64)
    norm = step(kind, lists, hyper)
    assert_close_to_truth("optimizer", "global_norm", norm.cpu(), exact_norm.float(), exact_norm)
    for name, actual, theirs, exact in (
        ("param", lists.master_params or lists.params, plain.params, truth.params),
        ("exp_avg", lists.exp_avgs, plain.exp_avgs, truth.exp_avgs),
        ("exp_avg_sq", lists.exp_avg_sqs, plain.exp_avg_sqs, truth.exp_avg_sqs),
    ):
        for ours, other, true in zip(actual, theirs, exact, strict=True):
            assert_close_to_truth("optimizer", name, ours, other.to(ours.dtype), true)
    assert all(torch.equal(p, m.to(p.dtype)) for p, m in zip(lists.params, lists.master_params, strict=False))
    step(kind, again, hyper)
    for one, other in zip(lists.all, again.all, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), "two runs differ"


@pytest.mark.parametrize("kind", ["adamw", "lamb"])
def test_unaligned_views_and_skipped_steps(kind: str) -> None:
    hyper = Hyper(max_grad_norm=1.0)
    expected = random_lists([(4099,), (300, 7)], torch.bfloat16, master=True, device="cuda")
    actual = expected.copy()
    actual.grads[0] = torch.cat([actual.grads[0][:1], actual.grads[0]])[1:]
    actual.exp_avgs[1] = torch.cat([torch.zeros(1, device="cuda"), actual.exp_avgs[1].flatten()])[1:].view(300, 7)
    for lists in (expected, actual):
        step(kind, lists, hyper, torch.zeros(1, device="cuda"))
    kept = actual.copy()
    step(kind, actual, hyper, torch.ones(1, device="cuda"))
    for one, other, third in zip(expected.all, actual.all, kept.all, strict=True):
        for a, b, c in zip(one, other, third, strict=True):
            assert torch.equal(a, b) and torch.equal(b, c)


@contextmanager
def no_syncs() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(7)
    return [nn.Parameter(torch.randn(*shape).to("cuda", dtype)) for shape in [(300, 77), (77,), (1,), (8193,)]]


@pytest.mark.parametrize("name", ["triton", "torch"])
@pytest.mark.parametrize("cls", [AdamW, Lamb])
def test_steps_do_not_sync(cls: type, name: str) -> None:
    params = [*_parameters(), *_parameters(torch.bfloat16)]
    optimizer = cls(params, lr=torch.tensor(0.01, device="cuda"), max_grad_norm=1.0, backend=name)
    optimizer.grad_scale, optimizer.found_inf = torch.full((), 2.0, device="cuda"), torch.zeros((), device="cuda")
    for i in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        if i == 0:
            optimizer.step()  # compiles, makes tables
        else:
            with no_syncs():
                optimizer.step()


@pytest.mark.parametrize("cls", [AdamW, Lamb])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grads", ["stay", "are made in the graph"])
def test_a_captured_step_is_an_eager_step(cls: type, dtype: torch.dtype, grads: str) -> None:
    """Replays with other gradients and another lr than at capture, bit for bit the eager steps."""
    eager, captured = _parameters(dtype), _parameters(dtype)
    lrs = [torch.tensor(0.01, device="cuda") for _ in range(2)]
    optimizers = [cls(p, lr=lr, max_grad_norm=1.0) for p, lr in zip((eager, captured), lrs, strict=True)]
    sources = [torch.randn_like(p) for p in eager]

    def run(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        for p, source in zip(params, sources, strict=True):
            if grads == "stay":
                p.grad = torch.empty_like(p) if p.grad is None else p.grad
                p.grad.copy_(source)
            else:
                p.grad = source * 2
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for params, optimizer in zip((eager, captured), optimizers, strict=True):
            run(params, optimizer)
    torch.cuda.current_stream().wait_stream(stream)
    if grads != "stay":
        for p in captured:
            p.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(captured, optimizers[1])
    for i in range(4):
        for source in sources:
            source.normal_()
        for lr in lrs:
            lr.fill_(0.01 / (i + 1))
        graph.replay()
        run(eager, optimizers[0])
        for p, q in zip(eager, captured, strict=True):
            assert torch.equal(p, q)
            for key, value in optimizers[0].state[p].items():
                assert torch.equal(value, optimizers[1].state[q][key]), key
    assert optimizers[1].state[captured[0]]["step"] == 5


def test_grad_scaler() -> None:
    params = _parameters()
    optimizer = Lamb(params, lr=0.01)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for i in range(3):
        for p in params:
            p.grad = torch.randn_like(p) * 1024
        if i == 1:
            params[0].grad[0, 0] = float("inf")
        scaler.scale(torch.zeros((), device="cuda"))
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.state[params[0]]["step"] == 2 and scaler.get_scale() == 512.0
    assert all(torch.isfinite(p).all() for p in params)
