"""The Triton kernels of dropout-add-LayerNorm on a GPU, at BERT's shapes: values, masks, gradients, repeatability."""

import pytest
import torch
from torch.nn import functional as F

from bert_fast import ops
from bert_fast.reference.dropout import dropout_scale, keep_mask
from bert_fast.testing.compare import assert_close_to_truth

pytestmark = pytest.mark.gpu

NAMES = ("y", "dx", "dresidual", "dx_bias", "dweight", "dbias")
SITE = 10


def _inputs(num_tokens, hidden_size, dtype):
    tensors = [torch.randn(num_tokens, hidden_size) for _ in range(3)]
    vectors = [torch.randn(hidden_size) for _ in range(3)]
    x, residual, dy, x_bias, weight, bias = (t.to("cuda", dtype) for t in (*tensors, *vectors))
    tokens = torch.arange(num_tokens, dtype=torch.int32, device="cuda")
    return (x, residual, x_bias, weight, bias), dy, torch.stack((tokens // 512, tokens % 512), dim=1)


def _run(function, inputs, dy):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*leaves)
    y.backward(dy.to(y.dtype))
    order = (0, 1, 2, 3, 4)
    return dict(zip(NAMES, (y.detach(), *(leaves[i].grad for i in order)), strict=True))


@pytest.mark.parametrize("hidden_size", [384, 768, 1000, 1024, 4096])
@pytest.mark.parametrize("num_tokens", [1, 4099, 32768])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_and_gradients(hidden_size, num_tokens, dropout_p, dtype):
    inputs, dy, coords = _inputs(num_tokens, hidden_size, dtype)
    seed = torch.tensor([-(2**61) + 7], device="cuda")
    factor = keep_mask(seed, SITE, coords, hidden_size, dropout_p) * dropout_scale(dropout_p)

    def fast(x, residual, x_bias, weight, bias):
        return ops.dropout_add_layer_norm(
            x, residual, weight, bias, x_bias=x_bias, dropout_p=dropout_p, seed=seed, coords=coords, site=SITE,
            backend="triton",
        )  # fmt: skip

    def plain(x, residual, x_bias, weight, bias):
        return F.layer_norm(residual + (x + x_bias) * factor.to(x.dtype), (hidden_size,), weight, bias, 1e-12)

    actual, stock = _run(fast, inputs, dy), _run(plain, inputs, dy)
    truth = _run(plain, [t.double() for t in inputs], dy.double())
    for name in NAMES:
        assert_close_to_truth("dropout_add_layer_norm", name, actual[name], stock[name], truth[name])
    again = _run(fast, inputs, dy)
    assert all(torch.equal(actual[name], again[name]) for name in NAMES), "two runs differ"
