"""The Triton kernels of attention on a GPU, at BERT's shapes: values, gradients, repeatability, no sync."""

import pytest
import torch

from bert_fast import backend, ops
from bert_fast.testing.attention import AttentionCase
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.torch import attention as aten

from .attention_grid import OP, arguments_of, in_fused_buffer, run, truth_of

pytestmark = pytest.mark.gpu

TOLERANCES = "triton_attention_on_gpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Lengths of a batch as texts have them, short ones and an empty one among them.
MIXED = (37, 128, 5, 0, 412, 91, 512, 1, 230, 64)


@pytest.fixture
def kernels():
    """The module under test, imported only where there is a GPU: importing triton costs a second."""
    return backend.resolve(OP, backend.OpSpec(torch.device("cuda"), torch.float32), "triton")


def on_gpu(case, dtype, fused=False):
    """Arguments of forward and dout, on the GPU."""
    inputs = {name: t.cuda() for name, t in case.inputs(dtype).items()}
    inputs = in_fused_buffer(inputs) if fused else inputs
    return arguments_of(case, inputs), inputs["dout"]


def compare(kernels, case, dtype, fused=False):
    """Every output against the reference in fp64, where the torch back-end says how far plain torch is off."""
    a, dout = on_gpu(case, dtype, fused)
    actual, plain, truth = run(kernels, a, dout), run(aten, a, dout), truth_of(a, dout)
    has_keys = torch.isfinite(truth["lse"])
    assert torch.equal(torch.isfinite(actual["lse"]), has_keys)
    for results in (actual, plain, truth):
        results["lse"] = results["lse"][has_keys]
    # Not the torch back-end's, whose scores are rounded to half precision.
    plain["lse"] = truth["lse"].float()
    for name in actual:
        assert_close_to_truth(TOLERANCES, name, actual[name], plain[name], truth[name])


