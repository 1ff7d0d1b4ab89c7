"""Cases of encoder_layer: a whole layer, forward and backward, on sequences of one length."""

import itertools
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.aot.case import AotCase, KernelFacts
from benchmarks.kernels.case import KernelCase, Problem, Use, assert_gradients_close, dtype_name, full_shapes
from benchmarks.kit import bert
from bert_fast.modules.call import Call
from bert_fast.modules.layer import BertLayer
from bert_fast.ops import Packing
from bert_fast.reference.dropout_add_layer_norm import AGAIN
from bert_fast.reference.encoder_layer import EncoderLayer, Saved


def cases() -> Iterator[KernelCase]:
    """BERT's token counts and widths; also with inputs of LayerNorms that backward has to compute again; a few rows."""
    for uses, num_tokens, size in full_shapes():
        yield _case(uses, num_tokens, 128, size, torch.bfloat16, 0.1)
    yield _case(Use.SMOKE, bert.FEWEST_TOKENS, 128, bert.BASE, torch.bfloat16, 0.0)
    yield _case(Use.SMOKE, bert.FEWEST_TOKENS, 128, bert.BASE, torch.bfloat16, 0.1, hides_inputs=True)
    yield _case(Use.CPU, bert.FEWEST_TOKENS, 128, bert.BASE, torch.float32, 0.1)
    yield _case(Use.CPU, 1, 1, bert.TINY, torch.float32, 0.0)
    for dtype in (torch.float32, torch.bfloat16):
        yield _case(Use.SMALL, 36, 12, bert.TINY, dtype, 0.1)
    yield _case(Use.SMALL, 36, 12, bert.TINY, torch.bfloat16, 0.1, hides_inputs=True)


def _case(
    uses: Use, num_tokens: int, length: int, size: bert.Size, dtype: torch.dtype, dropout_p: float,
    hides_inputs: bool = False,
) -> KernelCase:  # fmt: skip
    return KernelCase(
        "encoder_layer", f"{num_tokens // length}x{length}x{size.hidden}", dtype,
        f"p{dropout_p}" + (" weight 0" if hides_inputs else ""),
        partial(make, num_tokens, length, size, dtype, dropout_p, hides_inputs=hides_inputs), uses,
    )  # fmt: skip


