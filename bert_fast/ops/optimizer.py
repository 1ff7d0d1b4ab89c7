"""Steps of AdamW and LAMB over lists of tensors, and the global norm of gradients, on any back-end.

Registered as `bert_fast::adamw_step`, `lamb_step` and `global_norm`, with the lists that they change declared, so that
compiled graphs may hold them. Outside of those the implementation is called directly: boxing a thousand tensors for
PyTorch's dispatcher takes as long as the step itself, and there is no gradient to record. Either way the version
counters of what changed go up, so that autograd notices when a saved weight was stepped.

`bert_fast.optim` wraps these functions as `torch.optim.Optimizer`s.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bert_fast import backend as backends
from bert_fast.checks import check_dtype
from bert_fast.ops._register import custom_op
from bert_fast.reference.optimizer import is_dense
from bert_fast.reference.precision import wide_dtype

__all__ = ["adamw_step", "check_hyperparameters", "global_norm", "lamb_step", "step_unchecked", "unchecked_norm"]

_OP = "optimizer"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_CHANGED = ("params", "exp_avgs", "exp_avg_sqs", "steps", "master_params")
Lists = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


def _module(x: Tensor, backend: str) -> Any:
    return backends.resolve(_OP, backends.OpSpec.of(x, tensor_class=type(x)), backend)


def _run_norm(grads: list[Tensor], grad_scale: Tensor | None, backend: str) -> Tensor:
    return _module(grads[0], backend).global_norm(grads, grad_scale)


def _run_step(kind: str, lists: Lists, *arguments: Any) -> None:
    """`<kind>_step(*lists, *arguments)` of the back-end that the last argument asks for."""
    lists, copies = _with_one_layout(lists)
    *arguments_of_step, backend = arguments
    params, _, exp_avgs, exp_avg_sqs, steps, masters = lists
    getattr(_module(params[0], backend), f"{kind}_step")(*lists, *arguments_of_step)
    for original, copy in copies:
        original.copy_(copy)
    changed = [*params, *exp_avgs, *exp_avg_sqs, *steps, *masters]
    torch.autograd.graph.increment_version([t for t in changed if not t.is_inference()])


def _with_one_layout(lists: Lists) -> tuple[Lists, list[tuple[Tensor, Tensor]]]:
    """The lists with contiguous copies where the tensors of a place lie differently in memory; (original, copy) pairs.

    Back-ends see memory, not shapes: any dense layout will do if parameter, gradient and state share it.
    """
    params, grads, exp_avgs, exp_avg_sqs, steps, masters = lists
    columns = [grads, params, exp_avgs, exp_avg_sqs, *([masters] if masters else [])]
    if all(t.is_contiguous() for column in columns for t in column):
        return lists, []
    columns = [list(column) for column in columns]
    copies: list[tuple[Tensor, Tensor]] = []
    for i, row in enumerate(zip(*columns, strict=True)):
        if all(t.stride() == row[0].stride() for t in row) and is_dense(row[0]):
            continue
        for column in columns:
            column[i] = column[i].clone(memory_format=torch.contiguous_format)
        copies += zip(row[1:], (column[i] for column in columns[1:]), strict=True)
    grads, params, exp_avgs, exp_avg_sqs, *rest = columns
    return (params, grads, exp_avgs, exp_avg_sqs, steps, rest[0] if rest else []), copies


@custom_op("global_norm")
def _global_norm(grads: list[Tensor], grad_scale: Tensor | None, backend: str) -> Tensor:
    return _run_norm(grads, grad_scale, backend)


@_global_norm.register_fake
def _(grads, grad_scale, backend):  # type: ignore[no-untyped-def]
    return grads[0].new_empty((), dtype=_norm_dtype(grads))


def _norm_dtype(grads: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if all(g.dtype == torch.float64 for g in grads) else torch.float32


# A schema has no union of number and tensor: lr comes as a number, and as a tensor that takes its place if not None.
@custom_op("adamw_step", mutates_args=_CHANGED)
def _adamw_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    master_params: list[Tensor],
    lr: float,
    lr_tensor: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_norm: Tensor | None,
    max_grad_norm: float | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    backend: str,
) -> None:
    _run_step(
        "adamw", (params, grads, exp_avgs, exp_avg_sqs, steps, master_params), lr if lr_tensor is None else lr_tensor,
        beta1, beta2, eps, weight_decay, grad_norm, max_grad_norm, grad_scale, found_inf, backend,
    )  # fmt: skip


@custom_op("lamb_step", mutates_args=_CHANGED)
def _lamb_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    master_params: list[Tensor],
    lr: float,
    lr_tensor: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    grad_averaging: bool,
    use_nvlamb: bool,
    grad_norm: Tensor | None,
    max_grad_norm: float | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    backend: str,
) -> None:
    _run_step(
        "lamb", (params, grads, exp_avgs, exp_avg_sqs, steps, master_params), lr if lr_tensor is None else lr_tensor,
        beta1, beta2, eps, weight_decay, bias_correction, grad_averaging, use_nvlamb,
        grad_norm, max_grad_norm, grad_scale, found_inf, backend,
    )  # fmt: skip


for _step in (_adamw_step, _lamb_step):
    _step.register_fake(lambda *arguments: None)
_REGISTERED: dict[str, Callable[..., None]] = {"adamw": _adamw_step, "lamb": _lamb_step}


def step_unchecked(kind: str, lists: Lists, lr: float | Tensor, *arguments: Any) -> None:
    """One step of `kind` ("adamw" or "lamb") for callers that vouch for their lists; arguments as the op has them."""
    if torch.compiler.is_compiling():
        is_tensor = isinstance(lr, Tensor)
        _REGISTERED[kind](*lists, 0.0 if is_tensor else lr, lr if is_tensor else None, *arguments)
    else:
        _run_step(kind, lists, lr, *arguments)


def unchecked_norm(grads: list[Tensor], grad_scale: Tensor | None, backend: str) -> Tensor:
    """`global_norm` for callers that vouch for their list."""
    return (_global_norm if torch.compiler.is_compiling() else _run_norm)(grads, grad_scale, backend)


def global_norm(grads: Sequence[Tensor], *, grad_scale: Tensor | None = None, backend: str | None = None) -> Tensor:
    """sqrt(sum of grad^2 over all gradients) / grad_scale: the norm that clipping compares with.

    grads (Tensors of any shapes, fp32/fp16/bf16/fp64, at least one, on one device): dtypes may mix.
    grad_scale (Tensor [] or [1], fp32, or None): what the loss was multiplied by.
    backend: "triton", "torch" or "reference"; None takes the first that can run the call.
    Returns: Tensor [], fp32 (fp64 where all gradients are), on the gradients' device.
    Raises: TypeError, ValueError naming the argument; BackendError if the named back-end cannot run the call.
    Not differentiable. Deterministic: two-stage sums, no atomics. No sync on CUDA, except on the reference.
    Precision: sums in fp64, so no finite gradient overflows its square.
    """
    grads = list(grads)
    if not grads:
        raise ValueError("grads: expected at least one tensor, got an empty list")
    for i, g in enumerate(grads):
        check_dtype(f"grads[{i}]", g, _DTYPES)
        _check_device(f"grads[{i}]", g, grads[0])
    _check_scalar("grad_scale", grad_scale, grads[0])
    with torch.no_grad():
        return unchecked_norm(grads, grad_scale, backends.requested(backend))


def adamw_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    master_params: Sequence[Tensor] = (),
    *,
    lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    grad_norm: Tensor | None = None,
    max_grad_norm: float | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """p = p - lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * p) for every parameter, in place.

    params (Tensors of any shapes, one of fp32/fp16/bf16/fp64, one device): overwritten.
    grads (Tensors shaped as params, of their dtype or fp32): unchanged.
    exp_avgs, exp_avg_sqs (Tensors shaped as params, fp32; fp64 for fp64 params): m and v, overwritten.
    steps (Tensors [], fp32): how many steps each parameter has made; counted up.
    master_params (Tensors shaped as params, fp32; none, or one for each of half-precision params): the step is made on
        these and params are their rounded copies. Overwritten.
    lr (float, or floating-point Tensor [] on the device): a tensor may change between replays of a CUDA graph.
    grad_norm (Tensor [] or None), max_grad_norm: gradients are multiplied by max_grad_norm / grad_norm where
        grad_norm > max_grad_norm. Both or neither; `global_norm` of everything that is clipped together.
    grad_scale, found_inf (Tensors [] or [1], fp32, or None): of `torch.amp.GradScaler`: gradients are divided by the
        first; where the second is not 0 nothing changes at all.
    Raises: TypeError, ValueError naming the argument; BackendError if the named back-end cannot run the call.
    Any strides; aliasing between the tensors is undefined. Not differentiable. Deterministic. No sync on CUDA, except
        on the reference. Precision: fp32 arithmetic (fp64 for fp64 params).
    Source: Loshchilov & Hutter 2019 (arXiv:1711.05101), algorithm 2, as torch.optim.AdamW.
    """
    lists = (list(params), list(grads), list(exp_avgs), list(exp_avg_sqs), list(steps), list(master_params))
    check_hyperparameters(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
    _check(lists, lr, grad_norm, max_grad_norm, grad_scale, found_inf)
    if not lists[0]:
        return
    with torch.no_grad():
        step_unchecked(
            "adamw", lists, lr, *betas, eps, weight_decay, grad_norm, max_grad_norm, grad_scale, found_inf,
            backends.requested(backend),
        )  # fmt: skip


def lamb_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    master_params: Sequence[Tensor] = (),
    *,
    lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 1e-2,
    bias_correction: bool = True,
    grad_averaging: bool = True,
    use_nvlamb: bool = False,
    grad_norm: Tensor | None = None,
    max_grad_norm: float | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """p = p - lr * |p| / |u| * u with u = m_hat / (sqrt(v_hat) + eps) + weight_decay * p, per tensor, in place.

    The trust ratio |p| / |u| is 1 where either norm is 0, and, without use_nvlamb, where weight_decay is 0.
    bias_correction: False leaves m and v as they are in place of m_hat and v_hat.
    grad_averaging: m = beta1 * m + (1 - beta1) * g; False drops the factor of g.
    Everything else: as for `adamw_step`. Norms are summed in fp64, in a fixed order.
    Source: You et al. 2020 (arXiv:1904.00962), algorithm 2; options and their defaults as in NVIDIA apex's FusedLAMB.
    """
    lists = (list(params), list(grads), list(exp_avgs), list(exp_avg_sqs), list(steps), list(master_params))
    check_hyperparameters(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
    _check(lists, lr, grad_norm, max_grad_norm, grad_scale, found_inf)
    if not lists[0]:
        return
    with torch.no_grad():
        step_unchecked(
            "lamb", lists, lr, *betas, eps, weight_decay, bool(bias_correction), bool(grad_averaging), bool(use_nvlamb),
            grad_norm, max_grad_norm, grad_scale, found_inf, backends.requested(backend),
        )  # fmt: skip


def check_hyperparameters(*, lr: Any, betas: Any, eps: Any, weight_decay: Any, max_grad_norm: Any = None) -> None:
    """Raises TypeError or ValueError, naming the argument, unless all are numbers in their ranges.

    The value of an lr that is a tensor is not looked at: that would wait for the device.
    """
    if isinstance(lr, Tensor):
        if lr.numel() != 1 or not lr.is_floating_point():
            raise ValueError(f"lr: expected a number or a floating-point Tensor [], got {lr.dtype} {list(lr.shape)}")
    else:
        _check_number("lr", lr, 0.0, math.inf)
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas: expected two numbers, got {betas!r}")
    for i, beta in enumerate(betas):
        _check_number(f"betas[{i}]", beta, 0.0, 1.0)
    _check_number("eps", eps, 0.0, math.inf)
    _check_number("weight_decay", weight_decay, 0.0, math.inf)
    if max_grad_norm is not None and max_grad_norm != math.inf:
        _check_number("max_grad_norm", max_grad_norm, 0.0, math.inf)
        if max_grad_norm == 0:
            raise ValueError("max_grad_norm: expected a number above 0, or None for no clipping, got 0")


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    """Raises unless low <= value < high."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not low <= value < high:
        wanted = f"a number in [{low:g}, {high:g})" if high < math.inf else f"a finite number of at least {low:g}"
        raise ValueError(f"{name}: expected {wanted}, got {value}")


