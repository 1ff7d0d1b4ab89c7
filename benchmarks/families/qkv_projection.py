"""Cases of qkv_projection: query, key and value from one input, beside three library calls and beside one."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.case import KernelCase, Problem, Use, assert_gradients_close, full_shapes
from benchmarks.kit import bert
from bert_fast import ops
from bert_fast.storage import join_memory

_NAMES = ("qkv", "dx", "dwq", "dbq", "dwk", "dbk", "dwv", "dbv")


def cases() -> Iterator[KernelCase]:
    """BERT's token counts and widths; a few rows, also of weights that are no neighbours."""
    for uses, num_tokens, size in full_shapes():
        yield _case(uses, num_tokens, size.hidden, torch.bfloat16)
    for size in (bert.BASE, bert.MINILM):
        yield _case(Use.CPU, bert.FEWEST_TOKENS, size.hidden, torch.float32)
    yield _case(Use.SMALL, bert.FEW_ROWS, 41, torch.float32)  # a width that is no multiple of anything
    yield _case(Use.SMALL, bert.FEW_ROWS, 41, torch.float32, is_joined=False)
    yield _case(Use.SMALL, bert.FEW_ROWS, 40, torch.float16)
    yield _case(Use.SMALL, bert.FEW_ROWS, bert.MINILM.hidden, torch.bfloat16)


def _case(uses: Use, num_tokens: int, hidden: int, dtype: torch.dtype, is_joined: bool = True) -> KernelCase:
    return KernelCase(
        "qkv_projection", f"{num_tokens}x{hidden}x{3 * hidden}", dtype, "joined" if is_joined else "apart",
        partial(make, num_tokens, hidden, dtype, is_joined), uses,
    )  # fmt: skip


def make(num_tokens: int, hidden: int, dtype: torch.dtype, is_joined: bool, device: torch.device) -> Problem:
    """[T, H] to [T, 3H]. Joined: the three weights are neighbours in memory, and so are the biases, as in a model.

    eager makes three tensors and gets three gradients: nobody has to put them side by side for attention, so the copy
    that doing so would cost is no part of its time.
    """
    x = bert.normal(num_tokens, hidden, dtype=dtype, device=device).requires_grad_()
    weights = [torch.nn.Parameter(bert.weight(hidden, hidden, dtype, device).detach()) for _ in range(3)]
    biases = [torch.nn.Parameter(bert.bias(hidden, dtype, device).detach()) for _ in range(3)]
    one_weight, one_bias = (torch.cat([p.detach() for p in parts]).requires_grad_() for parts in (weights, biases))
    if is_joined:
        join_memory(*weights)
        join_memory(*biases)
    inputs = (x, *(parameter for pair in zip(weights, biases, strict=True) for parameter in pair))
    upstream = bert.normal(num_tokens, 3 * hidden, dtype=dtype, device=device)
    thirds = tuple(third.contiguous() for third in upstream.chunk(3, dim=1))

    def one_linear_of_three(x: Tensor, *parameters: Tensor) -> Tensor:
        return F.linear(x, torch.cat(parameters[::2]), torch.cat(parameters[1::2]))

    op = bert.tolerances_of("qkv_projection", device)
    product = 2 * num_tokens * hidden * 3 * hidden
    own_inputs = dict.fromkeys(("eager", "compiled"), (inputs, thirds))
    return Problem(
        inputs, upstream, ops.qkv_projection, _three_linears,
        verify=partial(
            assert_gradients_close, op, _NAMES, ops.qkv_projection, one_linear_of_three, inputs, upstream
        ),
        peers={"one_linear": F.linear},
        own_inputs=own_inputs | {"one_linear": ((x, one_weight, one_bias), upstream)},
        bytes_moved=bert.product_bytes(inputs, upstream), flops={"fwd": product, "bwd": 2 * product},
    )  # fmt: skip


def _three_linears(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    """As PyTorch users write it."""
    return tuple(F.linear(x, w, b) for w, b in zip(parameters[::2], parameters[1::2], strict=True))
