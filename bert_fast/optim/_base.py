"""What the optimizers share: state, parameter groups sorted into lists for the ops, loss scaling, checkpoints.

State of a parameter, with the names of torch.optim.AdamW: `step` (fp32 []), `exp_avg`, `exp_avg_sq` (fp32; fp64 for
fp64 parameters), all on the parameter's device; and `master_param` (fp32) for fp16 and bf16 parameters.
"""

import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from bert_fast import backend as backends
from bert_fast.checks import check_flag
from bert_fast.ops._optimizer_lists import (
    DTYPES,
    as_list,
    check_hyperparameters,
    check_lists,
    has_view_bits,
    lists_fit,
    sharing,
    with_one_layout,
)
from bert_fast.ops.optimizer import step_unchecked, unchecked_norm
from bert_fast.optim._known_form import KnownForm, known_form
from bert_fast.optim._per_device import PerDevice
from bert_fast.reference.optimizer import StepLists, StepOptions
from bert_fast.reference.precision import wide_dtype

# What FullyShardedDataParallel sets on parameters that it flattened and sharded, and on those made of several.
_IS_PIECE, _IS_FLAT = "_fsdp_flattened", "_is_flat_param"
# Options of torch.optim's optimizers that would change what is computed; the others choose how, which is of no account.
_REFUSED = {
    "amsgrad": "steps would need the maximum of all exp_avg_sq",
    "maximize": "negate the loss instead",
    "differentiable": "no gradient goes through a step",
}


# Names in the state of a parameter of the lists of a step, for messages.
_STATE = {"exp_avgs": "exp_avg", "exp_avg_sqs": "exp_avg_sq", "steps": "step", "master_params": "master_param"}


