"""AdamW and Lamb as torch.optim.Optimizers: values, groups, dtypes, schedulers, loss scaling, bad arguments."""

import contextlib
import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_fast import ops, use_backend
from bert_fast.errors import BackendError
from bert_fast.optim import AdamW, Lamb, weight_decay_groups
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.optimizers import Hyper, Lists, written_out_norm, written_out_step
from bert_fast.testing.tolerances import RELATIVE

CLASSES = {"adamw": AdamW, "lamb": Lamb}
BACKENDS = ["reference", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("kind", ["adamw", "lamb"])
def test_many_steps_against_written_out_formulas(kind: str, max_grad_norm: float | None, name: str) -> None:
    """Two groups with and without decay, clipped together; p in fp32 may err as the formula in fp32 does."""
    torch.manual_seed(3)
    params = [nn.Parameter(torch.randn(*shape)) for shape in [(9, 7), (5,), (1,)]]
    groups = [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "weight_decay": 0.0, "lr": 0.02}]
    optimizer = CLASSES[kind](groups, lr=0.01, eps=1e-6, max_grad_norm=max_grad_norm, backend=name)

    def zeros(dtype: torch.dtype) -> list[Lists]:
        parts = (params[:1], params[1:])
        return [
            Lists(
                [p.detach().to(dtype) for p in part], [],
                *([torch.zeros_like(p, dtype=dtype) for p in part] for _ in range(2)),
                [torch.zeros(()) for _ in part],
            )
            for part in parts
        ]  # fmt: skip

    plain, truth = zeros(torch.float32), zeros(torch.float64)
    for _ in range(15):
        grads = [torch.randn_like(p) for p in params]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()
        norm = written_out_norm(grads, None)
        # The formula clips by the norm of its own list; both groups share one norm, so it is given as a scale.
        scale = max(1.0, norm / max_grad_norm) if max_grad_norm else None
        for lists, dtype in ((plain, torch.float32), (truth, torch.float64)):
            for i, (part, lr, decay) in enumerate(((grads[:1], 0.01, 0.1), (grads[1:], 0.02, 0.0))):
                lists[i].grads = [g.to(dtype) for g in part]
                lists[i] = written_out_step(kind, lists[i], Hyper(lr=lr, weight_decay=decay, grad_scale=scale))
        if max_grad_norm:
            assert optimizer.grad_norm is not None
            assert_close_to_truth(
                "optimizer", "global_norm", optimizer.grad_norm, torch.tensor(norm), torch.tensor(norm).double()
            )
        else:
            assert optimizer.grad_norm is None
    for p, theirs, exact in zip(
        params, plain[0].params + plain[1].params, truth[0].params + truth[1].params, strict=True
    ):
        assert_close_to_truth("optimizer", "param_after_25_steps", p.detach(), theirs, exact)


@pytest.mark.parametrize("name", BACKENDS)
def test_adamw_is_torch_adamw(make_model, train, parameters, name: str) -> None:  # type: ignore[no-untyped-def]
    """Fifty steps of a model in fp32: as far from the steps in fp64 as torch.optim.AdamW is."""
    options: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.05}
    steps = range(50 if name != "triton" else 12)
    ours, stock, exact = make_model(), make_model(), make_model(torch.float64)
    losses = [
        train(ours, AdamW(ours.parameters(), **options, backend=name), steps),
        train(stock, torch.optim.AdamW(stock.parameters(), **options), steps),
    ]
    train(exact, torch.optim.AdamW(exact.parameters(), **options), steps)
    for one, other in zip(*losses, strict=True):
        assert math.isclose(one, other, rel_tol=RELATIVE["training_loss_50_steps"])
    for p, q, r in zip(*(parameters(m) for m in (ours, stock, exact)), strict=True):
        assert_close_to_truth("optimizer", "param_after_25_steps", p, q, r)


@pytest.mark.parametrize("cls", [AdamW, Lamb])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_master_weights_keep_what_half_precision_loses(cls: type, dtype: torch.dtype) -> None:
    """1,000 steps of 1e-5 each: from 1 to 0.99, a way on which bf16 and fp16 by themselves do not move at all."""
    p = nn.Parameter(torch.ones(8, 8, dtype=dtype))
    alone = nn.Parameter(torch.ones(8, 8, dtype=dtype))
    options = {"lr": 1e-5, "weight_decay": 0.0, "eps": 0.0, "max_grad_norm": None, "backend": "torch"}
    optimizers = [cls([p], **options), cls([alone], **options, master_weights=False)]
    p.grad = alone.grad = torch.full((8, 8), 0.5, dtype=dtype)
    for _ in range(1000):
        for optimizer in optimizers:
            optimizer.step()
    master = optimizers[0].state[p]["master_param"]
    assert master.dtype == torch.float32
    torch.testing.assert_close(master, torch.full((8, 8), 0.99), rtol=RELATIVE["sum_of_1000_steps"], atol=0)
    assert torch.equal(p.detach(), master.to(dtype))
    assert torch.equal(alone.detach(), torch.ones(8, 8, dtype=dtype))
    assert "master_param" not in optimizers[1].state[alone]


