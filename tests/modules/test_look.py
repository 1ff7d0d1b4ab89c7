"""What was concluded from modules is concluded anew after every change, with the C++ extension and without."""

import contextlib
import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.nn.utils import parametrize

from bert_fast import native
from bert_fast.modules.look import Concluded
from bert_fast.modules.originals import GLOBAL_HOOKS


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm, self.dropout = nn.Linear(3, 3), nn.LayerNorm(3), nn.Dropout(0.1)
        self.hidden_act = "gelu"

    def forward(self, x: Any) -> Any:
        return self.dropout(self.norm(self.dense(x)))


class Outer(nn.Module):
    size = 3

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Inner(), Inner()])

    def forward(self, x: Any) -> Any:
        return x


class OtherInner(Inner):
    pass


class OtherParameter(nn.Parameter):
    pass


class Doubled(nn.Module):
    def forward(self, weight: Any) -> Any:
        return 2 * weight


def _all_of(model: Any) -> tuple[Any, tuple[Any, ...]]:
    """Everything that a conclusion may read, by identity."""
    seen: list[Any] = [tuple(map(len, GLOBAL_HOOKS))]
    for module in model.modules():
        kind = type(module)
        seen += [id(module), id(kind), id(kind.forward), id(kind.__call__), getattr(kind, "size", None)]
        own = vars(module)
        seen += [module.training, id(own.get("forward")), id(module._compiled_call_impl), own.get("hidden_act")]
        seen += [getattr(module, "p", None), getattr(module, "eps", None), sorted(own)]
        for name in ("_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            seen += [(key, id(value)) for key, value in own[name].items()]
        seen += [(key, type(value).__name__) for key, value in module._parameters.items()]
    return seen, tuple(p for module in model.modules() for p in module._parameters.values())


def _forward(*args: Any) -> Any:
    return None


def _swap_class(model: Any) -> None:
    inner = model.layer[0]
    inner.__class__ = Inner if type(inner) is OtherInner else OtherInner


def _swap_class_of_parameter(model: Any) -> None:
    weight = model.layer[1].norm.weight
    weight.__class__ = nn.Parameter if type(weight) is OtherParameter else OtherParameter


def _move_in_dictionary(model: Any) -> None:
    model.layer._modules["0"] = Inner()


def _parametrize(model: Any) -> None:
    parametrize.register_parametrization(model.layer[1].dense, "weight", Doubled())


def _remove_hook(model: Any) -> None:
    for module in model.modules():
        module._forward_hooks.clear()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": lambda model: model.layer[0].dense.register_forward_hook(lambda *_: None),
    "pre-hook": lambda model: model.layer[0].register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda model: model.layer[1].norm.register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda model: model.register_full_backward_pre_hook(lambda *_: None),
    "hooks removed": _remove_hook,
    "module replaced": lambda model: model.layer.__setitem__(0, Inner()),
    "attribute replaced": lambda model: setattr(model.layer[1], "dense", nn.Linear(3, 3)),
    "dictionary edited": _move_in_dictionary,
    "module added": lambda model: model.layer.append(Inner()),
    "forward": lambda model: setattr(model.layer[1].dropout, "forward", _forward),
    "compiled": lambda model: setattr(model.layer[0], "_compiled_call_impl", _forward),
    "mode": lambda model: model.layer[0].dropout.train(not model.layer[0].dropout.training),
    "mode of all": lambda model: model.train(not model.training),
    "probability": lambda model: setattr(model.layer[0].dropout, "p", random.random()),
    "eps": lambda model: setattr(model.layer[0].norm, "eps", random.random()),
    "activation": lambda model: setattr(model.layer[0], "hidden_act", f"of {random.random()}"),
    "class": _swap_class,
    "parameter": lambda model: setattr(model.layer[0].dense, "weight", nn.Parameter(torch.ones(3, 3))),
    "parameter in dictionary": lambda model: model.layer[0].dense._parameters.update(bias=nn.Parameter(torch.ones(3))),
    "parameter removed": lambda model: model.layer[0].dense._parameters.update(bias=None),
    "tied": lambda model: setattr(model.layer[0].norm, "weight", model.layer[1].norm.weight),
    "class of a parameter": _swap_class_of_parameter,
    "parametrization": _parametrize,
}  # fmt: skip


