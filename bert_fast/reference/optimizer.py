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
from typing import NamedTuple

import torch
from torch import Tensor

from bert_fast.reference.precision import wide


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


class StepLists(NamedTuple):
    """What a step is made on, tensor by tensor: tensors of a parameter have its shape and one layout."""

    params: list[Tensor]  # of one dtype
    grads: list[Tensor]  # unchanged, all others are overwritten
    exp_avgs: list[Tensor]  # m, fp32 or fp64
    exp_avg_sqs: list[Tensor]  # v, likewise
    steps: list[Tensor]  # t, Tensors [], fp32
    master_params: list[Tensor]  # fp32, of half-precision params; an empty list for none


class StepOptions(NamedTuple):
    """What a step is given beside its lists."""

    lr: float | Tensor  # a Tensor [] or [1]: on the device of the lists
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias_correction: bool  # the next three are LAMB's; AdamW does not look at them
    grad_averaging: bool
    use_nvlamb: bool
    grad_norm: Tensor | None  # [], of all unscaled gradients; not None where max_grad_norm is not None
    max_grad_norm: float | None
    grad_scale: Tensor | None  # [] or [1], of torch.amp.GradScaler, and so is found_inf
    found_inf: Tensor | None


def adamw_step(lists: StepLists, a: StepOptions) -> None:
    """One step of AdamW, in place; tensors among the options are read on the host here."""
    if _skips(a.found_inf):
        return
    factor = _factor(a)
    for p, weight, grad, m, v, step in _rows(lists):
        u = _moments(m, v, wide(grad) * factor, step, a._replace(bias_correction=True, grad_averaging=True))
        weight -= float(a.lr) * (u + a.weight_decay * weight)
        p.copy_(weight)


def lamb_step(lists: StepLists, a: StepOptions) -> None:
    """One step of LAMB, in place; variants as in the description of this file."""
    if _skips(a.found_inf):
        return
    factor = _factor(a)
    for p, weight, grad, m, v, step in _rows(lists):
        u = _moments(m, v, wide(grad) * factor, step, a)
        u += a.weight_decay * weight
        ratio = 1.0
        if a.use_nvlamb or a.weight_decay != 0.0:
            weight_norm, u_norm = (float(t.double().square().sum().sqrt()) for t in (weight, u))
            if weight_norm != 0.0 and u_norm != 0.0:
                ratio = weight_norm / u_norm
        weight -= float(a.lr) * ratio * u
        p.copy_(weight)


def _skips(found_inf: Tensor | None) -> bool:
    return found_inf is not None and float(found_inf) != 0.0


def _factor(a: StepOptions) -> float:
    """What gradients are multiplied by."""
    factor = 1.0 if a.grad_scale is None else 1.0 / float(a.grad_scale)
    if a.grad_norm is not None and a.max_grad_norm is not None and float(a.grad_norm) > a.max_grad_norm:
        factor *= a.max_grad_norm / float(a.grad_norm)
    return factor


def _rows(lists: StepLists) -> Iterator[tuple[Tensor, ...]]:
    """(parameter, weight to step, gradient, m, v, step) of every tensor; the weight is a new one if none is wide."""
    for i, p in enumerate(lists.params):
        if lists.master_params:
            weight = lists.master_params[i]
            weight.copy_(torch.where(weight.to(p.dtype) == p, weight, wide(p)))
        else:
            weight = wide(p)
        yield p, weight, lists.grads[i], lists.exp_avgs[i], lists.exp_avg_sqs[i], lists.steps[i]


def _moments(m: Tensor, v: Tensor, g: Tensor, step: Tensor, a: StepOptions) -> Tensor:
    """Counts the step, updates m and v and returns m_hat / (sqrt(v_hat) + eps)."""
    step += 1.0
    m.mul_(a.beta1).add_(g, alpha=1.0 - a.beta1 if a.grad_averaging else 1.0)
    v.mul_(a.beta2).add_(g.square(), alpha=1.0 - a.beta2)
    t, correction1, correction2 = float(step), 1.0, 1.0
    if a.bias_correction:
        correction1, correction2 = 1.0 - _power(a.beta1, t), 1.0 - _power(a.beta2, t)
    return m / correction1 / ((v / correction2).sqrt() + a.eps)


def _power(beta: float, t: float) -> float:
    """beta^t as tensors have it: infinite where Python raises, of a count below 0 that somebody wrote."""
    try:
        return beta**t
    except (OverflowError, ZeroDivisionError):
        return math.inf
