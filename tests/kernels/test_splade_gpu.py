"""The Triton kernels of splade on a GPU, at BERT's vocabularies: values, gradients, memory, no sync."""

import itertools

import pytest
import torch

from bert_fast import ops
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.splade import chosen_splade, plain_splade

pytestmark = pytest.mark.gpu

OP = "splade"
NAMES = ("x", "weight", "bias")
LENGTHS = {"passages": [256, 200, 31, 0, 256, 90], "queries": [9, 4, 17, 1, 12, 7] * 8, "one": [1], "long": [512, 511]}


def _inputs(lengths, num_words, hidden_size, dtype, parameter_dtype=None):
    x = torch.randn(sum(lengths), hidden_size, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(num_words, hidden_size, device="cuda") / hidden_size**0.5).to(dtype)
    bias = (torch.randn(num_words, device="cuda") - 2).to(dtype)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    parameters = [t.to(parameter_dtype or dtype).requires_grad_() for t in (weight, bias)]
    return x, *parameters, cu_seqlens


def _check(lengths, inputs, activation="relu", back_end="triton"):
    *tensors, cu_seqlens = inputs
    dtype = tensors[0].dtype
    doubles = [t.detach().to(dtype).double().requires_grad_() for t in tensors]
    y = ops.splade(*inputs, activation=activation, backend=back_end)
    plain = plain_splade(*(t.detach() for t in tensors), lengths, activation).to(dtype)
    assert_close_to_truth(OP, "y_on_gpu", y, plain, plain_splade(*doubles, lengths, activation))
    given = [t.detach() for t in tensors]
    tokens = torch.ops.bert_fast.splade_fwd(*given, cu_seqlens, len(lengths), activation, True, back_end)[1]
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(y, tensors, dy, retain_graph=True)
    plain = torch.autograd.grad(chosen_splade(*tensors, tokens, activation).to(dtype), tensors, dy)
    exact = torch.autograd.grad(chosen_splade(*doubles, tokens, activation), doubles, dy.double())
    for name, actual, stock, truth in zip(NAMES, gradients, plain, exact, strict=True):
        suffix = "_of_half_on_gpu" if actual.dtype != dtype else "_on_gpu"
        assert_close_to_truth(OP, f"d{name}{suffix}", actual, stock, truth)
    assert all(map(torch.equal, gradients, torch.autograd.grad(y, tensors, dy))), "two runs differ"


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("num_words", [30522, 30528])
def test_bert_in_bf16(lengths, num_words):
    _check(lengths, _inputs(lengths, num_words, 768, torch.bfloat16))


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize(
    ("dtype", "parameter_dtype"),
    [(torch.float32, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.float32)],
)
@pytest.mark.parametrize("back_end", ["triton", "torch"])
def test_dtypes_and_parameters_wider_than_activations(dtype, parameter_dtype, activation, back_end):
    lengths = LENGTHS["passages"]
    _check(lengths, _inputs(lengths, 5003, 384, dtype, parameter_dtype), activation, back_end)


def test_peak_memory_is_that_of_outputs_and_gradients():
    """32 texts of 256 tokens, whose scores in bf16 would be 500 MB."""
    x, weight, bias, cu_seqlens = _inputs([256] * 32, 30522, 768, torch.bfloat16)
    dy = torch.randn(32, 30522, device="cuda", dtype=torch.bfloat16)
    ops.splade(x, weight, bias, cu_seqlens).backward(dy)
    x.grad = weight.grad = bias.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ops.splade(x, weight, bias, cu_seqlens).backward(dy)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= x.nbytes + weight.nbytes + bias.nbytes + 6 * 4 * dy.numel() + 2**22, f"{extra / 2**20:.0f} MB"


@pytest.mark.parametrize("back_end", ["triton", "torch"])
def test_forward_and_backward_never_wait_for_the_device(back_end):
    inputs = _inputs(LENGTHS["passages"], 30522, 128, torch.bfloat16)
    ops.splade(*inputs, backend=back_end).sum().backward()  # compiles
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.splade(*inputs, backend=back_end).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert all(torch.isfinite(t.grad).all() for t in inputs[:3])
