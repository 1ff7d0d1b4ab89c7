"""Surface: `AdamW` and `Lamb`: random constructions, steps of parameters that change between them, saved states."""

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bert_fast import optim

from .case import Case, Finding, Refused
from .tensors import DTYPES, Tensors, garbage, relaid, spoil

# What messages of these calls may name; the base class, torch.optim's, calls parameters by no other name.
_NAMES = ("params", "parameter", "parameters", "param_groups", "gradient", "state", "state_dict", "lr", "betas", "eps",
          "weight_decay", "max_grad_norm", "grad_scale", "found_inf", "closure", "backend", "bias_correction",
          "grad_averaging")  # fmt: skip
_OF_CHECKPOINTS = ("amsgrad", "maximize", "fused", "foreach", "capturable", "differentiable", "decoupled_weight_decay")
# Options that one of the optimizers does not have.
_OTHERS = {
    optim.AdamW: ("bias_correction", "grad_averaging", "use_nvlamb", "prefer_apex"),
    optim.Lamb: ("amsgrad", "maximize", "fused", "prefer_apex"),
    optim.make_lamb: ("amsgrad", "maximize", "fused"),
}


def run(case: Case) -> None:
    """An optimizer that lives through a few steps, and what happens to parameters, gradients and state in between."""
    rng, d = case.rng, Tensors(case)
    params = [_parameter(d) for _ in range(rng.randint(1, 4))]
    make = rng.choice((optim.AdamW, optim.AdamW, optim.Lamb, optim.Lamb, optim.make_lamb))
    options = _options(case, () if case.chance(0.05) else _OTHERS[make])
    given: Any = params
    if case.chance(0.3):
        given = [{"params": params[:1], "lr": rng.choice((0.0, 1e-2))}, {"params": params[1:]}]
    if case.chance(0.08):
        given = spoil(rng, given)
    optimizer = case.call(make, given, **options, names=(*_NAMES, *options))
    for _ in range(rng.randint(1, 3)):
        for p in params:
            p.grad = _gradient(d, p)
        _step(case, optimizer, params)
        if case.chance(0.6):
            params = _change(case, d, optimizer, params)


def _parameter(d: Tensors) -> nn.Parameter:
    dtype = d.dtype if d.case.chance(0.9) else d.rng.choice(DTYPES)
    return nn.Parameter(d.normal(*(d.size(0) for _ in range(d.rng.choice((0, 1, 2, 2, 3)))), dtype=dtype).detach())


def _gradient(d: Tensors, p: Tensor) -> Tensor | None:
    """One that fits, or none."""
    if not p.requires_grad or d.case.chance(0.1) or not p.is_floating_point():
        return None
    gradient = torch.randn(p.shape).to(p.dtype)
    return relaid(d.rng, gradient) if d.any_layout else gradient


def _options(case: Case, without: tuple[str, ...]) -> dict[str, Any]:
    rng = case.rng
    options: dict[str, Callable[[], Any]] = {
        "lr": lambda: rng.choice((1e-3, 0.0, 1, torch.tensor(1e-2))),
        "betas": lambda: rng.choice(((0.9, 0.999), (0.0, 0.0), [0.5, 0.9])),
        "eps": lambda: rng.choice((1e-8, 0.0, 1e-3)),
        "weight_decay": lambda: rng.choice((0.0, 0.01, 1)),
        "max_grad_norm": lambda: rng.choice((None, 1.0, 0.1, float("inf"))),
        "master_weights": lambda: case.chance(0.5),
        "backend": lambda: rng.choice((None, "torch", "reference")),
        "bias_correction": lambda: case.chance(0.5),
        "fused": lambda: case.chance(0.5),
        "grad_averaging": lambda: case.chance(0.5),
        "use_nvlamb": lambda: case.chance(0.5),
        "prefer_apex": lambda: case.chance(0.5),
        "amsgrad": lambda: False,
        "maximize": lambda: False,
    }
    known = sorted(options.keys() - set(without))
    chosen = {name: options[name]() for name in rng.sample(known, rng.choice((0, 1, 2, 4)))}
    if chosen and case.chance(0.2):
        name = rng.choice(sorted(chosen))
        chosen[name] = spoil(rng, chosen[name])
    return chosen


