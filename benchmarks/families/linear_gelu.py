"""Cases of linear_gelu: the widening half of BERT's MLP, GELU by erf and by tanh, pre-activation saved or not."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.case import KernelCase, Problem, Use, assert_gradients_close, full_shapes
from benchmarks.kit import bert
from bert_fast import ops

_SPLIT_ROWS = 256  # of BERT-large: products whose sums are split
_APPROXIMATE = {"erf": "none", "tanh": "tanh", "erf recompute": "none"}


def cases() -> Iterator[KernelCase]:
    """BERT's token counts and widths; variants at the size that goals are set for; a split sum; a few rows."""
    for uses, num_tokens, size in full_shapes():
        yield _case(uses, num_tokens, size, torch.bfloat16, "erf")
    for variant in ("tanh", "erf recompute"):
        yield _case(Use.GPU, bert.TOKENS[0], bert.BASE, torch.bfloat16, variant)
        yield _case(Use.SMOKE, bert.FEWEST_TOKENS, bert.BASE, torch.bfloat16, variant)
    yield _case(Use.GPU | Use.SMOKE, _SPLIT_ROWS, bert.LARGE, torch.bfloat16, "erf")
    for size in (bert.BASE, bert.MINILM):
        yield _case(Use.CPU, bert.FEWEST_TOKENS, size, torch.float32, "erf")
    for variant in ("erf", "erf recompute"):
        yield _case(Use.SMALL, bert.FEW_ROWS, bert.Size("odd", 41, 67), torch.float32, variant)
        yield _case(Use.SMALL, bert.KERNEL_ROWS, bert.MINILM, torch.bfloat16, variant)
    yield _case(Use.SMALL, bert.KERNEL_ROWS, bert.Size("odd", 40, 72), torch.float16, "tanh")


def _case(uses: Use, num_tokens: int, size: bert.Size, dtype: torch.dtype, variant: str) -> KernelCase:
    return KernelCase(
        "linear_gelu", f"{num_tokens}x{size.hidden}x{size.intermediate}", dtype, variant,
        partial(make, num_tokens, size, dtype, variant), uses,
    )  # fmt: skip


def make(num_tokens: int, size: bert.Size, dtype: torch.dtype, variant: str, device: torch.device) -> Problem:
    """[T, H] to [T, I] with a bias."""
    x = bert.normal(num_tokens, size.hidden, dtype=dtype, device=device).requires_grad_()
    weight = bert.weight(size.intermediate, size.hidden, dtype, device)
    bias = bert.bias(size.intermediate, dtype, device)
    upstream = bert.normal(num_tokens, size.intermediate, dtype=dtype, device=device)
    inputs = (x, weight, bias)
    approximate, save_pre = _APPROXIMATE[variant], "recompute" not in variant

    def fast(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ops.linear_gelu(x, weight, bias, approximate=approximate, save_pre=save_pre)

    def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(F.linear(x, weight, bias), approximate=approximate)

    op, names = bert.tolerances_of("linear_gelu", device), ("y", "dx", "dweight", "dbias")
    # The pre-activation is written and read once where it is saved; dpre, between backward's products, counts for none.
    pre = upstream.nbytes if save_pre else 0
    product = 2 * num_tokens * size.hidden * size.intermediate
    # No installed library has this function alone: flash-attn's and apex' are a whole MLP.
    return Problem(
        inputs, upstream, fast, eager, verify=partial(assert_gradients_close, op, names, fast, eager, inputs, upstream),
        bytes_moved=bert.product_bytes(inputs, upstream, pre), flops={"fwd": product, "bwd": 2 * product},
    )  # fmt: skip
