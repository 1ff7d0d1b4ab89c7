"""Cases of linear: attention's output projection and the narrowing half of the MLP, where dropout and LayerNorm follow.

The other products of a layer are in the families `qkv_projection`, `linear_gelu` and `mlp`. Ahead of time: the one
kernel that makes all of them.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.aot.gemm_cases import gemm_aot_cases
from benchmarks.kernels.case import AotCase, KernelCase, Problem, assert_gradients_close
from benchmarks.kit import bert
from bert_fast import ops


def cases() -> Iterator[KernelCase]:
    """bf16 at full token budgets, base and large: H to H and I to H."""
    for num_tokens in bert.TOKENS:
        for size in bert.SIZES:
            yield _case(num_tokens, size.hidden, size.hidden, torch.bfloat16, "attention output")
            yield _case(num_tokens, size.intermediate, size.hidden, torch.bfloat16, "down")


def smoke_cases() -> Iterator[KernelCase]:
    """BERT-base."""
    yield _case(4096, bert.BASE.hidden, bert.BASE.hidden, torch.bfloat16, "attention output")
    yield _case(4096, bert.BASE.intermediate, bert.BASE.hidden, torch.bfloat16, "down")


def small_cases() -> Iterator[KernelCase]:
    """A few rows: widths that are no multiple of anything, and BERT's."""
    yield _case(37, 41, 67, torch.float32, "odd")
    yield _case(37, 40, 72, torch.float16, "odd")
    yield _case(37, 384, 384, torch.bfloat16, "attention output")


def cpu_cases() -> Iterator[KernelCase]:
    """A training batch of BERT-base."""
    yield _case(bert.CPU_TOKENS, bert.BASE.hidden, bert.BASE.hidden, torch.float32, "attention output")
    yield _case(bert.CPU_TOKENS, bert.BASE.intermediate, bert.BASE.hidden, torch.float32, "down")


def _case(num_tokens: int, k: int, n: int, dtype: torch.dtype, variant: str) -> KernelCase:
    return KernelCase(
        "linear", f"{num_tokens}x{k}x{n}", dtype, variant, lambda device: make(num_tokens, k, n, dtype, device)
    )


def make(num_tokens: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> Problem:
    """[T, K] to [T, N] with a bias."""
    x = bert.normal(num_tokens, k, dtype=dtype, device=device).requires_grad_()
    weight, bias = bert.weight(n, k, dtype, device), bert.bias(n, dtype, device)
    upstream = bert.normal(num_tokens, n, dtype=dtype, device=device)
    inputs = (x, weight, bias)

    op = bert.tolerances_of("linear", device)

    def verify() -> None:
        assert_gradients_close(op, ("y", "dx", "dweight", "dbias"), ops.linear, F.linear, inputs, upstream)

    product = 2 * num_tokens * k * n
    return Problem(
        inputs, upstream, ops.linear, F.linear, verify=verify, peers=_peers(device),
        bytes_moved={
            "fwd": bert.nbytes(*inputs, upstream),
            "bwd": 2 * bert.nbytes(x, weight) + bert.nbytes(upstream, bias),
        },
        flops={"fwd": product, "bwd": 2 * product},
    )  # fmt: skip


def _peers(device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """Dense layers of flash-attn and apex, with bias and its gradient in cuBLASLt's epilogue, where they import."""
    peers: dict[str, Callable[..., Tensor]] = {}
    if device.type != "cuda":
        return peers
    try:
        from flash_attn.ops.fused_dense import fused_dense_func

        peers["flash_attn"] = fused_dense_func
    except ImportError:
        pass
    try:
        from apex.fused_dense.fused_dense import FusedDenseFunc

        peers["apex"] = FusedDenseFunc.apply
    except ImportError:
        pass
    return peers


def aot_cases() -> Iterator[AotCase]:
    """The matrix-product kernel of all families: every tile that ships, with every epilogue, layout and dtype."""
    return gemm_aot_cases()
