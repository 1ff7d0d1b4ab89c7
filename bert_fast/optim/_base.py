"""What the optimizers share: state, parameter groups sorted into lists for the ops, loss scaling, checkpoints.

State of a parameter, with the names of torch.optim.AdamW: `step` (fp32 []), `exp_avg`, `exp_avg_sq` (fp32; fp64 for
fp64 parameters), all on the parameter's device; and `master_param` (fp32) for fp16 and bf16 parameters.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bert_fast import backend as backends
from bert_fast.ops.optimizer import check_hyperparameters, step_unchecked, unchecked_norm
from bert_fast.reference.precision import wide_dtype

__all__ = ["MultiTensorOptimizer"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Options of torch.optim's optimizers that change what is computed, found in their checkpoints.
_REFUSED = ("amsgrad", "maximize", "differentiable")


@dataclass
class _Lists:
    """Parameters of one group, device and pair of dtypes, with their gradients and state."""

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    master_params: list[Tensor] = field(default_factory=list)

    @property
    def all(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        return self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, self.steps, self.master_params


class MultiTensorOptimizer(torch.optim.Optimizer):
    """Base of `AdamW` and `Lamb`; a subclass names its op and the arguments that the op takes from a group."""

    kind: str  # "adamw" or "lamb"

    # torch.amp.GradScaler then leaves unscaling and skipping to step(): it sets grad_scale and found_inf.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        max_grad_norm: float | None,
        master_weights: bool,
        backend: str | None,
    ) -> None:
        self.max_grad_norm = max_grad_norm
        self.master_weights = master_weights
        self.backend = backend
        self.grad_norm: Tensor | None = None
        backends.requested(backend)  # an unknown name is an error now, not at the first step
        check_hyperparameters(**_numbers(defaults), max_grad_norm=max_grad_norm)
        super().__init__(params, defaults)

    def arguments(self, group: dict[str, Any]) -> tuple[Any, ...]:
        """What the op takes between lr and grad_norm."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as `torch.optim.Optimizer.add_param_group`.

        Raises: TypeError, ValueError naming the argument or what is wrong with a parameter.
        """
        check_hyperparameters(**_numbers(self.defaults | param_group))
        if "max_grad_norm" in param_group:
            raise ValueError("max_grad_norm: the norm is that of all groups together; give it to the optimizer")
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.dtype not in _DTYPES:
                self.param_groups.pop()
                raise TypeError(f"params: expected parameters of float32, float16, bfloat16 or float64, got {p.dtype}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch.optim puts it there; it means nothing here
        for group in self.param_groups:  # groups of a checkpoint lack what other optimizers do not have
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def __getstate__(self) -> dict[str, Any]:
        own = ("max_grad_norm", "master_weights", "backend", "grad_norm")
        return super().__getstate__() | {name: getattr(self, name) for name in own}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what closure, called with gradients enabled, returned, or None.

        Parameters without gradient are passed over. `grad_norm` is then the norm of all (unscaled) gradients before
        clipping, a Tensor [] on the first parameter's device, or None without clipping. No device sync.

        Raises: ValueError for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        request = backends.requested(self.backend)
        work = [(group, lists) for group in self.param_groups for lists in self._lists_of(group)]
        scaling = _PerDevice(getattr(self, "grad_scale", None)), _PerDevice(getattr(self, "found_inf", None))
        norm = _PerDevice(self._norm([lists for _, lists in work], scaling[0], request))
        self.grad_norm = norm.tensor
        for group, lists in work:
            device = lists.params[0].device
            lr = group["lr"]
            if isinstance(lr, Tensor) and lr.device != device:
                lr = float(lr) if lr.device.type == "cpu" else lr.to(device)
            step_unchecked(
                self.kind, lists.all, lr, *self.arguments(group), norm.on(device),
                None if norm.tensor is None else self.max_grad_norm, *(one.on(device) for one in scaling), request,
            )  # fmt: skip
        return loss

    def _lists_of(self, group: dict[str, Any]) -> Iterable[_Lists]:
        by_kind: dict[tuple[Any, ...], _Lists] = defaultdict(_Lists)
        for p in group["params"]:
            grad = p.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise ValueError(
                    f"{type(self).__name__} does not support sparse gradients (got {grad.layout}): use dense ones, as "
                    "nn.Embedding(sparse=False) gives, or torch.optim.SparseAdam for that parameter"
                )
            state = self.state[p]
            if "exp_avg" not in state:
                self._start(p, state)
            lists = by_kind[p.device, p.dtype, grad.dtype, type(grad)]
            lists.params.append(p)
            lists.grads.append(grad)
            lists.exp_avgs.append(state["exp_avg"])
            lists.exp_avg_sqs.append(state["exp_avg_sq"])
            lists.steps.append(state["step"])
            if "master_param" in state:
                lists.master_params.append(state["master_param"])
        return by_kind.values()

    def _start(self, p: Tensor, state: dict[str, Any]) -> None:
        dtype = wide_dtype(p.dtype)
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        state["exp_avg"] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
        if self.master_weights and p.dtype != dtype:
            state["master_param"] = p.detach().to(dtype)

    def _norm(self, work: list[_Lists], grad_scale: "_PerDevice", request: str) -> Tensor | None:
        """Norm of all gradients on the device of the first; None where nothing is clipped."""
        if self.max_grad_norm is None or not work:
            return None
        grads: dict[torch.device, list[Tensor]] = defaultdict(list)
        for lists in work:
            grads[lists.params[0].device] += lists.grads
        norms = [unchecked_norm(tensors, grad_scale.on(device), request) for device, tensors in grads.items()]
        if len(norms) == 1:
            return norms[0]
        return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` of this class, of torch.optim.AdamW or (for LAMB) of apex's FusedLAMB returned.

        The state is copied, to the parameters' devices and in the dtypes named above; torch.optim would round it to
        the parameters' dtype. Missing master weights are made from the parameters.

        Raises: ValueError if the checkpoint's optimizer computed something else (amsgrad, maximize), or lacks state.
        """
        for group in state_dict["param_groups"]:
            for name in _REFUSED:
                if group.get(name):
                    raise ValueError(f"{name}: the checkpoint was made with {name}=True, which is not supported")
        super().load_state_dict(state_dict)
        for saved_group, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            group_step = group.pop("step", 0)  # apex counts per group
            for index, p in zip(saved_group["params"], group["params"], strict=True):
                saved = state_dict["state"].get(index)
                if saved:
                    self.state[p] = self._restored(p, saved, saved.get("step", group_step))

    def _restored(self, p: Tensor, saved: dict[str, Any], step: float | Tensor) -> dict[str, Any]:
        state: dict[str, Any] = {}
        self._start(p, state)
        with torch.no_grad():
            for name, tensor in state.items():
                if name == "step":
                    tensor.fill_(step) if not isinstance(step, Tensor) else tensor.copy_(step.reshape(()))
                elif name in saved and saved[name].shape == p.shape:
                    tensor.copy_(saved[name])
                elif name in saved:
                    got = list(saved[name].shape)
                    raise ValueError(f"state_dict: expected {name} of shape {list(p.shape)}, got {got}")
                elif name != "master_param":
                    raise ValueError(f"state_dict: expected {name} in the state of every parameter, got {list(saved)}")
        return state


class _PerDevice:
    """A tensor, or None, that is copied to each device at most once."""

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor = tensor
        self._copies = {} if tensor is None else {tensor.device: tensor}

    def on(self, device: torch.device) -> Tensor | None:
        if self.tensor is not None and device not in self._copies:
            self._copies[device] = self.tensor.to(device, non_blocking=True)
        return self._copies.get(device)


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group that have a range."""
    return {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
