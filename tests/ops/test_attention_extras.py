"""Attention with bias and relative positions: every combination, on every back-end that has no GPU."""

import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bert_fast import ops
from bert_fast.testing.attention import TABLES, AttentionCase
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.torch.attention import attention_bwd, attention_fwd
from tests.attention_records import plain_attention

BIASES = ["", "B", "A", "K", "Q", "BK", "QK", "BQK", "BAQK"]
LAYOUTS = [
    dict(lengths=(5, 0, 1, 7)),
    dict(lengths=(5, 1, 9), holes=True, order=(2, 0, 1)),
    dict(lengths=(5, 2, 0, 7), lengths_k=(3, 0, 4, 9), holes=True),
]
COMBINATIONS = [
    dict(bias=bias, relative=relative, causal=causal)
    for bias, relative, causal in itertools.product((None, "BAQK"), ("", "C", "P", "CP"), (False, True))
]


def check(case: AttentionCase, backend: str, dtype: torch.dtype) -> None:
    actual, plain, truth = case.run(backend, dtype), case.plain(dtype), case.truth(dtype)
    assert actual.keys() == plain.keys() == truth.keys()
    for name in actual:
        assert_close_to_truth("attention", name, actual[name], plain[name], truth[name])


def id_of(arguments: dict) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items() if value)


@pytest.mark.parametrize("features", COMBINATIONS, ids=id_of)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("torch", torch.float32), ("torch", torch.float16), ("torch", torch.bfloat16), ("reference", torch.float32)],
)
def test_combinations(features: dict, dropout_p: float, backend: str, dtype: torch.dtype) -> None:
    for layout in LAYOUTS:
        check(AttentionCase(**layout, **features, dropout_p=dropout_p), backend, dtype)


@pytest.mark.parametrize("letters", BIASES)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_broadcast_shapes(letters: str, backend: str) -> None:
    for layout in LAYOUTS:
        check(AttentionCase(**layout, bias=letters, dropout_p=0.1), backend, torch.float32)


@pytest.mark.parametrize("letters", ["K", "BK", "QK", "BAQK"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_removed_keys_and_queries(letters: str, causal: bool, backend: str) -> None:
    """-inf in the bias, for all keys of some queries too: exactly 0, and no gradient there is NaN."""
    for layout in LAYOUTS:
        case = AttentionCase(**layout, bias=letters, removes=True, causal=causal, relative="C")
        check(case, backend, torch.float32)
        removed = case.inputs(torch.float32)["bias"] == -torch.inf
        assert removed.any() and not case.run(backend, torch.float32)["dbias"][removed].any()


def test_any_strides_and_dtypes_of_bias() -> None:
    case = AttentionCase((5, 7), bias="BAQK")
    given = case.inputs(torch.float32)
    given.pop("dout")
    arguments = dict(cu_seqlens_q=case.cu_seqlens()[0], max_seqlen_q=7)
    for backend in ("torch", "reference"):
        expected = ops.attention(**given, **arguments, backend=backend)
        moved = given["bias"].permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
        assert torch.equal(ops.attention(**given | {"bias": moved}, **arguments, backend=backend), expected)
        double = given["bias"].double().requires_grad_()
        out = ops.attention(**given | {"bias": double}, **arguments, backend=backend)
        torch.testing.assert_close(out, expected)
        out.sum().backward()
        assert double.grad is not None and double.grad.dtype == torch.float64
        shared = given["bias"][:1].expand(2, -1, -1, -1)
        assert torch.equal(
            ops.attention(**given | {"bias": shared}, **arguments, backend=backend),
            ops.attention(**given | {"bias": given["bias"][:1]}, **arguments, backend=backend),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_one_table_for_all_heads_and_both_terms(dtype: torch.dtype, backend: str) -> None:
    """Expanded, as BERT's relative_key_query has it; its gradient is the sum over heads and both terms."""
    case = AttentionCase((5, 0, 7), num_heads=3, relative="CP", holes=True, dropout_p=0.1)
    inputs = case.inputs(dtype)
    table = torch.randn(len(inputs["relative_keys"]), case.head_dim).to(dtype).requires_grad_()
    shared = table[:, None].expand(-1, case.num_heads, -1)
    apart = {name: shared.detach().clone().requires_grad_() for name in TABLES.values()}
    tensors = {name: inputs[name] for name in "qkv"}
    one = case.attend(backend, tensors | dict.fromkeys(TABLES.values(), shared))
    other = case.attend(backend, tensors | apart)
    torch.testing.assert_close(one, other)
    one.backward(inputs["dout"])
    other.backward(inputs["dout"])
    torch.testing.assert_close(table.grad, sum(t.grad for t in apart.values()).sum(1))


def test_names_of_tokens_default_to_sequence_and_index() -> None:
    case = AttentionCase((5, 0, 7), bias="BQK", relative="CP", causal=True)
    given = case.inputs(torch.float32)
    given.pop("dout")
    arguments = dict(cu_seqlens_q=case.cu_seqlens()[0], max_seqlen_q=7, causal=True)
    named = ops.attention(**given, **arguments, coords_q=case.coords()[0])
    assert torch.equal(ops.attention(**given, **arguments), named)


class Largest(TorchDispatchMode):
    """The largest number of elements in the memory of any result."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        return result


@pytest.mark.parametrize("wanted", [{"relative_keys"}, {"relative_queries"}, {"relative_keys", "relative_queries"}])
def test_relative_positions_need_no_tensor_of_all_pairs(wanted: set[str]) -> None:
    """Nothing larger than the scores [A, S, S] of one sequence is made, forward and backward."""
    length, heads, head_dim = 96, 4, 16
    double = torch.float64  # which the C++ routine does not take
    q, k, v, dout = (torch.randn(length, heads, head_dim, dtype=double) for _ in range(4))
    tables = {name: torch.randn(2 * length + 5, heads, head_dim, dtype=double) for name in wanted}
    cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
    coords = torch.stack((torch.zeros(length), torch.arange(length)), 1).int()
    a = plain_attention(
        q, k, v, cu_seqlens, length, softmax_scale=0.1, coords_q=coords, coords_k=coords, **tables
    )  # fmt: skip
    with Largest() as largest:
        out, lse, mask = attention_fwd(a)
        attention_bwd(a, dout, out, lse, mask, wanted)
    assert largest.elements == heads * length * length


def test_a_row_whose_keys_are_all_pushed_far_down_is_still_a_softmax() -> None:
    """-1e9 on every key of a query: scores are then equal in fp32, and the log of their number is lost beside them."""
    q, k, v = (torch.randn(5, 2, 16, requires_grad=True) for _ in range(3))
    bias = torch.zeros(1, 1, 5, 5)
    bias[..., 2, :] = -1e9
    cu_seqlens = torch.tensor([0, 5], dtype=torch.int32)
    out = ops.attention(q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=5, bias=bias, backend="torch")
    torch.testing.assert_close(out[2], v.mean(0))
    dout = torch.randn(2, 16)
    (dv,) = torch.autograd.grad(out[2], v, dout)
    torch.testing.assert_close(dv, (dout / 5).expand(5, 2, 16))
