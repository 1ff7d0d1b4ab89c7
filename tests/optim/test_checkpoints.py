"""state_dict and load_state_dict: resumed = uninterrupted bit for bit; exchange with torch.optim and apex."""

import io
from typing import Any

import pytest
import torch
from torch import nn

from bert_fast.optim import AdamW, Lamb, weight_decay_groups

BACKENDS = ["reference", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", [AdamW, Lamb])
def test_resumed_is_uninterrupted(cls, dtype, name, make_model, train, parameters) -> None:  # type: ignore[no-untyped-def]
    """Bit for bit, master weights and steps included, through a file."""

    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make_model(dtype)
        return model, cls(weight_decay_groups(model, 0.1), lr=0.01, max_grad_norm=1.0, backend=name)

    whole, optimizer = start()
    losses = train(whole, optimizer, range(8))
    first, optimizer = start()
    train(first, optimizer, range(4))
    saved = through_a_file({"model": first.state_dict(), "optimizer": optimizer.state_dict()})
    resumed, optimizer = start()
    resumed.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert train(resumed, optimizer, range(4, 8)) == losses[4:]
    assert all(torch.equal(p, q) for p, q in zip(parameters(resumed), parameters(whole), strict=True))
    assert ("master_param" in optimizer.state[resumed[0].weight]) == (dtype == torch.bfloat16)


def test_state_of_half_precision_parameters_stays_fp32(make_model, train) -> None:  # type: ignore[no-untyped-def]
    model = make_model(torch.bfloat16)
    optimizer = AdamW(model.parameters())
    train(model, optimizer, range(2))
    other = AdamW(model.parameters())
    other.load_state_dict(optimizer.state_dict())
    for p in model.parameters():
        for key, value in optimizer.state[p].items():
            assert other.state[p][key].dtype == torch.float32
            assert torch.equal(other.state[p][key], value)


def test_a_loaded_state_is_a_copy(make_model, train) -> None:  # type: ignore[no-untyped-def]
    model = make_model()
    first, second = AdamW(model.parameters()), AdamW(model.parameters())
    train(model, first, range(1))
    second.load_state_dict(first.state_dict())
    kept = first.state[model[0].weight]["exp_avg"].clone()
    train(model, second, range(1, 3))
    assert torch.equal(first.state[model[0].weight]["exp_avg"], kept)
    assert first.state[model[0].weight]["step"] == 1


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_exchange_with_torch_adamw(options, make_model, train, parameters) -> None:  # type: ignore[no-untyped-def]
    """Four steps by one class, four by the other: either way the same state names, the same losses."""
    numbers: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-7}
    for first_class, second_class in ((AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW)):
        first_options, second_options = ({} if cls is AdamW else options for cls in (first_class, second_class))
        stock, one = make_model(), make_model()
        expected = train(stock, torch.optim.AdamW(stock.parameters(), **numbers, fused=True), range(8))
        optimizer = first_class(one.parameters(), **numbers, **first_options)
        losses = train(one, optimizer, range(4))
        second = second_class(one.parameters(), lr=9.0, **second_options)
        second.load_state_dict(through_a_file(optimizer.state_dict()))
        losses += train(one, second, range(4, 8))
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
        assert second.param_groups[0]["lr"] == 0.01
        assert second.state[one[0].weight]["step"] == 8
        assert set(second.state[one[0].weight]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("cls", [AdamW, Lamb])
def test_decay_within_the_gradient_is_another_optimizer(cls, make_model, train, parameters) -> None:  # type: ignore[no-untyped-def]
    """torch.optim.Adam names its state as AdamW does; without decay the two are one."""
    model = make_model()
    optimizer = cls(model.parameters(), lr=0.5, max_grad_norm=None)
    adam = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    train(model, adam, range(2))
    with pytest.raises(ValueError, match=r"weight_decay=0\.1 is part of the gradient \(torch\.optim\.Adam, L2\)"):
        optimizer.load_state_dict(adam.state_dict())
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.5


def test_adam_without_decay_is_adamw_without(make_model, train, parameters) -> None:  # type: ignore[no-untyped-def]
    stock, one = make_model(), make_model()
    expected = train(stock, torch.optim.Adam(stock.parameters(), lr=0.01), range(6))
    adam = torch.optim.Adam(one.parameters(), lr=0.01)
    losses = train(one, adam, range(3))
    optimizer = AdamW(one.parameters())
    optimizer.load_state_dict(through_a_file(adam.state_dict()))
    assert "decoupled_weight_decay" not in optimizer.param_groups[0]
    losses += train(one, optimizer, range(3, 6))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))


def test_bf16_state_of_torch_adamw_is_taken_over(make_model, train) -> None:  # type: ignore[no-untyped-def]
    """torch keeps moments in bf16 and has no masters: they are widened, masters start from the parameters."""
    model = make_model(torch.bfloat16)
    stock = torch.optim.AdamW(model.parameters())
    train(model, stock, range(2))
    ours = AdamW(model.parameters())
    ours.load_state_dict(stock.state_dict())
    for p in model.parameters():
        assert ours.state[p]["exp_avg"].dtype == torch.float32
        assert torch.equal(ours.state[p]["exp_avg"], stock.state[p]["exp_avg"].float())
        assert torch.equal(ours.state[p]["master_param"], p.detach().float())
    train(model, ours, range(2, 4))


def test_state_of_apex_is_taken_over(make_model, train) -> None:  # type: ignore[no-untyped-def]
    """FusedLAMB counts steps per group and knows no others than its own options."""
    model = make_model()
    ours = Lamb(model.parameters())
    train(model, ours, range(3))
    state = ours.state_dict()
    for entry in state["state"].values():
        del entry["step"]
    state["param_groups"][0] |= {"step": 3, "max_grad_norm": 1.0}
    loaded = Lamb(model.parameters())
    loaded.load_state_dict(state)
    assert all(loaded.state[p]["step"] == 3 for p in model.parameters())
    assert "step" not in loaded.param_groups[0]
    train(model, loaded, range(3, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["param_groups"][0].update(amsgrad=True), "amsgrad: expected False in a checkpoint"),
        (lambda state: state["param_groups"][0].update(maximize=True), "maximize: expected False in a checkpoint"),
        (lambda state: state["state"][0].pop("exp_avg_sq"), "state_dict: expected exp_avg_sq in the state of every"),
        (lambda state: state["state"][0].update(exp_avg=torch.zeros(2)), r"exp_avg of shape \[31, 13\], got \[2\]"),
        (lambda state: state["param_groups"][0]["params"].pop(), "doesn't match the size of optimizer's group"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("cls", [AdamW, Lamb])
def test_unfit_checkpoints(cls, change, message: str, make_model, train) -> None:  # type: ignore[no-untyped-def]
    model = make_model()
    optimizer = cls(model.parameters())
    train(model, optimizer, range(1))
    state = optimizer.state_dict()
    change(state)
    with pytest.raises(ValueError, match=message):
        cls(model.parameters()).load_state_dict(state)
