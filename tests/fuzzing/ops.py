"""Surfaces: the public functions of `bert_fast.ops`, and the registered `torch.ops.bert_fast` called directly."""

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bert_fast.backend import use_backend
from bert_fast.testing.tolerances import FUZZING_SLACK, tolerance

from .case import Case
from .op_arguments import OPS, STEPS, Arguments
from .tensors import Tensors, relaid, spoil

_BACKENDS = (None, None, "torch", "torch", "reference")
_STATE = ("params", "exp_avgs", "exp_avg_sqs", "steps", "master_params")  # what a step overwrites


def run_public(case: Case) -> None:
    """One function of `bert_fast.ops`, forward and backward."""
    if case.chance(0.08):
        return _run_step(case)
    name = case.rng.choice(sorted(OPS))
    function, make = OPS[name]
    d = Tensors(case)
    arguments = make(d)
    has_backend = name != "attention_with_probabilities"
    if has_backend:
        arguments["backend"] = case.rng.choice(_BACKENDS)
    fits = _disturb(case, arguments)
    before = _snapshot(arguments) if case.chance(0.3) else {}
    outputs = _tensors(case.call(function, **arguments))
    _expect_unchanged(case, arguments, before)
    if any(t.is_meta for t in _tensors(list(arguments.values()))):
        return case.expect(not fits or all(y.is_meta for y in outputs), "results of meta tensors are not on meta")
    leaves = _leaves(arguments)
    wanted = [y for y in outputs if y.requires_grad]
    upstream = [_upstream(d, y) for y in wanted]
    if fits and case.chance(0.1) and leaves and wanted:
        return _rewrite_offsets(case, arguments, wanted, list(leaves.values()), upstream)
    gradients = _backward(case, wanted, leaves, upstream)
    _expect_unchanged(case, arguments, before)
    if fits:
        _expect_finite(case, outputs, gradients)
        if has_backend and case.chance(0.6):
            _compare(case, name, function, arguments, outputs, gradients, upstream)


def _disturb(case: Case, arguments: Arguments) -> bool:
    """Moves or spoils some of the arguments; whether they still fit together."""
    if case.chance(0.08):
        for name, value in arguments.items():
            arguments[name] = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), value)
        if case.chance(0.5):
            return True
    elif case.chance(0.4):
        return True
    for name in case.rng.sample(sorted(arguments), min(len(arguments), case.rng.choice((1, 1, 1, 2, 3)))):
        arguments[name] = spoil(case.rng, arguments[name])
    if case.chance(0.03):
        arguments[case.rng.choice(("axis", "x", "training", ""))] = None
    if case.chance(0.03):
        del arguments[case.rng.choice(sorted(arguments))]
    return False


def _upstream(d: Tensors, y: Tensor) -> Tensor:
    values = torch.randn(y.shape).to(y.dtype)
    return relaid(d.rng, values) if d.any_layout else values


def _leaves(arguments: Arguments) -> dict[str, Tensor]:
    return {k: t for k, t in arguments.items() if isinstance(t, Tensor) and t.requires_grad and t.is_leaf}


def _backward(
    case: Case, outputs: list[Tensor], leaves: dict[str, Tensor], upstream: list[Tensor]
) -> dict[str, Tensor | None]:
    if not outputs or not leaves:
        return {}
    made = case.call(torch.autograd.grad, outputs, list(leaves.values()), upstream, allow_unused=True, names=leaves)
    for leaf, gradient in zip(leaves.values(), made, strict=True):
        fits = gradient is None or (gradient.shape == leaf.shape and gradient.dtype == leaf.dtype)
        case.expect(fits, "a gradient of another shape or dtype than its tensor")
    return dict(zip(leaves, made, strict=True))


def _rewrite_offsets(
    case: Case, arguments: Arguments, outputs: list[Tensor], leaves: list[Tensor], upstream: list[Tensor]
) -> None:
    """What a loader does that reuses its buffers: offsets change between forward and backward, unseen by autograd."""
    options = {"allow_unused": True, "retain_graph": True}
    expected = case.call(torch.autograd.grad, outputs, leaves, upstream, **options, names=arguments)
    integers = {k: t for k, t in arguments.items() if isinstance(t, Tensor) and t.dtype == torch.int32 and t.numel()}
    for name, t in integers.items():
        case.say(f"{name}.numpy()[...] = another")
        t.numpy()[...] = torch.randint(-3, 300, t.shape).numpy()
    try:
        made = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
    except Exception:
        return  # ids, labels or coords that another has rewritten; the process lives
    if set(integers) <= {"cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"}:
        for a, b in zip(expected, made, strict=True):
            same = a is b is None or (a is not None and b is not None and torch.equal(a, b))
            case.expect(same, "gradients follow offsets that changed after forward had checked them")


