"""LAMB on the op `lamb_step`, and the choice between it and NVIDIA apex's."""

import importlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bert_fast.checks import check_flag
from bert_fast.ops._optimizer_lists import as_list
from bert_fast.optim._base import MultiTensorOptimizer


class Lamb(MultiTensorOptimizer):
    """LAMB (You et al. 2020, arXiv:1904.00962) in two passes over memory; options and defaults of apex's FusedLAMB.

    u = m_hat / (sqrt(v_hat) + eps) + weight_decay * p;   p = p - lr * |p| / |u| * u, the ratio taken per parameter. It
    is 1 where either norm is 0, and where weight_decay is 0 unless use_nvlamb.

    Args:
        bias_correction: False takes m and v in place of m_hat and v_hat.
        grad_averaging: False takes m = beta1 * m + g, without the factor 1 - beta1.
        use_nvlamb: trust ratios also for parameters without weight decay.
        max_grad_norm: 1 by default, as in apex (and the paper's BERT training); None for no clipping.

    Groups may set lr, betas, eps, weight_decay, bias_correction and grad_averaging for themselves. Everything else is
    as for `AdamW`: params, lr, max_grad_norm, master_weights, backend, state, loss scaling, CUDA graphs.

    Beside apex: moments of half-precision parameters are fp32, steps count per parameter, gradients are left as they
    are, infinite gradients under a GradScaler skip the step.

    Example:
        >>> layer = torch.nn.Linear(4, 2)
        >>> optimizer = optim.Lamb(layer.parameters(), lr=1e-3)
        >>> layer(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    kind = "lamb"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        use_nvlamb: bool = False,
        max_grad_norm: float | None = 1.0,
        master_weights: bool = True,
        backend: str | None = None,
    ) -> None:
        check_flag("use_nvlamb", use_nvlamb)
        self.use_nvlamb = use_nvlamb
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "bias_correction": bias_correction, "grad_averaging": grad_averaging,
        }  # fmt: skip
        super().__init__(
            params, defaults, max_grad_norm=max_grad_norm, master_weights=master_weights, backend=backend
        )  # fmt: skip

    def check_group(self, group: dict[str, Any]) -> None:
        """As of every optimizer, and the switches are bools."""
        super().check_group(group)
        for name in ("bias_correction", "grad_averaging"):
            check_flag(name, group.get(name))

    def arguments(self, group: dict[str, Any]) -> tuple[Any, ...]:
        """beta1, beta2, eps, weight_decay, bias_correction, grad_averaging, use_nvlamb."""
        flags = group["bias_correction"], group["grad_averaging"], self.use_nvlamb
        return *group["betas"], group["eps"], group["weight_decay"], *flags

    def has_trust_ratios(self, group: dict[str, Any]) -> bool:
        """Whether the group decays, or ratios are taken everywhere."""
        return self.use_nvlamb or group["weight_decay"] != 0.0

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"use_nvlamb": self.use_nvlamb}


def make_lamb(
    params: Iterable[Any],
    lr: float | Tensor = 1e-3,
    *,
    prefer_apex: bool = True,
    max_grad_norm: float | None = 1.0,
    **options: Any,
) -> torch.optim.Optimizer:
    """NVIDIA apex's FusedLAMB where it is installed and can do what is asked; else `Lamb`.

    apex is taken when `apex.optimizers.FusedLAMB` exists (`pip install apex` brings another package), all parameters
    are fp32 on CUDA, and lr is a number. Results agree to rounding. Its class keeps its own ways: it overwrites
    gradients and cannot be captured in CUDA graphs.

    Args:
        params: parameters or groups, as for `Lamb`.
        lr (float, or Tensor []): the learning rate.
        max_grad_norm: the norm that gradients are clipped to, over all parameters; None: no clipping.
        prefer_apex: False takes `Lamb` always.
        options: betas, eps, weight_decay, bias_correction, grad_averaging, use_nvlamb.

    Returns:
        The optimizer.

    Example:
        >>> optimizer = optim.make_lamb(torch.nn.Linear(4, 2).parameters(), lr=1e-3)
        >>> type(optimizer).__name__  # no apex, or no CUDA
        'Lamb'
    """
    check_flag("prefer_apex", prefer_apex)
    params = [dict(group) if isinstance(group, dict) else group for group in as_list("params", params)]
    for i, group in enumerate(params):
        if isinstance(group, dict) and not isinstance(group.get("params"), Tensor):
            group["params"] = as_list(f"params[{i}]['params']", group.get("params"))
    fused_lamb = _apex_fused_lamb() if prefer_apex and not options.keys() & {"master_weights", "backend"} else None
    if fused_lamb is not None and _suits_apex(params) and not isinstance(lr, Tensor):
        return fused_lamb(params, lr=lr, max_grad_norm=math.inf if max_grad_norm is None else max_grad_norm, **options)
    return Lamb(params, lr, max_grad_norm=max_grad_norm, **options)


def _apex_fused_lamb() -> Any:
    """apex.optimizers.FusedLAMB, or None: not there, or there without its CUDA extensions."""
    try:
        importlib.import_module("amp_C")
        return getattr(importlib.import_module("apex.optimizers"), "FusedLAMB", None)
    except ImportError:
        return None


def _suits_apex(params: list[Any]) -> bool:
    tensors: list[Tensor] = []
    for entry in params:
        group = entry["params"] if isinstance(entry, dict) else entry
        if isinstance(entry, tuple):  # (name, parameter), which apex does not know
            return False
        tensors += [group] if isinstance(group, Tensor) else group
    return all(isinstance(t, Tensor) and t.is_cuda and t.dtype == torch.float32 for t in tensors)
