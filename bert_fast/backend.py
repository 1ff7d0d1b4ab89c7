"""THE place where the implementation of an op is chosen.

One table names, for every op, its implementations in order of preference. Each is a module that holds `<op>_fwd` and
`<op>_bwd`; modules are named by string and imported on first use, so a CPU machine never imports Triton.

A request comes from, in this order: the `backend` argument of an op, the `use_backend` context, the environment
variable `BERT_FAST_BACKEND`. A request that cannot be met raises `BackendError` with every reason; it never falls back.
Without a request the first implementation without a reason against it is taken; the list always ends at the reference,
which runs everywhere but where the op says so.
"""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch

from bert_fast.checks import check_choice
from bert_fast.devices import chip, triton_problems
from bert_fast.env import SETTINGS
from bert_fast.errors import BackendError

AUTO = "auto"
BACKENDS = ("triton", "torch", "reference")

_TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class OpSpec(NamedTuple):
    """What decides who can run a call: where its tensors live, their dtype, and what else an op asks about."""

    device: torch.device
    dtype: torch.dtype
    hidden_size: int | None = None
    head_dim: int | None = None
    tensor_class: type = torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, **details: Any) -> "OpSpec":
        """The spec of a call whose leading tensor is `x`; details: the other fields."""
        return cls(x.device, x.dtype, **details)


@dataclass(frozen=True)
class Implementation:
    """One way to run an op: back-end name, module that holds it, and what speaks against it for a given call."""

    backend: str
    module: str
    unsupported_reasons: Callable[[OpSpec], list[str]]


def _no_reasons(spec: OpSpec) -> list[str]:
    return []


@functools.cache
def _has_triton() -> bool:
    """Asked once: looking through the folders of packages costs more than choosing an implementation."""
    return importlib.util.find_spec("triton") is not None


def _triton_reasons(spec: OpSpec) -> list[str]:
    reasons = []
    if not _has_triton():
        reasons.append("the package triton is not installed")
    elif spec.device.type == "cuda":
        reasons += triton_problems(spec.device)
    if spec.device.type == "cpu" and not SETTINGS.triton_interpret:
        reasons.append("tensors are on the CPU and TRITON_INTERPRET is not 1")
    elif spec.device.type not in ("cpu", "cuda"):
        reasons.append(f"device type {spec.device.type} is neither cuda (NVIDIA, ROCm) nor cpu under the interpreter")
    if spec.dtype not in _TRITON_DTYPES:
        reasons.append(f"dtype {spec.dtype} is none of {', '.join(map(str, _TRITON_DTYPES))}")
    return reasons


def _triton_row_reasons(spec: OpSpec) -> list[str]:
    """Of the kernels that hold whole rows in registers."""
    reasons = _triton_reasons(spec)
    if spec.hidden_size is not None and spec.hidden_size > 8192:
        reasons.append(
            f"hidden size {spec.hidden_size} exceeds 8192, the longest row that a program keeps in registers"
        )
    return reasons


def _triton_attention_reasons(spec: OpSpec) -> list[str]:
    """Of the kernels that hold tiles of whole heads."""
    reasons = _triton_reasons(spec)
    if spec.head_dim is not None and spec.head_dim > 128:
        reasons.append(f"head size {spec.head_dim} exceeds 128, the widest tile that fits beside its scores")
    return reasons


def _triton_layer_reasons(spec: OpSpec) -> list[str]:
    return list(dict.fromkeys(_triton_row_reasons(spec) + _triton_attention_reasons(spec)))


def _triton_list_reasons(spec: OpSpec) -> list[str]:
    """Of the kernels that are given addresses of tensors."""
    reasons = _triton_reasons(spec)
    if spec.tensor_class not in (torch.Tensor, torch.nn.Parameter):
        reasons.append(f"tensors are of class {spec.tensor_class.__name__}, which hides its memory")
    return reasons


def _only_on_cpu(spec: OpSpec) -> list[str]:
    return [] if spec.device.type == "cpu" else [f"tensors are on {spec.device.type}, and int8 products run on a CPU"]


def _implementation(backend: str, op: str, reasons: Callable[[OpSpec], list[str]] = _no_reasons) -> Implementation:
    return Implementation(backend, f"bert_fast.{backend}.{op}", reasons)


