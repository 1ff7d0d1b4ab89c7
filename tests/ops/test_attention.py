"""Attention: the torch back-end against the reference, its gradients, dropout, edge cases, registration."""

import itertools
import math

import pytest
import torch

from bert_fast import ops
from bert_fast.errors import BackendError
from bert_fast.reference.dropout import attention_keep_mask
from bert_fast.testing.compare import assert_close_to_truth

LENGTHS = [[1], [5, 1, 3], [0, 4, 0, 7], [17, 31], [64, 2]]


def _inputs(lengths, heads=3, head_dim=8, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    tensors = [
        torch.randn(total, heads, head_dim, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)
    ]
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    packing = ops.Packing.from_cu_seqlens(cu_seqlens, max(lengths), total)
    return tensors, packing


def _run(tensors, packing, backend, dropout_p=0.0, causal=False, seed=1):
    q, k, v = (t.detach().clone().requires_grad_() for t in tensors[:3])
    out = ops.attention(
        q, k, v, cu_seqlens_q=packing.cu_seqlens, max_seqlen_q=packing.max_seqlen, causal=causal, dropout_p=dropout_p,
        seed=torch.tensor([seed]), coords_q=packing.coords, site=9, backend=backend,
    )  # fmt: skip
    out.backward(tensors[3].to(out.dtype))
    return {"out": out, "dq": q.grad, "dk": k.grad, "dv": v.grad}


def _plain(tensors, packing, dropout_p=0.0, causal=False, seed=1):
    """Attention as one would write it with PyTorch's operators, in the dtype of the inputs."""
    q, k, v = (t.detach().clone().requires_grad_() for t in tensors[:3])
    outs = []
    for start, end in itertools.pairwise(packing.cu_seqlens.tolist()):
        scores = q[start:end].transpose(0, 1) @ k[start:end].permute(1, 2, 0) / math.sqrt(q.shape[2])
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        coords = packing.coords[start:end]
        keep = attention_keep_mask(torch.tensor([seed]), 9, coords, len(coords), q.shape[1], dropout_p)
        probs = scores.softmax(-1) * keep / (1 - dropout_p)
        outs.append((probs @ v[start:end].transpose(0, 1)).transpose(0, 1))
    out = torch.cat(outs)
    out.backward(tensors[3])
    return {"out": out, "dq": q.grad, "dk": k.grad, "dv": v.grad}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torch_backend_matches_the_reference(lengths, dropout_p, causal, dtype):
    tensors, packing = _inputs(lengths, dtype=dtype)
    actual = _run(tensors, packing, "torch", dropout_p, causal)
    plain = _plain(tensors, packing, dropout_p, causal)
    truth = _run([t.double() for t in tensors], packing, "reference", dropout_p, causal)
    for name in actual:
        assert_close_to_truth("attention", name, actual[name], plain[name], truth[name])


@pytest.mark.parametrize("head_dim", [1, 16, 24, 32, 64, 128])
def test_head_sizes(head_dim):
    tensors, packing = _inputs([9, 3], heads=2, head_dim=head_dim)
    actual, plain = _run(tensors, packing, "torch", 0.1), _plain(tensors, packing, 0.1)
    truth = _run([t.double() for t in tensors], packing, "reference", 0.1)
    for name in actual:
        assert_close_to_truth("attention", name, actual[name], plain[name], truth[name])


def test_gradcheck_in_fp64_through_the_registered_op():
    tensors, packing = _inputs([3, 0, 4], heads=2, head_dim=3, dtype=torch.float64)
    q, k, v = (t.requires_grad_() for t in tensors[:3])

    def function(q, k, v):
        return ops.attention(
            q, k, v, cu_seqlens_q=packing.cu_seqlens, max_seqlen_q=4, dropout_p=0.3, seed=torch.tensor([5]),
            coords_q=packing.coords, site=3,
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, (q, k, v))


def test_different_query_and_key_lengths():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(5, 2, 8, generator=generator)
    k, v = (torch.randn(9, 2, 8, generator=generator) for _ in range(2))
    cu_q, cu_k = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([0, 9, 9], dtype=torch.int32)
    outs = [
        ops.attention(q, k, v, cu_seqlens_q=cu_q, max_seqlen_q=3, cu_seqlens_k=cu_k, max_seqlen_k=9, backend=backend)
        for backend in ("torch", "reference")
    ]
    torch.testing.assert_close(outs[0], outs[1])
    assert torch.equal(outs[0][3:], torch.zeros(2, 2, 8)), "queries without keys must give exactly 0"


def test_dropout_masks_are_the_specified_ones():
    """With v = identity the output is the dropped probability matrix itself."""
    length, heads = 24, 3
    tensors, packing = _inputs([length], heads=heads, head_dim=length)
    q, k, _, _ = tensors
    v = torch.eye(length).unsqueeze(1).expand(length, heads, length).contiguous()
    seed = torch.tensor([-(2**62) + 12345])
    out = ops.attention(
        q, k, v, cu_seqlens_q=packing.cu_seqlens, max_seqlen_q=length, dropout_p=0.4, seed=seed,
        coords_q=packing.coords, site=17,
    )  # fmt: skip
    keep = attention_keep_mask(seed, 17, packing.coords, length, heads, 0.4)
    assert torch.equal(out.transpose(0, 1) != 0, keep)


def test_masks_follow_original_positions_when_padding_stands_inside():
    """A query keeps its mask wherever padding was removed; keys are named by their ordinal among the kept."""
    keep_mask = torch.tensor([[1, 0, 1, 1, 0, 1]])
    packing = ops.Packing.from_keep_mask(keep_mask)
    seed, kept = torch.tensor([3]), keep_mask[0].bool()
    q = torch.zeros(4, 1, 6)
    v = torch.eye(6)[kept].unsqueeze(1).contiguous()
    out = ops.attention(
        q, q, v, cu_seqlens_q=packing.cu_seqlens, max_seqlen_q=4, dropout_p=0.5, seed=seed, coords_q=packing.coords,
        site=1,
    )  # fmt: skip
    positions = torch.arange(6, dtype=torch.int32)
    full = attention_keep_mask(seed, 1, torch.stack((positions * 0, positions), 1), 4, 1, 0.5)[0]
    assert torch.equal(out[:, 0][:, kept] != 0, full[kept])


def test_rows_that_drop_everything_and_p_one():
    tensors, packing = _inputs([4])
    result = _run(tensors, packing, "torch", dropout_p=1.0)
    for name, tensor in result.items():
        assert torch.equal(tensor, torch.zeros_like(tensor)), name


def test_huge_scores_stay_finite():
    tensors, packing = _inputs([6, 3])
    tensors[0] *= 1e4
    result = _run(tensors, packing, "torch")
    assert all(torch.isfinite(t).all() for t in result.values())


def test_strided_views_of_a_fused_buffer():
    buffer = torch.randn(10, 3, 2, 16)
    q, k, v = buffer.unbind(1)
    packing = ops.Packing.from_cu_seqlens(torch.tensor([0, 4, 10], dtype=torch.int32), 6, 10)
    arguments = dict(cu_seqlens_q=packing.cu_seqlens, max_seqlen_q=6)
    assert not q.is_contiguous()
    strided = ops.attention(q, k, v, **arguments)
    dense = ops.attention(q.contiguous(), k.contiguous(), v.contiguous(), **arguments)
    torch.testing.assert_close(strided, dense)


def test_runs_repeat_bit_for_bit():
    tensors, packing = _inputs([33, 12])
    first, second = (_run(tensors, packing, "torch", 0.1) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_thread_count_does_not_change_masks():
    tensors, packing = _inputs([33, 12])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = _run(tensors, packing, "torch", 0.3)["out"]
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(one, _run(tensors, packing, "torch", 0.3)["out"])


def test_no_tokens():
    q = torch.randn(0, 2, 8, requires_grad=True)
    out = ops.attention(q, q, q, cu_seqlens_q=torch.zeros(3, dtype=torch.int32), max_seqlen_q=0)
    out.sum().backward()
    assert out.shape == (0, 2, 8)


def test_opcheck():
    tensors, packing = _inputs([3, 2], dtype=torch.float64)
    q, k, v = (t.requires_grad_() for t in tensors[:3])
    torch.library.opcheck(
        torch.ops.bert_fast.attention_fwd,
        (q, k, v, packing.cu_seqlens, packing.cu_seqlens, 3, 3, 0.3, 0.2, torch.tensor([1]), packing.coords,
         packing.coords, 4, False, None, None, None, False, None, "auto"),
    )  # fmt: skip


def test_full_graph_compile_without_recompiling_for_other_lengths():
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def function(q, k, v, cu_seqlens, coords, longest):
        return ops.attention(
            q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=longest, dropout_p=0.2, seed=torch.tensor([1]),
            coords_q=coords, site=9,
        ).relu()  # fmt: skip

    torch._dynamo.config.error_on_recompile = True
    try:
        for lengths in ([4, 3], [6, 9], [11, 2]):
            tensors, packing = _inputs(lengths)
            q, k, v = (t.requires_grad_() for t in tensors[:3])
            compiled = function(q, k, v, packing.cu_seqlens, packing.coords, packing.max_seqlen)
            compiled.sum().backward()
            torch.testing.assert_close(compiled, _run(tensors, packing, "torch", 0.2)["out"].relu())
    finally:
        torch._dynamo.config.error_on_recompile = False


def _call(**changes):
    tensors, packing = _inputs([3, 2])
    arguments = dict(
        q=tensors[0], k=tensors[1], v=tensors[2], cu_seqlens_q=packing.cu_seqlens, max_seqlen_q=3, dropout_p=0.1,
        seed=torch.tensor([1]), coords_q=packing.coords,
    )  # fmt: skip
    return ops.attention(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.zeros(5, 24)}, ValueError, r"q: expected shape \[Tq, A, D\], got \[5, 24\]"),
        ({"k": torch.zeros(5, 3, 4)}, ValueError, r"k: expected shape \[Tk, 3, 8\], got \[5, 3, 4\]"),
        ({"v": torch.zeros(5, 3, 8).half()}, TypeError, r"v: expected dtype float32 \(that of q\), got float16"),
        ({"q": [1]}, TypeError, "q: expected a Tensor, got list"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 5])}, TypeError, "cu_seqlens_q: expected dtype int32, got int64"),
        ({"seed": None}, ValueError, "seed: expected a Tensor where dropout_p is 0.1, got None"),
        ({"coords_q": None}, ValueError, "coords_q: expected a Tensor"),
        ({"dropout_p": 1.5}, ValueError, r"dropout_p: expected a probability in \[0, 1\], got 1.5"),
        ({"seed": torch.tensor([1.0])}, TypeError, "seed: expected dtype int64, got float32"),
        ({"backend": "cuda"}, BackendError, "backend: expected one of triton, torch, reference, got 'cuda'"),
        ({"backend": "triton"}, BackendError, "no 'triton' implementation exists"),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        _call(**changes)