def check_options(options: dict[str, Any], where: str = "") -> None:
    """Raises ValueError for what torch.optim's optimizers can and these cannot; where: what had the options."""
    for name, reason in _REFUSED.items():
        value = options.get(name)
        if not (value is None or (isinstance(value, int) and not value)):
            raise ValueError(f"{name}: expected False{where}, got {reprlib.repr(value)}: {reason}")


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
        check_flag("master_weights", master_weights)
        self._forms: dict[int, KnownForm] = {}  # by the identity of a group; `lists_of` asks all that could differ
        super().__init__(params if isinstance(params, Tensor) else as_list("params", params), defaults)

    def check_group(self, group: dict[str, Any]) -> None:
        """Raises TypeError or ValueError, naming the option, unless those of a group are what `arguments` needs."""
        check_hyperparameters(**_numbers(group))

    def arguments(self, group: dict[str, Any]) -> tuple[Any, ...]:
        """Of the group: beta1, beta2, eps, weight_decay, and LAMB's bias_correction, grad_averaging, use_nvlamb."""
        raise NotImplementedError

    def has_trust_ratios(self, group: dict[str, Any]) -> bool:
        """Whether steps of the group need norms of its parameters."""
        return False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as `torch.optim.Optimizer.add_param_group`.

        Raises: TypeError, ValueError naming the argument or what is wrong with a parameter.
        """
        if not isinstance(param_group, dict) or "params" not in param_group:
            got = list(param_group) if isinstance(param_group, dict) else type(param_group).__name__
            raise TypeError(f"param_group: expected a dict with 'params', got {got}")
        self.check_group(self.defaults | param_group)
        check_options(param_group, " in a group")
        if "max_grad_norm" in param_group:
            raise ValueError("max_grad_norm: the norm is that of all groups together; give it to the optimizer")
        params = param_group["params"]
        if not isinstance(params, Tensor | set):  # torch.optim says of a set why it takes none
            param_group["params"] = params = as_list("params", params)
            for i, param in enumerate(params):
                if isinstance(param, tuple) and not (len(param) == 2 and isinstance(param[0], str)):
                    raise ValueError(f"params[{i}]: expected (name, parameter), got a tuple of other things")
        try:
            super().add_param_group(param_group)
        except (TypeError, ValueError) as error:
            raise type(error)(f"params: {error}") from None
        try:
            self._check_parameters(self.param_groups[-1]["params"])
            self._check_whole(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check_parameters(self, params: list[Tensor]) -> None:
        for p in params:
            if p.dtype not in DTYPES:
                raise TypeError(f"params: expected parameters of float32, float16, bfloat16 or float64, got {p.dtype}")
            if p.layout != torch.strided:
                raise TypeError(f"params: expected dense parameters, got layout {p.layout}")
            if has_view_bits(p):
                raise ValueError(
                    "params: expected parameters with memory of their own, got zeros without or a negated view"
                )
        if len({id(p) for p in params}) < len(params):
            raise ValueError("params: expected every parameter once, got one of them twice in a group")

    def _check_whole(self, group: dict[str, Any]) -> None:
        """Raises ValueError where norms are wanted of parameters of which FSDP1 left this process pieces.

        Those are plain Parameters that know neither the other pieces nor the processes that have them: the module does.
        (FSDP2's are DTensors, whose norms are those of all shards.)
        """
        ratios = self.has_trust_ratios(group)
        if not (ratios or self.max_grad_norm is not None) or not _is_distributed():
            return
        several = torch.distributed.get_world_size() > 1
        for p in group["params"]:
            if ratios and (getattr(p, _IS_FLAT, False) or (several and getattr(p, _IS_PIECE, False))):
                raise ValueError(
                    f"params: {type(self).__name__} needs norms of whole parameters, got pieces or flat ones of "
                    "FullyShardedDataParallel; shard with torch.distributed.fsdp.fully_shard (FSDP2)"
                )
            if several and getattr(p, _IS_PIECE, False):
                raise ValueError(
                    "max_grad_norm: expected None for FullyShardedDataParallel's parameters, of whose gradients each "
                    "process has a piece: call the module's clip_grad_norm_ before each step, or shard with "
                    "torch.distributed.fsdp.fully_shard (FSDP2)"
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forms = {}
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

        Raises: TypeError, ValueError, before anything is written, where a gradient or the state does not fit its
            parameter: one that was resized, moved or converted since, a sparse gradient, memory that two share.
        """
        loss = None
        if closure is not None:
            if not callable(closure):
                raise TypeError(f"closure: expected a function or None, got {type(closure).__name__}")
            with torch.enable_grad():
                loss = closure()
        request = backends.requested(self.backend)
        work = [(group, *found) for group in self.param_groups for found in self._lists_of(group)]
        ready = [
            (_rate(group, lists), group, *((lists, []) if is_known else self._one_layout(lists)))
            for group, lists, is_known in work
        ]
        scaling = PerDevice(getattr(self, "grad_scale", None)), PerDevice(getattr(self, "found_inf", None))
        norm = PerDevice(self._norm([lists for _, lists, _ in work], scaling[0], request))
        self.grad_norm = norm.tensor
        for lr, group, lists, copies in ready:
            device = lists[0][0].device
            max_grad_norm = None if norm.tensor is None else self.max_grad_norm
            scale, found_inf = scaling[0].on(device), scaling[1].on(device)
            a = StepOptions._make((lr, *self.arguments(group), norm.on(device), max_grad_norm, scale, found_inf))
            step_unchecked(self.kind, lists, copies, a, request)
        return loss

    def _lists_of(self, group: dict[str, Any]) -> list[tuple[StepLists, bool]]:
        """What is stepped of a group: parameters of one device, dtype and class, their gradients and state.

        Beside each: whether its form is known to fit and to be contiguous throughout.
        """
        self.check_group(group)
        self._check_whole(group)
        form = self._forms.get(id(group))
        known = None if form is None else form.lists_of(group["params"], self.state, self.master_weights)
        if known is not None:
            return [(known, True)]
        self._forms.pop(id(group), None)
        rows = []
        started = False
        for p in group["params"]:
            grad = p.grad
            if grad is None:
                continue
            state = self.state[p]
            if "exp_avg" not in state:
                self._start(p, state)
                started = True
            get = state.get
            rows.append((p, grad, get("exp_avg"), get("exp_avg_sq"), get("step"), get("master_param")))
        if started:
            self._check_memory()
        if not rows:
            return []
        lists = [_columns(rows)]
        if not lists_fit(lists[0]) or any(len(set(map(type, column))) > 1 for column in lists[0][:2]):
            by_kind: dict[tuple[Any, ...], list[tuple[Any, ...]]] = defaultdict(list)
            for row in rows:
                p, grad, *_, master = row
                by_kind[p.device, p.dtype, grad.dtype, type(p), type(grad), master is None].append(row)
            lists = [_columns(rows) for rows in by_kind.values()]
            for one in lists:
                self._check(one)
        for params, *_, masters in lists:
            if not masters and self.master_weights and params[0].dtype != wide_dtype(params[0].dtype):
                for p in params:  # converted since their first step
                    masters.append(_master(p))
                    self.state[p]["master_param"] = masters[-1]
        if len(lists) == 1:
            form = known_form(lists[0], self.master_weights)
            if form is not None:
                self._forms[id(group)] = form
        return [(one, False) for one in lists]

    def _check(self, lists: StepLists) -> None:
        """Raises TypeError or ValueError, which says what to do, where gradients or state do not fit parameters."""
        try:
            check_lists(lists, self._naming(lists))
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"{error}. If the parameter was resized, make a new optimizer (or `del optimizer.state[parameter]`) "
                "and run backward again; if it was moved or converted, "
                "`optimizer.load_state_dict(optimizer.state_dict())` makes the state follow"
            ) from None

    def _one_layout(self, lists: StepLists) -> tuple[StepLists, list[tuple[Tensor, Tensor]]]:
        """`with_one_layout` with names that a user knows."""
        try:
            return with_one_layout(lists, self._naming(lists))
        except ValueError:
            sparse = [grad.layout for grad in lists[1] if grad.layout != torch.strided]
            if not sparse:
                raise
            raise ValueError(
                f"{type(self).__name__} does not support sparse gradients (got {sparse[0]}): use dense ones, as "
                "nn.Embedding(sparse=False) gives, or torch.optim.SparseAdam for that parameter"
            ) from None

    def _naming(self, lists: StepLists) -> Callable[[str, int], str]:
        """What messages call the tensors of the lists: what they are of which parameter."""

        def name(column: str, i: int) -> str:
            label = self._label(lists[0][i])
            return label if column == "params" else f"{_STATE.get(column, 'gradient')} of {label}"

        return name

    def _label(self, parameter: Tensor) -> str:
        """What a message calls a parameter: its name if it was given one, and its place."""
        for number, group in enumerate(self.param_groups):
            for place, p in enumerate(group["params"]):
                if p is parameter:
                    names = group.get("param_names")
                    return f"param_groups[{number}]['params'][{place}]" + (f" ({names[place]})" if names else "")
        raise AssertionError("a parameter of this optimizer is in one of its groups")

    def _check_memory(self) -> None:
        """Raises ValueError where two parameters that are stepped lie in the same memory."""
        by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    by_device[p.device].append(p)
        for params in by_device.values():
            shared = sharing(params)
            if shared is not None:
                one, other = (self._label(params[place]) for place in shared)
                raise ValueError(
                    f"{one} and {other} share memory, which would be stepped twice: tie them as one nn.Parameter, or "
                    "give one of them a copy"
                )

    def _start(self, p: Tensor, state: dict[str, Any]) -> None:
        dtype = wide_dtype(p.dtype)
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        state["exp_avg"] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
        if self.master_weights and p.dtype != dtype:
            state["master_param"] = _master(p)

    def _norm(self, work: list[StepLists], grad_scale: PerDevice, request: str) -> Tensor | None:
        """Norm of all gradients on the device of the first; None where nothing is clipped."""
        if self.max_grad_norm is None or not work:
            return None
        by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
        # The first gradient chooses the back-end, so fp64 comes first: Triton's kernels do not take it.
        for _, grads, *_ in sorted(work, key=lambda lists: lists.grads[0].dtype != torch.float64):
            by_device[grads[0].device] += grads
        norms = [unchecked_norm(grads, grad_scale.on(device), request) for device, grads in by_device.items()]
        if len(norms) == 1:
            return norms[0]
        return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` of this class, of torch.optim.AdamW or (for LAMB) of apex's FusedLAMB returned.

        The state is copied, to the parameters' devices and in the dtypes named above; torch.optim would round it to
        the parameters' dtype. Missing master weights are made from the parameters.

        Raises: TypeError, ValueError if the checkpoint's optimizer computed something else (amsgrad, maximize, L2 decay
            as in torch.optim.Adam, which torch before 2.7 does not tell), or its state lacks something or does not fit
            the parameters. Nothing is loaded then.
        """
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError("state_dict: expected a dictionary with 'state' and 'param_groups'")
        _check_structure(state_dict)
        for group in state_dict["param_groups"]:
            check_options(group, " in a checkpoint")
            self.check_group(self.defaults | group)
            if group.get("decoupled_weight_decay") is False and group.get("weight_decay"):
                raise ValueError(
                    f"state_dict: weight_decay={group['weight_decay']} is part of the gradient (torch.optim.Adam, L2); "
                    "here it would be taken off the weights: go on with torch.optim.Adam, or with a new optimizer"
                )
        restored: dict[Tensor, dict[str, Any]] = {}
        for saved_group, group in zip(state_dict["param_groups"], self.param_groups, strict=False):
            for index, p in zip(saved_group["params"], group["params"], strict=False):
                saved = state_dict["state"].get(index)
                if saved:
                    restored[p] = self._restored(p, saved, saved.get("step", saved_group.get("step", 0)))
        before = self.state, self.param_groups
        try:
            super().load_state_dict(state_dict)
            for group in self.param_groups:
                group.pop("step", None)  # apex counts per group
                group.pop("decoupled_weight_decay", None)  # says nothing here: decay is never part of the gradient
            self.state.update(restored)
        except BaseException as error:
            self.state, self.param_groups = before
            if isinstance(error, RuntimeError):  # torch.optim copies groups, and some tensors cannot be copied
                raise ValueError(f"state_dict: expected groups that can be copied, got {error}") from error
            raise

    @torch.no_grad()
    def _restored(self, p: Tensor, saved: dict[str, Any], step: float | Tensor) -> dict[str, Any]:
        state: dict[str, Any] = {}
        self._start(p, state)
        for name, tensor in state.items():
            if name == "step":
                tensor.fill_(_count(step))
            elif name in saved:
                value, shape = saved[name], list(p.shape)
                if not _has_numbers(value):
                    got = f"{value.dtype}, {value.layout}, {value.device}" if isinstance(value, Tensor) else repr(value)
                    raise TypeError(f"state_dict: expected {name} as a dense tensor of floats, got {got}")
                if value.shape != p.shape:
                    raise ValueError(f"state_dict: expected {name} of shape {shape}, got {list(value.shape)}")
                tensor.copy_(value)
            elif name != "master_param":
                raise ValueError(f"state_dict: expected {name} in the state of every parameter, got {list(saved)}")
        return state


def _check_structure(state_dict: dict[str, Any]) -> None:
    """Raises ValueError unless groups are dictionaries with a list of keys, and states dictionaries under keys."""
    groups, states = state_dict["param_groups"], state_dict["state"]
    if not isinstance(groups, list | tuple) or not all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list | tuple)
        and all(isinstance(key, int | str) for key in group["params"])
        for group in groups
    ):
        raise ValueError("state_dict: expected 'param_groups' as a list of dictionaries with a list 'params'")
    if not isinstance(states, Mapping) or not all(isinstance(state, Mapping) for state in states.values()):
        raise ValueError("state_dict: expected 'state' as a dictionary of dictionaries")


def _has_numbers(value: Any) -> bool:
    dense = isinstance(value, Tensor) and value.layout == torch.strided
    return dense and value.is_floating_point() and not value.is_meta


def _count(step: Any) -> float:
    """The number of steps that a checkpoint says, as a number or a tensor of one element."""
    if isinstance(step, Tensor) and step.numel() == 1 and step.layout == torch.strided and not step.is_meta:
        step = step.item()
    if not isinstance(step, int | float) or not 0 <= step < 2**63:
        got = f"{step.dtype} {list(step.shape)}" if isinstance(step, Tensor) else repr(step)
        raise ValueError(f"state_dict: expected step as a number of at least 0, got {got}; at most 2**63 are counted")
    return step


def _rate(group: dict[str, Any], lists: StepLists) -> float | Tensor:
    """The learning rate of a group where its parameters are."""
    lr, device = group["lr"], lists[0][0].device
    if not isinstance(lr, Tensor) or lr.device == device:
        return lr
    if lr.is_meta:
        raise ValueError("lr: expected a Tensor with a value, got one on meta")
    return float(lr) if lr.device.type == "cpu" else lr.to(device)


def _master(p: Tensor) -> Tensor:
    return p.detach().to(wide_dtype(p.dtype))


def _columns(rows: list[tuple[Any, ...]]) -> StepLists:
    """(parameter, gradient, exp_avg, exp_avg_sq, step, master or None) of each parameter as the lists of a step."""
    params, grads, exp_avgs, exp_avg_sqs, steps, masters = map(list, zip(*rows, strict=True))
    has_masters = any(master is not None for master in masters)
    return StepLists(params, grads, exp_avgs, exp_avg_sqs, steps, masters if has_masters else [])


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group that have a range."""
    return {name: group.get(name) for name in ("lr", "betas", "eps", "weight_decay")}
