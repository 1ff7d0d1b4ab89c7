"""The Triton kernels of linear_cross_entropy on a GPU, at BERT's vocabularies: values, gradients, memory, no sync."""

import pytest
import torch
from torch.nn import functional as F

from bert_fast import backend, ops
from bert_fast.testing.compare import assert_close_to_truth

pytestmark = pytest.mark.gpu

OP = "linear_cross_entropy"
IGNORE = -100
NAMES = ("loss", "dx", "dweight", "dbias")


@pytest.fixture
def kernels():
    """The module under test, imported only where there is a GPU: importing triton costs a second."""
    return backend.resolve(OP, backend.OpSpec(torch.device("cuda"), torch.float32), "triton")


def _inputs(num_rows, num_words, hidden_size, dtype, parameter_dtype=None):
    x = torch.randn(num_rows, hidden_size, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(num_words, hidden_size, device="cuda") * 3 / hidden_size**0.5).to(dtype)
    bias = torch.randn(num_words, device="cuda").to(dtype)
    labels = torch.randint(0, num_words, (num_rows,), device="cuda")
    labels[1::7] = IGNORE
    parameters = [t.to(parameter_dtype or dtype).requires_grad_() for t in (weight, bias)]
    return x, *parameters, labels


def _run(function, x, weight, bias, labels):
    loss = function(x, weight, bias, labels)
    # Undoes the mean: gradients of size 1.
    gradients = torch.autograd.grad(loss, (x, weight, bias), torch.full_like(loss, float(len(labels))))
    return dict(zip(NAMES, (loss.detach(), *gradients), strict=True))


def _plain(smoothing):
    def function(x, weight, bias, labels):
        logits = F.linear(x, weight.to(x.dtype), bias.to(x.dtype))
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide, labels, label_smoothing=smoothing)

    return function


def _check(inputs, smoothing, back_end="triton"):
    def fast(*inputs):
        return ops.linear_cross_entropy(*inputs, label_smoothing=smoothing, backend=back_end)

    *tensors, labels = inputs
    exact = [t.detach().to(inputs[0].dtype).double().requires_grad_() for t in tensors]
    actual, stock, truth = (
        _run(fast, *inputs),
        _run(_plain(smoothing), *inputs),
        _run(_plain(smoothing), *exact, labels),
    )
    for name in NAMES:
        is_mixed = actual[name].dtype != inputs[0].dtype and name in ("dweight", "dbias")
        suffix = "_of_half_on_gpu" if is_mixed else "_on_gpu"
        assert_close_to_truth(OP, name + suffix, actual[name], stock[name], truth[name])
    again = _run(fast, *inputs)
    assert all(torch.equal(actual[name], again[name]) for name in actual), "two runs differ"


@pytest.mark.parametrize(("num_rows", "hidden_size"), [(614, 768), (2458, 768), (2458, 1024), (1, 768)])
@pytest.mark.parametrize("num_words", [30522, 30528])
def test_bert_in_bf16(num_rows, hidden_size, num_words):
    """15 % of 4,096 and of 16,384 tokens, the latter in two chunks."""
    _check(_inputs(num_rows, num_words, hidden_size, torch.bfloat16), 0.0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("dtype", "parameter_dtype"),
    [(torch.float32, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.float32)],
)
@pytest.mark.parametrize(
    ("num_rows", "num_words", "hidden_size"), [(1500, 30522, 768), (257, 28996, 384), (70, 50, 64)]
)
def test_dtypes_and_parameters_wider_than_activations(
    num_rows, num_words, hidden_size, dtype, parameter_dtype, smoothing
):
    _check(_inputs(num_rows, num_words, hidden_size, dtype, parameter_dtype), smoothing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_back_end_where_triton_is_missing(dtype):
    _check(_inputs(1200, 30522, 768, dtype, torch.float32), 0.1, "torch")


@pytest.mark.parametrize("chunk_rows", [128, 300, 1024])
def test_several_chunks(kernels, monkeypatch, chunk_rows):
    monkeypatch.setattr(kernels, "_CHUNK_BYTES", chunk_rows * kernels.padded_words(30522) * 2)
    _check(_inputs(1100, 30522, 768, torch.bfloat16), 0.1)


def test_peak_memory_is_that_of_a_chunk_and_the_gradients():
    """15 % of 16,384 tokens, where logits of all tokens in bf16 and fp32 alone would be 3.0 GB."""
    x, weight, bias, labels = _inputs(2458, 30522, 768, torch.bfloat16, torch.float32)
    ops.linear_cross_entropy(x, weight, bias, labels).backward()
    x.grad = weight.grad = bias.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ops.linear_cross_entropy(x, weight, bias, labels).backward()
    extra = torch.cuda.max_memory_allocated() - before
    chunk, narrow_weight = 1280 * 30528 * 2, weight.numel() * 2
    # A library product in fp32 that is not added in place takes another dweight.
    assert extra <= chunk + 2 * weight.nbytes + narrow_weight + 2**25, f"{extra / 2**20:.0f} MB"


def test_forward_and_backward_never_wait_for_the_device():
    inputs = _inputs(64, 30522, 128, torch.bfloat16)
    ops.linear_cross_entropy(*inputs).backward()  # compiles
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.linear_cross_entropy(*inputs).backward()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert all(torch.isfinite(t.grad).all() for t in inputs[:3])


@pytest.mark.parametrize("num_words", [50, 30522])
def test_labels_out_of_range_are_no_device_assert(num_words):
    x, weight, bias, labels = _inputs(6, num_words, 64, torch.bfloat16)
    labels[2], labels[3] = num_words, -1
    loss = ops.linear_cross_entropy(x, weight, bias, labels)
    loss.backward()
    torch.cuda.synchronize()
    assert loss.isnan() and x.grad.isnan().any(1).tolist() == [False, False, True, True, False, False]