def loaded(model: nn.Module, values: dict[str, Tensor]) -> None:
    model.load_state_dict(values)


def copied(model: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(values[name])


def through_data(model: nn.Module, values: dict[str, Tensor]) -> None:
    """No version counter notices."""
    for name, p in model.named_parameters():
        p.data.copy_(values[name])


def other_memory(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        p.data = values[name].clone()


@pytest.mark.parametrize("write", [loaded, copied, through_data, other_memory], ids=lambda write: write.__name__)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("cls", [AdamW, Lamb])
def test_weights_written_between_steps_stay(cls: type, name: str, write, make_model, train, parameters) -> None:  # type: ignore[no-untyped-def]
    """A best checkpoint, an average: the next step starts from it, not from the masters of the weights before."""
    model = make_model(torch.float16)
    best = {name: p * 2 + 1 for name, p in model.state_dict().items()}
    optimizer = cls(model.parameters(), lr=0.01, backend=name)
    train(model, optimizer, range(2))
    write(model, best)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, range(2, 3))
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), best[name])
        assert torch.equal(optimizer.state[p]["master_param"], best[name].float())


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("cls", [AdamW, Lamb])
def test_mixed_dtypes_are_clipped_together(cls: type, name: str) -> None:
    dtypes = [torch.float32, torch.float16, torch.bfloat16, *([torch.float64] if name != "triton" else [])]
    params = [nn.Parameter(torch.randn(4, 3).to(dtype)) for dtype in dtypes]
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.randn(4, 3).to(p.dtype)
    optimizer = cls(params, max_grad_norm=1.0, backend=name)
    optimizer.step()
    truth = torch.tensor(written_out_norm([p.grad for p in params], None)).double()
    assert_close_to_truth("optimizer", "global_norm", optimizer.grad_norm, truth.float(), truth)
    assert not any(torch.equal(p.detach(), q) for p, q in zip(params, before, strict=True) if p.dtype.itemsize >= 4)
    for p in params:
        state_dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
        assert {t.dtype for key, t in optimizer.state[p].items() if key != "step"} == {state_dtype}


@pytest.mark.parametrize("cls", [AdamW, Lamb])
def test_parameters_without_gradient_are_passed_over(cls: type) -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    params[0].grad = torch.ones(3)
    optimizer = cls(params)
    optimizer.step()
    assert torch.equal(params[1].detach(), torch.ones(3)) and not optimizer.state[params[1]]
    params[0].grad = None
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 1
    params[1].grad = torch.ones(3)
    optimizer.step()  # the second parameter's first step, bias-corrected as such
    assert optimizer.state[params[1]]["step"] == 1
    assert torch.equal(params[0].detach(), params[1].detach())


@pytest.mark.parametrize("cls", [AdamW, Lamb])
def test_closure_hooks_and_schedulers(cls: type, make_model) -> None:  # type: ignore[no-untyped-def]
    model = make_model()
    optimizer = cls(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(True))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 13)).square().mean()
        loss.backward()
        return loss

    assert isinstance(optimizer.step(closure), Tensor)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.step(closure).requires_grad
    assert called == [True, True]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("cls", [AdamW, Lamb])
def test_lr_tensors_are_read_at_every_step(cls: type, name: str) -> None:
    p, q = (nn.Parameter(torch.ones(4)) for _ in range(2))
    lr = torch.tensor(0.5)
    by_tensor, by_number = cls([p], lr=lr, backend=name), cls([q], lr=0.5, backend=name)
    for value in (0.5, 0.25):
        lr.fill_(value)
        by_number.param_groups[0]["lr"] = value
        p.grad = q.grad = torch.tensor([0.1, -0.2, 0.3, 0.4])
        by_tensor.step()
        by_number.step()
    assert torch.equal(p.detach(), q.detach())


