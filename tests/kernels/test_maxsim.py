"""The Triton kernels of maxsim, in the interpreter, against the fp64 reference."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast import backend
from bert_fast.reference import maxsim as reference
from bert_fast.reference.maxsim import EMPTY, Maxsim
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.testing.traffic import traffic

pytestmark = [
    pytest.mark.interpreter,
    # Infinite and masked similarities, whose results are selected away: NumPy says so, a GPU does not.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning"),
]

BOTH = {"queries", "documents"}


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    """The module under test, imported only where the interpreter runs: importing triton costs a second."""
    return backend.resolve("maxsim", backend.OpSpec(torch.device("cpu"), torch.float32), "triton")


def offsets_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def make(
    of_queries: tuple[int, ...], of_documents: tuple[int, ...], columns: int, dtype: torch.dtype = torch.float32
) -> Maxsim:
    queries, documents = (torch.randn(sum(t), columns).to(dtype) for t in (of_queries, of_documents))
    return Maxsim(queries, documents, offsets_of(of_queries), offsets_of(of_documents), max(of_documents))


def run(module: Any, a: Maxsim, dscores: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scores, chosen = module.maxsim_fwd(a)
    made = module.maxsim_bwd(a, dscores.to(scores.dtype), chosen, BOTH)
    return {"scores": scores, **{f"d{name}": t for name, t in made.items()}}, chosen


def plain(a: Maxsim, dscores: Tensor) -> dict[str, Tensor]:
    """As users write it, document by document: a product in the dtype, the sum over tokens in fp32."""
    queries, documents = (t.detach().clone().requires_grad_() for t in (a.queries, a.documents))
    columns, counts = [], a.cu_seqlens_q.diff().tolist()
    for part in documents.split(a.cu_seqlens_d.diff().tolist()):
        best = (queries @ part.t()).amax(1).float() if len(part) else None
        is_empty = [torch.full((), EMPTY)] * len(counts)
        columns.append(torch.stack(is_empty if best is None else [t.sum() for t in best.split(counts)]))
    scores = torch.stack(columns, 1)
    gradients = torch.autograd.grad(scores, (queries, documents), dscores)
    return {"scores": scores.detach(), **dict(zip(("dqueries", "ddocuments"), gradients, strict=True))}


def check(kernels: Any, a: Maxsim) -> None:
    """Scores and gradients beside those of fp64, of the same chosen tokens; arguments stay as they were."""
    before = a.queries.clone(), a.documents.clone()
    dscores = torch.randn(len(a.cu_seqlens_q) - 1, len(a.cu_seqlens_d) - 1)
    actual, chosen = run(kernels, a, dscores)
    stock = plain(a, dscores)
    truth, expected = run(reference, a._replace(queries=a.queries.double(), documents=a.documents.double()), dscores)
    assert torch.equal(chosen, expected)
    for name, one in actual.items():
        assert one.is_contiguous()
        assert_close_to_truth("maxsim", name, one, stock[name], truth[name])
    assert torch.equal(a.queries, before[0]) and torch.equal(a.documents, before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("of_queries", "of_documents", "columns"),
    [
        ((1,), (1,), 1),
        ((3, 0, 70), (64, 1, 0, 65, 128), 96),  # a document of one tile, of more by one, of two
        ((63, 66, 1), (0, 0, 3), 128),
        ((5, 130), (70, 63), 200),  # two tiles of columns, the last not full
        ((2,) * 17, (3,) * 19, 16),
    ],
    ids=["one", "edges", "mostly-empty", "wide", "many"],
)
def test_values(
    kernels: Any, of_queries: tuple[int, ...], of_documents: tuple[int, ...], columns: int, dtype: torch.dtype
) -> None:
    check(kernels, make(of_queries, of_documents, columns, dtype))


def test_two_runs_repeat_each_other_bit_for_bit(kernels: Any) -> None:
    a, dscores = make((5, 70), (70, 3, 128), 40), torch.randn(2, 3)
    (one, chosen), (other, again) = (run(kernels, a, dscores) for _ in range(2))
    assert torch.equal(chosen, again) and all(torch.equal(one[name], other[name]) for name in one)


def test_strides(kernels: Any) -> None:
    a = make((7, 9), (30, 71), 24)
    wide = torch.randn(101, 30)
    check(kernels, a._replace(queries=a.queries.t().contiguous().t(), documents=wide[:, 3:27]))


def test_the_first_of_equal_tokens_is_chosen(kernels: Any) -> None:
    """Within a tile, and in a later one at an earlier place."""
    a = make((4,), (200,), 16)
    a.queries.fill_(1.0), a.documents.fill_(0.5)
    a.documents[[37, 66, 130]] = 1.0
    assert (kernels.maxsim_fwd(a)[1] == 37).all()
    assert (kernels.maxsim_fwd(a._replace(documents=torch.full_like(a.documents, 2.0)))[1] == 0).all()


def test_values_that_are_not_finite(kernels: Any) -> None:
    """Similarities of -inf alone, some of inf, some of NaN: maxima are those of torch.max, tokens the document's."""
    a = make((3,), (70, 70, 70, 5), 16)
    a.queries.fill_(1.0)
    a.documents[:70, 0] = -torch.inf
    a.documents[75, 0] = torch.inf
    a.documents[150, 0] = torch.nan
    scores, chosen = kernels.maxsim_fwd(a)
    expected = reference.maxsim_fwd(a)[0]
    assert torch.equal(scores[:, :2], expected[:, :2]) and scores[0, 0] == -torch.inf and scores[0, 1] == torch.inf
    assert scores[0, 2].isnan() and scores[0, 3].isfinite()
    starts, ends = a.cu_seqlens_d[:-1, None], a.cu_seqlens_d[1:, None]
    assert ((chosen >= starts) & (chosen < ends)).all() and (chosen[0] == 0).all() and (chosen[1] == 75).all()


def test_nothing_to_score(kernels: Any) -> None:
    for of_queries, of_documents in (((0, 0), (3,)), ((2,), (0, 0)), ((0,), (0,))):
        a = make(of_queries, of_documents, 8)
        actual, _ = run(kernels, a, torch.ones(len(of_queries), len(of_documents)))
        assert (actual["scores"] == (0.0 if sum(of_documents) else EMPTY)).all()
        assert not actual["dqueries"].any() and not actual["ddocuments"].any()
    nothing = torch.zeros(1, dtype=torch.int32)
    a = Maxsim(torch.zeros(0, 8), torch.zeros(0, 8), nothing, nothing, 0)
    assert run(kernels, a, torch.ones(0, 0))[0]["scores"].shape == (0, 0)


@pytest.mark.parametrize("wants", [{"queries"}, {"documents"}, set()], ids=lambda wants: "".join(wants) or "none")
def test_only_wanted_gradients_are_made(kernels: Any, wants: set[str]) -> None:
    a = make((7, 9), (30, 71), 24)
    dscores = torch.randn(2, 2)
    both, chosen = run(kernels, a, dscores)
    made = kernels.maxsim_bwd(a, dscores, chosen, wants)
    assert made.keys() == wants and all(torch.equal(t, both[f"d{name}"]) for name, t in made.items())


def test_what_is_written(kernels: Any) -> None:
    """Every element of what is made, once."""
    a = make((40, 30), (100, 64), 32, torch.float16)
    dscores = torch.randn(2, 2)
    with traffic() as found:
        actual, chosen = run(kernels, a, dscores)
    for t in (*actual.values(), chosen):
        assert found.times_stored(t) == {1}
