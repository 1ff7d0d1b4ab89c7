"""A fused SentenceTransformer trains as an untouched one: losses of sentence-transformers, and its Trainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bert_fast import fuse
from bert_fast.testing.tolerances import ABSOLUTE

library = pytest.importorskip("sentence_transformers")
datasets = pytest.importorskip("datasets")
losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")

QUERIES = ["who wrote it", "where is the house", "what colour", "how long is the longest road of them all", "when"]
ANSWERS = ["a poet did", "on the hill behind the old mill, near the river", "red", "a mile", "in the last year"]


def _model(folder: Path) -> Any:
    """MiniLM's first layer without dropout, whose masks are drawn in another way when fused."""
    model = library.SentenceTransformer(
        str(folder), device="cpu", config_kwargs={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    )
    del model[0].model.encoder.layer[1:]
    model[0].model.config.num_hidden_layers = 1
    return model.train()


@pytest.fixture
def both(minilm_dir: Path) -> tuple[Any, Any]:
    """Untouched, fused."""
    return _model(minilm_dir), fuse(_model(minilm_dir))


LOSSES: dict[str, Callable[[Any], nn.Module]] = {
    "in_batch": losses.MultipleNegativesRankingLoss,
    "cached": lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2),
    "matryoshka": lambda model: losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [384, 64]),
    "cosine": losses.CosineSimilarityLoss,
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients(both: tuple[Any, Any], name: str) -> None:
    labels = torch.rand(len(QUERIES))
    values = []
    for model in both:
        features = [dict(model.preprocess(texts)) for texts in (QUERIES, ANSWERS)]
        loss = LOSSES[name](model)(features, labels)
        loss.backward()
        values.append(loss.detach())
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=10 * ABSOLUTE["sentence_embeddings"])
    theirs = dict(both[0].named_parameters())
    for key, parameter in both[1].named_parameters():
        wanted = theirs[key].grad
        assert (parameter.grad is None) == (wanted is None), key
        if wanted is not None:
            atol = 20 * ABSOLUTE["sentence_embeddings"] * max(1.0, wanted.abs().max().item())
            torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=atol, msg=lambda text, key=key: key + text)


@pytest.mark.slow
def test_trainer(both: tuple[Any, Any], tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"anchor": QUERIES * 4, "positive": ANSWERS * 4})
    histories, vectors = [], []
    for name, model in zip(("untouched", "fused"), both, strict=True):
        arguments = library.SentenceTransformerTrainingArguments(
            str(tmp_path / name), num_train_epochs=2, per_device_train_batch_size=5, logging_steps=1, report_to="none",
            save_strategy="epoch", learning_rate=1e-4, seed=1, use_cpu=True, disable_tqdm=True, eval_strategy="epoch",
        )  # fmt: skip
        loss = losses.MultipleNegativesRankingLoss(model)
        trainer = library.SentenceTransformerTrainer(model, arguments, train_dataset=rows, eval_dataset=rows, loss=loss)
        trainer.train()
        histories.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        vectors.append(model.encode(QUERIES, convert_to_tensor=True))
        checkpoint = library.SentenceTransformer(str(tmp_path / name / "checkpoint-8"), device="cpu")
        close = 20 * ABSOLUTE["sentence_embeddings"]
        torch.testing.assert_close(checkpoint.encode(QUERIES, convert_to_tensor=True), vectors[-1], rtol=0, atol=close)
    assert len(histories[0]) == 8 and histories[0][-1] < 0.8 * histories[0][0]
    atol = ABSOLUTE["short_run"]
    torch.testing.assert_close(torch.tensor(histories[1]), torch.tensor(histories[0]), rtol=0, atol=atol)
    torch.testing.assert_close(vectors[1], vectors[0], rtol=0, atol=atol)
