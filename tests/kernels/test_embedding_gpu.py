"""The Triton kernels of the embedding on a GPU, at BERT's shapes: values, repeatability, ids out of range."""

import pytest
import torch
from torch.nn import functional as F

from bert_fast import ops
from bert_fast.reference.dropout import dropout_scale, keep_mask
from bert_fast.testing.compare import assert_close_to_truth

pytestmark = pytest.mark.gpu

NAMES = ("y", "dword_table", "dposition_table", "dtype_table", "dweight", "dbias")
SITE = 0
NUM_WORDS, LENGTH, PADDING_IDX = 30522, 512, 0


def _inputs(num_tokens, hidden_size, dtype, one_word=False):
    """Tables, parameters, ids, upstream gradient, coords. A twentieth of the tokens is one word, as in text."""
    tables = [torch.randn(rows, hidden_size, device="cuda").to(dtype) for rows in (NUM_WORDS, LENGTH, 2)]
    weight, bias = torch.randn(2, hidden_size, device="cuda").to(dtype).unbind()
    token = torch.arange(num_tokens, device="cuda")
    words = torch.randint(0, NUM_WORDS, (num_tokens,), device="cuda")
    words[:: 1 if one_word else 20] = 1996
    words[7::50] = PADDING_IDX
    coords = torch.stack((token // LENGTH, token % LENGTH), dim=1).int()
    dy = torch.randn(num_tokens, hidden_size, device="cuda").to(dtype)
    return (*tables, weight, bias), (words, token % LENGTH, (token % LENGTH > 200).long()), dy, coords


def _run(function, tensors, dy):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    y.backward(dy.to(y.dtype))
    return dict(zip(NAMES, (y.detach(), *(leaf.grad for leaf in leaves)), strict=True))


def _functions(ids, coords, dropout_p):
    words, positions, types = ids
    seed = torch.tensor([-(2**61) + 7], device="cuda")

    def fast(word_table, position_table, type_table, weight, bias):
        return ops.embedding(
            words, word_table, type_table, weight, bias, token_type_ids=types, position_ids=positions,
            position_table=position_table, padding_idx=PADDING_IDX, dropout_p=dropout_p, seed=seed, coords=coords,
            site=SITE, backend="triton",
        )  # fmt: skip

    def plain(word_table, position_table, type_table, weight, bias):
        h = F.embedding(words, word_table, PADDING_IDX) + F.embedding(types, type_table)
        y = F.layer_norm(h + F.embedding(positions, position_table), weight.shape, weight, bias, 1e-12)
        return y * (keep_mask(seed, SITE, coords, y.shape[1], dropout_p) * dropout_scale(dropout_p)).to(y.dtype)

    return fast, plain


# Every variant is compiled anew, which takes longer than running it.
VARIANTS = [(768, dtype, 0.1) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
VARIANTS += [(768, torch.bfloat16, 0.0), (1024, torch.float32, 0.0), (1024, torch.bfloat16, 0.1)]
VARIANTS += [(384, torch.float16, 0.1), (1000, torch.bfloat16, 0.1)]


@pytest.mark.parametrize("num_tokens", [1, 4099, 32768])
@pytest.mark.parametrize(("hidden_size", "dtype", "dropout_p"), VARIANTS)
def test_values_and_gradients(hidden_size, dtype, dropout_p, num_tokens):
    tensors, ids, dy, coords = _inputs(num_tokens, hidden_size, dtype)
    fast, plain = _functions(ids, coords, dropout_p)
    actual, stock = _run(fast, tensors, dy), _run(plain, tensors, dy)
    truth = _run(plain, [t.double() for t in tensors], dy.double())
    for name in NAMES:
        assert_close_to_truth("embedding", name, actual[name], stock[name], truth[name])
    again = _run(fast, tensors, dy)
    assert all(torch.equal(actual[name], again[name]) for name in NAMES), "two runs differ"


@pytest.mark.parametrize("hidden_size", [768, 4096])
def test_all_tokens_the_same_word(hidden_size):
    tensors, ids, dy, coords = _inputs(16384, hidden_size, torch.float32, one_word=True)
    fast, plain = _functions(ids, coords, 0.0)
    actual, stock = _run(fast, tensors, dy), _run(plain, tensors, dy)
    truth = _run(plain, [t.double() for t in tensors], dy.double())
    for name in NAMES:
        assert_close_to_truth("embedding", name, actual[name], stock[name], truth[name])


@pytest.mark.parametrize("outside", [-1, NUM_WORDS, 2**40])
def test_ids_outside_the_table_give_nan_and_no_device_assertion(outside):
    tensors, (words, positions, types), dy, coords = _inputs(1000, 768, torch.bfloat16)
    words[[0, 500]] = outside
    fast, _ = _functions((words, positions, types), coords, 0.1)
    actual = _run(fast, tensors, dy)
    bad = actual["y"].isnan().all(1)
    assert bad.nonzero().flatten().tolist() == [0, 500]
    assert not actual["y"][~bad].isnan().any()
    assert all(actual[name].isfinite().all() for name in NAMES[1:])
    torch.cuda.synchronize()


def test_a_step_can_be_captured_and_replayed():
    """No device sync and no shape that depends on data: new ids in the same memory give new results."""
    tensors, ids, dy, coords = _inputs(4096, 768, torch.bfloat16)
    fast, _ = _functions(ids, coords, 0.1)
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(fast(*leaves), leaves, dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fast(*leaves)
        gradients = torch.autograd.grad(y, leaves, dy)
    ids[0].copy_(torch.randint(0, NUM_WORDS, (4096,), device="cuda"))
    graph.replay()
    expected = _run(fast, tensors, dy)
    for name, got in zip(NAMES, (y, *gradients), strict=True):
        assert torch.equal(got, expected[name]), name