def _bits(t: Tensor) -> bytes:
    return bytes(t.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist())


def _readable(params: list[nn.Parameter]) -> list[nn.Parameter]:
    kinds = (Tensor, nn.Parameter)
    return [p for p in params if type(p) in kinds and p.layout == torch.strided and not p.is_meta and p.numel() < 2000]


def _step(case: Case, optimizer: Any, params: list[nn.Parameter]) -> None:
    """A step; one that is refused has written nothing."""
    before = [(p, _bits(p)) for p in _readable(params)]
    try:
        closure = (garbage(case.rng),) if case.chance(0.02) else ()
        case.call(optimizer.step, *closure, names=_NAMES)
    except Refused as refusal:
        for p, bits in before:
            if _bits(p) != bits:
                raise Finding(f"a step was refused ({refusal}) and a parameter changed") from None
        raise


def _change(case: Case, d: Tensors, optimizer: Any, params: list[nn.Parameter]) -> list[nn.Parameter]:
    """One of the things that happen to parameters, gradients, state and groups during training."""
    rng, p = case.rng, case.rng.choice(params)
    kind = rng.choice(("resize", "convert", "grad", "state", "group", "save", "copy", "overwrite", "add"))
    case.say(f"# {kind}")
    if kind == "resize" and p.dim() and type(p) is nn.Parameter:
        p.data = torch.zeros((p.shape[0] + rng.choice((-1, 1, 40)) if p.shape[0] else 3, *p.shape[1:]), dtype=p.dtype)
    elif kind == "convert":
        p.data = p.data.to(rng.choice(DTYPES))
    elif kind == "grad":
        wrong = spoil(rng, torch.randn(p.shape).to(p.dtype))
        if isinstance(wrong, Tensor):
            try:
                p.grad = wrong
            except (RuntimeError, TypeError):
                p.grad = None  # PyTorch refuses it
            _step(case, optimizer, params)
    elif kind == "state" and optimizer.state:
        state = optimizer.state[rng.choice(list(optimizer.state))]
        name = rng.choice(sorted(state)) if state else "step"
        state[name] = spoil(rng, state.get(name))
    elif kind == "group":
        group = rng.choice(optimizer.param_groups)
        name = rng.choice([name for name in sorted(group) if name != "params"])
        group[name] = spoil(rng, group[name])
    elif kind == "save":
        _save_and_load(case, optimizer, params)
    elif kind == "copy":
        case.call(copy.deepcopy, optimizer, any_error=True)  # PyTorch copies no tensors of some classes
    elif kind == "overwrite":
        with torch.no_grad():
            p.fill_(rng.choice((0.0, 1.0, float("nan"))))
    elif kind == "add":
        new = _parameter(d)
        group = {"params": rng.choice((new, [new], [p], [new, new]))}
        if case.chance(0.3):
            group[rng.choice(("lr", "betas", "max_grad_norm", "other"))] = rng.choice(
                (0.1, (0.5, 0.5), None, garbage(rng))
            )
        case.call(optimizer.add_param_group, group, names=_NAMES)
        return [*params, new]
    return params


def _save_and_load(case: Case, optimizer: Any, params: list[nn.Parameter]) -> None:
    """A state dict, mutated or not, loaded into the same optimizer or another."""
    rng = case.rng
    state = case.call(copy.deepcopy, optimizer.state_dict(), any_error=True)
    if case.chance(0.5):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=False)
    if case.chance(0.5):
        part = rng.choice((state, *state["state"].values(), *state["param_groups"]))
        if part:
            name = rng.choice(list(part))
            part[name] = spoil(rng, part[name])
            if case.chance(0.3):
                del part[name]
    if case.chance(0.05):
        state = garbage(rng)
    if case.chance(0.3):
        adam = rng.choice((torch.optim.AdamW, torch.optim.Adam))(params, lr=0.1)
        state = adam.state_dict()
    case.call(optimizer.load_state_dict, state, names=(*_NAMES, *_OF_CHECKPOINTS))