@pytest.fixture(params=["extension", "python"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(native, "load", lambda: None)
    elif native.load() is None:
        pytest.skip("the extension is not built")
    return request.param


class Counted:
    """`_all_of`, its calls counted."""

    def __init__(self) -> None:
        self.calls, self.concluded = 0, Concluded(self._count)

    def _count(self, model: Any) -> Any:
        self.calls += 1
        return _all_of(model)

    def check(self, model: Any) -> None:
        found, parameters = self.concluded(model)
        wanted, own = _all_of(model)
        assert found == wanted
        assert len(parameters) == len(own) and all(map(lambda a, b: a is b, parameters, own))


@pytest.mark.parametrize("name", CHANGES)
def test_is_concluded_anew_after(by: str, name: str) -> None:
    model, counted = Outer(), Counted()
    model.layer[0].register_forward_hook(_forward)
    for _ in range(3):
        counted.check(model)
    assert counted.calls == (1 if by == "extension" else 3)
    CHANGES[name](model)
    counted.check(model)
    is_seen_without = name in ("parameter", "parameter in dictionary", "tied")  # another parameter in the same place
    assert counted.calls == (4 if by == "python" else 1 if is_seen_without else 2)


def test_random_changes(by: str) -> None:
    for seed in range(4):
        random.seed(seed)
        models, counted = [Outer(), Outer()], Counted()
        for _ in range(120):
            model = random.choice(models)
            if random.random() < 0.7:
                # An earlier change may have taken the module away, or parametrized it.
                with contextlib.suppress(KeyError, AttributeError, RuntimeError, ValueError, TypeError):
                    CHANGES[random.choice(list(CHANGES))](model)
            counted.check(random.choice(models))
            if random.random() < 0.05:
                models[random.randrange(2)] = copy.deepcopy(random.choice(models))


def test_classes_and_global_hooks(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, counted = Outer(), Counted()
    for owner, name in ((nn.Linear, "forward"), (Inner, "forward"), (nn.Module, "__call__"), (Outer, "size")):
        counted.check(model)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, _forward)
            counted.check(model)
            counted.check(model)
        counted.check(model)
    handle = hooks.register_module_forward_hook(_forward)
    counted.check(model)
    handle.remove()
    counted.check(model)


def test_keeps_nothing_alive_and_leaves_nothing_in_the_module(by: str) -> None:
    model, counted = Outer(), Counted()
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}
    model.layer[0].register_forward_hook(lambda *_, model=model: None)  # a cycle, for the garbage collector
    counted.concluded = Concluded(lambda model: (None, tuple(model.parameters())))
    for _ in range(2):
        counted.concluded(model)
    assert before == {name: sorted(vars(module)) for name, module in model.named_modules()}
    model.layer[0]._forward_hooks.clear()
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        _, parameters = counted.concluded(each)
        assert all(a is b for a, b in zip(parameters, each.parameters(), strict=True))
    model.layer[0].register_forward_hook(lambda *_, model=model: None)
    counted.concluded(model)
    reference = weakref.ref(model)
    del model, each, parameters, _
    gc.collect()
    assert reference() is None and not counted.concluded._known


def test_parameters_can_be_exchanged(by: str) -> None:
    """PyTorch exchanges no tensors that weak references name."""
    model, counted = Outer(), Counted()
    counted.check(model)
    torch.utils.swap_tensors(model.layer[0].dense.weight, nn.Parameter(torch.ones(3, 3)))
    counted.check(model)


def test_modules_that_it_cannot_compare(by: str) -> None:
    """An attribute that takes no weak reference: the conclusion is drawn at every call."""

    class Slots:
        __slots__ = ("other",)

    model, counted = Outer(), Counted()
    vars(model.layer[0])["other"] = Slots()
    counted.check(model)
    counted.check(model)
    assert counted.calls == 2
