"""Losses of a cross-encoder's scores: equal to sentence-transformers', gradients, masks, what is refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_fast import losses

SIZES = [(1, 2), (2, 3), (7, 13), (33, 5)]


def cross_encoder(scores: Tensor) -> Any:
    """In the place of a CrossEncoder: the pair ("i", "j") has the score [i, j]."""
    library = pytest.importorskip("sentence_transformers.cross_encoder")

    class Given(library.CrossEncoder):  # type: ignore[misc, name-defined]
        num_labels, device = 1, torch.device("cpu")

        def __init__(self) -> None:
            nn.Module.__init__(self)

        def preprocess(self, pairs: list[tuple[str, str]], **_: Any) -> dict[str, Tensor]:
            return {"places": torch.tensor([[int(one) for one in pair] for pair in pairs])}

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"scores": scores[features["places"].unbind(1)][:, None]}

    return Given()


def theirs(name: str, scores: Tensor, inputs: Any, labels: Any, **options: Any) -> Tensor:
    library = pytest.importorskip("sentence_transformers.cross_encoder.losses")
    return getattr(library, name)(cross_encoder(scores), **options)(inputs, labels)


def columns(shape: tuple[int, int]) -> list[list[str]]:
    """Queries, first documents, second documents, ..."""
    names = [str(row) for row in range(shape[0])]
    return [names, *([str(column)] * shape[0] for column in range(shape[1]))]


def same(loss: Tensor, expected: Tensor, scores: Tensor) -> None:
    torch.testing.assert_close(loss, expected.to(loss))
    torch.testing.assert_close(*(torch.autograd.grad(one, scores)[0] for one in (loss, expected)))


def made(shape: tuple[int, int]) -> Tensor:
    return (3 * torch.randn(shape)).requires_grad_()


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_single_documents_are_those_of_sentence_transformers(shape: tuple[int, int]) -> None:
    scores, labels = made(shape), torch.rand(shape[0])
    queries, documents = columns(shape)[0], ["1"] * shape[0]
    for ours, name in ((losses.score_cross_entropy, "BinaryCrossEntropyLoss"), (losses.score_mse, "MSELoss")):
        same(ours(scores[:, 1], labels), theirs(name, scores, [queries, documents], labels), scores)


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_one_document_among_others_is_that_of_sentence_transformers(shape: tuple[int, int]) -> None:
    scores = made(shape)
    labels = torch.zeros(shape)
    labels[:, 0] = 1
    library = pytest.importorskip("sentence_transformers.cross_encoder.losses")
    ranking = library.MultipleNegativesRankingLoss(cross_encoder(scores), scale=1.0, activation_fn=None)
    same(losses.list_softmax(scores, labels), ranking.calculate_loss([*scores.T], shape[0]), scores)
    classes = library.CrossEntropyLoss(cross_encoder(scores)).ce_loss
    same(losses.list_softmax(scores, labels), classes(scores, torch.zeros(shape[0], dtype=torch.int64)), scores)


def test_a_query_by_itself_has_no_other_negatives() -> None:
    """The whole loss of sentence-transformers, which takes those of other queries in."""
    scores = made((1, 6))
    options = {"num_negatives": None, "scale": 1.0, "activation_fn": None}
    expected = theirs("MultipleNegativesRankingLoss", scores, columns((1, 6)), None, **options)
    same(losses.list_softmax(scores, torch.eye(6)[:1]), expected, scores)


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_lists_are_those_of_sentence_transformers(shape: tuple[int, int]) -> None:
    """Of different lengths, at least one document each."""
    scores, labels = made(shape), torch.randint(0, 5, shape).float()
    lengths = torch.randint(1, shape[1] + 1, shape[:1])
    mask = torch.arange(shape[1]) < lengths[:, None]
    documents = [[str(column) for column in range(length)] for length in lengths]
    expected = theirs(
        "ListNetLoss",
        scores,
        [columns(shape)[0], documents],
        [*(row[keep] for row, keep in zip(labels, mask, strict=True))],
    )
    same(losses.list_softmax(scores, labels, mask, targets="softmax"), expected, scores)


@pytest.mark.parametrize("are_margins", [False, True])
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_margins_are_those_of_sentence_transformers(shape: tuple[int, int], are_margins: bool) -> None:
    scores, labels = made(shape), torch.randn(shape)
    given = labels[:, :1] - labels[:, 1:] if are_margins else labels
    same(losses.list_margin_mse(scores, labels), theirs("MarginMSELoss", scores, columns(shape), given), scores)


@pytest.mark.parametrize("targets", ["share", "softmax"])
def test_what_a_mask_leaves_out_has_no_say(targets: Any) -> None:
    """Lists of three documents and two, in a matrix with anything behind them, against each list by itself."""
    scores, labels = made((2, 5)), torch.rand(2, 5)
    mask = torch.tensor([[True, True, True, False, False], [True, True, False, False, False]])
    alone = [(scores[:1, :3], labels[:1, :3]), (scores[1:, :2], labels[1:, :2])]
    expected = sum(losses.list_softmax(*one, targets=targets) for one in alone) / 2
    with torch.no_grad():
        scores[~mask], labels[~mask] = math.inf, math.nan
    same(losses.list_softmax(scores, labels, mask, targets=targets), expected, scores)
    margins = (2 * losses.list_margin_mse(*alone[0]) + losses.list_margin_mse(*alone[1])) / 3
    with torch.no_grad():
        scores[~mask], labels[~mask] = 1e6, -1e6
    same(losses.list_margin_mse(scores, labels, mask), margins, scores)


def test_shares_by_hand() -> None:
    scores, labels = torch.tensor([[1.0, 2.0, 0.5]]), torch.tensor([[1.0, 0.0, 3.0]])
    shares = [math.exp(one) / sum(math.exp(other) for other in (1, 2, 0.5)) for one in (1, 2, 0.5)]
    expected = -(0.25 * math.log(shares[0]) + 0.75 * math.log(shares[2]))
    assert losses.list_softmax(scores, labels).item() == pytest.approx(expected)


LABELS = torch.rand(4, 3, dtype=torch.float64)
CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy": lambda s: losses.score_cross_entropy(s[:, 0], LABELS[:, 0]),
    "mse": lambda s: losses.score_mse(s[:, 0], LABELS[:, 0]),
    "share": lambda s: losses.list_softmax(s, LABELS),
    "softmax": lambda s: losses.list_softmax(s, LABELS, targets="softmax"),
    "margins": lambda s: losses.list_margin_mse(s, LABELS),
}


@pytest.mark.parametrize("name", CASES)
def test_formulas_are_differentiated_right(name: str) -> None:
    scores = torch.randn(4, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(CASES[name], [scores])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_half_precision_is_as_good_as_what_it_was_given(name: str, dtype: torch.dtype) -> None:
    scores = torch.randn(4, 3).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = CASES[name](scores)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, CASES[name](scores.double()).float())


S = torch.ones(2, 3)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "shape": (lambda: losses.score_cross_entropy(S, S), ValueError, "scores: expected shape"),
    "none": (lambda: losses.score_mse(S[0, :0], S[0, :0]), ValueError, "scores: expected at least one, got none"),
    "labels": (lambda: losses.score_mse(S[0], S[1, :2]), ValueError, "labels: expected shape"),
    "flags": (lambda: losses.list_softmax(S, S > 0), TypeError, "labels: expected numbers, got bool"),
    "integers": (lambda: losses.list_softmax(S.long(), S), TypeError, "scores: expected"),
    "mask": (lambda: losses.list_softmax(S, S, S), TypeError, "mask: expected"),
    "mask shape": (lambda: losses.list_margin_mse(S, S, S[:1] > 0), ValueError, "mask: expected shape"),
    "targets": (lambda: losses.list_softmax(S, S, targets="other"), ValueError, "targets: expected one of"),  # type: ignore[arg-type]
    "one": (lambda: losses.list_margin_mse(S[:, :1], S[:, :1]), ValueError, "scores: expected at least two"),
    "empty": (lambda: losses.list_softmax(S[:0], S[:0]), ValueError, "scores: expected at least one list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
