"""make_lamb: NVIDIA apex's FusedLAMB where it can do what is asked, ours otherwise; both agree where apex is there."""

import importlib.util
import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from bert_fast.optim import Lamb, lamb, make_lamb
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.optimizers import Hyper, Lists, written_out_step


class FusedLAMB(torch.optim.SGD):
    """Stands in for apex's class."""

    def __init__(self, params: Any, lr: float, **options: Any) -> None:
        super().__init__(params, lr)
        self.options = options


@pytest.fixture
def fake_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("apex", "apex.optimizers", "amp_C"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["apex.optimizers"], "FusedLAMB", FusedLAMB, raising=False)
    monkeypatch.setattr(lamb, "_suits_apex", lambda params: True)


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3))]


def test_apex_is_taken_where_it_is(fake_apex: None) -> None:
    optimizer = make_lamb(params(), 0.1, max_grad_norm=None, use_nvlamb=True)
    assert isinstance(optimizer, FusedLAMB)
    assert optimizer.options == {"max_grad_norm": math.inf, "use_nvlamb": True}


@pytest.mark.parametrize(
    "options",
    [{"prefer_apex": False}, {"lr": torch.tensor(0.1)}, {"backend": "reference"}, {"master_weights": True}],
    ids=str,
)
def test_apex_is_not_taken_where_it_cannot_do_what_is_asked(fake_apex: None, options: dict[str, Any]) -> None:
    assert isinstance(make_lamb(params(), **options), Lamb)


def test_the_unrelated_package_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    monkeypatch.setattr(lamb, "_suits_apex", lambda params: True)
    assert isinstance(make_lamb(params()), Lamb)


def test_what_suits_apex() -> None:
    assert not lamb._suits_apex(params()), "not on CUDA"
    assert not lamb._suits_apex([{"params": params()}])
    assert not lamb._suits_apex([("name", params()[0])])
    optimizer = make_lamb(iter([{"params": iter(params()), "weight_decay": 0.0}]), lr=0.5, betas=(0.5, 0.9))
    assert isinstance(optimizer, Lamb)
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.9) and optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.0}, {"use_nvlamb": True, "weight_decay": 0.0},
    {"bias_correction": False}, {"grad_averaging": False}, {"max_grad_norm": 0.1}], ids=str)  # fmt: skip
def test_agrees_with_apex(options: dict[str, Any]) -> None:
    if lamb._apex_fused_lamb() is None:
        found = "another package of that name" if importlib.util.find_spec("apex") else "no such package"
        pytest.skip(f"apex.optimizers.FusedLAMB with its CUDA extensions is not there: {found}")
    shapes = [(64, 48), (48,), (1000,)]
    weights = [torch.randn(*shape, device="cuda") for shape in shapes]
    ours, theirs = ([nn.Parameter(w.clone()) for w in weights] for _ in range(2))
    numbers = {"lr": 0.01} | options
    optimizers = Lamb(ours, **numbers), make_lamb(theirs, **numbers)
    assert not isinstance(optimizers[1], Lamb)
    zeros = [torch.zeros_like(w, dtype=torch.float64) for w in weights]
    steps = [torch.zeros(()) for _ in weights]
    truth = Lists([w.double() for w in weights], [], zeros, [z.clone() for z in zeros], steps)
    hyper = Hyper(**({"lr": 0.01, "eps": 1e-6, "max_grad_norm": 1.0} | options))
    for _ in range(10):
        grads = [torch.randn_like(w) for w in weights]
        truth.grads = [g.double() for g in grads]
        truth = written_out_step("lamb", truth, hyper)
        for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
            for p, g in zip(parameters, grads, strict=True):
                p.grad = g.clone()
            optimizer.step()
    for p, q, exact in zip(ours, theirs, truth.params, strict=True):
        assert_close_to_truth("optimizer", "param_after_25_steps", p.detach(), q.detach(), exact)


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match=r"^params: expected a sequence of Tensors, got int"):
        make_lamb(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^params\[0\]\['params'\]: expected a sequence of Tensors, got NoneType"):
        make_lamb([{}])
    with pytest.raises(TypeError, match=r"^prefer_apex: expected a bool, got int"):
        make_lamb(params(), prefer_apex=1)  # type: ignore[arg-type]