_TABLE: dict[str, tuple[Implementation, ...]] = {
    "attention": (
        _implementation("triton", "attention", _triton_attention_reasons),
        _implementation("torch", "attention"),
        _implementation("reference", "attention"),
    ),
    "cross_entropy": (
        _implementation("triton", "cross_entropy", _triton_reasons),
        _implementation("torch", "cross_entropy"),
        _implementation("reference", "cross_entropy"),
    ),
    "bias_gelu": (
        _implementation("triton", "bias_gelu", _triton_reasons),
        _implementation("torch", "bias_gelu"),
        _implementation("reference", "bias_gelu"),
    ),
    "dropout": (
        _implementation("triton", "dropout", _triton_reasons),
        _implementation("torch", "dropout"),
        _implementation("reference", "dropout"),
    ),
    "dropout_add_layer_norm": (
        _implementation("triton", "dropout_add_layer_norm", _triton_row_reasons),
        _implementation("torch", "dropout_add_layer_norm"),
        _implementation("reference", "dropout_add_layer_norm"),
    ),
    "embedding": (
        _implementation("triton", "embedding", _triton_row_reasons),
        _implementation("torch", "embedding"),
        _implementation("reference", "embedding"),
    ),
    "encoder_layer": (
        _implementation("triton", "encoder_layer", _triton_layer_reasons),
        _implementation("torch", "encoder_layer"),
        _implementation("reference", "encoder_layer"),
    ),
    "gated_mlp": (
        _implementation("triton", "gated_mlp", _triton_reasons),
        _implementation("torch", "gated_mlp"),
        _implementation("reference", "gated_mlp"),
    ),
    "layer_norm": (
        _implementation("triton", "layer_norm", _triton_row_reasons),
        _implementation("torch", "layer_norm"),
        _implementation("reference", "layer_norm"),
    ),
    "linear": (
        _implementation("triton", "linear", _triton_reasons),
        _implementation("torch", "linear"),
        _implementation("reference", "linear"),
    ),
    "linear_cross_entropy": (
        _implementation("triton", "linear_cross_entropy", _triton_reasons),
        _implementation("torch", "linear_cross_entropy"),
        _implementation("reference", "linear_cross_entropy"),
    ),
    "linear_int8": (
        _implementation("torch", "linear_int8", _only_on_cpu),
        _implementation("reference", "linear_int8", _only_on_cpu),
    ),
    "linear_gelu": (
        _implementation("triton", "linear_gelu", _triton_reasons),
        _implementation("torch", "linear_gelu"),
        _implementation("reference", "linear_gelu"),
    ),
    "maxsim": (
        _implementation("triton", "maxsim", _triton_reasons),
        _implementation("torch", "maxsim"),
        _implementation("reference", "maxsim"),
    ),
    "mlp": (
        _implementation("triton", "mlp", _triton_reasons),
        _implementation("torch", "mlp"),
        _implementation("reference", "mlp"),
    ),
    "optimizer": (
        _implementation("triton", "optimizer", _triton_list_reasons),
        _implementation("torch", "optimizer"),
        _implementation("reference", "optimizer"),
    ),
    "qkv_projection": (
        _implementation("triton", "qkv_projection", _triton_reasons),
        _implementation("torch", "qkv_projection"),
        _implementation("reference", "qkv_projection"),
    ),
    "splade": (
        _implementation("triton", "splade", _triton_reasons),
        _implementation("torch", "splade"),
        _implementation("reference", "splade"),
    ),
    "rotary": (
        _implementation("triton", "rotary", _triton_reasons),
        _implementation("torch", "rotary"),
        _implementation("reference", "rotary"),
    ),
}


def op_names() -> tuple[str, ...]:
    """The names of all ops."""
    return tuple(_TABLE)


def implementations(op: str) -> tuple[Implementation, ...]:
    """The implementations of `op`, in order of preference."""
    return _TABLE[op]


@dataclass(frozen=True, eq=False)
class _Request:
    """One open `use_backend` context; each is equal to itself alone."""

    backend: str


# Of this thread and asyncio task, the innermost last.
_requests: ContextVar[tuple[_Request, ...]] = ContextVar("bert_fast.backend", default=())


class _Traced:
    """The request of a `use_backend` within a function that is being compiled: the tracer follows plain attributes."""

    backend: str | None = None


