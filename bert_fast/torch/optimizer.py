"""Steps of AdamW and LAMB from PyTorch's multi-tensor operators; formulas in `reference/optimizer.py`.

AdamW is PyTorch's own fused kernel, one pass. Gradients that are scaled, clipped or of another dtype than the weights
are copied first: the fused kernel would write what it unscales back. On the CPU lists are treated a portion at a time:
what one operator leaves in the cache the next one finds there, and temporaries stay small. Elsewhere whole lists keep
the number of launches small, and no value is read on the host.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from bert_fast.reference.optimizer import StepLists, StepOptions
from bert_fast.reference.precision import wide_dtype

# Below this the squares of elements lose digits in fp32, above fp32's range the sum is infinite: then fp64 is used.
_SMALLEST_FP32_NORM = 1e-15
_PORTION = 2**18  # elements that the CPU treats at a time: 1 MB of each tensor
_ROW = 4096  # elements whose squares are added in one go


def global_norm(grads: list[Tensor], grad_scale: Tensor | None) -> Tensor:
    """Norm of all gradients together, divided by grad_scale, as `reference.global_norm`."""
    dtype = torch.float64 if all(g.dtype == torch.float64 for g in grads) else torch.float32
    norm = torch.linalg.vector_norm(_norms(grads))
    return (norm if grad_scale is None else norm / grad_scale.double().reshape(())).to(dtype)


def adamw_step(lists: StepLists, a: StepOptions) -> None:
    """One step of AdamW in place, as `reference.adamw_step`."""
    params, grads, exp_avgs, _, steps, master_params = lists
    lr, found_inf = a.lr, a.found_inf
    if not params or _skips_on_host(params, found_inf):
        return
    factor = _factor(params[0].device, a)
    if params[0].device.type == "cpu":
        lr, found_inf = float(lr), None
    torch._foreach_add_(steps, 1.0)
    if found_inf is not None:
        torch._foreach_sub_(steps, [(found_inf.reshape(()) != 0).to(steps[0].dtype)] * len(steps))
    dtype = exp_avgs[0].dtype
    as_they_are = grads[0].dtype == dtype and (bool(master_params) or params[0].dtype == dtype)
    if as_they_are and isinstance(factor, float) and factor == 1.0:
        portions: Iterator[StepLists] = iter([lists])
    else:
        portions = _portions(_pieces(lists))
    for p, g, m, v, step, masters in portions:
        weights = _current(p, masters)
        torch._fused_adamw_(
            weights, _scaled(g, factor, weights[0].dtype), m, v, [], step, lr=lr, beta1=a.beta1, beta2=a.beta2,
            weight_decay=a.weight_decay, eps=a.eps, amsgrad=False, maximize=False,
            found_inf=None if found_inf is None else found_inf.reshape(()),
        )  # fmt: skip
        _round_into(p, weights)


def lamb_step(lists: StepLists, a: StepOptions) -> None:
    """One step of LAMB in place, as `reference.lamb_step`."""
    params, _, exp_avgs, exp_avg_sqs, steps, master_params = lists
    found_inf, weight_decay = a.found_inf, a.weight_decay
    if not params or _skips_on_host(params, found_inf):
        return
    on_host = params[0].device.type == "cpu"
    factor = _factor(params[0].device, a)
    rate = float(a.lr) if on_host else a.lr
    adaptive = a.use_nvlamb or weight_decay != 0.0
    changed = [*params, *exp_avgs, *exp_avg_sqs, *steps, *master_params]
    before = [] if found_inf is None or on_host else [t.clone() for t in changed]
    for p, g, m, v, step, masters in _portions(lists):
        weights = _current(p, masters)
        g = _scaled(g, factor, weights[0].dtype)
        torch._foreach_add_(step, 1.0)
        if a.grad_averaging:
            torch._foreach_lerp_(m, g, 1.0 - a.beta1)
        else:
            torch._foreach_mul_(m, a.beta1)
            torch._foreach_add_(m, g)
        torch._foreach_mul_(v, a.beta2)
        torch._foreach_addcmul_(v, g, g, value=1.0 - a.beta2)
        u = list(torch._foreach_sqrt(v))
        if a.bias_correction:
            first, root_second = _corrections(step, a.beta1, a.beta2, on_host)
            torch._foreach_div_(u, root_second)
            torch._foreach_add_(u, a.eps)
            torch._foreach_mul_(u, first)
        else:
            torch._foreach_add_(u, a.eps)
        u = list(torch._foreach_div(m, u))
        if weight_decay != 0.0:
            torch._foreach_add_(u, weights, alpha=weight_decay)
        if adaptive:
            torch._foreach_mul_(u, _ratios(weights, u, on_host))
        torch._foreach_mul_(u, rate)
        torch._foreach_sub_(weights, u)
        _round_into(p, weights)
    if before and found_inf is not None:
        skips = found_inf.reshape(()) != 0
        for new, old in zip(changed, before, strict=True):
            new.copy_(torch.where(skips, old, new))


def _skips_on_host(params: list[Tensor], found_inf: Tensor | None) -> bool:
    """Whether to change nothing, where asking costs no device sync."""
    return found_inf is not None and params[0].device.type == "cpu" and float(found_inf) != 0.0


def _factor(device: torch.device, a: StepOptions) -> float | Tensor:
    """What gradients are multiplied by: a number on the CPU or where nothing is to be done, else a Tensor []."""
    grad_norm, max_grad_norm, grad_scale = a.grad_norm, a.max_grad_norm, a.grad_scale
    if grad_scale is None and (grad_norm is None or max_grad_norm is None):
        return 1.0
    factor = torch.ones((), dtype=torch.float64, device=device)
    if grad_norm is not None and max_grad_norm is not None:
        norm = grad_norm.double().reshape(())
        factor = torch.where(norm > max_grad_norm, max_grad_norm / norm, factor)
    if grad_scale is not None:
        factor = factor / grad_scale.double().reshape(())
    return float(factor) if device.type == "cpu" else factor


def _portions(lists: StepLists) -> Iterator[StepLists]:
    """Matching parts of the lists, on the CPU of few elements or one tensor; an empty list has empty parts."""
    start, elements = 0, 0
    for i, t in enumerate(lists.params):
        elements += t.numel()
        if t.device.type == "cpu" and elements >= _PORTION:
            yield StepLists._make([tensors[start : i + 1] for tensors in lists])
            start, elements = i + 1, 0
    if start < len(lists.params):
        yield StepLists._make([tensors[start:] for tensors in lists])


def _pieces(lists: StepLists) -> StepLists:
    """The lists with flat pieces of large tensors in their place, on the CPU; for steps that treat elements alike."""
    params, steps = lists.params, lists.steps
    if params[0].device.type != "cpu" or hasattr(params[0], "full_tensor"):
        return lists
    cut = {name: tensors for name, tensors in lists._asdict().items() if name != "steps"}
    pieces: dict[str, list[Tensor]] = {name: [] for name in cut}
    piece_steps: list[Tensor] = []
    for i, p in enumerate(params):
        flats = {name: tensors[i] for name, tensors in cut.items() if tensors}
        if p.numel() > _PORTION:
            flats = {name: t.as_strided((t.numel(),), (1,)) for name, t in flats.items()}
        for start in range(0, p.numel(), _PORTION):
            piece_steps.append(steps[i])
            for name, flat in flats.items():
                pieces[name].append(flat[start : start + _PORTION] if p.numel() > _PORTION else flat)
    return StepLists(**pieces, steps=piece_steps)


def _current(params: list[Tensor], masters: list[Tensor]) -> list[Tensor]:
    """What is stepped: the masters, after they took over parameters that were written to; without any, wide params."""
    if not masters:
        return [p.to(wide_dtype(p.dtype)) for p in params]
    for p, weight in zip(params, masters, strict=True):
        rounded = weight.to(p.dtype)
        if not _equal_on_host(rounded, p):
            weight.copy_(torch.where(rounded == p, weight, p))
    return masters


def _equal_on_host(rounded: Tensor, p: Tensor) -> bool:
    """Whether all bits are equal, where asking costs no device sync: the quick answer nearly always."""
    if p.device.type != "cpu" or hasattr(p, "full_tensor"):
        return False
    p, both = p.detach(), (rounded, p)
    if p.numel() and p.numel() % 4 == 0 and all(t.is_contiguous() and t.storage_offset() % 4 == 0 for t in both):
        # In fours: a third of the time. Flat, since a dimension of one element may have any stride.
        return torch.equal(rounded.view(-1).view(torch.int64), p.view(-1).view(torch.int64))
    return torch.equal(rounded.view(torch.int16), p.view(torch.int16))


def _scaled(grads: list[Tensor], factor: float | Tensor, dtype: torch.dtype) -> list[Tensor]:
    """factor * grads in the given dtype; the gradients themselves where that is what they are."""
    wide = [g.to(dtype) for g in grads]
    if isinstance(factor, Tensor):  # comparing it would wait for the device
        return list(torch._foreach_mul(wide, factor.to(dtype)))
    return wide if factor == 1.0 else list(torch._foreach_mul(wide, factor))


def _round_into(params: list[Tensor], weights: list[Tensor]) -> None:
    if params[0] is not weights[0]:
        torch._foreach_copy_(params, weights)


def _norms(tensors: list[Tensor]) -> Tensor:
    """Norms of the tensors, fp64 [n]."""
    if tensors[0].device.type != "cpu":
        return _whole(torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64)))
    norms = [_norm_on_host(t) for t in tensors]
    for i, norm in enumerate(norms):
        if not _SMALLEST_FP32_NORM < float(norm) < math.inf:
            norms[i] = _whole(torch.linalg.vector_norm(tensors[i], dtype=torch.float64))
    return torch.stack([norm.double() for norm in norms])


def _norm_on_host(x: Tensor) -> Tensor:
    """The norm of x, in two stages.

    PyTorch's CPU operator adds squares one after another in fp32: over the 12 million elements of a table it is off
    by 5e-4 (measured); rows of 4,096 elements whose norms are joined in fp64 are off by 1e-9, in the same time.
    """
    dtype = wide_dtype(x.dtype)
    if x.numel() <= _ROW or hasattr(x, "full_tensor"):
        return _whole(torch.linalg.vector_norm(x, dtype=dtype))
    flat = x.flatten()
    end = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:end].view(-1, _ROW), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[end:], dtype=dtype)
    return torch.linalg.vector_norm(torch.cat([rows, rest[None]]), dtype=torch.float64)


def _whole(x: Tensor) -> Tensor:
    """x itself; of a DTensor, as FSDP2 makes them, its value over all processes."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _ratios(weights: list[Tensor], updates: list[Tensor], on_host: bool) -> list[float] | list[Tensor]:
    """Trust ratio of every tensor: numbers on the host, else Tensors []."""
    weight_norms, update_norms = _norms(weights), _norms(updates)
    defined = (weight_norms != 0) & (update_norms != 0)
    ratios = torch.where(defined, weight_norms / update_norms, 1.0)
    return ratios.tolist() if on_host else list(ratios.to(weights[0].dtype).unbind())


def _corrections(
    steps: list[Tensor], beta1: float, beta2: float, on_host: bool
) -> tuple[list[float], list[float]] | tuple[list[Tensor], list[Tensor]]:
    """1 - beta1^t and sqrt(1 - beta2^t) of every tensor: numbers on the host, else Tensors []."""
    t = torch.stack(steps).double()
    first, root_second = 1.0 - beta1**t, (1.0 - beta2**t).sqrt()
    if on_host:
        return first.tolist(), root_second.tolist()
    return list(first.float().unbind()), list(root_second.float().unbind())
