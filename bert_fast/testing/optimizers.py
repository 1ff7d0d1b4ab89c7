"""Optimizer steps written out a second time, independently of the reference, and lists of tensors to try steps on."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from bert_fast.reference.optimizer import StepLists, StepOptions


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters and switches of a step; the last four are LAMB's alone."""

    lr: float = 1e-2
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.01
    max_grad_norm: float | None = None
    grad_scale: float | None = None
    bias_correction: bool = True
    grad_averaging: bool = True
    use_nvlamb: bool = False

    def __str__(self) -> str:
        """What differs from the defaults: tests are named by it."""
        values = ((at.name, getattr(self, at.name), at.default) for at in fields(self))
        return ", ".join(f"{name}={value}" for name, value, default in values if value != default) or "defaults"

    def options(
        self, grad_norm: Tensor | None = None, grad_scale: Tensor | None = None, found_inf: Tensor | None = None
    ) -> StepOptions:
        """What a back-end's step takes beside its lists."""
        return StepOptions(
            self.lr, self.beta1, self.beta2, self.eps, self.weight_decay, self.bias_correction, self.grad_averaging,
            self.use_nvlamb, grad_norm, self.max_grad_norm, grad_scale, found_inf,
        )  # fmt: skip


@dataclass
class Lists:
    """Arguments of a step: parameters, gradients and state, tensor by tensor."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    master_params: list[Tensor] = field(default_factory=list)

    @property
    def all(self) -> StepLists:
        """The lists as back-ends take them."""
        return StepLists(self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, self.steps, self.master_params)

    def copy(self) -> "Lists":
        """New tensors with the same values and layouts."""
        return Lists(*([t.clone() for t in tensors] for tensors in self.all))

    def to(self, dtype: torch.dtype) -> "Lists":
        """The same step in another precision: the weights that are stepped become the parameters, without masters."""
        weights = self.master_params or self.params
        params, grads, exp_avgs, exp_avg_sqs = (
            [t.to(dtype, copy=True) for t in column]
            for column in (weights, self.grads, self.exp_avgs, self.exp_avg_sqs)
        )
        return Lists(params, grads, exp_avgs, exp_avg_sqs, [t.clone() for t in self.steps])


def random_lists(
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype = torch.float32,
    *,
    master: bool = False,
    grad_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Lists:
    """Parameters some steps into training, each at another step; masters lie off their rounded copies.

    They lie on the far side from 0, so that parameters are their rounded and their truncated copies: Triton's
    interpreter truncates to bf16, and what is not a copy would be taken for a parameter that somebody wrote to.
    """
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(scale: float, to: torch.dtype) -> list[Tensor]:
        return [(torch.randn(*shape, device=device) * scale).to(to) for shape in shapes]

    params = normal(1.0, dtype)
    # Half a unit in the last place is at least a quarter of eps, relatively.
    masters = (
        [p.float() * (1 + torch.rand_like(p.float()) * torch.finfo(dtype).eps / 4) for p in params] if master else []
    )
    # Away from 0: the square root of a moment that never saw a gradient would make one element outweigh all others.
    squares = [t.square() + 1e-2 for t in normal(0.1, state_dtype)]
    steps = [torch.tensor(float(i), device=device) for i in range(len(shapes))]
    return Lists(params, normal(1.0, grad_dtype or dtype), normal(0.1, state_dtype), squares, steps, masters)


def written_out_norm(grads: Sequence[Tensor], grad_scale: float | None) -> float:
    """The norm of one long vector, element by element in fp64."""
    joined = torch.cat([g.double().flatten() for g in grads]) if grads else torch.zeros(1)
    return float(torch.linalg.vector_norm(joined / (grad_scale or 1.0)))


def written_out_step(kind: str, lists: Lists, hyper: Hyper) -> Lists:
    """The lists after one step, in the precision of `lists.params`; a new object."""
    factor = 1.0 / (hyper.grad_scale or 1.0)
    if hyper.max_grad_norm is not None:
        factor *= min(1.0, hyper.max_grad_norm / max(written_out_norm(lists.grads, hyper.grad_scale), 1e-300))
    new = replace(lists, params=[], exp_avgs=[], exp_avg_sqs=[], steps=[])
    for p, grad, m, v, step in zip(*lists.all[:5], strict=True):
        t = int(step) + 1
        g = grad.to(p.dtype) * factor
        m = hyper.beta1 * m + (1 - hyper.beta1 if kind == "adamw" or hyper.grad_averaging else 1.0) * g
        v = hyper.beta2 * v + (1 - hyper.beta2) * g * g
        corrected = kind == "adamw" or hyper.bias_correction
        m_hat = m / (1 - hyper.beta1**t) if corrected else m
        v_hat = v / (1 - hyper.beta2**t) if corrected else v
        update = m_hat / (v_hat**0.5 + hyper.eps) + hyper.weight_decay * p
        ratio = 1.0
        if kind == "lamb" and (hyper.weight_decay != 0 or hyper.use_nvlamb):
            p_norm, update_norm = written_out_norm([p], None), written_out_norm([update], None)
            ratio = p_norm / update_norm if p_norm > 0 and update_norm > 0 else 1.0
        new.params.append(p - hyper.lr * ratio * update)
        new.exp_avgs.append(m)
        new.exp_avg_sqs.append(v)
        new.steps.append(step + 1)
    return new
