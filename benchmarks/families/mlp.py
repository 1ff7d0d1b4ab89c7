"""Cases of mlp: BERT's whole feed-forward block, which keeps the pre-activation for backward and not the activation."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.case import AotCase, KernelCase, Problem, assert_gradients_close
from benchmarks.kit import bert
from bert_fast import ops

_ACTIVATIONS = {"erf": "gelu", "tanh": "gelu_new", "erf recompute": "gelu", "erf fp32-parameters": "gelu"}
_NAMES = ("y", "dx", "dup_weight", "dup_bias", "ddown_weight", "ddown_bias")


def cases() -> Iterator[KernelCase]:
    """bf16 at full token budgets, base and large; the variants at the size that goals are set for."""
    for num_tokens in bert.TOKENS:
        for size in bert.SIZES:
            yield _case(num_tokens, size, torch.bfloat16, "erf")
    for variant in ("tanh", "erf recompute", "erf fp32-parameters"):
        yield _case(bert.TOKENS[0], bert.BASE, torch.bfloat16, variant)


def smoke_cases() -> Iterator[KernelCase]:
    """BERT-base."""
    for variant in ("erf", "erf recompute", "erf fp32-parameters"):
        yield _case(4096, bert.BASE, torch.bfloat16, variant)


def small_cases() -> Iterator[KernelCase]:
    """A few rows: widths that are no multiple of anything, and MiniLM's, with as many rows as our kernel asks for."""
    odd = bert.Size("odd", 41, 67)
    yield _case(37, odd, torch.float32, "erf")
    yield _case(37, odd, torch.float32, "erf recompute")
    yield _case(130, bert.Size("odd", 40, 72), torch.float16, "tanh")
    for variant in ("erf", "erf recompute", "erf fp32-parameters"):
        yield _case(130, bert.MINILM, torch.bfloat16, variant)


def cpu_cases() -> Iterator[KernelCase]:
    """A training batch of BERT-base and of MiniLM."""
    for size in (bert.BASE, bert.MINILM):
        yield _case(bert.CPU_TOKENS, size, torch.float32, "erf")


def _case(num_tokens: int, size: bert.Size, dtype: torch.dtype, variant: str) -> KernelCase:
    return KernelCase(
        "mlp", f"{num_tokens}x{size.hidden}x{size.intermediate}", dtype, variant,
        lambda device: make(num_tokens, size, dtype, variant, device),
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

    def verify() -> None:
        assert_gradients_close(op, _NAMES, fast, eager, inputs, upstream)

    # The pre-activation is written and read once where it is saved; what lies between two products counts for none.
    pre = num_tokens * wide * dtype.itemsize if save_pre else 0
    product = 2 * num_tokens * hidden * wide
    return Problem(
        inputs, upstream, fast, eager, verify=verify, peers=_peers(device) if variant == "tanh" else {},
        bytes_moved={
            "fwd": bert.nbytes(*inputs, upstream) + pre,
            "bwd": 2 * bert.nbytes(x, up, down) + bert.nbytes(upstream, inputs[2], inputs[4]) + pre,
        },
        flops={"fwd": 2 * product, "bwd": 4 * product},
    )  # fmt: skip


def _peers(device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """MLPs of other libraries, where they import; both know GELU by tanh alone."""
    peers: dict[str, Callable[..., Tensor]] = {}
    if device.type != "cuda":
        return peers
    try:
        from flash_attn.ops.fused_dense import fused_mlp_func

        def flash_attn(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
            return fused_mlp_func(x, up, down, up_bias, down_bias, activation="gelu_approx")

        peers["flash_attn"] = flash_attn
    except ImportError:
        pass
    try:
        from apex.fused_dense.fused_dense import FusedDenseGeluDenseFunc

        peers["apex"] = FusedDenseGeluDenseFunc.apply
    except ImportError:
        pass
    return peers


def aot_cases() -> Iterator[AotCase]:
    """None of its own: `linear` has the kernel, with the epilogues of both halves."""
    return iter(())
