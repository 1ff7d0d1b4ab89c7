"""Scores of late interaction: those of sentence-transformers, alone and in a step of a fused MultiVectorEncoder."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast import fuse, losses, why_not
from bert_fast.testing.tolerances import ABSOLUTE
from tests.huggingface.sentence_folders import TEXTS, make_checkpoint

library = pytest.importorskip("sentence_transformers", reason="the package sentence-transformers is not installed")
scoring = pytest.importorskip("sentence_transformers.multi_vector_encoder.scoring")
their_losses = pytest.importorskip("sentence_transformers.multi_vector_encoder.losses")

QUERIES, DOCUMENTS = (4, 9, 16), (4, 3, 11, 16)
ATOL = ABSOLUTE["sentence_embeddings"]


def unit(*shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(shape), dim=-1)


def results(function: Any, queries: Tensor, documents: Tensor, upstream: Tensor, **masks: Any) -> tuple[Tensor, ...]:
    leaves = queries.clone().requires_grad_(), documents.clone().requires_grad_()
    scores = function(*leaves, **masks)
    return scores.detach(), *torch.autograd.grad(scores, leaves, upstream)


@pytest.mark.parametrize("kind", ["none", "zero rows", "holes", "numbers", "without tokens"])
@pytest.mark.parametrize("name", ["colbert_scores", "mean_colbert_scores"])
def test_values_and_gradients_are_theirs(name: str, kind: str) -> None:
    queries, documents = unit(*QUERIES), unit(*DOCUMENTS)
    keep_q, keep_d = torch.rand(QUERIES[:2]) > 0.3, torch.rand(DOCUMENTS[:3]) > 0.4
    masks: dict[str, Any] = {"queries_mask": keep_q, "documents_mask": keep_d}
    if kind == "without tokens":
        keep_q[2], keep_d[1, 2] = False, False
    elif kind == "numbers":
        masks = {key: mask.long() for key, mask in masks.items()}
    elif kind != "holes":
        masks = {}
    if kind == "zero rows":
        queries[~keep_q], documents[~keep_d] = 0.0, 0.0
    upstream = torch.randn(4, 12)
    found, wanted = (results(getattr(m, name), queries, documents, upstream, **masks) for m in (losses, scoring))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=ABSOLUTE["late_interaction"])


def test_what_a_mask_leaves_out_may_hold_anything() -> None:
    queries, documents, keep = unit(*QUERIES), unit(*DOCUMENTS), torch.rand(DOCUMENTS[:3]) > 0.4
    expected = losses.colbert_scores(queries, documents, documents_mask=keep)
    documents[~keep] = torch.nan
    assert torch.equal(losses.colbert_scores(queries, documents, documents_mask=keep), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries_embeddings": torch.ones(3, 16)}, "queries_embeddings"),
        ({"documents_embeddings": torch.ones(4, 11, 16)}, "documents_embeddings"),
        ({"documents_embeddings": torch.ones(4, 3, 11, 8)}, "documents_embeddings"),
        ({"queries_mask": torch.ones(4, 8)}, "queries_mask"),
        ({"documents_mask": torch.ones(4, 11)}, "documents_mask"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_messages_name_the_argument(changes: dict[str, Tensor], message: str) -> None:
    given = {"queries_embeddings": unit(*QUERIES), "documents_embeddings": unit(*DOCUMENTS), **changes}
    with pytest.raises(ValueError, match=message):
        losses.colbert_scores(**given)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small BERT with a projection, as sentence-transformers makes a ColBERT of one, untouched."""
    folder: Path = tmp_path_factory.mktemp("colbert")
    make_checkpoint("Bert", folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return library.MultiVectorEncoder(str(folder), device="cpu")


@pytest.mark.parametrize("task", ["query", "document"])
def test_a_fused_model_encodes_the_same(model: Any, task: str) -> None:
    fused = fuse(copy.deepcopy(model))
    assert why_not(fused) == []
    found, wanted = (getattr(one, f"encode_{task}")(TEXTS) for one in (fused, model))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=ATOL)


def test_a_step_of_a_fused_model_is_theirs(model: Any) -> None:
    """Their loss around our scores and a fused encoder, beside theirs around their own."""
    steps = []
    for one, scores in ((fuse(copy.deepcopy(model)), losses.colbert_scores), (model, scoring.colbert_scores)):
        one.train().zero_grad()
        loss = their_losses.MultiVectorMultipleNegativesRankingLoss(one, similarity_fct=scores)
        columns = [one.preprocess(texts, task=task) for texts, task in ((TEXTS, "query"), (TEXTS[::-1], "document"))]
        value = loss([dict(column) for column in columns])
        value.backward()
        gradients = {name: t.grad for name, t in one.named_parameters() if t.grad is not None}
        steps.append({"loss": value.detach(), **gradients})
    found, wanted = steps
    assert found.keys() == wanted.keys() and len(found) > 15
    for name, value in wanted.items():
        atol = 20 * ATOL * max(1.0, value.abs().max().item())
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=lambda text, name=name: name + text)