# --- what must hold ---------------------------------------------------------------------------------------------------


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _bits(t: Tensor) -> bytes:
    """What the tensor holds, in the order of its indices."""
    plain = torch.empty(t.shape, dtype=t.dtype).copy_(t.detach())
    return plain.view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


def _is_readable(t: Any) -> bool:
    return isinstance(t, Tensor) and type(t) is Tensor and t.layout == torch.strided and t.device.type == "cpu"


def _snapshot(arguments: Arguments) -> dict[str, bytes]:
    return {k: _bits(t) for k, t in arguments.items() if _is_readable(t)}


def _expect_unchanged(case: Case, arguments: Arguments, before: dict[str, bytes]) -> None:
    for name, bits in before.items():
        case.expect(_bits(arguments[name]) == bits, f"{name} was overwritten")


def _expect_finite(case: Case, outputs: list[Tensor], gradients: dict[str, Tensor | None]) -> None:
    for y in outputs:
        case.expect(bool(torch.isfinite(y.detach()).all()), "a result of finite inputs is not finite")
    for name, gradient in gradients.items():
        if gradient is not None:
            case.expect(bool(torch.isfinite(gradient).all()), f"the gradient of {name} is not finite")


def _results(
    function: Callable[..., Any], arguments: Arguments, upstream: list[Tensor], dtype: torch.dtype | None = None
) -> list[Tensor | None]:
    """Outputs and gradients of the reference; all floating tensors in `dtype`."""

    def prepared(t: Tensor) -> Tensor:
        fresh = t.detach() if dtype is None or not t.is_floating_point() else t.detach().to(dtype)
        return fresh.requires_grad_(t.requires_grad)

    arguments = {name: pytree.tree_map_only(Tensor, prepared, value) for name, value in arguments.items()}
    arguments["backend"] = "reference"
    outputs = _tensors(function(**arguments))
    wanted, leaves = [y for y in outputs if y.requires_grad], list(_leaves(arguments).values())
    if not wanted or not leaves:
        return [y.detach() for y in outputs]
    cast = [u.to(y.dtype) for u, y in zip(upstream, wanted, strict=True)]
    gradients = torch.autograd.grad(wanted, leaves, cast, allow_unused=True)
    return [*(y.detach() for y in outputs), *gradients]


def _compare(
    case: Case, name: str, function: Callable[..., Any], arguments: Arguments, outputs: list[Tensor],
    gradients: dict[str, Tensor | None], upstream: list[Tensor],
) -> None:  # fmt: skip
    """The same call on the reference in fp64 is the truth, in the tensors' own dtype the error that is allowed."""
    mine = ["output"] * len(outputs) + [f"d{leaf}" for leaf in gradients]
    actual = [*(y.detach() for y in outputs), *gradients.values()]
    plain, exact = (_results(function, arguments, upstream, t) for t in (None, torch.float64))
    floating = [t.dtype for t in _tensors(list(arguments.values())) if t.is_floating_point()]
    dtype = next((half for half in (torch.bfloat16, torch.float16) if half in floating), outputs[0].dtype)
    for what, a, p, e in zip(mine, actual, plain, exact, strict=True):
        if a is None or e is None:
            case.expect(a is None and e is None, f"{what}: one of back-end and reference has none")
            continue
        _expect_close(case, name, what, a, p, e, dtype)
    again = case.call(function, **arguments)
    for first, second in zip(outputs, _tensors(again), strict=True):
        case.expect(_bits(first) == _bits(second), "a second call gave other bits")


