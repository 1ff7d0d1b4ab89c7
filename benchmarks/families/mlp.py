"""Cases of mlp: BERT's whole feed-forward block, which keeps the pre-activation for backward and not the activation."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.case import KernelCase, Problem, Use, assert_gradients_close, full_shapes, installed
from benchmarks.kit import bert
from bert_fast import ops

_ACTIVATIONS = {"erf": "gelu", "tanh": "gelu_new", "erf recompute": "gelu", "erf fp32-parameters": "gelu"}
_NAMES = ("y", "dx", "dup_weight", "dup_bias", "ddown_weight", "ddown_bias")


def cases() -> Iterator[KernelCase]:
    """BERT's token counts and widths; the variants at the size that goals are set for; a few rows."""
    for uses, num_tokens, size in full_shapes():
        yield _case(uses, num_tokens, size, torch.bfloat16, "erf")
    yield _case(Use.GPU, bert.TOKENS[0], bert.BASE, torch.bfloat16, "tanh")
    for variant in ("erf recompute", "erf fp32-parameters"):
        yield _case(Use.GPU, bert.TOKENS[0], bert.BASE, torch.bfloat16, variant)
        yield _case(Use.SMOKE, bert.FEWEST_TOKENS, bert.BASE, torch.bfloat16, variant)
    for size in (bert.BASE, bert.MINILM):
        yield _case(Use.CPU, bert.FEWEST_TOKENS, size, torch.float32, "erf")
    for variant in ("erf", "erf recompute"):
        yield _case(Use.SMALL, bert.FEW_ROWS, bert.Size("odd", 41, 67), torch.float32, variant)
    yield _case(Use.SMALL, bert.KERNEL_ROWS, bert.Size("odd", 40, 72), torch.float16, "tanh")
    for variant in ("erf", "erf recompute", "erf fp32-parameters"):
        yield _case(Use.SMALL, bert.KERNEL_ROWS, bert.MINILM, torch.bfloat16, variant)


def _case(uses: Use, num_tokens: int, size: bert.Size, dtype: torch.dtype, variant: str) -> KernelCase:
    return KernelCase(
        "mlp", f"{num_tokens}x{size.hidden}x{size.intermediate}", dtype, variant,
        partial(make, num_tokens, size, dtype, variant), uses,
    )  # fmt: skip


def make(num_tokens: int, size: bert.Size, dtype: torch.dtype, variant: str, device: torch.device) -> Problem:
    """[T, H] to [T, I] and back, with both biases.

    fp32-parameters: as under autocast, eager's way from fp32 to the dtype of x being a copy of each in every pass.
    """
    hidden, wide = size.hidden, size.intermediate
    x = bert.normal(num_tokens, hidden, dtype=dtype, device=device).requires_grad_()
    is_autocast = "fp32-parameters" in variant
    of_parameters = torch.float32 if is_autocast else dtype
    up, down = bert.weight(wide, hidden, of_parameters, device), bert.weight(hidden, wide, of_parameters, device)
    inputs = (x, up, bert.bias(wide, of_parameters, device), down, bert.bias(hidden, of_parameters, device))
    upstream = bert.normal(num_tokens, hidden, dtype=dtype, device=device)
    hidden_act, save_pre = _ACTIVATIONS[variant], "recompute" not in variant
    approximate = "tanh" if variant == "tanh" else "none"

    def fast(*inputs: Tensor) -> Tensor:
        return ops.mlp(*inputs, hidden_act=hidden_act, save_pre=save_pre)

    def eager(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=is_autocast):
            return F.linear(F.gelu(F.linear(x, up, up_bias), approximate=approximate), down, down_bias)

    op = bert.tolerances_of("mlp", device)
    # The pre-activation is written and read once where it is saved; what lies between two products counts for none.
    pre = num_tokens * wide * dtype.itemsize if save_pre else 0
    product = 2 * num_tokens * hidden * wide
    return Problem(
        inputs, upstream, fast, eager,
        verify=partial(assert_gradients_close, op, _NAMES, fast, eager, inputs, upstream),
        peers=_peers() if variant == "tanh" and device.type == "cuda" else {},
        bytes_moved=bert.product_bytes(inputs, upstream, pre), flops={"fwd": 2 * product, "bwd": 4 * product},
    )  # fmt: skip


def _peers() -> dict[str, Callable[..., Tensor]]:
    """MLPs of other libraries; both know GELU by tanh alone."""

    def flash_attn(f: Any, x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
        return f(x, up, down, up_bias, down_bias, activation="gelu_approx")

    return installed(
        flash_attn=("flash_attn.ops.fused_dense:fused_mlp_func", flash_attn),
        apex=("apex.fused_dense.fused_dense:FusedDenseGeluDenseFunc", lambda f, *inputs: f.apply(*inputs)),
    )
