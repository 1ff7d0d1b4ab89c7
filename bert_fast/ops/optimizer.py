"""Steps of AdamW and LAMB over lists of tensors, and the global norm of gradients, on any back-end.

Registered as `bert_fast::adamw_step`, `lamb_step` and `global_norm`, with the lists that they change declared, so that
compiled graphs may hold them. Outside of those the implementation is called directly: boxing a thousand tensors for
PyTorch's dispatcher takes as long as the step itself, and there is no gradient to record. Either way the version
counters of what changed go up, so that autograd notices when a saved weight was stepped.

`bert_fast.optim` wraps these functions as `torch.optim.Optimizer`s.
"""

from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from bert_fast.backend import OpSpec, requested, resolve
from bert_fast.checks import check_dtype, check_flag, check_tensor
from bert_fast.ops._define import declaration
from bert_fast.ops._memory import name_call
from bert_fast.ops._optimizer_lists import (
    DTYPES,
    as_list,
    as_lists,
    check_betas,
    check_device,
    check_hyperparameters,
    check_lists,
    check_memory,
    sharing,
    with_one_layout,
)
from bert_fast.ops._register import Op, custom_op
from bert_fast.reference.optimizer import StepLists, StepOptions

_OP = "optimizer"
_CHANGED = ("params", "exp_avgs", "exp_avg_sqs", "steps", "master_params")
_ADAMW = {"bias_correction": True, "grad_averaging": True, "use_nvlamb": False}  # LAMB's switches, as AdamW is
_PLAIN = frozenset({Tensor, nn.Parameter})


def _module(tensors: Sequence[Tensor], backend: str) -> Any:
    unusual = set(map(type, tensors)) - _PLAIN
    tensor_class = unusual.pop() if unusual else Tensor
    return resolve(_OP, OpSpec.of(tensors[0], tensor_class=tensor_class), backend)


def _run_norm(grads: list[Tensor], grad_scale: Tensor | None, backend: str) -> Tensor:
    try:
        return _module(grads, backend).global_norm(grads, grad_scale)
    except torch.OutOfMemoryError as error:
        name_call(error, "global_norm", grads)
        raise


def _run_step(kind: str, lists: StepLists, copies: list[tuple[Tensor, Tensor]], a: StepOptions, backend: str) -> None:
    """`<kind>_step(lists, a)` of the back-end; then copies go back."""
    params, grads, exp_avgs, exp_avg_sqs, steps, masters = lists
    try:
        getattr(_module([*params, *grads], backend), f"{kind}_step")(lists, a)
    except torch.OutOfMemoryError as error:
        name_call(error, f"{kind}_step", params)
        raise
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


def _check_sharing(lists: StepLists) -> None:
    """Raises ValueError where two of the tensors that are written lie in the same memory."""
    if torch.compiler.is_compiling():  # traced tensors have no addresses
        return
    written = [(name, i, t) for name in _CHANGED for i, t in enumerate(getattr(lists, name))]
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


def _names(kind: str) -> list[str]:
    """The options that the op of this kind has, in its order."""
    switches = ("bias_correction", "grad_averaging", "use_nvlamb")
    return [name for name in StepOptions._fields if kind == "lamb" or name not in switches]


def _registered(kind: str) -> Op:
    """The op of `adamw_step` or `lamb_step`."""
    names, types = _names(kind), get_type_hints(StepOptions)

    def run(*given: Any) -> None:
        lists, (lr, lr_tensor, *options, backend) = StepLists._make(given[:6]), given[6:]
        values = dict(zip(names, (lr if lr_tensor is None else lr_tensor, *options), strict=True))
        _checked_step(_run_step, kind, lists, StepOptions(**{**_ADAMW, **values}), backend)

    # A schema has no union of number and tensor: lr comes as a number, and as a tensor that takes its place.
    arguments = get_type_hints(StepLists) | {"lr": float, "lr_tensor": Tensor | None}
    arguments |= {name: types[name] for name in names[1:]} | {"backend": str}
    op = Op(f"{kind}_step", run, {}, None, None, mutates_args=_CHANGED, declaration=declaration(arguments, 0))
    op.register_fake(lambda *given: None)
    return op


