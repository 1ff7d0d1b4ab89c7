"""How ops are registered: like `torch.library.custom_op`, without its cost.

`torch.library.custom_op` imports `torch._dynamo` on first use (about a second) and wraps every call in Python. Defining
the op straight in a `torch.library.Library` gives `torch.compile`, autograd and `opcheck` the same op without either.

PyTorch's dispatcher costs a call 10 microseconds, with gradients 30. Where nobody on the way would do anything with it,
a call goes around it: the implementation runs as it stands, or within one `torch.autograd.Function` made of the same
formula (`docs/decisions/0012-around-the-dispatcher.md`).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import (
    _any_requires_grad,
    _are_functorch_transforms_active,
    _functorch,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._autograd import _profiler_enabled
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import forward_ad

from bert_fast.errors import DerivativeError
from bert_fast.ops._memory import name_call
from bert_fast.ops._signature import Line, checker

_NAMESPACE = "bert_fast"
_library = torch.library.Library(_NAMESPACE, "DEF")
# What the implementations take as it is. Not among them: lists (of tensors that are written to), symbolic numbers, and
# tensors of subclasses, each of which has a way of its own through the dispatcher.
_is_dead_wrapper: Callable[[Tensor], bool] = getattr(_functorch, "is_dead_tensor_wrapper")  # noqa: B009  not in its stub
_PLAIN_TYPES = frozenset({Tensor, nn.Parameter, type(None), bool, int, float, str, torch.dtype})


class Op:
    """A registered op: callable, and the place where its fake implementation and its autograd formula are added."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        tensors: Mapping[str, str | Line],
        check: Callable[..., None] | None,
        check_values: Callable[..., None] | None,
        mutates_args: tuple[str, ...] = (),
        declaration: Callable[..., Any] | None = None,
    ) -> None:
        declaration = declaration or function  # whose signature the schema is made of
        self._qualified_name, self._short_name = f"{_NAMESPACE}::{name}", name
        self._name = f"{_NAMESPACE}.{name}"  # in messages
        self._implementation = self._run = function
        self._check = checker(declaration, tensors, check)
        self.formula: type[torch.autograd.Function] | None = None
        _library.define(name + torch.library.infer_schema(declaration, mutates_args=mutates_args))
        _library.impl(name, self._checked(function, check_values), "CompositeExplicitAutograd")
        self._overload = getattr(getattr(torch.ops, _NAMESPACE), name).default
        if name.endswith("_bwd"):  # a formula of first derivatives: nothing differentiates it again
            self.register_autograd(self._refuse_backward, setup_context=lambda ctx, inputs, output: None)

    def __call__(self, *arguments: Any) -> Any:
        """Runs the op, through PyTorch's dispatcher where somebody watches or an argument is not plain."""
        try:
            if is_watched() or not are_plain(arguments):
                return self._dispatch(*arguments)
            if self.formula is not None and torch.is_grad_enabled() and _any_requires_grad(*arguments):
                return self._apply(*arguments)
            return self._implementation(*arguments)
        except torch.OutOfMemoryError as error:
            name_call(error, self._short_name, arguments)
            raise

    def around(self, needs_gradients: bool, *arguments: Any) -> Any:
        """As a call, for who knows that nobody watches and all arguments are plain; outputs may be None.

        needs_gradients: whether gradients are recorded, and any of the arguments requires one.
        """
        try:
            return self._apply(*arguments) if needs_gradients else self._run(*arguments)
        except torch.OutOfMemoryError as error:
            name_call(error, self._short_name, arguments)
            raise

    def _checked(
        self, function: Callable[..., Any], check_values: Callable[..., None] | None = None
    ) -> Callable[..., Any]:
        """The function as PyTorch's dispatcher may call it: for anybody, with anything that the schema allows."""

        def run(*arguments: Any) -> Any:
            self._check(*arguments)
            if check_values is not None:
                check_values(*arguments)
            try:
                return function(*arguments)
            except torch.OutOfMemoryError as error:
                name_call(error, self._short_name, arguments)
                raise

        return run

    def _dispatch(self, *arguments: Any) -> Any:
        """Runs the op through PyTorch's dispatcher, which would leave the tangents of dual tensors behind."""
        if forward_ad._current_level >= 0:
            for i, argument in enumerate(arguments):
                if isinstance(argument, Tensor) and _has_tangent(argument):
                    name = self._overload._schema.arguments[i].name
                    raise DerivativeError(
                        f"{name}: expected no tangent, got one: derivatives of {self._name} in forward mode (jvp, "
                        "jacfwd, dual tensors) are not implemented, only backward is"
                    )
        return self._overload(*arguments)

    def _refuse_backward(self, ctx: Any, *_: Any) -> None:
        raise DerivativeError(f"backward through {self._name}: second derivatives are not implemented")

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Adds the implementation that knows shapes and dtypes only; usable as a decorator."""
        return torch.library.register_fake(self._qualified_name, self._checked(function), lib=_library)

    def register_autograd(
        self,
        backward: Callable[..., Any],
        *,
        setup_context: Callable[..., None],
        first_only: bool = False,
        run: Callable[..., Any] | None = None,
    ) -> None:
        """Adds the backward formula: `backward(ctx, *doutputs)`, `setup_context(ctx, inputs, output)`.

        first_only: whether callers of the op read its first output alone; around the dispatcher the others, which are
        for backward, then do not become outputs of an autograd function, each of which costs a microsecond. run: what
        is called there in place of the op's implementation; its outputs may be None.
        """
        torch.library.register_autograd(self._qualified_name, backward, setup_context=setup_context, lib=_library)
        implementation = self._run = run or self._implementation

        def forward(ctx: Any, *arguments: Any) -> Any:
            output = implementation(*arguments)
            setup_context(ctx, arguments, output)
            return output[:1] if first_only else output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self.formula = type(self._qualified_name, (torch.autograd.Function,), methods)
        # Not `Function.apply`, which looks at each argument again and decides who runs the function: `__call__` has.
        self._apply = super(torch.autograd.Function, self.formula).apply  # type: ignore[misc]


def is_watched(by_profiler: bool = True) -> bool:
    """Whether something wants to see each op: tracing, modes, `torch.func`, forward-mode derivatives, a profiler.

    by_profiler: whether one that sees calls but does not change them counts.
    """
    return (
        torch.compiler.is_compiling()
        or _len_torch_dispatch_stack() > 0
        or _len_torch_function_stack() > 0
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _get_tracing_state() is not None
        or (by_profiler and _profiler_enabled())
    )


def _has_tangent(tensor: Tensor) -> bool:
    """Whether a tensor is dual, at any level of `torch.func`."""
    level = _functorch.maybe_current_level()
    if level is None:
        return forward_ad.unpack_dual(tensor, level=0).tangent is not None
    if _functorch.maybe_get_level(tensor) == level:
        if _functorch.is_gradtrackingtensor(tensor) and forward_ad.unpack_dual(tensor, level=0).tangent is not None:
            return True
        tensor = _functorch.get_unwrapped(tensor)
    with temporarily_pop_interpreter_stack():
        return _has_tangent(tensor)


def are_plain(arguments: tuple[Any, ...]) -> bool:
    """Whether all tensors are memory that can be read as it is, led by one that is not on the meta device.

    Not those that `torch.func` has left behind, either.
    """
    if not _PLAIN_TYPES.issuperset(map(type, arguments)):
        return False
    for argument in arguments:
        if type(argument) is Tensor and (argument.is_neg() or argument._is_zerotensor() or _is_dead_wrapper(argument)):
            return False
    return not arguments[0].is_meta


def custom_op(
    name: str,
    *,
    tensors: Mapping[str, str | Line] = MappingProxyType({}),
    check: Callable[..., None] | None = None,
    check_values: Callable[..., None] | None = None,
    mutates_args: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Op]:
    """Registers the decorated function as `bert_fast::<name>`; its annotations become the schema.

    tensors: what is expected of its tensors (`_signature.py`). check: called with all arguments after that;
    check_values: too, but not where tensors have no values. All are for calls through PyTorch's dispatcher: public
    functions, and the formulas that they lead to, pass what fits.
    Outputs must not share memory with inputs or with one another. An op named `..._bwd` refuses to be differentiated.
    Tensors that it writes to stand in lists.
    """
    return lambda function: Op(name, function, tensors, check, check_values, mutates_args)
