"""What the tests of linear, linear_gelu and mlp share: gradients by name, what is saved, what autocast must do."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bert_fast.testing.compare import assert_close_to_truth

Function = Callable[..., Tensor]
Tensors = dict[str, Tensor | None]


def randn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype)


def leaves(inputs: Tensors, dtype: torch.dtype | None = None) -> list[Tensor | None]:
    """Fresh copies that want gradients, strides kept."""
    fresh = [None if t is None else t.detach().to(dtype or t.dtype, copy=True) for t in inputs.values()]
    return [None if t is None else t.requires_grad_() for t in fresh]


def gradients(function: Function, inputs: Tensors, dy: Tensor, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """y, and the gradient of every input by name."""
    given = leaves(inputs, dtype)
    y = function(*given)
    y.backward(dy.to(y.dtype))
    return {"y": y.detach()} | {f"d{n}": t.grad for n, t in zip(inputs, given, strict=True) if t is not None}


def assert_matches(
    op: str, function: Function, plain: Function, reference: Function, inputs: Tensors, dy: Tensor
) -> None:
    """Every output against the reference in fp64 on the same rounded inputs; `plain` sets what error is allowed."""
    truth = gradients(reference, inputs, dy, torch.float64)
    stock, actual = gradients(plain, inputs, dy), gradients(function, inputs, dy)
    assert actual.keys() == truth.keys()
    for name in actual:
        assert_close_to_truth(op, name, actual[name], stock[name], truth[name])


def saved(function: Callable[[], Tensor]) -> list[Tensor]:
    """What autograd keeps of a call, every storage once."""
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        y = function()
    del y
    return list(kept.values())


def assert_autocast_agrees(op: str, function: Function, plain: Function, inputs: Tensors, compiles: bool) -> None:
    """In bf16, with gradients in fp32 and no half-precision copy of a parameter kept."""

    def autocast(called: Function) -> Function:
        def run(*arguments: Tensor | None) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return called(*arguments)

        return run

    run = torch.compile(autocast(function), fullgraph=True, backend="aot_eager") if compiles else autocast(function)
    rounded = {name: None if t is None else t.bfloat16() for name, t in inputs.items()}
    dy = torch.randn_like(plain(*rounded.values()))
    truth = gradients(plain, rounded, dy, torch.float64)
    actual, stock = gradients(run, inputs, dy), gradients(autocast(plain), inputs, dy)
    for name in truth:
        # Gradients are fp32 numbers made from operands that were rounded to bf16.
        close = actual[name].bfloat16() if name != "y" else actual[name]
        assert actual[name].dtype == stock[name].dtype == (torch.bfloat16 if name == "y" else torch.float32)
        assert_close_to_truth(op, name, close, stock[name].bfloat16(), truth[name])

    given = leaves(inputs)
    sizes = {t.numel() for t in given[1:] if t is not None and t.dim() == 2}
    for t in saved(lambda: run(*given)):
        assert t.dtype == torch.float32 or t.numel() not in sizes, f"{t.dtype} copy of a weight, {list(t.shape)}"


def assert_checkpoints(function: Function, inputs: Tensors, dy: Tensor) -> None:
    """Checkpointing of either kind gives the same bits."""
    expected = gradients(function, inputs, dy)
    for use_reentrant in (False, True):
        actual = gradients(lambda *t: checkpoint(function, *t, use_reentrant=use_reentrant), inputs, dy)  # noqa: B023
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
