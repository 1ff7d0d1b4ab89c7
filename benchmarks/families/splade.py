"""Cases of splade: texts of up to 256 tokens, maxima of the scores of BERT's words over each, all gradients."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.aot.case import AotCase, KernelFacts
from benchmarks.kernels.case import KernelCase, Problem, Use, dtype_name, full_shapes
from benchmarks.kit import bert
from bert_fast import ops
from bert_fast.backend import requested
from bert_fast.reference.splade import Splade
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.splade import chosen_splade, plain_splade

_LONGEST = 256
_MOST_TOKENS_ON_CPU = 1024  # beyond, scores of all tokens take seconds each time


def cases() -> Iterator[KernelCase]:
    """BERT's token counts and widths, texts of 1 to 256 tokens; short ones; a few tokens, texts without any."""
    words = bert.VOCAB_SIZE
    for uses, num_tokens, size in full_shapes():
        yield _case(uses, num_tokens, size.hidden, words, torch.bfloat16)
    yield _case(Use.GPU, bert.TOKENS[1], bert.BASE.hidden, words, torch.bfloat16, longest=16)
    yield _case(Use.CPU, _MOST_TOKENS_ON_CPU, bert.BASE.hidden, words, torch.float32)
    # Several texts to a tile, several tiles to a text; widths that are no multiple of anything.
    yield _case(Use.SMALL, bert.FEW_ROWS, 41, 67, torch.float32, longest=7)
    yield _case(Use.SMALL, 80, 40, 131, torch.float16, longest=70)
    yield _case(Use.SMALL, 70, 64, 64, torch.bfloat16, longest=70)
    yield _case(Use.SMALL, bert.FEW_ROWS, 33, 35, torch.float32, longest=30, activation="log1p_relu")


def _case(
    uses: Use, num_tokens: int, hidden: int, num_words: int, dtype: torch.dtype, longest: int = _LONGEST,
    activation: str = "relu",
) -> KernelCase:  # fmt: skip
    make_it = partial(make, num_tokens, hidden, num_words, dtype, longest, activation)
    variant = f"{activation} S<={longest}"
    return KernelCase("splade", f"{num_tokens}x{hidden}x{num_words}", dtype, variant, make_it, uses)


def make(
    num_tokens: int, hidden: int, num_words: int, dtype: torch.dtype, longest: int, activation: str,
    device: torch.device,
) -> Problem:  # fmt: skip
    """Texts of 0 to `longest` tokens; a bias of -2 leaves a word without a score above 0 in most short texts."""
    lengths = _lengths(num_tokens, longest)
    x = bert.normal(num_tokens, hidden, dtype=dtype, device=device).requires_grad_()
    weight = bert.weight(num_words, hidden, dtype, device)
    bias = (torch.randn(num_words, device=device) - 2).to(dtype).requires_grad_()
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    inputs, num_texts = (x, weight, bias), len(lengths)
    upstream = bert.normal(num_texts, num_words, dtype=dtype, device=device)

    def fast(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ops.splade(x, weight, bias, cu_seqlens, activation=activation)

    def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return plain_splade(x, weight, bias, lengths, activation).to(dtype)

    def verify() -> None:
        """Gradients are those of the tokens that were chosen: scores that nearly tie are rounded."""
        given = [t.detach() for t in inputs]
        doubles = [t.double().requires_grad_() for t in given]
        y = fast(*inputs)
        exact = plain_splade(*doubles, lengths, activation)
        op = bert.tolerances_of("splade", device)
        suffix = "_on_gpu" if device.type == "cuda" else ""
        assert_close_to_truth(op, f"y{suffix}", y, eager(*given), exact)
        tokens = torch.ops.bert_fast.splade_fwd(*given, cu_seqlens, num_texts, activation, True, requested())[1]
        plain = torch.autograd.grad(chosen_splade(*inputs, tokens, activation).to(dtype), inputs, upstream)
        truth = torch.autograd.grad(chosen_splade(*doubles, tokens, activation), doubles, upstream.double())
        gradients = torch.autograd.grad(y, inputs, upstream)
        for name, *outputs in zip(("dx", "dweight", "dbias"), gradients, plain, truth, strict=True):
            assert_close_to_truth(op, f"{name}{suffix}", *outputs)

    product = 2 * num_tokens * hidden * num_words
    pairs = 8 * num_texts * num_words  # y and tokens, saved
    operands = bert.nbytes(*inputs)
    return Problem(
        inputs, upstream, fast, eager, verify=verify,
        bytes_moved={"fwd": operands + upstream.nbytes + pairs, "bwd": 2 * operands + upstream.nbytes + pairs},
        flops={"fwd": product, "bwd": 2 * product},
    )  # fmt: skip


def _lengths(num_tokens: int, longest: int) -> list[int]:
    """Of every length as many as of each other, from none on, until there are so many tokens."""
    lengths: list[int] = []
    for length in itertools.cycle((0, 1, longest, *range(2, longest, 3))):
        left = num_tokens - sum(lengths)
        lengths.append(min(length, left))
        if length >= left:
            return lengths
    raise AssertionError


def aot_cases() -> Iterator[AotCase]:
    """The three kernels for BERT's words and widths, with and without what only training needs."""
    for dtype, activation in itertools.product(bert.DTYPES, ("relu", "log1p_relu")):
        yield _aot_case(dtype, activation)
    yield _aot_case(torch.bfloat16, "relu", hidden=bert.MINILM.hidden)
    yield _aot_case(torch.float32, "relu", is_training=False)
    yield _aot_case(torch.bfloat16, "relu", is_training=False)


def _aot_case(dtype: torch.dtype, activation: str, hidden: int = bert.BASE.hidden, is_training: bool = True) -> AotCase:
    from bert_fast.triton import splade as family
    from bert_fast.triton._launch import assumed_architecture

    def launch() -> None:
        x, weight = torch.zeros(2, hidden, dtype=dtype), torch.zeros(bert.VOCAB_SIZE, hidden, dtype=dtype)
        cu_seqlens = torch.tensor([0, 2], dtype=torch.int32)
        a = Splade(x, weight, weight[:, 0], cu_seqlens, 1, activation, is_training)
        y, tokens = family.splade_fwd(a)
        if tokens is not None:
            family.splade_bwd(a, y, y, tokens, {"x", "weight", "bias"})

    forward, dx = family.forward_tile(dtype, assumed_architecture()), family.dx_tile(dtype)
    is_half = dtype != torch.float32
    kernels = {
        "_splade_fwd_kernel": KernelFacts(
            forward.block_m * forward.block_n, multiply_adds=forward.block_k if is_half else None,
            needs_warpgroup_products=is_half,
        ),
        "_splade_bwd_dx_kernel": KernelFacts(
            dx.block_m * dx.block_n, multiply_adds=dx.block_k if is_half else None, needs_warpgroup_products=is_half
        ),
    }  # fmt: skip
    name = f"H={hidden} {dtype_name(dtype)} {activation}" + ("" if is_training else " without gradients")
    return AotCase(name, launch, kernels)
