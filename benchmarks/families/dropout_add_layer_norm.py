"""Cases of dropout_add_layer_norm: BERT's token counts and widths, with and without dropout."""

import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.aot.case import AotCase, facts_of_rows
from benchmarks.kernels.case import KernelCase, Problem, Use, assert_gradients_close, dtype_name, full_shapes, installed
from benchmarks.kit import bert
from bert_fast import ops
from bert_fast.reference.dropout import dropout_scale, keep_mask
from bert_fast.reference.dropout_add_layer_norm import AGAIN, DropoutAddLayerNorm

EPS = 1e-12


def cases() -> Iterator[KernelCase]:
    """BERT's token counts and widths, also with weights that make forward keep its sum h; a few rows."""
    base = bert.BASE.hidden
    for (uses, num_tokens, size), dropout_p in itertools.product(full_shapes(), (0.0, 0.1)):
        yield _case(uses, num_tokens, size.hidden, torch.bfloat16, dropout_p)
    yield _case(Use.GPU, bert.TOKENS[0], base, torch.bfloat16, 0.1, keeps_h=True)
    yield _case(Use.SMOKE, bert.FEWEST_TOKENS, base, torch.bfloat16, 0.1, keeps_h=True)
    yield _case(Use.CPU, bert.FEWEST_TOKENS, base, torch.float32, 0.1)
    yield _case(Use.SMALL, bert.FEW_ROWS, 100, torch.float32, 0.1)  # a width that is no power of two
    yield _case(Use.SMALL, bert.FEW_ROWS, base, torch.bfloat16, 0.0)
    yield _case(Use.SMALL, bert.FEW_ROWS, base, torch.bfloat16, 0.1, keeps_h=True)


def _case(
    uses: Use, num_tokens: int, hidden_size: int, dtype: torch.dtype, dropout_p: float, keeps_h: bool = False
) -> KernelCase:
    return KernelCase(
        "dropout_add_layer_norm", f"{num_tokens}x{hidden_size}", dtype,
        f"p{dropout_p}" + (" weight 0" if keeps_h else ""),
        partial(make, num_tokens, hidden_size, dtype, dropout_p, keeps_h=keeps_h), uses,
    )  # fmt: skip


def make(
    num_tokens: int,
    hidden_size: int,
    dtype: torch.dtype,
    dropout_p: float,
    device: torch.device,
    *,
    keeps_h: bool = False,
) -> Problem:
    """Random rows, weights as trained models have them (one of them 0 if keeps_h), sequences of 512 tokens."""
    x, residual = (torch.randn(num_tokens, hidden_size, device=device).to(dtype).requires_grad_() for _ in range(2))
    x_bias, weight, bias = (0.2 * torch.randn(hidden_size, device=device) + c for c in (0.0, 0.9, 0.0))
    weight, bias = weight.abs() + 0.1, bias.clamp(-0.15, 0.15)  # within the limits, or forward would keep h
    if keeps_h:
        weight[7] = 0.0
    x_bias, weight, bias = (t.to(dtype).requires_grad_() for t in (x_bias, weight, bias))
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

    def flash_attn(f: Any, x: Tensor, residual: Tensor, x_bias: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """All but the bias is fused."""
        return f(x + x_bias, weight, bias, residual=residual, eps=EPS, dropout_p=dropout_p)

    inputs = (x, residual, x_bias, weight, bias)
    tile, mask_bytes = x.nbytes, coords.nbytes if dropout_p else 0
    return Problem(
        inputs, upstream, fast, eager, verify=verify,
        peers=installed(flash_attn=("flash_attn.ops.triton.layer_norm:layer_norm_fn", flash_attn)),
        bytes_moved={
            "fwd": (4 if keeps_h else 3) * tile + 8 * num_tokens + mask_bytes,
            "bwd": (4 if dropout_p else 3) * tile + (8 if keeps_h else 4) * num_tokens + mask_bytes,
        },
    )  # fmt: skip


def aot_cases() -> Iterator[AotCase]:
    """Every launch configuration of BERT's widths and of the widest rows, alone and as a whole layer launches them.

    Parameters are mostly in fp32, as under autocast.
    """
    yield from _aot_cases(itertools.product(bert.HIDDEN_SIZES, bert.DTYPES))
    yield from _aot_cases([(bert.BASE.hidden, torch.bfloat16)], torch.bfloat16)
    yield from _aot_cases(itertools.product(bert.WIDEST, (torch.float32, torch.bfloat16)))
    yield from _aot_cases(itertools.product(bert.HIDDEN_SIZES, (torch.float16, torch.bfloat16)), saves=AGAIN)
    yield from _aot_cases([(bert.BASE.hidden, torch.bfloat16)], torch.bfloat16, AGAIN)


def _aot_cases(
    shapes: Iterable[tuple[int, torch.dtype]], parameters: torch.dtype = torch.float32, saves: str = "device"
) -> Iterator[AotCase]:
    for (hidden_size, dtype), dropout_p in itertools.product(shapes, (0.0, 0.1)):
        yield _aot_case(hidden_size, dtype, parameters, saves, dropout_p)


def _aot_case(hidden_size: int, dtype: torch.dtype, parameters: torch.dtype, saves: str, dropout_p: float) -> AotCase:
    from bert_fast.triton import dropout_add_layer_norm as family
    from bert_fast.triton._launch import architecture

    def launch() -> None:
        x, weight = torch.zeros(64, hidden_size, dtype=dtype), torch.zeros(hidden_size, dtype=parameters)
        drawn = torch.zeros(1, dtype=torch.int64), torch.zeros(64, 2, dtype=torch.int32)  # seed and coords
        masks = (dropout_p, *(drawn if dropout_p else (None, None)), 1)
        a = DropoutAddLayerNorm(x, x, weight, weight, weight, EPS, *masks, saves)
        y, h_kept, mean, rstd = family.dropout_add_layer_norm_fwd(a)
        family.dropout_add_layer_norm_bwd(a, x, y, x if saves == AGAIN else h_kept, mean, rstd)

    config = family.launch_config(hidden_size, dtype, architecture(Tensor().device))
    facts = facts_of_rows(
        "dropout_add_layer_norm", config, hidden_size,
        forward_bytes=(4 if config.keeps_h else 3) * dtype.itemsize,
        backward_bytes=(4 if dropout_p else 3) * dtype.itemsize,
    )  # fmt: skip
    name = f"H={hidden_size} {dtype_name(dtype)}"
    name += " parameters bf16" if parameters == torch.bfloat16 else ""
    name += " in a layer" if saves == AGAIN else ""
    return AotCase(name, launch, facts, has_dropout=dropout_p > 0)
