"""Parameters that change between steps, and what does not fit them: refused with a way out; nothing is written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_fast.optim import AdamW, Lamb

CLASSES = pytest.mark.parametrize("cls", [AdamW, Lamb])


def started(cls: type, dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], Any]:
    """Parameters of two groups, each after a step; the last one is to be spoilt, all others must not notice."""
    torch.manual_seed(2)
    params = [nn.Parameter(torch.randn(*shape).to(dtype)) for shape in [(5, 3), (7,), (300, 30)]]
    optimizer = cls([{"params": params[:2]}, {"params": params[2:]}], backend="torch")
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    for p in params:
        p.grad = torch.randn_like(p)
    return params, optimizer


class Uncopied:
    """What torch says of some tensors."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copies")


def resized(p: nn.Parameter, state: dict[str, Any]) -> None:
    p.data = torch.randn(3000, 30)
    p.grad = torch.randn(3000, 30)


def old_gradient(p: nn.Parameter, state: dict[str, Any]) -> None:
    p.data, p.grad = torch.zeros(4, 4), None
    p.grad = torch.zeros(4, 4)
    p.data = torch.zeros(300, 30)


def transposed(p: nn.Parameter, state: dict[str, Any]) -> None:
    p.data, p.grad = torch.zeros(30, 300), torch.zeros(30, 300)


def widened(p: nn.Parameter, state: dict[str, Any]) -> None:
    p.data, p.grad = p.data.double(), torch.zeros(300, 30).double()


def moved(p: nn.Parameter, state: dict[str, Any]) -> None:
    for name in ("exp_avg", "exp_avg_sq", "step"):
        state[name] = state[name].to("meta")


def narrow_state(p: nn.Parameter, state: dict[str, Any]) -> None:
    state["exp_avg_sq"].data = state["exp_avg_sq"].half()


def short_state(p: nn.Parameter, state: dict[str, Any]) -> None:
    state["exp_avg"].resize_(2)


def counted_by_int(p: nn.Parameter, state: dict[str, Any]) -> None:
    state["step"] = 1


def counted_by_row(p: nn.Parameter, state: dict[str, Any]) -> None:
    state["step"] = torch.ones(3)


def expanded(p: nn.Parameter, state: dict[str, Any]) -> None:
    p.data = torch.zeros(1, 30).expand(300, 30)


def negated_gradient(p: nn.Parameter, state: dict[str, Any]) -> None:
    p.grad = torch._neg_view(torch.ones(300, 30))


def gradient_without_memory(p: nn.Parameter, state: dict[str, Any]) -> None:
    p.grad = torch._efficientzerotensor((300, 30))


def negated(p: nn.Parameter, state: dict[str, Any]) -> None:
    p.data = torch._neg_view(torch.ones(300, 30))


def state_without_memory(p: nn.Parameter, state: dict[str, Any]) -> None:
    state["exp_avg_sq"] = torch._efficientzerotensor((300, 30))


def negated_count(p: nn.Parameter, state: dict[str, Any]) -> None:
    state["step"] = torch._neg_view(torch.ones(()))


def half_a_state(p: nn.Parameter, state: dict[str, Any]) -> None:
    del state["exp_avg_sq"]


