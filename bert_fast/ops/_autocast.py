"""What `torch.autocast` means to the ops: which operands are cast, and that nothing is cast behind their back."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled

_Function = TypeVar("_Function", bound=Callable[..., Any])


def is_autocast_on(x: Tensor) -> bool:
    """Whether autocast is on for the device of x; PyTorch refuses to say so of meta tensors."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def autocast_dtype(x: Any) -> torch.dtype | None:
    """What autocast asks of an op led by x; None where it is off or x is no tensor that it casts."""
    if not _is_any_autocast_enabled():  # of any device: what is asked most often, and at the least cost
        return None
    if not isinstance(x, Tensor) or x.dtype == torch.float64:
        return None
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def _cast(t: Any, dtype: torch.dtype) -> Any:
    return t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t


def autocast_operands(*operands: Any) -> tuple[Any, ...]:
    """The operands in the dtype that autocast asks of an op led by the first; all as they are where it is off.

    Only floating-point tensors are cast, and nothing where the first is fp64; whatever else stands among the operands
    is left to the checks that follow.
    """
    if not _is_any_autocast_enabled():  # here too: a call costs more
        return operands
    dtype = autocast_dtype(operands[0])
    return operands if dtype is None else tuple(_cast(t, dtype) for t in operands)


def autocast_linear_operands(x: Any, *parameters: Any) -> tuple[Any, ...]:
    """x in the dtype that autocast asks for; fp32 parameters as they are, others in that dtype too.

    A linear op casts fp32 parameters itself, each time it needs them: no half-precision copy is saved, and their
    gradients come out in fp32. Only where parameters are of several dtypes are all of them cast here, as
    `torch.nn.functional.linear` casts them.
    """
    if not _is_any_autocast_enabled():
        return x, *parameters
    dtype = autocast_dtype(x)
    if dtype is None:
        return x, *parameters
    dtypes = {p.dtype for p in parameters if isinstance(p, Tensor)}
    if dtypes != {torch.float32}:
        parameters = tuple(_cast(p, dtype) for p in parameters)
    return x if x.dtype is dtype else _cast(x, dtype), *parameters


def without_autocast(function: _Function) -> _Function:
    """The implementation of an op, led by a tensor, such that autocast casts nothing within: its dtypes are decided.

    A backward that is started inside of the context is concerned too. Compiled graphs run without autocast anyway.
    """

    @functools.wraps(function)
    def run(x: Tensor, *arguments: Any) -> Any:
        if not (_is_any_autocast_enabled() and is_autocast_on(x)):
            return function(x, *arguments)
        return call_without_autocast(x, function, x, *arguments)

    return run  # type: ignore[return-value]


def call_without_autocast(x: Tensor, function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns function(*arguments), called with autocast off for the device of x, where it is on.

    Sets the flag alone: `torch.autocast(..., enabled=False)` also handles dtypes and the cache of casts, which nothing
    uses while autocast is off. torch.compile follows the context manager only.
    """
    kind = x.device.type
    if torch.compiler.is_compiling():
        with torch.autocast(kind, enabled=False):
            return function(*arguments)
    torch.set_autocast_enabled(kind, False)
    try:
        return function(*arguments)
    finally:
        torch.set_autocast_enabled(kind, True)
