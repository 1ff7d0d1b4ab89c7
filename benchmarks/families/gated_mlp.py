"""Cases of gated_mlp: feed-forward blocks with a gate, as transformers' nomic_bert (SwiGLU) and gte (GeGLU)."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.aot.case import AotCase, KernelFacts
from benchmarks.kernels.case import KernelCase, Problem, Use, assert_gradients_close, dtype_name, full_shapes
from benchmarks.kit import bert
from bert_fast import ops
from bert_fast.reference.dropout import dropout_scale, keep_mask
from bert_fast.reference.gated_mlp import GatedMlp
from bert_fast.storage import join_memory

_SITE = 7
_NAMES = ("y", "dx", "dgate_weight", "dup_weight", "ddown_weight")
_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu}


def cases() -> Iterator[KernelCase]:
    """BERT's token counts and widths; the variants at the size that goals are set for; a few rows."""
    for uses, num_tokens, size in full_shapes():
        yield _case(uses, num_tokens, size, torch.bfloat16, "silu")
    for variant in ("gelu p0.1", "silu recompute", "silu apart"):
        yield _case(Use.GPU, bert.TOKENS[0], bert.BASE, torch.bfloat16, variant)
        yield _case(Use.SMOKE, bert.FEWEST_TOKENS, bert.BASE, torch.bfloat16, variant)
    for variant in ("silu", "gelu p0.1"):
        yield _case(Use.CPU, bert.FEWEST_TOKENS, bert.BASE, torch.float32, variant)
    for variant in ("silu", "silu recompute"):
        yield _case(Use.SMALL, bert.FEW_ROWS, bert.Size("odd", 41, 67), torch.float32, variant)
    for variant in ("silu", "gelu p0.1", "silu recompute"):
        yield _case(Use.SMALL, bert.KERNEL_ROWS, bert.Size("odd", 40, 72), torch.float16, variant)
    yield _case(Use.SMALL, bert.FEW_ROWS, bert.Size("odd", 40, 264), torch.bfloat16, "gelu p0.1")


def _case(uses: Use, num_tokens: int, size: bert.Size, dtype: torch.dtype, variant: str) -> KernelCase:
    return KernelCase(
        "gated_mlp", f"{num_tokens}x{size.hidden}x{size.intermediate}", dtype, variant,
        partial(make, num_tokens, size, dtype, variant), uses,
    )  # fmt: skip


def make(num_tokens: int, size: bert.Size, dtype: torch.dtype, variant: str, device: torch.device) -> Problem:
    """[T, H] to [T, I] twice and back, without biases; sequences of 512 tokens.

    apart: the weights of gate and up are no neighbours in memory; eager's never are.
    """
    hidden, wide = size.hidden, size.intermediate
    hidden_act, dropout_p, save_pre = variant.split()[0], 0.1 if "p0.1" in variant else 0.0, "recompute" not in variant
    act = _PLAIN[hidden_act]
    x = bert.normal(num_tokens, hidden, dtype=dtype, device=device).requires_grad_()
    gate, up = (nn.Parameter(bert.weight(wide, hidden, dtype, device).detach()) for _ in range(2))
    if "apart" not in variant:
        join_memory(gate, up)
    inputs = (x, gate, up, bert.weight(hidden, wide, dtype, device))
    upstream = bert.normal(num_tokens, hidden, dtype=dtype, device=device)
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=device)
    coords = torch.stack((tokens // 512, tokens % 512), dim=1)
    seed = ops.draw_seed(device)

    def fast(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return ops.gated_mlp(
            x, gate, None, up, None, down, hidden_act=hidden_act, dropout_p=dropout_p, seed=seed, coords=coords,
            site=_SITE, save_pre=save_pre,
        )  # fmt: skip

    def eager(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.dropout(act(F.linear(x, gate)) * F.linear(x, up), dropout_p), down)

    def same_mask(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        keep = keep_mask(seed, _SITE, coords, wide, dropout_p)
        h = act(F.linear(x, gate)) * F.linear(x, up)
        return F.linear(torch.where(keep, h * dropout_scale(dropout_p), 0.0), down)

    op = bert.tolerances_of("gated_mlp", device)
    # Gate and up are written and read once where they are saved; what lies between two products counts for none.
    pre = 2 * num_tokens * wide * dtype.itemsize if save_pre else 0
    product = 2 * num_tokens * hidden * wide
    return Problem(
        inputs, upstream, fast, eager,
        verify=partial(assert_gradients_close, op, _NAMES, fast, same_mask, inputs, upstream),
        bytes_moved=bert.product_bytes(inputs, upstream, pre), flops={"fwd": 3 * product, "bwd": 6 * product},
    )  # fmt: skip


def aot_cases() -> Iterator[AotCase]:
    """SwiGLU and, with dropout, GeGLU in all dtypes, the other activations in bf16; a width that is cut unevenly."""
    wide = bert.BASE.intermediate
    for dtype, dropout_p in itertools.product(bert.DTYPES, (0.0, 0.1)):
        yield _aot_case(wide, dtype, "silu", dropout_p)
    for dtype in bert.DTYPES:
        yield _aot_case(wide, dtype, "gelu", 0.1)
    for act in ("gelu_new", "relu", "tanh"):
        yield _aot_case(wide, torch.bfloat16, act, 0.1)
    yield _aot_case(1000, torch.bfloat16, "silu", 0.0)


def _aot_case(num_cols: int, dtype: torch.dtype, hidden_act: str, dropout_p: float) -> AotCase:
    from bert_fast.triton import gated_mlp as family

    def launch() -> None:
        x, pre = torch.zeros(64, num_cols, dtype=dtype), torch.zeros(64, 2 * num_cols, dtype=dtype)
        seed = torch.zeros(1, dtype=torch.int64) if dropout_p else None
        coords = torch.zeros(64, 2, dtype=torch.int32) if dropout_p else None
        a = GatedMlp(x, x, None, x, None, x, None, hidden_act, dropout_p, seed, coords, 1, True)
        family.gated(a, pre)
        family.gated_bwd(a, pre, x, torch.empty_like(pre), True)

    block = 32 * 16 // dtype.itemsize
    return AotCase(
        f"{hidden_act} I={num_cols} {dtype_name(dtype)}",
        launch,
        {
            "_gated_mlp_fwd_kernel": KernelFacts(family.ROWS * block, 3 * dtype.itemsize),
            "_gated_mlp_bwd_kernel": KernelFacts(family.ROWS * block, 6 * dtype.itemsize),
        },
        has_dropout=dropout_p > 0,
    )