def _check_device(name: str, tensor: Tensor, other: Tensor) -> None:
    if tensor.device != other.device:
        raise ValueError(f"{name}: expected device {other.device} (that of the first tensor), got {tensor.device}")


def _check_scalar(name: str, tensor: Tensor | None, like: Tensor) -> None:
    """Raises unless `tensor` is None or a floating-point tensor of one element on the device of `like`."""
    if tensor is None:
        return
    check_dtype(name, tensor, (torch.float32, torch.float64))
    if tensor.numel() != 1:
        raise ValueError(f"{name}: expected shape [] or [1], got {list(tensor.shape)}")
    _check_device(name, tensor, like)


def _check(
    lists: Lists,
    lr: float | Tensor,
    grad_norm: Tensor | None,
    max_grad_norm: float | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    params, grads, exp_avgs, exp_avg_sqs, steps, masters = lists
    columns = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "steps": steps}
    if masters:
        columns["master_params"] = masters
    for name, column in columns.items():
        if len(column) != len(params):
            raise ValueError(f"{name}: expected {len(params)} tensors (as params), got {len(column)}")
    if not params:
        return
    first = params[0]
    check_dtype("params[0]", first, _DTYPES)
    if masters and first.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"master_params: expected none, since params are {first.dtype}, got {len(masters)}")
    state_dtype = (wide_dtype(first.dtype),)
    dtypes = {
        "grads": (grads[0].dtype,) if grads[0].dtype in (first.dtype, state_dtype[0]) else (first.dtype,),
        "exp_avgs": state_dtype,
        "exp_avg_sqs": state_dtype,
        "steps": (torch.float32,),
        "master_params": state_dtype,
    }
    for i, p in enumerate(params):
        check_dtype(f"params[{i}]", p, (first.dtype,))
        _check_device(f"params[{i}]", p, first)
        for name, column in columns.items():
            check_dtype(f"{name}[{i}]", column[i], dtypes[name])
            shape = torch.Size() if name == "steps" else p.shape
            if column[i].shape != shape:
                raise ValueError(f"{name}[{i}]: expected shape {list(shape)}, got {list(column[i].shape)}")
            _check_device(f"{name}[{i}]", column[i], first)
    if isinstance(lr, Tensor):
        _check_device("lr", lr, first)
    if (grad_norm is None) != (max_grad_norm is None):
        missing = "grad_norm" if grad_norm is None else "max_grad_norm"
        raise ValueError(
            f"{missing}: expected a value, since clipping needs both grad_norm and max_grad_norm, got None"
        )
    for name, tensor in (("grad_norm", grad_norm), ("grad_scale", grad_scale), ("found_inf", found_inf)):
        _check_scalar(name, tensor, first)
