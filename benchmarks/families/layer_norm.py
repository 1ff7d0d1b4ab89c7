"""Cases of layer_norm: BERT's token counts and widths; ahead of time also wide rows."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.aot.case import AotCase, facts_of_rows
from benchmarks.kernels.case import KernelCase, Problem, Use, assert_gradients_close, dtype_name, full_shapes, installed
from benchmarks.kit import bert
from bert_fast import ops
from bert_fast.reference.layer_norm import LayerNorm

EPS = 1e-12


def cases() -> Iterator[KernelCase]:
    """BERT's token counts and widths; a few rows of a width that is no power of two, and of BERT's."""
    for uses, num_tokens, size in full_shapes():
        yield _case(uses, num_tokens, size.hidden, torch.bfloat16)
    yield _case(Use.CPU, bert.FEWEST_TOKENS, bert.BASE.hidden, torch.float32)
    yield _case(Use.SMALL, bert.FEW_ROWS, 100, torch.float32)
    yield _case(Use.SMALL, bert.FEW_ROWS, bert.BASE.hidden, torch.bfloat16)


def _case(uses: Use, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> KernelCase:
    make_it = partial(make, num_tokens, hidden_size, dtype)
    return KernelCase("layer_norm", f"{num_tokens}x{hidden_size}", dtype, "affine", make_it, uses)


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

    names = ("y", "dx", "dweight", "dbias")
    return Problem(
        inputs, upstream, fast, eager,
        verify=partial(assert_gradients_close, "layer_norm", names, fast, eager, inputs, upstream),
        peers=installed(
            liger=("liger_kernel.ops.layer_norm:LigerLayerNormFunction", lambda f, *given: f.apply(*given, EPS)),
            apex=(
                "apex.normalization.fused_layer_norm:fused_layer_norm_affine",
                lambda f, x, weight, bias: f(x, weight, bias, weight.shape, EPS),
            ),
            flash_attn=("flash_attn.ops.triton.layer_norm:layer_norm_fn", lambda f, *given: f(*given, eps=EPS)),
        ),
        bytes_moved={"fwd": 2 * x.nbytes + 8 * num_tokens, "bwd": 3 * x.nbytes + 8 * num_tokens},
    )  # fmt: skip


def aot_cases() -> Iterator[AotCase]:
    """Every launch configuration of BERT's widths and of the widest rows; parameters mostly in fp32, as in autocast."""
    for hidden_size, dtype in itertools.product(bert.HIDDEN_SIZES, bert.DTYPES):
        yield _aot_case(hidden_size, dtype)
    yield _aot_case(bert.BASE.hidden, torch.bfloat16, torch.bfloat16)
    for hidden_size, dtype in itertools.product(bert.WIDEST, (torch.float32, torch.bfloat16)):
        yield _aot_case(hidden_size, dtype)


def _aot_case(hidden_size: int, dtype: torch.dtype, parameters: torch.dtype = torch.float32) -> AotCase:
    from bert_fast.triton import layer_norm as family

    def launch() -> None:
        x, weight = torch.zeros(64, hidden_size, dtype=dtype), torch.zeros(hidden_size, dtype=parameters)
        a = LayerNorm(x, weight, weight, EPS)
        _, mean, rstd = family.layer_norm_fwd(a)
        family.layer_norm_bwd(a, x, mean, rstd)

    config, e = family.launch_config(hidden_size, dtype), dtype.itemsize
    facts = facts_of_rows("layer_norm", config, hidden_size, forward_bytes=2 * e, backward_bytes=3 * e)
    name = f"H={hidden_size} {dtype_name(dtype)}" + (" parameters bf16" if parameters == torch.bfloat16 else "")
    return AotCase(name, launch, facts)