def make(
    num_tokens: int,
    length: int,
    size: bert.Size,
    dtype: torch.dtype,
    dropout_p: float,
    device: torch.device,
    *,
    hides_inputs: bool = False,
) -> Problem:
    """[T, H] to [T, H]; eager is what PyTorch's users write, with its fused attention.

    hides_inputs: a column of both LayerNorms has weight 0, so that their outputs do not give their inputs back.
    """
    layer = _layer(size, dtype, dropout_p, device)
    if hides_inputs:
        with torch.no_grad():
            for module in layer.modules():
                if isinstance(module, nn.LayerNorm):
                    module.weight[0] = 0.0
    packing = Packing.full(num_tokens // length, length, device)
    call = Call(packing, torch.tensor([7], device=device) if dropout_p else None)
    x = bert.normal(num_tokens, size.hidden, dtype=dtype, device=device).requires_grad_()
    upstream = bert.normal(num_tokens, size.hidden, dtype=dtype, device=device)
    inputs = (x, *layer.parameters())

    def fast(x: Tensor, *_: Tensor) -> Tensor:
        return layer(x, call=call)

    def eager(x: Tensor, *parameters: Tensor, p: float = dropout_p) -> Tensor:
        heads = [
            F.linear(x, *parameters[first : first + 2]).view(-1, length, size.heads, size.hidden // size.heads)
            for first in (0, 2, 4)
        ]
        attended = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in heads), dropout_p=p).transpose(1, 2)
        output, norm, wide, narrow, last_norm = (parameters[first : first + 2] for first in range(6, 16, 2))
        z = F.layer_norm(x + F.dropout(F.linear(attended.reshape(x.shape), *output), p), x.shape[1:], *norm, 1e-12)
        product = F.linear(F.gelu(F.linear(z, *wide)), *narrow)
        return F.layer_norm(z + F.dropout(product, p), x.shape[1:], *last_norm, 1e-12)

    def verify() -> None:
        """Without dropout, whose masks are not PyTorch's."""
        plain = Call(packing)
        names = ("y", "dx", *(f"d{name}" for name, _ in layer.named_parameters()))
        assert_gradients_close(
            "encoder_layer", names, lambda x, *_: layer(x, call=plain), lambda *given: eager(*given, p=0.0), inputs,
            upstream,
        )  # fmt: skip

    products = 2 * num_tokens * (4 * size.hidden**2 + 2 * size.hidden * size.intermediate)
    attention = 4 * num_tokens * length * size.hidden
    between = num_tokens * (7 * size.hidden + size.intermediate) * dtype.itemsize  # what is kept: read again once
    return Problem(
        inputs, upstream, fast, eager, verify=verify,
        bytes_moved={
            "fwd": bert.nbytes(*inputs) + between, "bwd": 2 * bert.nbytes(*inputs) + bert.nbytes(upstream) + between
        },
        flops={"fwd": products + attention, "bwd": 2 * products + 5 * attention // 2},
    )  # fmt: skip


def _layer(size: bert.Size, dtype: torch.dtype, dropout_p: float, device: torch.device) -> BertLayer:
    """With weights whose outputs are of the size of their inputs."""
    config = SimpleNamespace(
        hidden_size=size.hidden, intermediate_size=size.intermediate, num_attention_heads=size.heads,
        layer_norm_eps=1e-12, hidden_dropout_prob=dropout_p, attention_probs_dropout_prob=dropout_p, hidden_act="gelu",
    )  # fmt: skip
    layer = BertLayer(config, 0)
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            nn.init.normal_(module.bias, std=0.1)
    return layer.to(device, dtype)


def aot_cases() -> Iterator[AotCase]:
    """What is launched by a layer alone; all else is its ops' own.

    The sums of gradients of biases and LayerNorms, and inputs of LayerNorms computed again.
    """
    fp32, fp16, bf16 = bert.DTYPES
    sizes = (bert.MINILM, *bert.SIZES)
    for size, dtype in itertools.product(sizes, (fp32, bf16)):
        name = f"layer H={size.hidden}" + (" parameters bf16" if dtype == bf16 else " fp32")
        yield AotCase(name, partial(_launch_sums, size, dtype))
    shapes = [*itertools.product(sizes, (fp16, bf16), [fp32]), (bert.BASE, bf16, bf16)]
    for (size, dtype, parameters), dropout_p in itertools.product(shapes, (0.0, 0.1)):
        yield _norm_inputs(size, dtype, parameters, dropout_p)


def _launch_sums(size: bert.Size, dtype: torch.dtype) -> None:
    from bert_fast.triton._column_sums import column_sums, launched_together, row_sums

    with launched_together():
        for num_sums, num_cols in ((3, size.hidden), (1, size.intermediate), (3, size.hidden)):
            column_sums(torch.zeros(2, num_sums, num_cols), dtype)
        row_sums(torch.zeros(64, 3 * size.hidden, dtype=dtype), dtype)


def _norm_inputs(size: bert.Size, dtype: torch.dtype, parameters: torch.dtype, dropout_p: float) -> AotCase:
    from bert_fast.triton import _norm_inputs as family

    name = f"H={size.hidden} {dtype_name(dtype)}" + (" parameters bf16" if parameters == torch.bfloat16 else "")
    facts = KernelFacts(family._BLOCK_M * family._BLOCK_N, resident_programs=family.PROGRAMS)

    def launch() -> None:
        family.norm_inputs(*_computed_again(size, dtype, parameters, dropout_p), True)

    return AotCase(name, launch, {"_norm_inputs_kernel": facts}, has_dropout=dropout_p > 0)


def _computed_again(
    size: bert.Size, dtype: torch.dtype, parameters: torch.dtype, p: float
) -> tuple[EncoderLayer, Saved]:
    """The arguments of a layer of 64 tokens and what it keeps, as far as the inputs of LayerNorms depend on them."""
    hidden, wide = torch.zeros(64, size.hidden, dtype=dtype), torch.zeros(64, size.intermediate, dtype=dtype)
    vector = torch.zeros(size.hidden, dtype=parameters)
    numbers = torch.zeros(64, dtype=torch.float32)
    of_names: dict[str, Any] = dict.fromkeys(EncoderLayer._fields) | {
        "x": hidden, "attention_output_weight": torch.zeros(size.hidden, size.hidden, dtype=parameters),
        "down_weight": torch.zeros(size.hidden, size.intermediate, dtype=parameters),
        "coords_q": torch.zeros(64, 2, dtype=torch.int32), "seed": torch.zeros(1, dtype=torch.int64),
        "hidden_act": "gelu", "attention_dropout_p": p, "dropout_p": p, "attention_site": 2, "site": 3,
        "attention_saves": AGAIN, "saves": AGAIN,
    }  # fmt: skip
    of_names |= dict.fromkeys(("attention_output_bias", "down_bias", "attention_norm_weight"), vector)
    of_names |= dict.fromkeys(("attention_norm_bias", "norm_weight", "norm_bias"), vector)
    kept: dict[str, Any] = dict.fromkeys(Saved._fields) | dict.fromkeys(("out", "z"), hidden) | {"pre": wide}
    kept |= dict.fromkeys(("attention_rstd", "rstd"), numbers)
    return EncoderLayer(**of_names), Saved(**kept)