_traced = _Traced()


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name not in BACKENDS:
        got = repr(name) if isinstance(name, str) else type(name).__name__
        raise BackendError(f"backend: expected one of {', '.join(BACKENDS)}, got {got}")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the context every op of this thread or asyncio task runs on the named back-end, or raises `BackendError`.

    Contexts may be closed in any order: the innermost of those still open counts. Tasks begin with what was open where
    they were made, threads with nothing. The choice is recorded in the autograd graph, where backward runs where
    forward ran, and by `torch.compile` when it traces.

    Args:
        name: "triton", "torch" or "reference".

    Raises:
        BackendError: another name.

    Example:
        >>> x, one, zero = torch.randn(2, 4), torch.ones(4), torch.zeros(4)
        >>> with bert_fast.use_backend("reference"):
        ...     y = ops.layer_norm(x, one, zero)
        >>> torch.allclose(y, ops.layer_norm(x, one, zero), atol=1e-5)
        True
    """
    _check_name(name)
    if torch.compiler.is_dynamo_compiling():
        previous, _traced.backend = _traced.backend, name
        try:
            yield
        finally:
            _traced.backend = previous
        return
    request = _Request(name)
    _requests.set((*_requests.get(), request))
    try:
        yield
    finally:
        _requests.set(tuple(other for other in _requests.get() if other is not request))


def requested(argument: str | None = None) -> str:
    """The name asked for by argument, context or environment, in this order; `AUTO` where none is asked for."""
    name = _traced.backend or _requested_around() if argument is None else argument
    if not isinstance(name, str) or name != AUTO:  # an array would answer for each of its elements
        _check_name(name)
    return name


def _requested_around() -> str:
    requests = _requests.get()
    return (requests[-1].backend if requests else SETTINGS.backend) or AUTO


# What `torch.compiler.assume_constant_result` sets, which would import torch._dynamo: the tracer cannot read a context
# variable, and takes what it holds as it traces.
_requested_around._dynamo_marked_constant = True  # type: ignore[attr-defined]


def implementation(op: str, spec: OpSpec, request: str = AUTO) -> Implementation:
    """The implementation that runs `op` for this spec.

    Raises:
        BackendError: the requested back-end does not hold the op or cannot run the call.
    """
    candidates = _TABLE[op]
    if request == AUTO:
        for candidate in candidates:
            if not candidate.unsupported_reasons(spec):
                return candidate
        raise BackendError(
            f"{op}: no back-end can run this call: {'; '.join(candidates[-1].unsupported_reasons(spec))}"
        )
    for candidate in candidates:
        if candidate.backend == request:
            reasons = candidate.unsupported_reasons(spec)
            if reasons:
                raise BackendError(f"{op}: back-end {request!r} cannot run this call: {'; '.join(reasons)}")
            return candidate
    held = ", ".join(candidate.backend for candidate in candidates)
    raise BackendError(f"{op}: no {request!r} implementation exists; there are: {held}")


@functools.lru_cache(maxsize=4096)
def resolve(op: str, spec: OpSpec, request: str = AUTO) -> ModuleType:
    """The module that holds `<op>_fwd` and `<op>_bwd` for this spec; raises as `implementation` does.

    What was found once is remembered: nothing that it depends on changes while a process runs. Where a GPU cannot run
    Triton's kernels at all, no back-end was asked for, and triton is there, a process is warned once.
    """
    taken = implementation(op, spec, request)
    if request == AUTO and spec.device.type == "cuda" and taken.backend != "triton" and _has_triton():
        _warn_of(tuple(triton_problems(spec.device)), taken.backend)
    return importlib.import_module(taken.module)


@functools.cache
def _warn_of(problems: tuple[str, ...], taken: str) -> None:
    """Says once why a GPU does without Triton's kernels."""
    if problems:
        warnings.warn(f"back-end {taken!r} runs in the place of 'triton': {'; '.join(problems)}", stacklevel=2)


# Ops with matrix products, which the Triton back-end makes as the device's stored table says.
_WITH_PRODUCTS = (
    "linear", "linear_gelu", "mlp", "gated_mlp", "qkv_projection", "linear_cross_entropy", "encoder_layer",
)  # fmt: skip
_TABLES = "bert_fast.triton._gemm_tiles"


class ProductTable(NamedTuple):
    """Where the choices for a GPU's matrix products come from. device: whose table; None: none, or not used.

    problem: why the table there is is not used.
    """

    device: str | None
    problem: str | None


def product_table(index: int) -> ProductTable:
    """The stored table that a GPU's matrix products are made by: its own, or that of the nearest GPU."""
    if not _has_triton():
        return ProductTable(None, None)
    gpu = chip(index)
    table, problem = importlib.import_module(_TABLES).stored(gpu.product, gpu.name, gpu.multiprocessors)
    return ProductTable(table and table.device, problem)


def explain(op: str, x: torch.Tensor, **details: Any) -> str:
    """Says, a line per implementation of `op`, whether it can run a call led by `x`, why not, and which is taken.

    Of an op with matrix products one more line says by which stored table they are made on a GPU, or why by none.

    Args:
        op: the name of an op, as in `bert_fast.ops`.
        x (Tensor): of the call's device and dtype; its values are not looked at.
        details: further facts of the call that a back-end asks for, such as head_dim.

    Returns:
        The lines, joined.

    Raises:
        ValueError: there is no such op.

    Example:
        >>> print(bert_fast.explain("layer_norm", torch.zeros(2, 4)))  # doctest: +ELLIPSIS
        layer_norm: triton: ...
        layer_norm: torch: taken
        layer_norm: reference: can run
    """
    check_choice("op", op, _TABLE)
    spec = OpSpec.of(x, **details)
    taken = next((one for one in _TABLE[op] if not one.unsupported_reasons(spec)), None)
    lines = []
    for candidate in _TABLE[op]:
        reasons = candidate.unsupported_reasons(spec)
        state = "; ".join(reasons) if reasons else ("taken" if candidate is taken else "can run")
        lines.append(f"{op}: {candidate.backend}: {state}")
    if taken is not None and taken.backend == "triton" and op in _WITH_PRODUCTS and spec.device.type == "cuda":
        index = torch.cuda.current_device() if spec.device.index is None else spec.device.index
        of_device, problem = product_table(index)
        gpu = chip(index).product
        if of_device is None:
            lines.append(f"{op}: matrix products by no table: {problem or f'none is stored for a GPU like {gpu}'}")
        else:
            others = "" if of_device == gpu else f", as none is stored for {gpu}"
            lines.append(f"{op}: matrix products by the table of {of_device}{others}")
    return "\n".join(lines)
