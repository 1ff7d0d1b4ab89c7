"""Cases of encoder_layer: a whole layer, forward and backward, on sequences of one length."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.kernels.case import AotCase, KernelCase, Problem, assert_gradients_close, dtype_name
from benchmarks.kit import bert
from bert_fast.modules.call import Call
from bert_fast.modules.layer import BertLayer
from bert_fast.ops import Packing
from bert_fast.reference.dropout_add_layer_norm import AGAIN
from bert_fast.reference.encoder_layer import EncoderLayer, Saved

_HALF = (torch.float16, torch.bfloat16)


def cases() -> Iterator[KernelCase]:
    """bf16 at full token budgets, base and large."""
    for num_tokens in bert.TOKENS:
        for size in bert.SIZES:
            yield _case(num_tokens, 128, size, torch.bfloat16, 0.1)


def smoke_cases() -> Iterator[KernelCase]:
    """BERT-base; also with inputs of LayerNorms that backward has to compute again."""
    for dropout_p in (0.0, 0.1):
        yield _case(4096, 128, bert.BASE, torch.bfloat16, dropout_p)
    yield _case(4096, 128, bert.BASE, torch.bfloat16, 0.1, hides_inputs=True)


def small_cases() -> Iterator[KernelCase]:
    """A few rows; also with inputs of LayerNorms that backward has to compute again."""
    for dtype in (torch.float32, torch.bfloat16):
        yield _case(36, 12, bert.TINY, dtype, 0.1)
    yield _case(36, 12, bert.TINY, torch.bfloat16, 0.1, hides_inputs=True)


def cpu_cases() -> Iterator[KernelCase]:
    """A training batch of BERT-base, and one token."""
    yield _case(bert.CPU_TOKENS, 128, bert.BASE, torch.float32, 0.1)
    yield _case(1, 1, bert.TINY, torch.float32, 0.0)


def _case(
    num_tokens: int, length: int, size: bert.Size, dtype: torch.dtype, dropout_p: float, hides_inputs: bool = False
) -> KernelCase:
    return KernelCase(
        "encoder_layer", f"{num_tokens // length}x{length}x{size.hidden}", dtype,
        f"p{dropout_p}" + (" weight 0" if hides_inputs else ""),
        lambda device: make(num_tokens, length, size, dtype, dropout_p, device, hides_inputs=hides_inputs),
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
    from bert_fast.triton._column_sums import column_sums, launched_together, row_sums

    for size in (bert.MINILM, *bert.SIZES):
        for dtype in (torch.float32, torch.bfloat16):

            def launch(size: bert.Size = size, dtype: torch.dtype = dtype) -> None:
                with launched_together():
                    for num_sums, num_cols in ((3, size.hidden), (1, size.intermediate), (3, size.hidden)):
                        column_sums(torch.zeros(2, num_sums, num_cols), dtype)
                    row_sums(torch.zeros(64, 3 * size.hidden, dtype=dtype), dtype)

            name = f"layer H={size.hidden}" + (" parameters bf16" if dtype == torch.bfloat16 else " fp32")
            yield AotCase(name, None, launch, {}, {})
    yield from _norm_inputs()


def _norm_inputs() -> Iterator[AotCase]:
    from bert_fast.triton import _norm_inputs as family

    shapes = [(size, dtype, torch.float32) for size in (bert.MINILM, *bert.SIZES) for dtype in _HALF]
    for size, dtype, parameters in [*shapes, (bert.BASE, torch.bfloat16, torch.bfloat16)]:
        for p in (0.0, 0.1):

            def launch(
                size: bert.Size = size, dtype: torch.dtype = dtype, parameters: torch.dtype = parameters, p: float = p
            ) -> None:
                a, saved = _computed_again(size, dtype, parameters, p)
                family.norm_inputs(a, saved, True)

            name = f"H={size.hidden} {dtype_name(dtype)}"
            tile = family._BLOCK_M * family._BLOCK_N
            yield AotCase(
                name + (" parameters bf16" if parameters == torch.bfloat16 else ""), p > 0, launch,
                {"_norm_inputs_kernel": tile}, {"_norm_inputs_kernel": family.PROGRAMS},
            )  # fmt: skip


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
