"""The op maxsim: every back-end, devices other than the CPU, autocast, values that are not finite, messages."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bert_fast import backend, ops
from bert_fast.reference.maxsim import EMPTY, Maxsim
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.tolerances import ABSOLUTE

TRITON = pytest.param("triton", marks=pytest.mark.interpreter)
BACKENDS = ["reference", "torch", TRITON]
QUERIES, DOCUMENTS = (3, 0, 5, 1), (4, 0, 7, 1, 0)
OUTPUTS = ("scores", "dqueries", "ddocuments")


def offsets_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def layout(of_queries: tuple[int, ...] = QUERIES, of_documents: tuple[int, ...] = DOCUMENTS) -> dict[str, Any]:
    return {
        "cu_seqlens_q": offsets_of(of_queries),
        "cu_seqlens_d": offsets_of(of_documents),
        "max_seqlen_d": max(of_documents),
    }


def leaves(columns: int = 16, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    queries, documents = (torch.randn(sum(t), columns).to(dtype) for t in (QUERIES, DOCUMENTS))
    return queries.requires_grad_(), documents.requires_grad_()


def results(name: str, inputs: tuple[Tensor, Tensor], dscores: Tensor, **given: Any) -> tuple[Tensor, ...]:
    scores = ops.maxsim(*inputs, **(given or layout()), backend=name)
    return scores.detach(), *torch.autograd.grad(scores, inputs, dscores.to(scores.dtype))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_back_ends_agree_with_fp64(name: str, dtype: torch.dtype) -> None:
    inputs, dscores = leaves(dtype=dtype), torch.randn(len(QUERIES), len(DOCUMENTS)).to(dtype).float()
    truth = results("reference", tuple(t.detach().double().requires_grad_() for t in inputs), dscores)
    plain = results("reference", inputs, dscores)
    for output, actual, stock, exact in zip(OUTPUTS, results(name, inputs, dscores), plain, truth, strict=True):
        assert actual.is_contiguous()
        assert_close_to_truth("maxsim", output, actual, stock, exact)


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    inputs = leaves(3, torch.float64)
    assert torch.autograd.gradcheck(lambda q, d: ops.maxsim(q, d, **layout(), backend=name), inputs)


def test_scores_are_sums_of_maxima() -> None:
    """By hand: two tokens of a query, two documents, and one without tokens."""
    queries = torch.tensor([[1.0, 0.0], [0.0, 2.0]], requires_grad=True)
    documents = torch.tensor([[3.0, 1.0], [1.0, 4.0], [-1.0, -1.0]], requires_grad=True)
    scores = ops.maxsim(queries, documents, **layout((2,), (2, 0, 1)))
    assert scores.tolist() == [[3.0 + 8.0, EMPTY, -1.0 - 2.0]]
    scores.backward(torch.tensor([[1.0, 100.0, 10.0]]))
    assert queries.grad.tolist() == [[3.0 - 10.0, 1.0 - 10.0], [1.0 - 10.0, 4.0 - 10.0]]
    assert documents.grad.tolist() == [[1.0, 0.0], [0.0, 2.0], [10.0, 20.0]]


@pytest.mark.parametrize("name", BACKENDS)
def test_of_equal_tokens_the_first_gets_the_gradient(name: str) -> None:
    queries, documents = torch.ones(2, 4).requires_grad_(), torch.ones(7, 4).requires_grad_()
    scores = ops.maxsim(queries, documents, **layout((2,), (3, 4)), backend=name)
    (gradient,) = torch.autograd.grad(scores.sum(), documents)
    assert gradient[:, 0].tolist() == [2.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("wanted", [0, 1])
def test_one_input_alone_may_want_a_gradient(name: str, wanted: int) -> None:
    inputs, dscores = leaves(), torch.randn(len(QUERIES), len(DOCUMENTS))
    _, *expected = results(name, inputs, dscores)
    inputs[1 - wanted].requires_grad_(False)
    scores = ops.maxsim(*inputs, **layout(), backend=name)
    assert torch.equal(torch.autograd.grad(scores, inputs[wanted], dscores)[0], expected[wanted])


@pytest.mark.parametrize("name", BACKENDS)
def test_views(name: str) -> None:
    queries, documents = leaves()
    dscores = torch.randn(len(QUERIES), len(DOCUMENTS))
    expected = results(name, (queries, documents), dscores)
    wide = torch.randn(len(documents), 20)
    wide[:, 2:18] = documents.detach()
    views = queries.detach().t().contiguous().t().requires_grad_(), wide[:, 2:18].requires_grad_()
    for one, other in zip(results(name, views, dscores.t().contiguous().t()), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=ABSOLUTE["late_interaction"])


@pytest.mark.parametrize("budget", [1, 40, 2**20])
def test_similarities_are_made_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    """And the bits are those of all at once, except for products of other shapes."""
    module = backend.resolve("maxsim", backend.OpSpec(torch.device("cpu"), torch.float32), "torch")
    inputs, dscores = leaves(), torch.randn(len(QUERIES), len(DOCUMENTS))
    expected = results("reference", inputs, dscores)
    monkeypatch.setattr(module, "_CPU_SIMILARITIES", budget)
    for one, other in zip(results("torch", inputs, dscores), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=ABSOLUTE["late_interaction"])


@pytest.mark.parametrize("budget", [1, 500, 2**20])
@pytest.mark.parametrize("longest", [7, 9])
def test_what_other_devices_run_needs_no_offsets_on_the_host(
    monkeypatch: pytest.MonkeyPatch, budget: int, longest: int
) -> None:
    module: Any = backend.resolve("maxsim", backend.OpSpec(torch.device("cpu"), torch.float32), "torch")
    monkeypatch.setattr(module, "_OTHER_SIMILARITIES", budget)
    queries, documents = (t.detach() for t in leaves())
    a = Maxsim(queries, documents, *(offsets_of(t) for t in (QUERIES, DOCUMENTS)), longest)
    best, chosen = module._fwd_on_cpu(a)
    other_best, other_chosen = module._fwd_elsewhere(a)
    has_tokens = torch.tensor(DOCUMENTS) > 0
    assert torch.equal(chosen, other_chosen)
    torch.testing.assert_close(best[has_tokens], other_best[has_tokens], rtol=0, atol=ABSOLUTE["late_interaction"])
    upstream, both = torch.randn(best.shape), {"queries", "documents"}
    made, others = (f(a, upstream, chosen, both) for f in (module._bwd_on_cpu, module._bwd_elsewhere))
    for name in both:
        torch.testing.assert_close(made[name], others[name], rtol=0, atol=ABSOLUTE["late_interaction"])


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_values_that_are_not_finite(name: str) -> None:
    """A document's NaN is its own scores', and a token that was not chosen gets no gradient of one that is infinite."""
    queries, documents = leaves()
    with torch.no_grad():
        documents[5] = torch.nan
        queries[0] = torch.inf
    scores, _, ddocuments = results(name, (queries, documents), torch.ones(len(QUERIES), len(DOCUMENTS)))
    assert scores[:, 2].isnan().tolist() == [True, False, True, True]  # the query without tokens has the score 0
    assert scores[2:, [0, 3]].isfinite().all() and (scores[:, [1, 4]] == EMPTY).all()
    finite = ddocuments[:4].isfinite().all(1)
    assert not finite.all() and finite.any()


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # of lanes that are masked
@pytest.mark.parametrize("name", BACKENDS)
def test_of_similarities_that_are_all_minus_infinity_the_first_is_chosen(name: str) -> None:
    """Of its own document, not of all."""
    queries, documents = torch.full((9, 16), -torch.inf), torch.ones(12, 16)
    given = layout()
    chosen = torch.ops.bert_fast.maxsim_fwd.default(
        queries, documents, given["cu_seqlens_q"], given["cu_seqlens_d"], 7, name
    )[1]
    first = torch.where(torch.tensor(DOCUMENTS) > 0, given["cu_seqlens_d"][:-1], -1)
    assert torch.equal(chosen, first[:, None].expand(-1, 9).int())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    inputs, dscores = leaves(), torch.randn(len(QUERIES), len(DOCUMENTS))
    with torch.autocast("cpu", dtype):
        scores = ops.maxsim(*inputs, **layout())
        gradients = torch.autograd.grad(scores, inputs, dscores)
    expected = results("torch", tuple(t.detach().to(dtype).requires_grad_() for t in inputs), dscores)
    assert scores.dtype == torch.float32 and torch.equal(scores, expected[0])
    for gradient, other in zip(gradients, expected[1:], strict=True):
        assert gradient.dtype == torch.float32 and torch.equal(gradient, other.float())


def test_runs_repeat_bit_for_bit() -> None:
    inputs, dscores = leaves(), torch.randn(len(QUERIES), len(DOCUMENTS))
    first, second = (results("torch", inputs, dscores) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_what_is_kept_is_the_choice_alone() -> None:
    """Neither similarities nor maxima: both inputs, offsets, and an int32 for each token of a query and document."""
    queries, documents = torch.randn(60, 16).requires_grad_(), torch.randn(900, 16).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ops.maxsim(queries, documents, **layout((20,) * 3, (300,) * 3))
    others = [t for t in kept if t.dtype != torch.int32 or t.dim() == 2]
    assert sorted(tuple(t.shape) for t in others) == [(3, 60), (60, 16), (900, 16)]


def test_similarities_are_what_is_counted() -> None:
    inputs = leaves()
    with FlopCounterMode(display=False) as counter:
        ops.maxsim(*inputs, **layout()).sum().backward()
    assert counter.get_total_flops() == 2 * sum(QUERIES) * sum(DOCUMENTS) * 16


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"queries": torch.zeros(9)}, ValueError, "queries"),
        ({"queries": torch.zeros(9, 16, dtype=torch.int64)}, TypeError, "queries"),
        ({"documents": torch.zeros(12, 15)}, ValueError, "documents"),
        ({"documents": torch.zeros(12, 16, dtype=torch.float16)}, TypeError, "documents"),
        ({"cu_seqlens_q": torch.tensor([0, 9])}, TypeError, "cu_seqlens_q"),
        ({"cu_seqlens_q": torch.tensor([0, 8], dtype=torch.int32)}, ValueError, "cu_seqlens_q"),
        ({"cu_seqlens_d": torch.zeros(0, dtype=torch.int32)}, ValueError, "cu_seqlens_d"),
        ({"cu_seqlens_d": torch.tensor([0, 13], dtype=torch.int32)}, ValueError, "cu_seqlens_d"),
        ({"max_seqlen_d": 6}, ValueError, "max_seqlen_d: expected at least the longest sequence"),
        ({"max_seqlen_d": 7.5}, TypeError, "max_seqlen_d"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)) if isinstance(value, dict) else None,
)
def test_messages_name_the_argument(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    queries, documents = leaves()
    with pytest.raises(error, match=message):
        ops.maxsim(**{"queries": queries, "documents": documents, **layout(), **changes})
