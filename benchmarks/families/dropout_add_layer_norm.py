"""Cases of dropout_add_layer_norm: BERT's token counts and widths, with and without dropout."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.case import AotCase, KernelCase, Problem, assert_gradients_close, dtype_name
from bert_fast import ops
from bert_fast.reference.dropout import dropout_scale, keep_mask
from bert_fast.reference.dropout_add_layer_norm import AGAIN, DropoutAddLayerNorm

EPS = 1e-12


def cases() -> Iterator[KernelCase]:
    """bf16 at full token budgets, and once with weights that make forward keep its sum h."""
    shapes = [(t, h, p, False) for t in (4096, 16384, 32768) for h in (768, 1024) for p in (0.0, 0.1)]
    for num_tokens, hidden_size, dropout_p, keeps_h in [*shapes, (16384, 768, 0.1, True)]:
        yield _case(num_tokens, hidden_size, torch.bfloat16, dropout_p, keeps_h)


def smoke_cases() -> Iterator[KernelCase]:
    """BERT-base; both things that forward may keep."""
    yield _case(4096, 768, torch.bfloat16, 0.0)
    yield _case(4096, 768, torch.bfloat16, 0.1)
    yield _case(4096, 768, torch.bfloat16, 0.1, keeps_h=True)


def small_cases() -> Iterator[KernelCase]:
    """A few rows: a width that is no power of two, and BERT's; both things that forward may keep."""
    yield _case(37, 100, torch.float32, 0.1)
    yield _case(37, 768, torch.bfloat16, 0.0)
    yield _case(37, 768, torch.bfloat16, 0.1, keeps_h=True)


def cpu_cases() -> Iterator[KernelCase]:
    """A training batch of BERT-base."""
    yield _case(4096, 768, torch.float32, 0.1)


def _case(num_tokens: int, hidden_size: int, dtype: torch.dtype, dropout_p: float, keeps_h: bool = False) -> KernelCase:
    return KernelCase(
        "dropout_add_layer_norm", f"{num_tokens}x{hidden_size}", dtype,
        f"p{dropout_p}" + (" weight 0" if keeps_h else ""),
        lambda device: make(num_tokens, hidden_size, dtype, dropout_p, device, keeps_h=keeps_h),
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

    inputs = (x, residual, x_bias, weight, bias)
    tile, mask_bytes = x.nbytes, coords.nbytes if dropout_p else 0
    return Problem(
        inputs, upstream, fast, eager, verify=verify, peers=_peers(dropout_p),
        bytes_moved={
            "fwd": (4 if keeps_h else 3) * tile + 8 * num_tokens + mask_bytes,
            "bwd": (4 if dropout_p else 3) * tile + (8 if keeps_h else 4) * num_tokens + mask_bytes,
        },
    )  # fmt: skip


def _peers(dropout_p: float) -> dict[str, Callable[..., Tensor]]:
    """Other libraries' fusion of all but the bias, where they import."""
    peers: dict[str, Callable[..., Tensor]] = {}
    try:
        from flash_attn.ops.triton.layer_norm import layer_norm_fn
    except ImportError:
        return peers

    def flash_attn(x: Tensor, residual: Tensor, x_bias: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return layer_norm_fn(x + x_bias, weight, bias, residual=residual, eps=EPS, dropout_p=dropout_p)

    peers["flash_attn"] = flash_attn
    return peers


def aot_cases() -> Iterator[AotCase]:
    """Every launch configuration of BERT's widths, and of the widest rows, as the op launches them on a GPU."""
    from bert_fast.triton import dropout_add_layer_norm as family
    from bert_fast.triton._launch import architecture

    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    # Parameters are mostly in fp32, as under autocast.
    shapes = [(h, dtype, fp32, "device") for h in (384, 768, 1024) for dtype in (fp32, fp16, bf16)]
    shapes += [(768, bf16, bf16, "device")]
    shapes += [(h, dtype, fp32, "device") for h in (2048, 4096, 8192) for dtype in (fp32, bf16)]
    # As a whole layer launches them.
    shapes += [(h, dtype, fp32, AGAIN) for h in (384, 768, 1024) for dtype in (fp16, bf16)]
    shapes += [(768, bf16, bf16, AGAIN)]
    num_tokens = 64
    seed = torch.zeros(1, dtype=torch.int64)
    coords = torch.zeros(num_tokens, 2, dtype=torch.int32)
    for hidden_size, dtype, parameter_dtype, saves in shapes:
        config = family.launch_config(hidden_size, dtype, architecture(seed.device))
        for p in (0.0, 0.1):

            def launch(
                h: int = hidden_size,
                dtype: torch.dtype = dtype,
                parameters: torch.dtype = parameter_dtype,
                p: float = p,
                saves: str = saves,
            ) -> None:
                x, weight = torch.zeros(num_tokens, h, dtype=dtype), torch.zeros(h, dtype=parameters)
                masks = (p, seed, coords, 1) if p else (p, None, None, 1)
                a = DropoutAddLayerNorm(x, x, weight, weight, weight, EPS, *masks, saves)
                y, h_kept, mean, rstd = family.dropout_add_layer_norm_fwd(a)
                family.dropout_add_layer_norm_bwd(a, x, y, x if saves == AGAIN else h_kept, mean, rstd)

            yield AotCase(
                f"H={hidden_size} {dtype_name(dtype)}"
                + (" parameters bf16" if parameter_dtype == bf16 else "")
                + (" in a layer" if saves == AGAIN else ""),
                p > 0,
                launch,
                {
                    "_dropout_add_layer_norm_fwd_kernel": config.forward.rows * hidden_size,
                    "_dropout_add_layer_norm_bwd_kernel": config.backward.rows * hidden_size,
                },
                {
                    "_dropout_add_layer_norm_fwd_kernel": config.forward_programs_per_multiprocessor,
                    "_dropout_add_layer_norm_bwd_kernel": config.backward_programs_per_multiprocessor,
                },
                {
                    "_dropout_add_layer_norm_fwd_kernel": (4 if config.keeps_h else 3) * dtype.itemsize,
                    "_dropout_add_layer_norm_bwd_kernel": (4 if p else 3) * dtype.itemsize,
                },
            )