@pytest.mark.parametrize(("head_dim", "num_heads"), [(32, 12), (64, 12), (128, 4), (40, 2), (80, 2), (16, 1)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_lengths(kernels, head_dim, num_heads, dropout_p, dtype):
    compare(kernels, AttentionCase(MIXED, None, num_heads, head_dim, dropout_p=dropout_p), dtype, fused=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "batch", "num_heads"), [(128, 8, 12), (512, 4, 12), (2048, 1, 4), (8192, 1, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_full_lengths(kernels, length, batch, num_heads, causal, dtype):
    case = AttentionCase((length,) * batch, None, num_heads, 64, dropout_p=0.1, causal=causal)
    compare(kernels, case, dtype)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 383])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_around_tiles(kernels, length, dropout_p, dtype):
    compare(kernels, AttentionCase((length, 3, length), None, 3, 64, dropout_p=dropout_p), dtype)


@pytest.mark.parametrize(
    ("lengths", "lengths_k", "cached"),
    [((1, 1, 1), (900, 3, 128), True), ((64, 5), (700, 0), True), ((300, 0, 40), (17, 64, 513), False)],
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_keys(kernels, lengths, lengths_k, cached, causal, dtype):
    case = AttentionCase(lengths, lengths_k, 4, 64, dropout_p=0.1, causal=causal, cached=cached, holes=True)
    compare(kernels, case, dtype)


EXTRAS = {
    "padding mask": dict(bias="BK", removes=True),
    "mask of all pairs": dict(bias="BQK", removes=True, causal=True),
    "bias of every head": dict(bias="AQK"),
    "everything full": dict(bias="BAQK", relative="CP", holes=True),
    "relative_key": dict(relative="C"),
    "relative_key_query": dict(relative="CP", causal=True),
}


@pytest.mark.parametrize("extras", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("lengths_k", [None, (33, 5, 90, 300)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_biases_and_relative_positions(kernels, extras, lengths_k, dtype):
    compare(kernels, AttentionCase((130, 0, 64, 270), lengths_k, 4, 64, dropout_p=0.1, **extras), dtype)


@pytest.mark.parametrize("softmax_scale", [0.0, -0.2, 0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_scales(kernels, softmax_scale, dtype):
    compare(kernels, AttentionCase((70, 200), None, 2, 32, softmax_scale=softmax_scale, dropout_p=0.1), dtype)


@pytest.mark.parametrize("length", [64, 127, 128])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_both_regimes_agree(kernels, monkeypatch, length, dropout_p, dtype):
    """The same sequences by whole heads and by tiles: each close to the truth, so the masks are the same."""
    case = AttentionCase((length, 9, length), None, 4, 64, dropout_p=dropout_p)
    compare(kernels, case, dtype)
    monkeypatch.setattr(kernels, "short_config", lambda *_: None)
    compare(kernels, case, dtype)


@pytest.mark.parametrize("lengths", [(128,) * 64, MIXED, (2048,) * 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_repeat_bit_for_bit(kernels, lengths, causal, dtype):
    extras = dict(bias="AQK", relative="CP") if max(lengths) == 512 else {}
    case = AttentionCase(lengths, None, 12, 64, dropout_p=0.1, causal=causal, **extras)
    a, dout = on_gpu(case, dtype)
    first = run(kernels, a, dout)
    order = torch.tensor(lengths).argsort(descending=True).int().cuda()
    for sequence_order in (None, None, order):
        again = run(kernels, a._replace(sequence_order=sequence_order), dout)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_are_those_of_the_torch_back_end(kernels, dtype):
    """Uniform probabilities and values that are unit vectors: what is not 0 was kept."""
    case = AttentionCase((128, 64, 100), None, 12, 128, dropout_p=0.5, softmax_scale=0.0)
    a, _ = on_gpu(case, dtype)
    places = torch.cat([torch.arange(n) for n in case.lengths])
    a = a._replace(v=torch.nn.functional.one_hot(places, 128).to(dtype).cuda()[:, None].expand(-1, 12, -1))
    actual, expected = (family.attention_fwd(a)[0] != 0 for family in (kernels, aten))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_leaks_into_other_sequences(kernels, dtype):
    case = AttentionCase((100, 33, 300), None, 4, 40, dropout_p=0.1)
    a, dout = on_gpu(case, dtype)
    good = run(kernels, a, dout)
    for t in (a.q, a.k, a.v, dout):
        t[100:133] = torch.nan
    spoilt = run(kernels, a, dout)
    for name, t in good.items():
        one, other = (x.transpose(0, 1) if name == "lse" else x for x in (t, spoilt[name]))
        assert torch.equal(one[:100], other[:100]) and torch.equal(one[133:], other[133:]), name


def test_more_than_two_to_the_31_elements(kernels):
    """The last sequence starts behind 2^31 elements of q."""
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 30 GB of memory on the device")
    num_tokens, num_heads, head_dim, last = 2**31 // 1024 + 200, 16, 64, 130
    buffer = torch.zeros(num_tokens, num_heads, head_dim, dtype=torch.bfloat16, device="cuda")
    buffer[-last:] = torch.randn(last, num_heads, head_dim, device="cuda")
    bounds = [*range(0, num_tokens - last, 4096), num_tokens - last, num_tokens]
    case = AttentionCase((last,), None, num_heads, head_dim)
    a, dout = on_gpu(case, torch.bfloat16)
    near = buffer[-last:].clone()
    a = a._replace(q=near, k=near, v=near, max_seqlen_q=4096, max_seqlen_k=4096)
    expected = run(kernels, a, dout)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    a = a._replace(q=buffer, k=buffer, v=buffer, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    far = torch.zeros_like(buffer)
    far[-last:] = dout
    results = run(kernels, a, far)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(results[name][-last:], expected[name]), name


@pytest.mark.parametrize("length", [100, 300])
def test_forward_and_backward_never_wait_for_the_device(length):
    q = torch.randn(length, 3, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    cu_seqlens = torch.tensor([0, 20, length], dtype=torch.int32, device="cuda")
    coords = ops.Packing.from_cu_seqlens(cu_seqlens, length, length).coords
    seed = torch.tensor([5], device="cuda")
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = ops.attention(
            *q.unbind(1), cu_seqlens_q=cu_seqlens, max_seqlen_q=length, dropout_p=0.1, seed=seed, coords_q=coords,
            site=1, causal=True, backend="triton",
        )  # fmt: skip
        out.backward(torch.ones_like(out))
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.isfinite(q.grad).all()
