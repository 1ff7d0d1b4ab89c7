"""Cases of layer_norm: BERT's token counts and widths; ahead of time also wide rows."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.case import AotCase, KernelCase, Problem, assert_gradients_close, dtype_name
from bert_fast import ops
from bert_fast.reference.layer_norm import LayerNorm

EPS = 1e-12
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def cases() -> Iterator[KernelCase]:
    """bf16 at full token budgets."""
    for num_tokens in (4096, 16384, 32768):
        for hidden_size in (768, 1024):
            yield _case(num_tokens, hidden_size, torch.bfloat16)


def smoke_cases() -> Iterator[KernelCase]:
    """BERT-base."""
    yield _case(4096, 768, torch.bfloat16)


def small_cases() -> Iterator[KernelCase]:
    """A few rows: a width that is no power of two, and BERT's."""
    yield _case(37, 100, torch.float32)
    yield _case(37, 768, torch.bfloat16)


def cpu_cases() -> Iterator[KernelCase]:
    """A training batch of BERT-base."""
    yield _case(4096, 768, torch.float32)


def _case(num_tokens: int, hidden_size: int, dtype: torch.dtype) -> KernelCase:
    return KernelCase(
        "layer_norm", f"{num_tokens}x{hidden_size}", dtype, "affine",
        lambda device: make(num_tokens, hidden_size, dtype, device),
    )  # fmt: skip


def make(num_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Problem:
    """Random rows, weights away from the identity."""
    x = torch.randn(num_tokens, hidden_size, device=device).to(dtype).requires_grad_()
    weight, bias = (torch.randn(hidden_size, device=device).to(dtype).requires_grad_() for _ in range(2))
    upstream = torch.randn(num_tokens, hidden_size, device=device).to(dtype)
    inputs = (x, weight, bias)

    def fast(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ops.layer_norm(x, weight, bias, eps=EPS)

    def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, EPS)

    def verify() -> None:
        assert_gradients_close("layer_norm", ("y", "dx", "dweight", "dbias"), fast, eager, inputs, upstream)

    return Problem(
        inputs, upstream, fast, eager, verify=verify, peers=_peers(),
        bytes_moved={"fwd": 2 * x.nbytes + 8 * num_tokens, "bwd": 3 * x.nbytes + 8 * num_tokens},
    )  # fmt: skip


def _peers() -> dict[str, Callable[..., Tensor]]:
    """Other libraries' LayerNorm of the same three tensors, where they import."""
    peers: dict[str, Callable[..., Any]] = {}
    try:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        peers["liger"] = lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, EPS)
    except ImportError:
        pass
    try:
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine

        peers["apex"] = lambda x, weight, bias: fused_layer_norm_affine(x, weight, bias, weight.shape, EPS)
    except ImportError:
        pass
    try:
        from flash_attn.ops.triton.layer_norm import layer_norm_fn

        peers["flash_attn"] = lambda x, weight, bias: layer_norm_fn(x, weight, bias, eps=EPS)
    except ImportError:
        pass
    return peers


def aot_cases() -> Iterator[AotCase]:
    """Every launch configuration of BERT's widths, and of the widest rows."""
    from bert_fast.triton import layer_norm as family

    shapes = [(h, dtype, torch.float32) for h in (384, 768, 1024) for dtype in _DTYPES]  # parameters as under autocast
    shapes += [(768, torch.bfloat16, torch.bfloat16)]
    shapes += [(h, dtype, torch.float32) for h in (2048, 4096, 8192) for dtype in (torch.float32, torch.bfloat16)]
    num_tokens = 64
    for hidden_size, dtype, parameter_dtype in shapes:
        config = family.launch_config(hidden_size, dtype)

        def launch(h: int = hidden_size, dtype: torch.dtype = dtype, parameters: torch.dtype = parameter_dtype) -> None:
            x, weight = torch.zeros(num_tokens, h, dtype=dtype), torch.zeros(h, dtype=parameters)
            a = LayerNorm(x, weight, weight, EPS)
            _, mean, rstd = family.layer_norm_fwd(a)
            family.layer_norm_bwd(a, x, mean, rstd)

        name = f"H={hidden_size} {dtype_name(dtype)}"
        if parameter_dtype not in (torch.float32, dtype) or parameter_dtype == torch.bfloat16:
            name += f" parameters {dtype_name(parameter_dtype)}"
        yield AotCase(
            name,
            None,
            launch,
            {
                "_layer_norm_fwd_kernel": config.forward.rows * hidden_size,
                "_layer_norm_bwd_kernel": config.backward.rows * hidden_size,
            },
            {"_layer_norm_bwd_kernel": config.backward_programs_per_multiprocessor},
            {"_layer_norm_fwd_kernel": 2 * dtype.itemsize, "_layer_norm_bwd_kernel": 3 * dtype.itemsize},
        )
