"""AdamW on the op `adamw_step`."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from bert_fast.optim._base import MultiTensorOptimizer, check_options


class AdamW(MultiTensorOptimizer):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) as torch.optim.AdamW computes it, in one pass over memory.

    Args:
        params: parameters, or dictionaries of groups, as for every PyTorch optimizer; fp32, fp16, bf16 or fp64, which
            may mix, as may devices. Groups may set lr, betas, eps and weight_decay for themselves.
        lr (float, or Tensor []): a tensor on the parameters' device may change between replays of a CUDA graph.
        betas: as torch.optim.AdamW.
        eps: as torch.optim.AdamW.
        weight_decay: as torch.optim.AdamW.
        max_grad_norm (float or None): gradients are clipped to this norm, taken over all parameters together, while the
            step reads them; `param.grad` stays as it is. `grad_norm` then holds the norm before clipping, on the
            device.
        master_weights: fp16 and bf16 parameters get a copy in fp32 in the optimizer's state, on which steps are made.
            What is written to a parameter between steps (a checkpoint, an average) takes the copy's place at the next
            one, element by element.
        backend: "triton", "torch" or "reference"; None takes the first that can run.
        amsgrad: only False; so are maximize and differentiable.
        foreach: taken for code written for torch.optim.AdamW, where it chooses how to compute; it changes nothing.
        fused: like `foreach`.
        capturable: like `foreach`.

    State and checkpoints are those of torch.optim.AdamW, and may be exchanged with it (`master_param` comes on top for
    half-precision parameters). Under `torch.amp.GradScaler`, unscaling happens in the same pass, and a step with
    infinite gradients is skipped without asking the device.

    CUDA graphs: make one step before capturing. Capture then works as with torch's capturable optimizers: give lr as a
    tensor, and let gradients keep their memory, either with `zero_grad(set_to_none=False)` or because backward is part
    of the graph. Compiled training steps best leave the optimizer outside.

    Raises:
        TypeError, ValueError: the message names the argument.

    Example:
        >>> layer = torch.nn.Linear(4, 2)
        >>> optimizer = optim.AdamW(optim.weight_decay_groups(layer, 0.01), lr=1e-3, max_grad_norm=1.0)
        >>> layer(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.grad_norm.item() > 1.0  # before clipping
        True
    """

    kind = "adamw"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        max_grad_norm: float | None = None,
        master_weights: bool = True,
        backend: str | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        check_options({"amsgrad": amsgrad, "maximize": maximize, "differentiable": differentiable})
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params, defaults, max_grad_norm=max_grad_norm, master_weights=master_weights, backend=backend
        )  # fmt: skip

    def arguments(self, group: dict[str, Any]) -> tuple[Any, ...]:
        """beta1, beta2, eps, weight_decay, and LAMB's switches as AdamW is."""
        return *group["betas"], group["eps"], group["weight_decay"], True, True, False