SPOILS = [
    (negated_gradient, ValueError, r"gradient of .*\[0\]: expected memory with its values, got zeros without or a neg"),
    (gradient_without_memory, ValueError, r"gradient of .*: expected memory with its values"),
    (negated, ValueError, r"^param_groups\[1\]\['params'\]\[0\]: expected memory with its values"),
    (state_without_memory, ValueError, r"exp_avg_sq of .*: expected memory with its values"),
    (negated_count, ValueError, r"step of .*: expected memory with its values"),
    (half_a_state, TypeError, r"exp_avg_sq of .*: expected a Tensor, got NoneType"),
    (
        resized,
        ValueError,
        r"exp_avg of param_groups\[1\]\['params'\]\[0\]: expected shape \[3000, 30\], got \[300, 30\]",
    ),
    (old_gradient, ValueError, r"gradient of .*: expected shape \[300, 30\], got \[4, 4\].* run backward again"),
    (transposed, ValueError, r"exp_avg of .*: expected shape \[30, 300\], got \[300, 30\].* make a new optimizer"),
    (widened, TypeError, r"exp_avg of .*: expected dtype float64, got float32.*load_state_dict\(optimizer\.state_dict"),
    (moved, ValueError, r"exp_avg of .*: expected device cpu .*got meta.*load_state_dict\(optimizer\.state_dict"),
    (narrow_state, TypeError, r"exp_avg_sq of .*: expected dtype float32, got float16"),
    (short_state, ValueError, r"exp_avg of .*: expected shape \[300, 30\], got \[2\]"),
    (counted_by_int, TypeError, r"step of .*: expected a Tensor, got int"),
    (counted_by_row, ValueError, r"step of .*: expected shape \[\], got \[3\]"),
    (expanded, ValueError, r"param_groups\[1\]\['params'\]\[0\]: expected one place per element, got strides \(0, 1\)"),
]


@pytest.mark.parametrize(("spoil", "error", "message"), SPOILS, ids=[spoil.__name__ for spoil, *_ in SPOILS])
@CLASSES
def test_nothing_is_written_where_something_does_not_fit(
    cls: type, spoil: Callable[..., None], error: type[Exception], message: str
) -> None:
    params, optimizer = started(cls)
    spoil(params[2], optimizer.state[params[2]])
    before = [t.clone() for p in params[:2] for t in (p.detach(), *optimizer.state[p].values())]
    with pytest.raises(error, match=message):
        optimizer.step()
    after = [t for p in params[:2] for t in (p.detach(), *optimizer.state[p].values())]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@CLASSES
def test_ways_out_that_messages_name(cls: type) -> None:
    params, optimizer = started(cls)
    widened(params[2], {})
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert optimizer.state[params[2]]["exp_avg"].dtype == torch.float64
    assert optimizer.state[params[2]]["step"] == 2
    params, optimizer = started(cls)
    resized(params[2], {})
    del optimizer.state[params[2]]
    optimizer.step()
    assert optimizer.state[params[2]]["step"] == 1 and optimizer.state[params[0]]["step"] == 2


@CLASSES
def test_parameters_converted_to_half_precision_get_masters(cls: type) -> None:
    """One of a group, and all: those that have none start from the parameter."""
    for converted in (slice(0, 1), slice(0, 2)):
        params, optimizer = started(cls)
        for p in params[converted]:
            p.data, p.grad = p.data.half(), None
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for p in params:
            assert ("master_param" in optimizer.state[p]) == (p.dtype == torch.float16)
        params[0].data, params[0].grad = params[0].data.float(), torch.zeros(5, 3)
        with pytest.raises(ValueError, match="master_params: expected none, since params"):
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()


@CLASSES
def test_names_are_told(cls: type) -> None:
    layer = nn.Linear(3, 2)
    optimizer = cls(layer.named_parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.state[layer.bias] = {name: torch.zeros(9) for name in ("exp_avg", "exp_avg_sq", "step")}
    with pytest.raises(ValueError, match=r"exp_avg of param_groups\[0\]\['params'\]\[1\] \(bias\): expected shape"):
        optimizer.step()


def halves(base: Tensor) -> list[nn.Parameter]:
    return [nn.Parameter(base[:4]), nn.Parameter(base[3:])]


def tied(base: Tensor) -> list[nn.Parameter]:
    return [nn.Parameter(base), nn.Parameter(base)]


@pytest.mark.parametrize("make", [halves, tied], ids=["overlapping", "the same"])
@CLASSES
def test_parameters_that_share_memory_are_refused(cls: type, make: Callable[[Tensor], list[nn.Parameter]]) -> None:
    params = make(torch.ones(8))
    optimizer = cls([{"params": params[:1]}, {"params": params[1:]}])
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"\[0\]\['params'\]\[0\] and param_groups\[1\].* share memory.* one nn.Param"):
        optimizer.step()
    assert torch.equal(params[0].detach(), torch.ones(len(params[0])))