def test_a_change_of_groups(make_model) -> None:  # type: ignore[no-untyped-def]
    model = make_model()
    groups = weight_decay_groups(model, 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [p.dim() for group in groups for p in group["params"]] == [2, 2, 1, 1, 1, 1]
    optimizer = Lamb(groups[0]["params"], weight_decay=0.1)
    optimizer.add_param_group(groups[1] | {"bias_correction": False})
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert len(optimizer.state) == 6
    model[0].weight.requires_grad_(False)
    assert len(weight_decay_groups(model, 0.1)[0]["params"]) == 1
    assert weight_decay_groups(nn.Linear(2, 2, bias=False), 0.1)[0]["weight_decay"] == 0.1


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("cls", [AdamW, Lamb])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grad_scaler_unscales_and_skips_in_the_step(cls: type, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    scaled = [nn.Parameter(torch.randn(5, 3).to(dtype)), nn.Parameter(torch.randn(7).to(dtype))]
    plain = [nn.Parameter(p.detach().clone()) for p in scaled]
    with_scaler, without = cls(scaled, max_grad_norm=1.0, backend=name), cls(plain, max_grad_norm=1.0, backend=name)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for i in range(4):
        for p, q in zip(scaled, plain, strict=True):
            q.grad = torch.randn(p.shape).to(dtype)
            p.grad = q.grad * 64
        if i == 2:
            scaled[0].grad[0, 0] = float("inf")
        else:
            without.step()
        kept = [p.grad.clone() for p in scaled]
        scaler.scale(torch.zeros(()))
        scaler.step(with_scaler)
        assert all(torch.equal(p.grad, g) for p, g in zip(scaled, kept, strict=True)), "gradients must stay"
        if i == 2:
            scaler.update()
            assert scaler.get_scale() == 32.0
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        else:
            scaler.update()
            assert torch.equal(with_scaler.grad_norm, without.grad_norm)
        assert not hasattr(with_scaler, "found_inf"), "GradScaler takes back what it set"
    for p, q in zip(scaled, plain, strict=True):
        assert torch.equal(p.detach(), q.detach())
        assert with_scaler.state[p]["step"] == without.state[q]["step"] == 3


@pytest.mark.parametrize("cls", [AdamW, Lamb])
def test_nothing_is_read_on_the_host(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without values (as traced ones) would fail where a value is asked for; `torch` on another device."""
    # PyTorch's kernel runs on real tensors only; what it is given must have been made without one.
    fused: list[Any] = []
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *args, **kwargs: fused.append((args, kwargs)))
    p = nn.Parameter(torch.ones(3, device="meta"))
    p.grad = torch.ones(3, device="meta")
    optimizer = cls([p], lr=torch.ones((), device="meta"), max_grad_norm=1.0, backend="torch")
    optimizer.grad_scale = optimizer.found_inf = torch.ones((), device="meta")
    optimizer.step()
    assert len(fused) == (cls is AdamW)
    assert all(t.device.type == "meta" for call, keywords in fused for t in (*call[1], keywords["lr"]))
    assert optimizer.grad_norm.device.type == "meta"


@pytest.mark.parametrize("cls", [AdamW, Lamb])
def test_copies_and_pickles_keep_everything(cls: type, make_model, train) -> None:  # type: ignore[no-untyped-def]
    model = make_model()
    optimizer = cls(model.parameters(), max_grad_norm=2.5, backend="reference", master_weights=False)
    train(model, optimizer, range(2))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (other.max_grad_norm, other.backend, other.master_weights) == (2.5, "reference", False)
        assert getattr(other, "use_nvlamb", None) == getattr(optimizer, "use_nvlamb", None)
        for p, q in zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
            assert torch.equal(optimizer.state[p]["exp_avg"], other.state[q]["exp_avg"])
        for p in other.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        other.step()


def test_back_end_of_the_context_counts(make_model, train) -> None:  # type: ignore[no-untyped-def]
    model = make_model()
    with use_backend("triton"), pytest.raises(BackendError) if not _interpreting() else contextlib.nullcontext():
        train(model, AdamW(model.parameters()), range(1))


def _interpreting() -> bool:
    from bert_fast.env import SETTINGS

    return SETTINGS.triton_interpret


ONE = [nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize("cls", [AdamW, Lamb])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"lr": -1e-3}, ValueError, "lr: expected a finite number of at least 0, got -0.001"),
        ({"lr": "fast"}, TypeError, "lr: expected a number, got str"),
        ({"betas": (0.9, 1.5)}, ValueError, r"betas\[1\]: expected a number in \[0, 1\), got 1.5"),
        ({"betas": 0.9}, ValueError, "betas: expected two numbers, got 0.9"),
        ({"eps": -1.0}, ValueError, "eps: expected a finite number of at least 0, got -1.0"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay: expected a finite number of at least 0, got -0.1"),
        ({"max_grad_norm": 0}, ValueError, "max_grad_norm: expected a number above 0"),
        ({"max_grad_norm": -1}, ValueError, "max_grad_norm: expected a finite number of at least 0, got -1"),
        ({"backend": "cuda"}, BackendError, "expected one of .*, got 'cuda'"),
        ({"params": []}, ValueError, "empty parameter list"),
        ({"params": [{"params": ONE, "lr": -2}]}, ValueError, "lr: expected a finite number of at least 0, got -2"),
        ({"params": [{"params": ONE, "max_grad_norm": 1}]}, ValueError, "max_grad_norm: the norm is that of all"),
        ({"params": [()]}, ValueError, r"params\[0\]: expected \(name, parameter\)"),
        ({"params": [{"params": [(1, ONE[0])]}]}, ValueError, r"params\[0\]: expected \(name, parameter\)"),
        ({"params": [{"params": ONE, "maximize": torch.ones(2)}]}, ValueError, "maximize: expected False in a group"),
        ({"lr": torch._neg_view(torch.ones(()))}, ValueError, "lr: expected memory with its values"),
        ({"eps": 10**5000}, ValueError, "eps: expected an int of at most 64 bits or a float, got one of 16610 bits"),
        ({"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]}, TypeError, "got torch.complex64"),
    ],
)  # fmt: skip
def test_bad_arguments(cls: type, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cls(**({"params": ONE} | arguments))


@pytest.mark.parametrize(
    "options",
    [
        {"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": True}, {"amsgrad": False},
        {"maximize": False, "differentiable": False, "fused": None, "foreach": None, "capturable": False},
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()),
)  # fmt: skip
def test_options_of_torch_that_change_nothing(options: dict[str, Any], make_model, train, parameters) -> None:  # type: ignore[no-untyped-def]
    plain, one = make_model(), make_model()
    groups = [{"params": list(one.parameters())[:3], **options}, {"params": list(one.parameters())[3:]}]
    assert train(one, AdamW(groups, **options), range(2)) == train(plain, AdamW(plain.parameters()), range(2))
    copied = AdamW(one.parameters(), 0.1, (0.9, 0.99), 1e-8, 0.01, False)  # in torch's order
    assert copied.defaults["weight_decay"] == 0.01


def test_what_a_step_is_given() -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    p.grad = q.grad = torch.ones(2)
    optimizer = Lamb([{"params": p}, {"params": q}])
    with pytest.raises(TypeError, match=r"^closure: expected a function or None, got int"):
        optimizer.step(3)  # type: ignore[arg-type]
    group = optimizer.param_groups[1]
    group["lr"] = torch.ones((), device="meta")
    with pytest.raises(ValueError, match=r"^lr: expected a Tensor with a value, got one on meta"):
        optimizer.step()
    assert p.tolist() == [1.0, 1.0]
    for value in (torch.ones(2), 1, None):
        group.update(lr=0.1, grad_averaging=value)
        with pytest.raises(TypeError, match=r"^grad_averaging: expected a bool"):
            optimizer.step()
        with pytest.raises(TypeError, match=r"^bias_correction: expected a bool"):
            Lamb([{"params": p, "bias_correction": value}])
    saved = optimizer.state_dict()
    group["grad_averaging"] = True
    with pytest.raises(TypeError, match=r"^grad_averaging: expected a bool, got NoneType"):
        optimizer.load_state_dict(saved)


def test_groups_are_of_a_module() -> None:
    with pytest.raises(TypeError, match=r"^model: expected a Module, got list"):
        weight_decay_groups(ONE, 0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^weight_decay: expected a number, got str"):
        weight_decay_groups(nn.Linear(1, 1), "0.1")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["amsgrad", "maximize", "differentiable"])
def test_options_of_torch_that_would_change_something(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected False, got True: "):
        AdamW(ONE, **{name: True})
    for cls in (AdamW, Lamb):
        with pytest.raises(ValueError, match=f"^{name}: expected False in a group, got True: "):
            cls([{"params": ONE, name: True}])


@pytest.mark.parametrize("cls", [AdamW, Lamb])
def test_sparse_gradients_are_refused(cls: type) -> None:
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=f"{cls.__name__} does not support sparse gradients .*sparse=False"):
        cls(table.parameters()).step()


@pytest.mark.interpreter
def test_fp64_among_gradients_chooses_a_back_end_that_has_it() -> None:
    grads = [torch.full((3,), 2.0), torch.full((4,), 2.0, dtype=torch.float64)]
    for given in (grads, grads[::-1]):
        norm = ops.global_norm(given)
        assert norm.dtype == torch.float32 and torch.equal(norm, torch.tensor(28.0).sqrt())
    params = [torch.nn.Parameter(torch.ones_like(grad)) for grad in grads]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
    optimizer = AdamW(params, max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.grad_norm is not None and torch.equal(optimizer.grad_norm, torch.tensor(28.0).sqrt())
