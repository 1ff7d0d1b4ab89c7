"""Steps of AdamW and LAMB over lists of tensors, and the global norm of gradients, on any back-end.

Registered as `bert_fast::adamw_step`, `lamb_step` and `global_norm`, with the lists that they change declared, so that
compiled graphs may hold them. Outside of those the implementation is called directly: boxing a thousand tensors for
PyTorch's dispatcher takes as long as the step itself, and there is no gradient to record. Either way the version
counters of what changed go up, so that autograd notices when a saved weight was stepped.

`bert_fast.optim` wraps these functions as `torch.optim.Optimizer`s.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bert_fast import backend as backends
from bert_fast.checks import check_dtype, check_flag, check_tensor
from bert_fast.ops._optimizer_lists import (
    DTYPES,
    Lists,
    as_list,
    as_lists,
    check_device,
    check_hyperparameters,
    check_lists,
    check_memory,
    sharing,
    with_one_layout,
)
from bert_fast.ops._register import custom_op

__all__ = ["adamw_step", "global_norm", "lamb_step", "step_unchecked", "unchecked_norm"]

_OP = "optimizer"
_CHANGED = ("params", "exp_avgs", "exp_avg_sqs", "steps", "master_params")
_PLAIN = frozenset({Tensor, nn.Parameter})


def _module(tensors: Sequence[Tensor], backend: str) -> Any:
    unusual = set(map(type, tensors)) - _PLAIN
    tensor_class = unusual.pop() if unusual else Tensor
    return backends.resolve(_OP, backends.OpSpec.of(tensors[0], tensor_class=tensor_class), backend)


def _run_norm(grads: list[Tensor], grad_scale: Tensor | None, backend: str) -> Tensor:
    return _module(grads, backend).global_norm(grads, grad_scale)


def _run_step(kind: str, lists: Lists, copies: list[tuple[Tensor, Tensor]], *arguments: Any) -> None:
    """`<kind>_step(*lists, *arguments)` of the back-end that the last argument asks for; then copies go back."""
    *arguments_of_step, backend = arguments
    params, grads, exp_avgs, exp_avg_sqs, steps, masters = lists
    getattr(_module([*params, *grads], backend), f"{kind}_step")(*lists, *arguments_of_step)
    for original, copy in copies:
        original.copy_(copy)
    changed = [*params, *exp_avgs, *exp_avg_sqs, *steps, *masters]
    if torch.is_inference_mode_enabled() or params[0].is_inference():
        changed = [t for t in changed if not t.is_inference()]
    torch.autograd.graph.increment_version(changed)


def _check_norm(grads: list[Tensor], grad_scale: Tensor | None) -> None:
    if not grads:
        raise ValueError("grads: expected at least one tensor, got an empty list")
    for i, g in enumerate(grads):
        check_dtype(f"grads[{i}]", g, DTYPES)
        check_device(f"grads[{i}]", g, grads[0])
        if g.layout != torch.strided:
            raise ValueError(f"grads[{i}]: expected a dense tensor, got layout {g.layout}")
        check_memory(f"grads[{i}]", g)
    _check_scalar("grad_scale", grad_scale, grads[0])


def _check_sharing(lists: Lists) -> None:
    """Raises ValueError where two of the tensors that are written lie in the same memory."""
    if torch.compiler.is_compiling():  # traced tensors have no addresses
        return
    names = ("params", None, "exp_avgs", "exp_avg_sqs", "steps", "master_params")
    written = [(name, i, t) for name, column in zip(names, lists, strict=True) if name for i, t in enumerate(column)]
    shared = sharing([t for _, _, t in written])
    if shared is not None:
        one, other = (f"{written[place][0]}[{written[place][1]}]" for place in shared)
        raise ValueError(f"{other}: expected memory of its own, got that of {one}")


def _check_scalar(name: str, tensor: Tensor | None, like: Tensor) -> None:
    """Raises unless `tensor` is None or a floating-point tensor of one element on the device of `like`."""
    if tensor is None:
        return
    check_tensor(name, tensor)
    check_dtype(name, tensor, (torch.float32, torch.float64))
    if tensor.numel() != 1:
        raise ValueError(f"{name}: expected shape [] or [1], got {list(tensor.shape)}")
    check_device(name, tensor, like)
    check_memory(name, tensor)


@custom_op("global_norm")
def _global_norm(grads: list[Tensor], grad_scale: Tensor | None, backend: str) -> Tensor:
    _check_norm(grads, grad_scale)
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
    _checked_step(
        _run_step, "adamw", (params, grads, exp_avgs, exp_avg_sqs, steps, master_params),
        lr if lr_tensor is None else lr_tensor, (beta1, beta2), eps, weight_decay, (),
        grad_norm, max_grad_norm, grad_scale, found_inf, backend,
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
    _checked_step(
        _run_step, "lamb", (params, grads, exp_avgs, exp_avg_sqs, steps, master_params),
        lr if lr_tensor is None else lr_tensor, (beta1, beta2), eps, weight_decay,
        (bias_correction, grad_averaging, use_nvlamb), grad_norm, max_grad_norm, grad_scale, found_inf, backend,
    )  # fmt: skip


for _step in (_adamw_step, _lamb_step):
    _step.register_fake(lambda *arguments: None)
_REGISTERED: dict[str, Callable[..., None]] = {"adamw": _adamw_step, "lamb": _lamb_step}


def step_unchecked(
    kind: str, lists: Lists, copies: list[tuple[Tensor, Tensor]], lr: float | Tensor, *arguments: Any
) -> None:
    """One step of `kind` ("adamw" or "lamb"), with arguments as the op has them, for callers that asked `check_lists`.

    lists, copies: of `with_one_layout`.
    """
    if torch.compiler.is_compiling():
        is_tensor = isinstance(lr, Tensor)
        _REGISTERED[kind](*lists, 0.0 if is_tensor else lr, lr if is_tensor else None, *arguments)
    else:
        _run_step(kind, lists, copies, lr, *arguments)


def _checked_step(
    run: Callable[..., None],
    kind: str,
    lists: Lists,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    switches: tuple[bool, ...],
    grad_norm: Tensor | None,
    max_grad_norm: float | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    backend: str,
) -> None:
    """`run` (`step_unchecked` or, in a registered op, what it leads to) after all checks.

    switches: the arguments that only LAMB takes.
    """
    check_hyperparameters(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
    check_lists(lists)
    if not lists[0]:
        return
    _check_sharing(lists)
    first = lists[0][0]
    if isinstance(lr, Tensor):
        check_device("lr", lr, first)
    if (grad_norm is None) != (max_grad_norm is None):
        missing = "grad_norm" if grad_norm is None else "max_grad_norm"
        raise ValueError(
            f"{missing}: expected a value, since clipping needs both grad_norm and max_grad_norm, got None"
        )
    for name, tensor in (("grad_norm", grad_norm), ("grad_scale", grad_scale), ("found_inf", found_inf)):
        _check_scalar(name, tensor, first)
    if first.is_meta:  # nothing there to change
        return
    with torch.no_grad():
        run(
            kind, *with_one_layout(lists), lr, *betas, eps, weight_decay, *switches,
            grad_norm, max_grad_norm, grad_scale, found_inf, backend,
        )  # fmt: skip


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
    grads = as_list("grads", grads)
    _check_norm(grads, grad_scale)
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
    Any strides; what is overwritten shares no memory. Not differentiable. Deterministic. No sync on CUDA, except on the
        reference. Precision: fp32 arithmetic (fp64 for fp64 params).
    Source: Loshchilov & Hutter 2019 (arXiv:1711.05101), algorithm 2, as torch.optim.AdamW.
    """
    lists = as_lists(params, grads, exp_avgs, exp_avg_sqs, steps, master_params)
    _checked_step(
        step_unchecked, "adamw", lists, lr, betas, eps, weight_decay, (), grad_norm, max_grad_norm, grad_scale,
        found_inf, backends.requested(backend),
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
    lists = as_lists(params, grads, exp_avgs, exp_avg_sqs, steps, master_params)
    check_flag("bias_correction", bias_correction)
    check_flag("grad_averaging", grad_averaging)
    check_flag("use_nvlamb", use_nvlamb)
    switches = bias_correction, grad_averaging, use_nvlamb
    _checked_step(
        step_unchecked, "lamb", lists, lr, betas, eps, weight_decay, switches, grad_norm, max_grad_norm, grad_scale,
        found_inf, backends.requested(backend),
    )  # fmt: skip
