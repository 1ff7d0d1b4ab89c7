"""Losses of pairs and triplets, and Matryoshka: equal to sentence-transformers', gradients, what is refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_fast import losses

SIZES = [(1, 5), (2, 3), (7, 13), (33, 48)]


class Given(nn.Module):
    """In the place of a SentenceTransformer: its texts are their embeddings."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["e"]}

    def get_embedding_dimension(self) -> int:
        return 12


def same_gradients(loss: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    for one, other in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(one, other)


def theirs(name: str, embeddings: list[Tensor], labels: Tensor, **options: Any) -> Tensor:
    library = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    for key in ("distance_metric",):
        if key in options:
            options[key] = getattr(library.TripletDistanceMetric, options[key])
    return getattr(library, name)(Given(), **options)([{"e": one} for one in embeddings], labels)


def make(count: int, shape: tuple[int, int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype).requires_grad_() for _ in range(count)]


def ties(size: int) -> Tensor:
    return torch.randint(0, 4, (size,)).double() / 3


Loss = Callable[..., Tensor]
# Ours, how many embeddings, labels of B rows, theirs with its options.
CASES: dict[str, tuple[Loss, int, Callable[[int], Tensor], str, dict[str, Any]]] = {
    "cosine_mse": (losses.cosine_mse, 2, ties, "CosineSimilarityLoss", {}),
    "cosent": (losses.cosent, 2, ties, "CoSENTLoss", {}),
    "cosent, scale": (lambda *a: losses.cosent(*a, scale=3.5), 2, ties, "CoSENTLoss", {"scale": 3.5}),
    "contrastive": (losses.contrastive, 2, lambda n: torch.randint(0, 2, (n,)), "ContrastiveLoss", {}),
    "contrastive, margin": (
        lambda *a: losses.contrastive(*a, margin=1.2), 2, lambda n: torch.randint(0, 2, (n,)), "ContrastiveLoss",
        {"margin": 1.2},
    ),
    "margin_mse": (losses.margin_mse, 3, lambda n: torch.randn(n).double(), "MarginMSELoss", {}),
    **{
        f"triplet, {name}": (
            lambda a, b, c, _, name=name, margin=margin: losses.triplet(a, b, c, distance=name, margin=margin),
            3, lambda n: torch.zeros(n), "TripletLoss",
            {"distance_metric": name.upper(), "triplet_margin": margin},
        )
        for name, margin in (("euclidean", 5.0), ("manhattan", 2.0), ("cosine", 0.5))
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_sentence_transformers(name: str, shape: tuple[int, int]) -> None:
    ours, count, labels_of, their_name, options = CASES[name]
    embeddings, labels = make(count, shape), labels_of(shape[0])
    loss, expected = ours(*embeddings, labels), theirs(their_name, embeddings, labels, **options)
    torch.testing.assert_close(loss, expected.to(loss))
    for one, other in zip(
        torch.autograd.grad(loss, embeddings), torch.autograd.grad(expected, embeddings), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", CASES)
def test_formulas_are_differentiated_right(name: str) -> None:
    ours, count, labels_of, _, _ = CASES[name]
    labels = labels_of(5)
    assert torch.autograd.gradcheck(lambda *e: ours(*e, labels), make(count, (5, 4)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_half_precision_is_as_good_as_what_it_was_given(name: str, dtype: torch.dtype) -> None:
    """In fp32 inside, under autocast too."""
    ours, count, labels_of, _, _ = CASES[name]
    embeddings, labels = [t.detach().to(dtype) for t in make(count, (9, 16))], labels_of(9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ours(*embeddings, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, ours(*(t.double() for t in embeddings), labels).float())


def test_cosent_of_many_pairs_needs_no_square() -> None:
    """A hundred thousand pairs: the matrix of all comparisons would be 80 GB."""
    first, second = make(2, (100_000, 4), torch.float32)
    scores = torch.rand(100_000)
    losses.cosent(first, second, scores).backward()
    assert first.grad is not None and first.grad.isfinite().all() and first.grad.abs().sum() > 0


def test_cosent_by_hand() -> None:
    first = torch.eye(2, dtype=torch.float64).repeat(2, 1)
    second = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8], [0.6, 0.8]], dtype=torch.float64)  # cosines 1, 0, .6, .8
    scores = torch.tensor([2.0, 0.0, 1.0, 1.0])
    compared = [(1, 0), (1, 2), (1, 3), (2, 0), (3, 0)]  # the lower score first; equal ones are not
    cosines = [1.0, 0.0, 0.6, 0.8]
    expected = math.log(1 + sum(math.exp(2 * (cosines[i] - cosines[j])) for i, j in compared))
    assert losses.cosent(first, second, scores, scale=2.0).item() == pytest.approx(expected)
    assert losses.cosent(first, second, torch.ones(4)).item() == 0


@pytest.mark.parametrize("weights", [None, [1.0, 0.5, 0.0]])
def test_matryoshka_is_that_of_sentence_transformers(weights: list[float] | None) -> None:
    library = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    queries, documents = make(2, (6, 12))
    loss = losses.matryoshka(losses.in_batch_negatives, queries, documents, dims=[12, 5, 2], weights=weights)
    inner = library.MultipleNegativesRankingLoss(model := Given())
    outer = library.MatryoshkaLoss(model, inner, matryoshka_dims=[12, 5, 2], matryoshka_weights=weights or [1, 1, 1])
    expected = outer([{"e": queries}, {"e": documents}], torch.zeros(6))
    torch.testing.assert_close(loss, expected)
    same_gradients(loss, expected, [queries, documents])


@pytest.mark.parametrize("distance", ["euclidean", "manhattan", "cosine"])
def test_a_triplet_of_one_text_has_gradients(distance: Any) -> None:
    (anchors,) = make(1, (3, 4))
    losses.triplet(
        anchors, anchors.detach().clone(), anchors.detach().clone(), margin=1.0, distance=distance
    ).backward()
    assert anchors.grad is not None and anchors.grad.isfinite().all()


E = torch.ones(3, 4)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "shape": (lambda: losses.cosine_mse(E, E[:2], E[:, 0]), ValueError, "second: expected shape"),
    "dtype": (lambda: losses.cosent(E, E.double(), E[:, 0]), TypeError, "second: expected"),
    "integers": (lambda: losses.triplet(E.long(), E, E), TypeError, "anchors: expected"),
    "empty": (lambda: losses.contrastive(E[:0], E[:0], E[:0, 0]), ValueError, "first: expected at least one row"),
    "no tensor": (lambda: losses.cosent([1.0], E, E[:, 0]), TypeError, "first: expected"),  # type: ignore[arg-type]
    "scores": (lambda: losses.margin_mse(E, E, E, E), ValueError, "margins: expected shape"),
    "flags": (lambda: losses.cosine_mse(E, E, E[:, 0] > 0), TypeError, "scores: expected numbers, got bool"),
    "margin": (lambda: losses.triplet(E, E, E, margin=-1.0), ValueError, "margin: expected a finite number above 0"),
    "cosines": (lambda: losses.triplet(E, E, E, distance="cosine"), ValueError, "margin: expected at most 2"),
    "distance": (lambda: losses.triplet(E, E, E, distance="l3"), ValueError, "distance: expected one of"),  # type: ignore[arg-type]
    "scale": (lambda: losses.cosent(E, E, E[:, 0], scale=math.inf), ValueError, "scale: expected"),
    "dims": (lambda: losses.matryoshka(losses.triplet, E, E, E, dims=[5]), ValueError, "dims: expected different"),
    "twice": (lambda: losses.matryoshka(losses.triplet, E, E, E, dims=[2, 2]), ValueError, "dims: expected different"),
    "none": (lambda: losses.matryoshka(losses.triplet, E, E, E, dims=[]), ValueError, "dims: expected different"),
    "weights": (
        lambda: losses.matryoshka(losses.triplet, E, E, E, dims=[2], weights=[1, 2]), ValueError, "weights: expected 1"
    ),
    "words": (lambda: losses.matryoshka(losses.triplet, E, dims="ab"), TypeError, "dims: expected a list"),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
