"""Cases of bias_gelu: BERT's token counts and intermediate widths, GELU by erf and by tanh; ahead of time all names."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.aot.case import AotCase, KernelFacts
from benchmarks.kernels.case import KernelCase, Problem, Use, assert_gradients_close, dtype_name, full_shapes
from benchmarks.kit import bert
from bert_fast import ops
from bert_fast.reference.bias_gelu import BiasGelu

_APPROXIMATE = {"erf": "none", "tanh": "tanh"}


def cases() -> Iterator[KernelCase]:
    """BERT's token counts and intermediate widths; a few rows of a width that is no power of two, and of BERT's."""
    wide = bert.BASE.intermediate
    for (uses, num_tokens, size), variant in itertools.product(full_shapes(), _APPROXIMATE):
        yield _case(uses, num_tokens, size.intermediate, torch.bfloat16, variant)
    yield _case(Use.CPU, bert.FEWEST_TOKENS, wide, torch.float32, "erf")
    yield _case(Use.SMALL, bert.FEW_ROWS, 100, torch.float32, "erf")
    for variant in _APPROXIMATE:
        yield _case(Use.SMALL, bert.FEW_ROWS, wide, torch.bfloat16, variant)


def _case(uses: Use, num_tokens: int, num_cols: int, dtype: torch.dtype, variant: str) -> KernelCase:
    make_it = partial(make, num_tokens, num_cols, dtype, _APPROXIMATE[variant])
    return KernelCase("bias_gelu", f"{num_tokens}x{num_cols}", dtype, variant, make_it, uses)


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

    # No installed library has this function of two tensors: Liger's GELU is gated, apex' and flash-attn's are parts of
    # matrix products.
    return Problem(
        inputs, upstream, fast, eager,
        verify=partial(assert_gradients_close, "bias_gelu", ("y", "dx", "dbias"), fast, eager, inputs, upstream),
        bytes_moved={"fwd": 2 * x.nbytes, "bwd": 3 * x.nbytes},
    )  # fmt: skip


def aot_cases() -> Iterator[AotCase]:
    """Every launch configuration of BERT's widths: both GELUs in all dtypes, the other activations in bf16."""
    base, wide = bert.BASE.hidden, bert.BASE.intermediate
    for num_cols, dtype, act in itertools.product((base, wide), bert.DTYPES, ("gelu", "gelu_new")):
        yield _aot_case(num_cols, dtype, act)
    for act in ("relu", "silu", "tanh"):
        yield _aot_case(wide, torch.bfloat16, act)
    for num_cols in (bert.MINILM.hidden, bert.MINILM.intermediate, bert.LARGE.intermediate):
        yield _aot_case(num_cols, torch.bfloat16, "gelu")
    yield _aot_case(wide, torch.bfloat16, "gelu", of_bias=torch.bfloat16)
    yield _aot_case(wide, torch.bfloat16, "gelu", of_bias=None)


def _aot_case(
    num_cols: int, dtype: torch.dtype, hidden_act: str, of_bias: torch.dtype | None = torch.float32
) -> AotCase:
    """of_bias: its dtype; None where there is none."""
    from bert_fast.triton import bias_gelu as family

    def launch() -> None:
        x = torch.zeros(64, num_cols, dtype=dtype)
        a = BiasGelu(x, None if of_bias is None else torch.zeros(num_cols, dtype=of_bias), hidden_act)
        family.bias_gelu_fwd(a)
        family.bias_gelu_bwd(a, x)

    config = family.launch_config(num_cols, dtype)
    bias = {torch.float32: "", torch.bfloat16: " bias bf16", None: " no bias"}[of_bias]
    return AotCase(
        f"{hidden_act} N={num_cols} {dtype_name(dtype)}{bias}",
        launch,
        {
            "_bias_gelu_fwd_kernel": KernelFacts(
                config.forward_rows * config.cols, 2 * dtype.itemsize, config.forward_programs_per_multiprocessor
            ),
            "_bias_gelu_bwd_kernel": KernelFacts(
                config.backward_rows * config.cols, 3 * dtype.itemsize, config.backward_programs_per_multiprocessor
            ),
        },
    )
