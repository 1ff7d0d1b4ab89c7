"""Cases of bias_gelu: BERT's token counts and intermediate widths, GELU by erf and by tanh; ahead of time all names."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.case import AotCase, KernelCase, Problem, assert_gradients_close, dtype_name
from bert_fast import ops
from bert_fast.reference.bias_gelu import BiasGelu

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_APPROXIMATE = {"erf": "none", "tanh": "tanh"}


def cases() -> Iterator[KernelCase]:
    """bf16 at full token budgets, base (3,072) and large (4,096)."""
    for num_tokens in (4096, 16384, 32768):
        for num_cols in (3072, 4096):
            for variant in _APPROXIMATE:
                yield _case(num_tokens, num_cols, torch.bfloat16, variant)


def smoke_cases() -> Iterator[KernelCase]:
    """BERT-base."""
    for variant in _APPROXIMATE:
        yield _case(4096, 3072, torch.bfloat16, variant)


def small_cases() -> Iterator[KernelCase]:
    """A few rows: a width that is no power of two, and BERT's."""
    yield _case(37, 100, torch.float32, "erf")
    yield _case(37, 3072, torch.bfloat16, "erf")
    yield _case(37, 3072, torch.bfloat16, "tanh")


def cpu_cases() -> Iterator[KernelCase]:
    """A training batch of BERT-base."""
    yield _case(4096, 3072, torch.float32, "erf")


def _case(num_tokens: int, num_cols: int, dtype: torch.dtype, variant: str) -> KernelCase:
    return KernelCase(
        "bias_gelu", f"{num_tokens}x{num_cols}", dtype, variant,
        lambda device: make(num_tokens, num_cols, dtype, _APPROXIMATE[variant], device),
    )  # fmt: skip


def make(num_tokens: int, num_cols: int, dtype: torch.dtype, approximate: str, device: torch.device) -> Problem:
    """Pre-activations of spread 2, as a trained BERT has them, and a bias."""
    x = (2.0 * torch.randn(num_tokens, num_cols, device=device)).to(dtype).requires_grad_()
    bias = torch.randn(num_cols, device=device).to(dtype).requires_grad_()
    upstream = torch.randn(num_tokens, num_cols, device=device).to(dtype)
    inputs = (x, bias)

    def fast(x: Tensor, bias: Tensor) -> Tensor:
        return ops.bias_gelu(x, bias, approximate=approximate)

    def eager(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x + bias, approximate=approximate)

    def verify() -> None:
        assert_gradients_close("bias_gelu", ("y", "dx", "dbias"), fast, eager, inputs, upstream)

    # No installed library has this function of two tensors: Liger's GELU is gated, apex' and flash-attn's are parts of
    # matrix products.
    return Problem(inputs, upstream, fast, eager, verify=verify, bytes_moved={"fwd": 2 * x.nbytes, "bwd": 3 * x.nbytes})


def aot_cases() -> Iterator[AotCase]:
    """Every launch configuration of BERT's widths: both GELUs in all dtypes, the other activations in bf16."""
    from bert_fast.triton import bias_gelu as family

    names = [(n, dtype, act, torch.float32) for n in (768, 3072) for dtype in _DTYPES for act in ("gelu", "gelu_new")]
    names += [(3072, torch.bfloat16, act, torch.float32) for act in ("relu", "silu", "tanh")]
    names += [(n, torch.bfloat16, "gelu", torch.float32) for n in (384, 1536, 4096)]
    names += [(3072, torch.bfloat16, "gelu", torch.bfloat16), (3072, torch.bfloat16, "gelu", None)]
    num_tokens = 64
    for num_cols, dtype, hidden_act, bias_dtype in names:
        config = family.launch_config(num_cols, dtype)

        def launch(
            n: int = num_cols,
            dtype: torch.dtype = dtype,
            act: str = hidden_act,
            of_bias: torch.dtype | None = bias_dtype,
        ) -> None:
            x = torch.zeros(num_tokens, n, dtype=dtype)
            bias = None if of_bias is None else torch.zeros(n, dtype=of_bias)
            a = BiasGelu(x, bias, act)
            family.bias_gelu_fwd(a)
            family.bias_gelu_bwd(a, x)

        name = f"{hidden_act} N={num_cols} {dtype_name(dtype)}"
        if bias_dtype != torch.float32:
            name += " no bias" if bias_dtype is None else f" bias {dtype_name(bias_dtype)}"
        yield AotCase(
            name,
            None,
            launch,
            {
                "_bias_gelu_fwd_kernel": config.forward_rows * config.cols,
                "_bias_gelu_bwd_kernel": config.backward_rows * config.cols,
            },
            {
                "_bias_gelu_fwd_kernel": config.forward_programs_per_multiprocessor,
                "_bias_gelu_bwd_kernel": config.backward_programs_per_multiprocessor,
            },
            {"_bias_gelu_fwd_kernel": 2 * dtype.itemsize, "_bias_gelu_bwd_kernel": 3 * dtype.itemsize},
        )
