"""Steps whose lists were checked before give what steps with all checks give, whatever changes between them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bert_fast import remembered
from bert_fast.optim import AdamW, Lamb

Params = list[nn.Parameter]


def nothing(params: Params, optimizer: Any) -> None:
    pass


def moved_data(params: Params, optimizer: Any) -> None:
    params[1].data = params[1].data.clone() + 1


def no_gradient(params: Params, optimizer: Any) -> None:
    params[1].grad = None


def frozen(params: Params, optimizer: Any) -> None:
    params[1].requires_grad_(False)
    params[1].grad = None


def other_layout(params: Params, optimizer: Any) -> None:
    params[0].grad = params[0].grad.t().contiguous().t()  # type: ignore[union-attr]


def replaced(params: Params, optimizer: Any) -> None:
    params[1] = nn.Parameter(params[1].detach() * 2)
    params[1].grad = torch.ones_like(params[1])
    optimizer.param_groups[0]["params"][1] = params[1]


def new_group(params: Params, optimizer: Any) -> None:
    params.append(nn.Parameter(torch.ones(6)))
    params[-1].grad = torch.ones(6)
    optimizer.add_param_group({"params": params[-1:], "lr": 0.5})


def other_options(params: Params, optimizer: Any) -> None:
    optimizer.param_groups[0].update(lr=0.3, betas=(0.5, 0.6), weight_decay=0.2)


def loaded(params: Params, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def other_state(params: Params, optimizer: Any) -> None:
    optimizer.state[params[0]]["exp_avg"] = torch.full_like(optimizer.state[params[0]]["exp_avg"], 0.25)


def forgotten(params: Params, optimizer: Any) -> None:
    del optimizer.state[params[0]]  # it starts anew, and stands last in the state


CHANGES = [
    nothing, moved_data, no_gradient, frozen, other_layout, replaced, new_group, other_options, loaded, other_state,
    forgotten,
]  # fmt: skip


def steps(cls: type, dtype: torch.dtype, change: Callable[[Params, Any], None], forgets: bool) -> tuple[Params, Any]:
    """Seven steps with new gradients each, the change before the fourth; forgets: every step makes all checks."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(*shape).to(dtype)) for shape in [(5, 4), (7,), (3, 2)]]
    optimizer: Any = cls([{"params": params[:2]}, {"params": params[2:]}], lr=0.1, max_grad_norm=1.0, backend="torch")
    for i in range(7):
        for p in params:
            p.grad = torch.randn_like(p) if p.requires_grad else None
        if i == 3:
            change(params, optimizer)
        if forgets:
            optimizer._forms.clear()
        before = [p._version for p in params if p.grad is not None]
        optimizer.step()
        assert all(p._version > old for p, old in zip([p for p in params if p.grad is not None], before, strict=True))
    return params, optimizer


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("cls", [AdamW, Lamb])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_guards", [True, False])
def test_a_change_between_steps(monkeypatch, has_guards, dtype, cls, change) -> None:  # type: ignore[no-untyped-def]
    if not has_guards:
        monkeypatch.setattr(remembered, "_has_guards", lambda: False)
    params, optimizer = steps(cls, dtype, change, False)
    wanted, other = steps(cls, dtype, change, True)
    for p, q in zip(params, wanted, strict=True):
        assert torch.equal(p, q)
        mine, its = optimizer.state[p], other.state[q]
        assert mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in its)


def test_the_form_is_used() -> None:
    params, optimizer = steps(AdamW, torch.float32, nothing, False)
    for p in params:
        p.grad = torch.ones_like(p)
    assert [is_known for group in optimizer.param_groups for _, is_known in optimizer._lists_of(group)] == [True, True]


def sparse(p: nn.Parameter, state: dict[str, Any]) -> None:
    p.grad = torch.ones(7).to_sparse()


def zeros_without_memory(p: nn.Parameter, state: dict[str, Any]) -> None:
    p.grad = torch._efficientzerotensor(7)


def other_device(p: nn.Parameter, state: dict[str, Any]) -> None:
    state["exp_avg"] = state["exp_avg"].to("meta")


def cast(p: nn.Parameter, state: dict[str, Any]) -> None:
    p.data, p.grad = p.data.double(), torch.ones(7).double()


def a_master_too_many(p: nn.Parameter, state: dict[str, Any]) -> None:
    state["master_param"] = torch.zeros(7)


@pytest.mark.parametrize("spoil", [sparse, zeros_without_memory, other_device, cast, a_master_too_many])
def test_misfits_after_a_known_form(spoil: Callable[[nn.Parameter, dict[str, Any]], None]) -> None:
    params, optimizer = steps(AdamW, torch.float32, nothing, False)
    for p in params:
        p.grad = torch.ones_like(p)
    spoil(params[1], optimizer.state[params[1]])
    before = [p.detach().clone() for p in params]
    messages = []
    for forgets in (False, True):
        if forgets:
            optimizer._forms.clear()
        with pytest.raises((TypeError, ValueError)) as error:
            optimizer.step()
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