def step_unchecked(
    kind: str, lists: StepLists, copies: list[tuple[Tensor, Tensor]], a: StepOptions, backend: str
) -> None:
    """One step of `kind` ("adamw" or "lamb"), for callers that asked `check_lists`.

    lists, copies: of `with_one_layout`.
    """
    if torch.compiler.is_compiling():
        is_tensor = isinstance(a.lr, Tensor)
        options = [getattr(a, name) for name in _names(kind)[1:]]
        _REGISTERED[kind](*lists, 0.0 if is_tensor else a.lr, a.lr if is_tensor else None, *options, backend)
    else:
        _run_step(kind, lists, copies, a, backend)


def _checked_step(run: Callable[..., None], kind: str, lists: StepLists, a: StepOptions, backend: str) -> None:
    """`run` (`step_unchecked` or, in a registered op, what it leads to) after all checks."""
    check_hyperparameters(
        lr=a.lr, betas=(a.beta1, a.beta2), eps=a.eps, weight_decay=a.weight_decay, max_grad_norm=a.max_grad_norm
    )
    check_lists(lists)
    if not lists.params:
        return
    _check_sharing(lists)
    first = lists.params[0]
    if isinstance(a.lr, Tensor):
        check_device("lr", a.lr, first)
    if (a.grad_norm is None) != (a.max_grad_norm is None):
        missing = "grad_norm" if a.grad_norm is None else "max_grad_norm"
        raise ValueError(
            f"{missing}: expected a value, since clipping needs both grad_norm and max_grad_norm, got None"
        )
    for name in ("grad_norm", "grad_scale", "found_inf"):
        _check_scalar(name, getattr(a, name), first)
    if first.is_meta:  # nothing there to change
        return
    with torch.no_grad():
        run(kind, *with_one_layout(lists), a, backend)


_REGISTERED = {kind: _registered(kind) for kind in ("adamw", "lamb")}


def unchecked_norm(grads: list[Tensor], grad_scale: Tensor | None, backend: str) -> Tensor:
    """`global_norm` for callers that vouch for their list."""
    return (_global_norm if torch.compiler.is_compiling() else _run_norm)(grads, grad_scale, backend)


