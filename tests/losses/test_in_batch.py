"""Losses of embeddings: beside the formula in fp64, sentence-transformers, one process, backward of the whole batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from bert_fast import losses
from bert_fast.testing.compare import assert_close_to_truth
from tests.two_processes import WORLD_SIZE, run_two_processes

Grads = list[Tensor]


def draw(num_queries: int, num_documents: int, dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Queries and documents of which each query's own is the nearest more often than not."""
    queries = torch.randn(num_queries, dim, dtype=torch.float64)
    documents = torch.randn(num_documents, dim, dtype=torch.float64)
    documents[:num_queries] += 0.5 * queries
    return queries.to(dtype), documents.to(dtype)


def with_gradients(loss: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, Grads]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    value = loss(*leaves)
    value.backward()
    return value.detach(), [leaf.grad for leaf in leaves]


def formula(
    queries: Tensor,
    documents: Tensor,
    scale: Tensor,
    similarity: str = "cosine",
    symmetric: bool = False,
    groups: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Of the whole matrix of scores, in the dtype given."""
    if similarity == "cosine":
        queries, documents = F.normalize(queries, dim=1), F.normalize(documents, dim=1)
    scores = scale * (queries @ documents.T)
    own = torch.eye(*scores.shape, dtype=torch.bool)
    if groups is not None:
        scores = scores.masked_fill((groups[0][:, None] == groups[1]) & ~own, -torch.inf)
    positive = scores[own]
    loss = (scores.logsumexp(1) - positive).mean()
    if symmetric:
        loss = (loss + (scores[:, : len(queries)].logsumexp(0) - positive).mean()) / 2
    return loss


@pytest.mark.parametrize("symmetric", [False, True], ids=["one way", "symmetric"])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize(("num_queries", "num_documents"), [(1, 1), (5, 5), (7, 23), (130, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_formula(
    num_queries: int, num_documents: int, similarity: str, symmetric: bool, dtype: torch.dtype
) -> None:
    queries, documents = draw(num_queries, num_documents, 33, dtype)
    scale = torch.tensor(3.0)
    options: dict[str, Any] = {"similarity": similarity, "symmetric": symmetric}
    mine, grads = with_gradients(
        lambda q, d, s: losses.in_batch_negatives(q, d, scale=s, **options), queries, documents, scale
    )
    plain, plain_grads = with_gradients(
        lambda q, d, s: formula(q, d, s, **options), queries.float(), documents.float(), scale
    )
    truth, true_grads = with_gradients(
        lambda q, d, s: formula(q, d, s, **options), queries.double(), documents.double(), scale.double()
    )
    assert mine.dtype is torch.float32 and [g.dtype for g in grads] == [dtype, dtype, torch.float32]
    assert_close_to_truth("linear_cross_entropy", "loss", mine, plain, truth)
    for name, got, other, exact in zip(("dx", "dweight", "dscale"), grads, plain_grads, true_grads, strict=True):
        kind = "dweight" if name == "dscale" else name
        assert_close_to_truth("linear_cross_entropy", kind, got, other.to(got.dtype), exact, name=name)


@pytest.mark.parametrize("symmetric", [False, True], ids=["one way", "symmetric"])
def test_groups_are_no_negatives_of_each_other(symmetric: bool) -> None:
    queries, documents = draw(9, 14, 16)
    of_queries = torch.tensor([0, 1, 0, 2, 3, 3, 3, 4, 5])
    of_documents = torch.cat((of_queries, torch.tensor([0, 4, 6, 6, 3])))
    mine, grads = with_gradients(
        lambda q, d: losses.in_batch_negatives(
            q, d, query_groups=of_queries, document_groups=of_documents, symmetric=symmetric
        ),
        queries,
        documents,
    )
    groups, scale = (of_queries, of_documents), torch.tensor(20.0)
    plain, plain_grads = with_gradients(
        lambda q, d: formula(q, d, scale, symmetric=symmetric, groups=groups), queries, documents
    )
    truth, true_grads = with_gradients(
        lambda q, d: formula(q, d, scale.double(), symmetric=symmetric, groups=groups),
        queries.double(), documents.double(),
    )  # fmt: skip
    assert_close_to_truth("linear_cross_entropy", "loss", mine, plain, truth)
    for name, got, other, exact in zip(("dx", "dweight"), grads, plain_grads, true_grads, strict=True):
        assert_close_to_truth("linear_cross_entropy", name, got, other, exact)
    without = losses.in_batch_negatives(queries, documents, symmetric=symmetric)
    assert not torch.equal(mine, without)


@pytest.mark.parametrize("negatives", [0, 1, 3])
@pytest.mark.parametrize("symmetric", [False, True], ids=["one way", "symmetric"])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_it_is_that_of_sentence_transformers(negatives: int, symmetric: bool, similarity: str) -> None:
    package = pytest.importorskip("sentence_transformers", reason="the package sentence-transformers is not installed")
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    scale = 20.0 if similarity == "cosine" else 0.5
    theirs = MultipleNegativesRankingLoss(
        torch.nn.Identity(), scale, package.util.cos_sim if similarity == "cosine" else package.util.dot_score,
        directions=("query_to_doc", "doc_to_query") if symmetric else ("query_to_doc",), partition_mode="per_direction",
    )  # fmt: skip
    queries, documents = draw(12, 12 * (1 + negatives), 32)
    mine, grads = with_gradients(
        lambda q, d: losses.in_batch_negatives(q, d, scale=scale, similarity=similarity, symmetric=symmetric),
        queries, documents,
    )  # fmt: skip
    plain, plain_grads = with_gradients(
        lambda q, d: theirs.compute_loss_from_embeddings([q, *d.split(len(q))], None), queries, documents
    )
    truth, true_grads = with_gradients(
        lambda q, d: theirs.compute_loss_from_embeddings([q, *d.split(len(q))], None),
        queries.double(), documents.double(),
    )  # fmt: skip
    assert_close_to_truth("linear_cross_entropy", "loss", mine, plain, truth)
    for name, got, other, exact in zip(("dx", "dweight"), grads, plain_grads, true_grads, strict=True):
        assert_close_to_truth("linear_cross_entropy", name, got, other, exact)


def test_under_autocast_scores_stay_fp32() -> None:
    queries, documents = draw(16, 16, 64)
    alone = with_gradients(losses.in_batch_negatives, queries, documents)
    with torch.autocast("cpu", torch.bfloat16):
        inside = with_gradients(losses.in_batch_negatives, queries, documents)
    assert torch.equal(alone[0], inside[0]) and all(map(torch.equal, alone[1], inside[1]))


class LargestTensor(TorchDispatchMode):
    """The elements of the largest tensor that an operator gave."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for t in made if isinstance(made, tuple | list) else (made,):
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return made


@pytest.mark.parametrize("symmetric", [False, True], ids=["one way", "symmetric"])
def test_the_matrix_of_scores_never_exists(symmetric: bool) -> None:
    """What is largest are blocks of a fixed size, whatever the batch: here 16 and 64 million scores."""
    for count in (4096, 8192):
        queries, documents = (torch.randn(count, 16, requires_grad=True) for _ in range(2))
        with LargestTensor() as found:
            losses.in_batch_negatives(queries, documents, symmetric=symmetric).backward()
        assert 4 * found.elements <= 2**25


# Processes


def of_process(rank: int, symmetric: bool, is_gathered: bool) -> dict[str, Tensor]:
    """Loss and gradients of half of the batch, DDP's way: of the mean over processes."""
    torch.manual_seed(5)
    queries, documents = draw(8, 24, 16)
    halves = [queries.chunk(WORLD_SIZE)[rank], torch.cat([part.chunk(WORLD_SIZE)[rank] for part in documents.split(8)])]
    groups = torch.arange(8).remainder(5)
    of_queries = groups.chunk(WORLD_SIZE)[rank]
    of_documents = torch.cat((of_queries, 10 + torch.arange(8) + 8 * rank))
    loss, grads = with_gradients(
        lambda q, d: losses.in_batch_negatives(
            q, d, symmetric=symmetric, gather=is_gathered, query_groups=of_queries, document_groups=of_documents
        ),
        *halves,
    )
    return {"loss": loss, "queries": grads[0] / WORLD_SIZE, "documents": grads[1] / WORLD_SIZE}


def gathered(rank: int) -> dict[str, Tensor]:
    return of_process(rank, False, True)


def gathered_both_ways(rank: int) -> dict[str, Tensor]:
    return of_process(rank, True, True)


@pytest.mark.parametrize("work", [gathered, gathered_both_ways])
def test_two_processes_that_gather_are_one(work: Callable[[int], Any], tmp_path: Path) -> None:
    found = run_two_processes(work, tmp_path)
    torch.manual_seed(5)
    queries, documents = draw(8, 24, 16)
    groups = torch.arange(8).remainder(5)
    symmetric = work is gathered_both_ways
    of_documents = torch.cat((groups, 10 + torch.arange(16)))
    loss, grads = with_gradients(
        lambda q, d: losses.in_batch_negatives(
            q, d, symmetric=symmetric, query_groups=groups, document_groups=of_documents
        ),
        queries, documents,
    )  # fmt: skip
    torch.testing.assert_close(sum(one["loss"] for one in found) / WORLD_SIZE, loss)
    torch.testing.assert_close(torch.cat([one["queries"] for one in found]), grads[0])
    places = torch.cat(
        [torch.cat([part.chunk(WORLD_SIZE)[rank] for part in torch.arange(24).split(8)]) for rank in (0, 1)]
    )
    torch.testing.assert_close(torch.cat([one["documents"] for one in found]), grads[1][places])


# Bad input


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"queries": torch.zeros(0, 8)}, "queries: expected at least one row, got none"),
        ({"documents": torch.zeros(3, 8)}, "documents: expected at least 4 rows, one for each query, got 3"),
        ({"documents": torch.zeros(4, 7)}, r"documents: expected shape \[N, 8\], got \[4, 7\]"),
        ({"documents": torch.zeros(4, 8).double()}, "documents: expected dtype float32, got float64"),
        ({"queries": torch.zeros(4, 8).long()}, "queries: "),
        ({"similarity": "euclid"}, "similarity: expected one of cosine, dot, got 'euclid'"),
        (
            {"query_groups": torch.zeros(4).long()},
            "document_groups: expected a tensor beside the other groups, got None",
        ),
        (
            {"query_groups": torch.zeros(4).long(), "document_groups": torch.zeros(3).long()},
            r"document_groups: expected shape \[4\], got \[3\]",
        ),
        ({"query_groups": torch.zeros(4), "document_groups": torch.zeros(4)}, "query_groups: expected dtype"),
    ],
)
def test_bad_input(changes: dict[str, Any], said: str) -> None:
    inputs = {"queries": torch.ones(4, 8), "documents": torch.ones(4, 8)} | changes
    with pytest.raises((TypeError, ValueError), match=said):
        losses.in_batch_negatives(**inputs)
