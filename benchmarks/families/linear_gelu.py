"""Cases of linear_gelu: the widening half of BERT's MLP, GELU by erf and by tanh, pre-activation saved or not."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.case import AotCase, KernelCase, Problem, assert_gradients_close
from benchmarks.kit import bert
from bert_fast import ops

FEW_ROWS = 256  # of BERT-large: products whose sums are split
_APPROXIMATE = {"erf": "none", "tanh": "tanh", "erf recompute": "none"}


def cases() -> Iterator[KernelCase]:
    """bf16 at full token budgets, base and large; the variants at the size that goals are set for; a split sum."""
    for num_tokens in bert.TOKENS:
        for size in bert.SIZES:
            yield _case(num_tokens, size, torch.bfloat16, "erf")
    for variant in ("tanh", "erf recompute"):
        yield _case(bert.TOKENS[0], bert.BASE, torch.bfloat16, variant)
    yield _case(FEW_ROWS, bert.LARGE, torch.bfloat16, "erf")


def smoke_cases() -> Iterator[KernelCase]:
    """BERT-base; few rows of BERT-large."""
    for variant in _APPROXIMATE:
        yield _case(4096, bert.BASE, torch.bfloat16, variant)
    yield _case(FEW_ROWS, bert.LARGE, torch.bfloat16, "erf")


def small_cases() -> Iterator[KernelCase]:
    """A few rows: widths that are no multiple of anything, and MiniLM's, with as many rows as our kernel asks for."""
    odd = bert.Size("odd", 41, 67)
    yield _case(37, odd, torch.float32, "erf")
    yield _case(37, odd, torch.float32, "erf recompute")
    yield _case(130, bert.Size("odd", 40, 72), torch.float16, "tanh")
    yield _case(130, bert.MINILM, torch.bfloat16, "erf")
    yield _case(130, bert.MINILM, torch.bfloat16, "erf recompute")


def cpu_cases() -> Iterator[KernelCase]:
    """A training batch of BERT-base and of MiniLM."""
    for size in (bert.BASE, bert.MINILM):
        yield _case(bert.CPU_TOKENS, size, torch.float32, "erf")


def _case(num_tokens: int, size: bert.Size, dtype: torch.dtype, variant: str) -> KernelCase:
    return KernelCase(
        "linear_gelu", f"{num_tokens}x{size.hidden}x{size.intermediate}", dtype, variant,
        lambda device: make(num_tokens, size, dtype, variant, device),
    )  # fmt: skip


def make(num_tokens: int, size: bert.Size, dtype: torch.dtype, variant: str, device: torch.device) -> Problem:
    """[T, H] to [T, I] with a bias."""
    x = bert.normal(num_tokens, size.hidden, dtype=dtype, device=device).requires_grad_()
    weight, bias = (
        bert.weight(size.intermediate, size.hidden, dtype, device),
        bert.bias(size.intermediate, dtype, device),
    )
    upstream = bert.normal(num_tokens, size.intermediate, dtype=dtype, device=device)
    inputs = (x, weight, bias)
    approximate, save_pre = _APPROXIMATE[variant], "recompute" not in variant

    def fast(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ops.linear_gelu(x, weight, bias, approximate=approximate, save_pre=save_pre)

    def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(F.linear(x, weight, bias), approximate=approximate)

    op = bert.tolerances_of("linear_gelu", device)

    def verify() -> None:
        assert_gradients_close(op, ("y", "dx", "dweight", "dbias"), fast, eager, inputs, upstream)

    # The pre-activation is written and read once where it is saved; dpre, between backward's products, counts for none.
    pre = upstream.nbytes if save_pre else 0
    product = 2 * num_tokens * size.hidden * size.intermediate
    # No installed library has this function alone: flash-attn's and apex' are a whole MLP.
    return Problem(
        inputs, upstream, fast, eager, verify=verify,
        bytes_moved={
            "fwd": bert.nbytes(*inputs, upstream) + pre,
            "bwd": 2 * bert.nbytes(x, weight) + bert.nbytes(upstream, bias) + pre,
        },
        flops={"fwd": product, "bwd": 2 * product},
    )  # fmt: skip


def aot_cases() -> Iterator[AotCase]:
    """None of its own: `linear` has the kernel with this epilogue, `bias_gelu` what follows a library's product."""
    return iter(())
