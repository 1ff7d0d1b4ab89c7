"""Counter-based dropout as a differentiable op, and the names of its sites."""

from typing import Any

import torch
from torch import Tensor

from bert_fast.backend import OpSpec, requested, resolve
from bert_fast.checks import (
    check_dropout_p,
    check_dtype,
    check_floating,
    check_same_device,
    check_shape,
    check_site,
)
from bert_fast.ops._register import custom_op
from bert_fast.ops._saved import keep_tensors, kept_tensors
from bert_fast.reference.dropout import DropoutSite as DropoutSite
from bert_fast.reference.dropout import dropout_site as dropout_site


def draw_seed(device: torch.device) -> Tensor:
    """A dropout seed from PyTorch's generator of that device; no device sync.

    Args:
        device: where the seed is made; `torch.manual_seed` decides what it is.

    Returns:
        seed (Tensor [1], int64).

    Example:
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch._C.Generator ...>
        >>> ops.draw_seed(torch.device("cpu")).dtype
        torch.int64
    """
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def check_dropout_state(
    dropout_p: float, seed: Tensor | None, coords: Tensor | None, x: Tensor, site: int, names: tuple[str, str]
) -> None:
    """Raises unless dropout_p is a probability, site is in [0, 2**31) and, where p is not 0, seed and coords fit x.

    seed: int64 [1]; coords: int32 [T, 2], T = len(x); both on x's device. names: of coords and x.
    """
    coords_name, x_name = names
    if type(site) is not int or not 0 <= site < 2**31:  # here, since a call costs more than this
        check_site(site)
    check_dropout_p("dropout_p", dropout_p)
    if dropout_p == 0.0:
        return
    if seed is None or coords is None:
        missing = "seed" if seed is None else coords_name
        raise ValueError(f"{missing}: expected a Tensor where dropout_p is {dropout_p}, got None")
    are_dense = type(seed) is type(coords) is Tensor and seed.layout is coords.layout is torch.strided
    if are_dense and not seed.is_nested and not coords.is_nested:
        device = x.device
        if (
            seed.dtype is torch.int64
            and seed.shape == (1,)
            and seed.device == device
            and coords.dtype is torch.int32
            and coords.shape == (x.shape[0], 2)
            and coords.device == device
        ):
            return  # as nearly always, at a third of the cost of the checks, which say what is wrong
    check_shape("seed", seed, (1,))
    check_dtype("seed", seed, (torch.int64,))
    check_same_device("seed", seed, x_name, x)
    check_coords(coords_name, coords, x, x_name)


def check_coords(name: str, coords: Tensor, x: Tensor, x_name: str) -> None:
    """Raises unless coords is int32 [T, 2] on x's device, T = len(x)."""
    check_shape(name, coords, (x.shape[0], 2))
    check_dtype(name, coords, (torch.int32,))
    check_same_device(name, coords, x_name, x)


def dropout(
    x: Tensor, dropout_p: float, *, seed: Tensor | None, coords: Tensor | None, site: int, backend: str | None = None
) -> Tensor:
    """y = x * keep / (1 - p), keep a pure function of (seed, site, row, position, column).

    Args:
        x (Tensor [T, H], floating): input.
        seed (Tensor [1], int64): of this forward pass, see `draw_seed`.
        coords (Tensor [T, 2], int32): (row, position).
        site (int): of the call, see `dropout_site`.
        dropout_p: probability of dropping, in [0, 1]; where it is 0, seed and coords may be None.
        backend: "triton", "torch" or "reference"; None takes the first that can run the call.

    Returns:
        y (Tensor [T, H], dtype of x); x itself where dropout_p is 0.

    Raises:
        ValueError, TypeError: dropout_p outside [0, 1], wrong shape or dtype.
        BackendError: the forced back-end cannot run the call.

    Saves seed and coords, never a mask.
    Source: Salmon et al. 2011 (Philox); `reference/dropout.py` is the definition.

    Example:
        >>> coords = torch.tensor([[0, 0], [0, 1]], dtype=torch.int32)  # two tokens of one text
        >>> seed, site = torch.tensor([1]), ops.dropout_site(ops.DropoutSite.EMBEDDING)
        >>> y = ops.dropout(torch.ones(2, 64), 0.5, seed=seed, coords=coords, site=site)
        >>> sorted(set(y.flatten().tolist()))
        [0.0, 2.0]
        >>> torch.equal(y, ops.dropout(torch.ones(2, 64), 0.5, seed=seed, coords=coords, site=site))
        True
    """
    check_shape("x", x, ("T", "H"))
    check_floating("x", x)
    check_dropout_state(dropout_p, seed, coords, x, site, ("coords", "x"))
    if dropout_p == 0.0:
        return x
    return _forward(x, dropout_p, seed, coords, int(site), requested(backend))


@custom_op("dropout", tensors={"x": "x T H", "seed": "int64 1", "coords": "int32 T 2"})
def _forward(x: Tensor, dropout_p: float, seed: Tensor, coords: Tensor, site: int, backend: str) -> Tensor:
    y = resolve("dropout", OpSpec.of(x), backend).dropout_fwd(x, dropout_p, seed, coords, site)
    # The fake implementation promises this layout; PyTorch's own operators would keep that of a transposed x.
    return y.contiguous()


@_forward.register_fake
def _(x: Tensor, dropout_p: float, seed: Tensor, coords: Tensor, site: int, backend: str) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.dropout_p, seed, coords, ctx.site, ctx.backend = inputs
    keep_tensors(ctx, (seed, coords))


def _autograd(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    seed, coords = kept_tensors(ctx, ("seed", "coords"))
    return _forward(dy, ctx.dropout_p, seed, coords, ctx.site, ctx.backend), None, None, None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)
