"""Attention: back-ends against the reference, its gradients, dropout, edge cases, registration, compiled graphs."""

import math
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bert_fast import ops
from bert_fast.reference.dropout import attention_keep_mask
from bert_fast.testing.attention import AttentionCase
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.torch import attention as aten

LENGTHS = [(1,), (5, 1, 3), (0, 4, 0, 7), (17, 31), (64, 2)]
LAYOUTS = {
    "no sequences": AttentionCase(()),
    "only empty ones": AttentionCase((0, 0)),
    "no keys": AttentionCase((3, 2), (0, 0)),
    "no queries": AttentionCase((0, 0), (3, 2)),
    "other keys": AttentionCase((5, 2, 0, 7), (3, 0, 4, 33)),
    "one query, a cache": AttentionCase((1, 1, 1), (9, 40, 1)),
    "padding inside": AttentionCase((5, 0, 9), holes=True),
    "rows in another order": AttentionCase((5, 1, 9), order=(2, 0, 1)),
    "127 and neighbours": AttentionCase((127, 128, 129), head_dim=16),
}


def check(case: AttentionCase, backend: str, dtype: torch.dtype) -> None:
    actual, plain, truth = case.run(backend, dtype), case.plain(dtype), case.truth(dtype)
    assert actual.keys() == plain.keys() == truth.keys()
    for name in actual:
        assert_close_to_truth("attention", name, actual[name], plain[name], truth[name])


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torch_backend_matches_the_reference(
    lengths: tuple[int, ...], dropout_p: float, causal: bool, dtype: torch.dtype
) -> None:
    check(AttentionCase(lengths, num_heads=3, dropout_p=dropout_p, causal=causal), "torch", dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [8, 16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_layouts(layout: str, head_dim: int, causal: bool, backend: str) -> None:
    arguments = vars(LAYOUTS[layout]) | {"head_dim": head_dim, "causal": causal, "dropout_p": 0.2}
    check(AttentionCase(**arguments), backend, torch.float32)


@pytest.mark.parametrize("head_dim", [1, 16, 24, 32, 64, 128, 136])
def test_head_sizes(head_dim: int) -> None:
    check(AttentionCase((9, 3), head_dim=head_dim, dropout_p=0.1), "torch", torch.float32)


def inputs(lengths: list[int], heads: int = 3, head_dim: int = 8) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v as leaves, and the arguments that say where sequences stand, dropout on."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    total = sum(lengths)
    packing = ops.Packing.from_cu_seqlens(cu_seqlens, max(lengths, default=0), total)
    layout = dict(cu_seqlens_q=cu_seqlens, max_seqlen_q=packing.max_seqlen, coords_q=packing.coords)
    return [torch.randn(total, heads, head_dim).requires_grad_() for _ in range(3)], layout


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_gradcheck_in_fp64_through_the_registered_op(backend: str) -> None:
    case = AttentionCase((3, 0, 2), head_dim=3, bias="BQK", relative="CP", holes=True, dropout_p=0.3)
    leaves = {name: t.requires_grad_() for name, t in case.inputs(torch.float64).items() if name != "dout"}

    def function(*tensors: Tensor) -> Tensor:
        return ops.attention(
            **dict(zip(leaves, tensors, strict=True)), cu_seqlens_q=case.cu_seqlens()[0], max_seqlen_q=3, dropout_p=0.3,
            seed=torch.tensor([5]), coords_q=case.coords()[0], site=3, backend=backend,
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


def test_queries_without_keys_give_exactly_zero() -> None:
    case = AttentionCase((3, 2), (9, 0))
    for backend in ("torch", "reference"):
        result = case.run(backend, torch.float32)
        assert not result["out"][3:].any() and not result["dq"][3:].any()


def test_dropout_masks_are_the_specified_ones() -> None:
    """With v = identity the output is the dropped probability matrix itself."""
    length, heads = 40, 3
    (q, k, _), layout = inputs([length], heads, length)
    v = torch.eye(length).unsqueeze(1).expand(length, heads, length)
    seed = torch.tensor([-(2**62) + 12345])
    out = ops.attention(q, k, v, **layout, dropout_p=0.4, seed=seed, site=17)
    keep = attention_keep_mask(seed, 17, layout["coords_q"], length, heads, 0.4)
    assert torch.equal(out.transpose(0, 1) != 0, keep)


def test_masks_follow_original_positions_when_padding_stands_inside() -> None:
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


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_p_one_drops_everything(backend: str) -> None:
    case = AttentionCase((4,), dropout_p=1.0, bias="BAQK", relative="C")
    for name, tensor in case.run(backend, torch.float32).items():
        assert not tensor.any(), name


def test_p_below_the_smallest_step_drops_nothing() -> None:
    (q, k, v), layout = inputs([4, 3])
    assert torch.equal(ops.attention(q, k, v, **layout, dropout_p=1e-6, seed=torch.tensor([1])),
                       ops.attention(q, k, v, **layout))  # fmt: skip


def test_huge_scores_stay_finite() -> None:
    (q, k, v), layout = inputs([6, 3])
    out = ops.attention(q * 1e4, k, v, **layout)
    assert all(torch.isfinite(t).all() for t in (out, *torch.autograd.grad(out, (q, k, v), torch.randn_like(out))))


def test_scale_and_the_sizes_of_bounds() -> None:
    """A given scale is used as it is; bounds of the lengths may be loose."""
    (q, k, v), layout = inputs([6, 3])
    default = ops.attention(q, k, v, **layout)
    torch.testing.assert_close(ops.attention(q, k, v, **layout, softmax_scale=1 / math.sqrt(8)), default)
    for bound in (1000, numpy.int64(6), torch.tensor(6)):
        torch.testing.assert_close(ops.attention(q, k, v, **layout | {"max_seqlen_q": bound}), default)
    torch.testing.assert_close(ops.attention(q * 2, k, v, **layout, softmax_scale=0.5 / math.sqrt(8)), default)
    assert not torch.allclose(ops.attention(q, k, v, **layout, softmax_scale=1), default)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_any_strides(backend: str) -> None:
    (q, k, v), layout = inputs([4, 6], 2, 16)
    arguments = layout | {"backend": backend, "causal": True}
    dense = ops.attention(q, k, v, **arguments)
    fused = torch.stack((q, k, v), 1)  # [T, 3, A, D]
    strided = [t.transpose(0, 2).contiguous().transpose(0, 2) for t in (q, k, v)]
    assert strided[0].stride(2) != 1
    for views in (fused.unbind(1), strided):
        torch.testing.assert_close(ops.attention(*views, **arguments), dense)
        gradients, expected = (
            torch.autograd.grad(ops.attention(*tensors, **arguments), (q, k, v), dense.detach())
            for tensors in (views, (q, k, v))
        )
        for gradient, want in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, want)
    one = q[:1].expand(10, -1, -1)
    torch.testing.assert_close(ops.attention(one, k, v, **arguments), ops.attention(one.clone(), k, v, **arguments))


def test_parts_of_a_fused_buffer_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(10, 3, 2, 16).unbind(1)
    library, seen = aten.routines(q), []
    if library is None:
        pytest.skip("the C++ extension is not loaded")

    class Recorder:
        def attention_fwd(self, *arguments: Any) -> None:
            seen.extend(arguments[:3])
            library.attention_fwd(*arguments)

    monkeypatch.setattr(aten, "routines", lambda *_: Recorder())
    ops.attention(q, k, v, cu_seqlens_q=torch.tensor([0, 4, 10], dtype=torch.int32), max_seqlen_q=6)
    assert seen == [t.data_ptr() for t in (q, k, v)]


def test_runs_repeat_bit_for_bit() -> None:
    for case in (
        AttentionCase((33, 12), dropout_p=0.1),
        AttentionCase((33, 12), dropout_p=0.1, bias="A", relative="CP"),
    ):
        first, second = (case.run("torch", torch.float32) for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_thread_count_does_not_change_masks() -> None:
    case, threads = AttentionCase((33, 12), dropout_p=0.3), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = case.run("torch", torch.float32)["out"]
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(one, case.run("torch", torch.float32)["out"])


def test_the_order_of_work_changes_nothing() -> None:
    (q, k, v), layout = inputs([4, 6, 1])
    order = torch.tensor([1, 0, 2], dtype=torch.int32)
    for backend in ("torch", "reference"):
        arguments = layout | {"backend": backend}
        assert torch.equal(ops.attention(q, k, v, **arguments, sequence_order=order),
                           ops.attention(q, k, v, **arguments))  # fmt: skip


class _Calls(TorchDispatchMode):
    """The results of the backward op."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[Tensor, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.bert_fast.attention_bwd.default:
            self.results.append(result)
        return result


@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "relative_keys", "relative_queries"])
def test_only_wanted_gradients_are_made(wanted: str) -> None:
    case = AttentionCase((3, 4), bias="K", relative="CP")
    given = {name: t for name, t in case.inputs(torch.float32).items() if name != "dout"}
    given[wanted].requires_grad_()
    with _Calls() as calls:
        ops.attention(
            **given, cu_seqlens_q=case.cu_seqlens()[0], max_seqlen_q=4, coords_q=case.coords()[0]
        ).square().sum().backward()
    assert [name for name, t in given.items() if t.grad is not None] == [wanted]
    torch.testing.assert_close(given[wanted].grad.shape, given[wanted].shape)
    (made,) = calls.results
    for name, gradient in zip(("bias", "relative_keys", "relative_queries"), made[3:], strict=True):
        assert gradient.numel() == (given[name].numel() if name == wanted else 0)


def test_no_gradients_without_leaves_and_none_of_gradients() -> None:
    (q, k, v), layout = inputs([3])
    out = ops.attention(q.detach(), k.detach(), v.detach(), **layout)
    assert not out.requires_grad
    (gradient,) = torch.autograd.grad(ops.attention(q, k, v, **layout).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        gradient.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """q, k and v are cast; bias and fp32 tables keep their dtypes, and so do gradients."""
    case = AttentionCase((5, 3), bias="BAQK", relative="CP", causal=True)
    leaves = {name: t.requires_grad_() for name, t in case.inputs(torch.float32).items() if name != "dout"}
    arguments = dict(cu_seqlens_q=case.cu_seqlens()[0], max_seqlen_q=5, causal=True)
    with torch.autocast("cpu", dtype):
        out = ops.attention(**leaves, **arguments)
    cast = {name: t.to(dtype) if name in "qkv" else t for name, t in leaves.items()}
    assert out.dtype == dtype and torch.equal(out, ops.attention(**cast, **arguments))
    gradients = torch.autograd.grad(out, list(leaves.values()), torch.randn_like(out))
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    with torch.autocast("cpu", dtype):
        double = {name: t.detach().double() for name, t in leaves.items()}
        assert ops.attention(**double, **arguments).dtype == torch.float64


def test_full_graph_compile_without_recompiling_for_other_sizes() -> None:
    """Other numbers of tokens, of sequences, other longest lengths, and with them other sizes of bias and table."""

    def function(q, k, v, cu_seqlens, coords, longest, bias, *tables):
        return ops.attention(
            q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=longest, dropout_p=0.2, seed=torch.tensor([1]),
            coords_q=coords, site=9, bias=bias, relative_keys=tables[0], relative_queries=tables[1], causal=True,
        ).relu()  # fmt: skip

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        # The first call's sizes differ from one another: the compiler takes equal ones for one and the same.
        for lengths in ([4, 3, 7, 2], [6, 9], [11, 2, 0, 5, 7]):
            tensors, layout = inputs(lengths)
            longest = max(lengths)
            extras = torch.randn(len(lengths), 1, 1, longest), *torch.randn(2, 2 * longest - 1, 3, 8)
            tensors += [t.requires_grad_() for t in extras]
            arguments = (*tensors[:3], *(layout[n] for n in ("cu_seqlens_q", "coords_q", "max_seqlen_q")), *extras)
            results = [f(*arguments) for f in (compiled, function)]
            dout = torch.randn_like(results[0])
            got, want = ([out, *torch.autograd.grad(out, tensors, dout)] for out in results)
            for one, other in zip(got, want, strict=True):
                assert torch.equal(one, other)
    torch._dynamo.reset()


def test_automatic_dynamic_shapes_compile_twice_at_most() -> None:
    """As users compile: the first other length makes sizes symbolic, the next ones change nothing."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def function(q, k, v, cu_seqlens, longest):
        return ops.attention(q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=longest, causal=True)

    for lengths in ([4, 3], [6, 9, 2], [11, 2, 8, 5], [3, 3, 3, 3, 4]):
        (q, k, v), layout = inputs(lengths)
        out = function(q, k, v, layout["cu_seqlens_q"], layout["max_seqlen_q"])
        torch.testing.assert_close(out, ops.attention(q, k, v, **layout, causal=True))
    assert counter.frame_count <= 2
    torch._dynamo.reset()