def global_norm(grads: Sequence[Tensor], *, grad_scale: Tensor | None = None, backend: str | None = None) -> Tensor:
    """sqrt(sum of grad^2 over all gradients) / grad_scale: the norm that clipping compares with.

    Args:
        grads (Tensors of any shapes, fp32/fp16/bf16/fp64, at least one, on one device): dtypes may mix.
        grad_scale (Tensor [] or [1], fp32, or None): what the loss was multiplied by.
        backend: "triton", "torch" or "reference"; None takes the first that can run the call.

    Returns:
        Tensor [], fp32 (fp64 where all gradients are), on the gradients' device.

    Raises:
        TypeError, ValueError: the message names the argument.
        BackendError: the named back-end cannot run the call.

    Not differentiable. Deterministic: two-stage sums, no atomics. No sync on CUDA, except on the reference.
    Precision: sums in fp64, so no finite gradient overflows its square.

    Example:
        >>> ops.global_norm([torch.tensor([3.0]), torch.tensor([4.0])]).item()
        5.0
    """
    grads = as_list("grads", grads)
    _check_norm(grads, grad_scale)
    # The first gradient chooses the back-end, so fp64 comes first: Triton's kernels do not take it.
    grads.sort(key=lambda grad: grad.dtype != torch.float64)
    with torch.no_grad():
        return unchecked_norm(grads, grad_scale, requested(backend))


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

    Args:
        params (Tensors of any shapes, one of fp32/fp16/bf16/fp64, one device): overwritten.
        grads (Tensors shaped as params, of their dtype or fp32): unchanged.
        exp_avgs (Tensors shaped as params, fp32; fp64 for fp64 params): m, overwritten.
        exp_avg_sqs (Tensors shaped as params, dtypes of exp_avgs): v, overwritten.
        steps (Tensors [], fp32): how many steps each parameter has made; counted up.
        master_params (Tensors shaped as params, fp32; none, or one for each of half-precision params): the step is made
            on these and params are their rounded copies. Overwritten.
        lr (float, or floating-point Tensor [] on the device): a tensor may change between replays of a CUDA graph.
        betas: decay of m and of v.
        eps: added to the root of v_hat.
        weight_decay: times lr, by which parameters shrink.
        grad_norm (Tensor [] or None): gradients are multiplied by max_grad_norm / grad_norm where grad_norm >
            max_grad_norm. Both or neither; `global_norm` of everything that is clipped together.
        max_grad_norm: the largest norm.
        grad_scale (Tensors [] or [1], fp32, or None): of `torch.amp.GradScaler`: gradients are divided by it.
        found_inf (Tensors [] or [1], fp32, or None): of the scaler too: where it is not 0 nothing changes at all.
        backend: "triton", "torch" or "reference"; None takes the first that can run the call.

    Raises:
        TypeError, ValueError: the message names the argument.
        BackendError: the named back-end cannot run the call.

    Any strides; what is overwritten shares no memory. Not differentiable. Deterministic. No sync on CUDA, except on the
        reference. Precision: fp32 arithmetic (fp64 for fp64 params).
    Source: Loshchilov & Hutter 2019 (arXiv:1711.05101), algorithm 2, as torch.optim.AdamW.

    Example:
        >>> p, m, v, step = torch.ones(2), torch.zeros(2), torch.zeros(2), torch.tensor(0.0)
        >>> ops.adamw_step([p], [torch.ones(2)], [m], [v], [step], lr=0.1, weight_decay=0.0)
        >>> [round(number, 4) for number in p.tolist()], step.item()
        ([0.9, 0.9], 1.0)
    """
    lists = as_lists(params, grads, exp_avgs, exp_avg_sqs, steps, master_params)
    beta1, beta2 = check_betas(betas)
    a = StepOptions(
        lr, beta1, beta2, eps, weight_decay, **_ADAMW, grad_norm=grad_norm, max_grad_norm=max_grad_norm,
        grad_scale=grad_scale, found_inf=found_inf,
    )  # fmt: skip
    _checked_step(step_unchecked, "adamw", lists, a, requested(backend))


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

    Args:
        params (Tensors): this and what is not listed here as for `adamw_step`.
        grads (Tensors): as there.
        exp_avgs (Tensors): as there.
        exp_avg_sqs (Tensors): as there.
        steps (Tensors []): as there.
        master_params (Tensors): as there.
        lr (float or Tensor []): as there.
        betas: as there.
        eps: as there.
        weight_decay: as there.
        bias_correction: False leaves m and v as they are in place of m_hat and v_hat.
        grad_averaging: m = beta1 * m + (1 - beta1) * g; False drops the factor of g.
        use_nvlamb: a trust ratio where weight_decay is 0, too.
        grad_norm (Tensor [] or None): as there.
        max_grad_norm: as there.
        grad_scale (Tensor or None): as there.
        found_inf (Tensor or None): as there.
        backend: "triton", "torch" or "reference"; None takes the first that can run the call.

    Raises:
        TypeError, ValueError, BackendError: as for `adamw_step`.

    Norms are summed in fp64, in a fixed order.
    Source: You et al. 2020 (arXiv:1904.00962), algorithm 2; options and their defaults as in NVIDIA apex's FusedLAMB.

    Example:
        >>> p, m, v, step = torch.ones(2), torch.zeros(2), torch.zeros(2), torch.tensor(0.0)
        >>> ops.lamb_step([p], [torch.ones(2)], [m], [v], [step], lr=0.1, weight_decay=0.0)
        >>> step.item()
        1.0
    """
    lists = as_lists(params, grads, exp_avgs, exp_avg_sqs, steps, master_params)
    check_flag("bias_correction", bias_correction)
    check_flag("grad_averaging", grad_averaging)
    check_flag("use_nvlamb", use_nvlamb)
    beta1, beta2 = check_betas(betas)
    a = StepOptions(
        lr, beta1, beta2, eps, weight_decay, bias_correction, grad_averaging, use_nvlamb, grad_norm, max_grad_norm,
        grad_scale, found_inf,
    )  # fmt: skip
    _checked_step(step_unchecked, "lamb", lists, a, requested(backend))
