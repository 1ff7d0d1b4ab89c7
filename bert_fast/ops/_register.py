"""How ops are registered: like `torch.library.custom_op`, without its cost.

`torch.library.custom_op` imports `torch._dynamo` on first use (about a second) and wraps every call in Python. Defining
the op straight in a `torch.library.Library` gives `torch.compile`, autograd and `opcheck` the same op without either.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Op", "custom_op", "without_none"]

_NAMESPACE = "bert_fast"
_library = torch.library.Library(_NAMESPACE, "DEF")


class Op:
    """A registered op: callable, and the place where its fake implementation and its autograd formula are added."""

    def __init__(self, name: str, function: Callable[..., Any], mutates_args: tuple[str, ...]) -> None:
        self._qualified_name = f"{_NAMESPACE}::{name}"
        _library.define(name + torch.library.infer_schema(function, mutates_args=mutates_args))
        _library.impl(name, function, "CompositeExplicitAutograd")
        self._overload = getattr(getattr(torch.ops, _NAMESPACE), name).default
        if name.endswith("_bwd"):  # a formula of first derivatives: nothing differentiates it again
            self.register_autograd(self._refuse_backward, setup_context=lambda ctx, inputs, output: None)

    def __call__(self, *arguments: Any) -> Any:
        """Runs the op through PyTorch's dispatcher."""
        return self._overload(*arguments)

    def _refuse_backward(self, ctx: Any, *_: Any) -> None:
        name = self._qualified_name.replace("::", ".")
        raise RuntimeError(f"backward through {name}: second derivatives are not implemented")

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Adds the implementation that knows shapes and dtypes only; usable as a decorator."""
        return torch.library.register_fake(self._qualified_name, function, lib=_library)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Adds the backward formula: `backward(ctx, *doutputs)`, `setup_context(ctx, inputs, output)`."""
        torch.library.register_autograd(self._qualified_name, backward, setup_context=setup_context, lib=_library)


def custom_op(name: str, *, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Op]:
    """Registers the decorated function as `bert_fast::<name>`; its annotations become the schema.

    Outputs must not share memory with inputs or with one another. An op named `..._bwd` refuses to be differentiated.
    """
    return lambda function: Op(name, function, mutates_args)


def without_none(tensors: tuple[Tensor | None, ...], like: Tensor) -> Any:
    """The tensors, with an empty one in the place of each None, since an op cannot return None."""
    return tuple(like.new_empty(0) if t is None else t for t in tensors)