@CLASSES
def test_neighbours_in_one_storage_are_no_sharers(cls: type) -> None:
    base = torch.ones(4, 6)
    params = [nn.Parameter(base[:2]), nn.Parameter(base[2:]), nn.Parameter(torch.ones(0))]
    columns = torch.ones(4, 6)
    params += [nn.Parameter(columns[:, 0::2]), nn.Parameter(columns[:, 1::2])]
    for p in params:
        p.grad = torch.ones_like(p)
    cls(params).step()
    assert (base < 1).all() and (columns < 1).all()


@CLASSES
def test_a_parameter_twice(cls: type) -> None:
    p = nn.Parameter(torch.ones(3))
    with (
        pytest.raises(ValueError, match="params: expected every parameter once"),
        pytest.warns(UserWarning, match="duplicate"),
    ):
        cls([p, p])
    optimizer = cls([nn.Parameter(torch.ones(2))])
    with pytest.raises(TypeError, match="params: expected dense parameters, got layout"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.eye(3).to_sparse())]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["state"][1].update(exp_avg=torch.zeros(2)), r"expected exp_avg of shape \[7\], got \[2\]"),
        (lambda s: s["state"][1].update(exp_avg=torch.zeros(7).long()), "exp_avg as a dense .*, got torch.int64"),
        (lambda s: s["state"][1].update(exp_avg=torch.zeros(7).cfloat()), "exp_avg as a dense .* torch.complex64"),
        (lambda s: s["state"][1].update(exp_avg=torch.zeros(7).to_sparse()), "exp_avg as a dense tensor .*sparse_coo"),
        (lambda s: s["state"][1].update(exp_avg=torch.zeros(7).to("meta")), "exp_avg as a dense tensor .* meta"),
        (lambda s: s["state"][1].update(exp_avg=[0.0] * 7), r"exp_avg as a dense tensor .*, got \[0\.0"),
        (lambda s: s["state"][1].update(step=torch.zeros(3)), r"expected step as a number .*, got torch.float32 \[3\]"),
        (lambda s: s["state"][1].update(step=torch.ones((), device="meta")), r"expected step as a number .*32 \[\]"),
        (lambda s: s["state"][1].update(step=-1), "expected step as a number of at least 0, got -1"),
        (lambda s: s["state"][1].update(step=float("nan")), "expected step as a number of at least 0, got nan"),
        (lambda s: s["state"][1].update(step="3"), "expected step as a number of at least 0, got '3'"),
        (lambda s: s["param_groups"][1].update(betas=(0.9, 2.0)), r"betas\[1\]: expected a number in \[0, 1\)"),
        (lambda s: s["param_groups"][1].update(lr="fast"), "lr: expected a number, got str"),
        (lambda s: s.pop("state"), "state_dict: expected a dictionary with 'state' and 'param_groups'"),
        (lambda s: s["param_groups"][1].update(name=Uncopied()), "state_dict: expected groups that can be copied, got"),
    ],
    ids=[
        "shape", "int", "complex", "sparse", "meta", "list", "steps", "no value", "negative", "nan", "text", "betas",
        "lr", "keys", "uncopied",
    ],
)  # fmt: skip
@CLASSES
def test_a_checkpoint_that_does_not_fit_loads_nothing(cls: type, change: Callable[..., Any], message: str) -> None:
    params, optimizer = started(cls)
    saved = optimizer.state_dict()
    saved = {
        "state": {k: dict(v) for k, v in saved["state"].items()},
        "param_groups": list(map(dict, saved["param_groups"])),
    }
    saved["state"][0]["exp_avg"] = torch.full((5, 3), 9.0)
    saved["param_groups"][0]["lr"] = 9.0
    change(saved)
    before = [t.clone() for p in params for t in optimizer.state[p].values()]
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert all(
        torch.equal(t, b) for t, b in zip((t for p in params for t in optimizer.state[p].values()), before, strict=True)
    )
    optimizer.step()
