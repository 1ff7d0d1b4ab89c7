"""Steps of AdamW and LAMB, and the global norm of gradients: one tensor after another, as the papers write them.

Of every parameter p with gradient grad, moments m and v (0 at first) and step count t (counted up first):

    g = grad / grad_scale * clip        clip = max_grad_norm / norm where norm > max_grad_norm, else 1
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g^2
    m_hat = m / (1 - beta1^t);   v_hat = v / (1 - beta2^t)

AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2; as torch.optim.AdamW has it):

    p = p - lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * p)

LAMB (You et al. 2020, arXiv:1904.00962, algorithm 2; variants as NVIDIA apex's FusedLAMB names them):

    u = m_hat / (sqrt(v_hat) + eps) + weight_decay * p
    p = p - lr * ratio * u              ratio = |p| / |u| per tensor, 1 where either norm is 0

    bias_correction=False   m_hat = m and v_hat = v
    grad_averaging=False    m = beta1 * m + g
    use_nvlamb=False        ratio = 1 where weight_decay is 0 (biases and LayerNorm, usually); True: no such exception

The paper's phi is the identity. `norm` is that of all gradients together, unscaled; no epsilon is added to it.

Half-precision parameters may have master weights in fp32: the step is made on those and p is their rounded copy. An
element of p that is not that any more was written to since (loaded, averaged, set) and takes the master's place. Where
found_inf is not 0 nothing changes, t included.

Precision: a tensor's arithmetic is that of its moments, fp32 or (for fp64 parameters) fp64; norms are fp64.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from bert_fast.reference.precision import wide

__all__ = ["adamw_step", "global_norm", "is_dense", "lamb_step"]


def is_dense(x: Tensor) -> bool:
    """Whether the elements of x fill a piece of memory without gaps or overlaps, in whatever order."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def global_norm(grads: list[Tensor], grad_scale: Tensor | None) -> Tensor:
    """The 2-norm of all gradients together, divided by grad_scale.

    grads (Tensors of any shapes, at least one). Returns: Tensor [], fp32; fp64 where all gradients are.
    """
    total = sum((g.double().square().sum() for g in grads), torch.zeros((), dtype=torch.float64))
    norm = total.sqrt() if grad_scale is None else total.sqrt() / grad_scale.double().reshape(())
    return norm.to(torch.float64 if all(g.dtype == torch.float64 for g in grads) else torch.float32)


def adamw_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    master_params: list[Tensor],
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_norm: Tensor | None,
    max_grad_norm: float | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """One step of AdamW, in place.

    params (Tensors of any shapes, one dtype), grads (Tensors of the same shapes): unchanged are the gradients only.
    exp_avgs, exp_avg_sqs (Tensors as params, fp32 or fp64): m and v. steps (Tensors [], fp32): t.
    master_params (Tensors as params, fp32): of half-precision params; an empty list for none.
    lr (float or Tensor []), beta1, beta2, eps, weight_decay: as in the formulas.
    grad_norm (Tensor [] or None): norm of all unscaled gradients; not None where max_grad_norm is not None.
    grad_scale, found_inf (Tensors [] or [1], or None): of torch.amp.GradScaler; read on the host here.
    """
    if _skips(found_inf):
        return
    factor = _factor(grad_norm, max_grad_norm, grad_scale)
    rows = _rows(params, grads, exp_avgs, exp_avg_sqs, steps, master_params)
    for p, weight, grad, m, v, step in rows:
        u = _moments(m, v, wide(grad) * factor, step, beta1, beta2, 1.0 - beta1, eps, True)
        weight -= float(lr) * (u + weight_decay * weight)
        p.copy_(weight)


def lamb_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    master_params: list[Tensor],
    lr: float | Tensor,
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
) -> None:
    """One step of LAMB, in place; arguments as for `adamw_step`, variants as in the description of this file."""
    if _skips(found_inf):
        return
    factor = _factor(grad_norm, max_grad_norm, grad_scale)
    rows = _rows(params, grads, exp_avgs, exp_avg_sqs, steps, master_params)
    grad_weight = 1.0 - beta1 if grad_averaging else 1.0
    for p, weight, grad, m, v, step in rows:
        u = _moments(m, v, wide(grad) * factor, step, beta1, beta2, grad_weight, eps, bias_correction)
        u += weight_decay * weight
        ratio = 1.0
        if use_nvlamb or weight_decay != 0.0:
            weight_norm, u_norm = (float(t.double().square().sum().sqrt()) for t in (weight, u))
            if weight_norm != 0.0 and u_norm != 0.0:
                ratio = weight_norm / u_norm
        weight -= float(lr) * ratio * u
        p.copy_(weight)


def _skips(found_inf: Tensor | None) -> bool:
    return found_inf is not None and float(found_inf) != 0.0


def _factor(grad_norm: Tensor | None, max_grad_norm: float | None, grad_scale: Tensor | None) -> float:
    """What gradients are multiplied by."""
    factor = 1.0 if grad_scale is None else 1.0 / float(grad_scale)
    if grad_norm is not None and max_grad_norm is not None and float(grad_norm) > max_grad_norm:
        factor *= max_grad_norm / float(grad_norm)
    return factor


def _rows(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    master_params: list[Tensor],
) -> Iterator[tuple[Tensor, ...]]:
    """(parameter, weight to step, gradient, m, v, step) of every tensor; the weight is a new one if none is wide."""
    for i, p in enumerate(params):
        if master_params:
            weight = master_params[i]
            weight.copy_(torch.where(weight.to(p.dtype) == p, weight, wide(p)))
        else:
            weight = wide(p)
        yield p, weight, grads[i], exp_avgs[i], exp_avg_sqs[i], steps[i]


def _moments(
    m: Tensor, v: Tensor, g: Tensor, step: Tensor, beta1: float, beta2: float, grad_weight: float, eps: float,
    bias_correction: bool,
) -> Tensor:  # fmt: skip
    """Counts the step, updates m and v and returns m_hat / (sqrt(v_hat) + eps)."""
    step += 1.0
    m.mul_(beta1).add_(g, alpha=grad_weight)
    v.mul_(beta2).add_(g.square(), alpha=1.0 - beta2)
    t = float(step)
    correction1, correction2 = (1.0 - _power(beta1, t), 1.0 - _power(beta2, t)) if bias_correction else (1.0, 1.0)
    return m / correction1 / ((v / correction2).sqrt() + eps)


def _power(beta: float, t: float) -> float:
    """beta^t as tensors have it: infinite where Python raises, of a count below 0 that somebody wrote."""
    try:
        return beta**t
    except (OverflowError, ZeroDivisionError):
        return math.inf