def _expect_close(
    case: Case, name: str, what: str, actual: Tensor, plain: Tensor, exact: Tensor, dtype: torch.dtype
) -> None:
    """dtype: the narrowest of the arguments; gradients of wider parameters are products of rounded tensors, too."""
    if not exact.numel():
        return
    bound = tolerance(name, what, dtype)
    mine, theirs = (float((t.double() - exact).abs().max()) for t in (actual, plain))
    size = max(1.0, float(exact.abs().max()))
    allowed = FUZZING_SLACK * (bound.factor * theirs + bound.floor * size)
    case.expect(
        mine <= allowed and not math.isnan(mine),
        f"{name}: {what} differs from the reference in fp64 by {mine:.3g}, allowed {allowed:.3g} ({actual.dtype})",
    )


# --- steps of optimizers ----------------------------------------------------------------------------------------------


def _run_step(case: Case) -> None:
    name = case.rng.choice(sorted(STEPS))
    function, make = STEPS[name]
    arguments = make(Tensors(case)) | {"backend": case.rng.choice(_BACKENDS)}
    copies = pytree.tree_map_only(Tensor, torch.clone, arguments)
    if not _disturb(case, arguments) or _tensors(list(arguments.values()))[:1] == []:
        case.call(function, **arguments)
        return
    case.call(function, **arguments)
    if any(t.is_meta for t in _tensors(list(arguments.values()))):
        return
    for key in ("grads",):
        for before, after in zip(copies[key], arguments[key], strict=True):
            case.expect(_bits(before) == _bits(after), f"{key} were overwritten")
    copies["backend"] = "reference"
    function(**copies)
    for key in _STATE:
        for mine, theirs in zip(arguments.get(key, ()), copies.get(key, ()), strict=True):
            if mine.numel():
                case.expect(bool(torch.isfinite(mine).all()), f"{key}: not finite after a step from finite numbers")
                _expect_close(case, name, key, mine, theirs, theirs.double(), mine.dtype)


# --- the registered ops -----------------------------------------------------------------------------------------------


class _Recorder(TorchDispatchMode):
    """Notes the calls of registered ops: the op, and its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "bert_fast":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def _recorded(case: Case) -> tuple[Any, list[Any]]:
    """A registered op with arguments as a public function, or the backward of one, gives them."""
    name = case.rng.choice(sorted((OPS | STEPS).keys() - {"attention_with_probabilities"}))
    function, make = (OPS | STEPS)[name]
    arguments = make(Tensors(case))
    # As within a compiled graph: some public functions go around PyTorch's dispatcher elsewhere.
    with mock.patch.object(torch.compiler, "_is_compiling_flag", True), _Recorder() as recorder:
        with use_backend(case.rng.choice(("torch", "reference"))):
            outputs = _tensors(case.call(function, **arguments))
        wanted, leaves = [y for y in outputs if y.requires_grad], list(_leaves(arguments).values())
        if wanted and leaves:
            torch.autograd.grad(wanted, leaves, [torch.randn(y.shape).to(y.dtype) for y in wanted], allow_unused=True)
    if not recorder.calls:
        return None, []
    op, values = case.rng.choice(recorder.calls)
    return op, list(pytree.tree_map_only(Tensor, lambda t: t.detach(), values))


def run_registered(case: Case) -> None:
    """One of `torch.ops.bert_fast`, with arguments that the public functions would have refused.

    These are operators of PyTorch, past the library's own checks of arguments: a graph calls them thousands of times
    with what a public function has checked once. They refuse as PyTorch's operators do, with errors of all kinds. What
    is asked of them is that no argument makes them read or write outside of their tensors, and that arguments of the
    public functions are taken.
    """
    op, values = _recorded(case)
    if op is None:
        return
    spoiled = case.rng.sample(range(len(values)), min(len(values), case.rng.choice((0, 1, 1, 1, 2, 3))))
    if case.chance(0.15):
        values = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), values)
    for place in spoiled:
        values[place] = spoil(case.rng, values[place])
    if case.chance(0.3):
        for value in values:
            if isinstance(value, Tensor) and value.is_floating_point() and value.is_leaf and not value.is_inference():
                value.requires_grad_()
    outputs = [y for y in _tensors(case.call(op, *values, any_error=bool(spoiled))) if y.requires_grad]
    leaves = [t for t in values if isinstance(t, Tensor) and t.requires_grad]
    is_backward = op._schema.name.endswith("_bwd")
    if outputs and leaves and not is_backward and not any(y.is_meta for y in outputs):
        upstream = [torch.randn(y.shape).to(y.dtype) for y in outputs]
        case.call(torch.autograd.grad, outputs, leaves, upstream, allow_unused=True, any_error=bool(spoiled))
