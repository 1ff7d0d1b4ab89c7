"""Cases of dropout_add_layer_norm: BERT's token counts and widths, with and without dropout."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.case import AotCase, KernelCase, Problem, assert_gradients_close, dtype_name
from bert_fast import ops
from bert_fast.reference.dropout import dropout_scale, keep_mask

__all__ = ["aot_cases", "cases"]

EPS = 1e-12


def cases() -> Iterator[KernelCase]:
    """bf16 at full token budgets."""
    for num_tokens in (4096, 16384, 32768):
        for hidden_size in (768, 1024):
            for dropout_p in (0.0, 0.1):
                yield KernelCase(
                    "dropout_add_layer_norm", f"{num_tokens}x{hidden_size}", torch.bfloat16, f"p{dropout_p}",
                    lambda device, t=num_tokens, h=hidden_size, p=dropout_p: make(t, h, torch.bfloat16, p, device),
                )  # fmt: skip


def make(num_tokens: int, hidden_size: int, dtype: torch.dtype, dropout_p: float, device: torch.device) -> Problem:
    """Random rows, weights away from the identity, sequences of 512 tokens."""
    x, residual = (torch.randn(num_tokens, hidden_size, device=device).to(dtype).requires_grad_() for _ in range(2))
    x_bias, weight, bias = (torch.randn(hidden_size, device=device).to(dtype).requires_grad_() for _ in range(3))
    upstream = torch.randn(num_tokens, hidden_size, device=device).to(dtype)
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=device)
    coords = torch.stack((tokens // 512, tokens % 512), dim=1)
    seed = ops.draw_seed(device)

    def fast(x: Tensor, residual: Tensor, x_bias: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ops.dropout_add_layer_norm(
            x, residual, weight, bias, x_bias=x_bias, eps=EPS, dropout_p=dropout_p, seed=seed, coords=coords
        )

    def eager(x: Tensor, residual: Tensor, x_bias: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(residual + F.dropout(x + x_bias, dropout_p), weight.shape, weight, bias, EPS)

    def verify() -> None:
        factor = keep_mask(seed, 0, coords, hidden_size, dropout_p) * dropout_scale(dropout_p)

        def same_mask(x: Tensor, residual: Tensor, x_bias: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.layer_norm(residual + (x + x_bias) * factor.to(x.dtype), weight.shape, weight, bias, EPS)

        names = ("y", "dx", "dresidual", "dx_bias", "dweight", "dbias")
        assert_gradients_close("dropout_add_layer_norm", names, fast, same_mask, inputs, upstream)

    inputs = (x, residual, x_bias, weight, bias)
    tile = x.nbytes
    return Problem(
        inputs, upstream, fast, eager, verify=verify,
        bytes_moved={
            "fwd": 4 * tile + 16 * num_tokens,
            "bwd": (4 if dropout_p else 3) * tile + 24 * num_tokens,
        },
    )  # fmt: skip


def aot_cases() -> Iterator[AotCase]:
    """Every launch configuration of BERT's widths."""
    from bert_fast.kernels import dropout_add_layer_norm as family

    num_tokens = 32
    seed = torch.zeros(1, dtype=torch.int64)
    coords = torch.zeros(num_tokens, 2, dtype=torch.int32)
    for hidden_size in (384, 768, 1024):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            config = family.launch_config(hidden_size, dtype)
            for dropout_p in (0.0, 0.1):

                def launch(hidden_size: int = hidden_size, dtype: torch.dtype = dtype, p: float = dropout_p) -> None:
                    x = torch.zeros(num_tokens, hidden_size, dtype=dtype)
                    weight = torch.zeros(hidden_size)  # parameters in fp32, as under autocast
                    masks = (p, seed, coords, 1) if p else (p, None, None, 1)
                    _, h, mean, rstd = family.dropout_add_layer_norm_fwd(x, x, weight, weight, weight, 1e-12, *masks)
                    family.dropout_add_layer_norm_bwd(x, h, mean, rstd, weight, *masks)

                yield AotCase(
                    f"H={hidden_size} {dtype_name(dtype)}",
                    dropout_p > 0,
                    launch,
                    {
                        "_dropout_add_layer_norm_fwd_kernel": config.forward.rows * hidden_size,
                        "_dropout_add_layer_norm_bwd_kernel": config.backward.rows * hidden_size,
                    },
                    {"_dropout_add_layer_norm_bwd_kernel": config.backward_programs_per_multiprocessor},
                )
