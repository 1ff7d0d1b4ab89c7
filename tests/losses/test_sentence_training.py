"""In-batch negatives of a SentenceTransformer: as its own losses, alone and in its Trainer."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bert_fast import fuse, losses
from bert_fast.testing.tolerances import ABSOLUTE

library = pytest.importorskip("sentence_transformers", reason="the package sentence-transformers is not installed")
theirs = pytest.importorskip("sentence_transformers.sentence_transformer.losses")

QUERIES = ["who wrote it", "where is the house", "what colour", "how long is the longest road of them all", "when"]
ANSWERS = ["a poet did", "on the hill behind the old mill, near the river", "red", "a mile", "in the last year"]
WRONG = ["a painter", "it is a house", "the sky is high", "twelve", "a year has twelve months"]
COLUMNS = (QUERIES, ANSWERS, WRONG)


@cache
def _loaded(folder: Path, dropout: float) -> Any:
    """MiniLM's first layer."""
    model = library.SentenceTransformer(
        str(folder), device="cpu",
        config_kwargs={"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout},
    )  # fmt: skip
    del model[0].model.encoder.layer[1:]
    model[0].model.config.num_hidden_layers = 1
    return model


def _model(folder: Path, dropout: float = 0.0) -> Any:
    return fuse(copy.deepcopy(_loaded(folder, dropout)).train())


def _step(model: Any, loss: Any, columns: Any = COLUMNS) -> dict[str, Tensor]:
    """The loss, and gradients by name."""
    model.zero_grad()
    torch.manual_seed(3)
    value = loss([dict(model.preprocess(texts)) for texts in columns], None)
    value.backward()
    return {"loss": value.detach()} | {
        name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
    }


def _tensors(column: dict[str, Any], function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The features of a column, with a function of each tensor."""
    return {name: function(one) if isinstance(one, Tensor) else one for name, one in column.items()}


@pytest.mark.parametrize("columns", [COLUMNS, COLUMNS[:2]], ids=["triplets", "pairs"])
@pytest.mark.parametrize(
    "parts", [{}, {"mini_batch_size": 2}, {"mini_batch_num_tokens": 40}], ids=["whole", "rows", "tokens"]
)
@pytest.mark.parametrize("symmetric", [False, True])
def test_values_and_gradients_are_theirs(
    minilm_dir: Path, columns: Any, parts: dict[str, int], symmetric: bool
) -> None:
    model = _model(minilm_dir)
    directions = ("query_to_doc", "doc_to_query") if symmetric else ("query_to_doc",)
    wanted = _step(
        model,
        theirs.MultipleNegativesRankingLoss(model, directions=directions, partition_mode="per_direction"),
        columns,
    )
    ours = losses.InBatchNegatives(model, symmetric=symmetric, **parts)
    found = _step(model, ours, columns)
    assert found.keys() == wanted.keys() and len(found) > 15
    for name, value in wanted.items():
        atol = 20 * ABSOLUTE["sentence_embeddings"] * max(1.0, value.abs().max().item())
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=lambda text, name=name: name + text)


def test_mini_batches_hold_as_many_tokens_as_theirs(minilm_dir: Path) -> None:
    gradcache = pytest.importorskip("sentence_transformers.base.losses.gradcache")
    model = _model(minilm_dir)
    columns = [dict(model.preprocess(texts)) for texts in COLUMNS]
    of_all = {
        "input_ids": columns[0]["input_ids"],
        "attention_mask": torch.cat([c["attention_mask"] for c in columns], 1),
    }
    sizes = set()
    for budget in range(1, int(of_all["attention_mask"].sum()) + 1):
        loss = losses.InBatchNegatives(model, mini_batch_num_tokens=budget)
        found = [(rows.start, rows.stop) for rows in loss._mini_batches(columns, len(QUERIES))]
        assert found == gradcache._minibatch_ranges(of_all, 1, budget)
        sizes.add(len(found))
    assert sizes == set(range(1, len(QUERIES) + 1))


def test_parts_have_the_same_dropout_the_second_time(minilm_dir: Path) -> None:
    """As `cached_loss` of the same parts and the whole graph of all parts."""
    model = _model(minilm_dir, dropout=0.3)
    loss = losses.InBatchNegatives(model, mini_batch_size=2)
    found = _step(model, loss)
    features = [dict(model.preprocess(texts)) for texts in COLUMNS]
    model.zero_grad()
    torch.manual_seed(3)
    parts = [[_tensors(column, lambda one, i=i: one[i : i + 2]) for column in features] for i in (0, 2, 4)]
    value = loss._loss(torch.cat([loss._encode(part) for part in parts]))
    value.backward()
    assert torch.equal(found["loss"], value.detach())
    for name, one in model.named_parameters():
        if one.grad is not None:
            close = ABSOLUTE["sentence_embeddings"] * max(1.0, one.grad.abs().max().item())
            torch.testing.assert_close(found[name], one.grad, rtol=0, atol=close)
    torch.manual_seed(4)
    assert loss([dict(one) for one in features], None) != found["loss"], "another dropout"


@pytest.mark.slow
def test_trainer(minilm_dir: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    names = ("anchor", "positive", "negative")
    rows = datasets.Dataset.from_dict({name: texts * 4 for name, texts in zip(names, COLUMNS, strict=True)})
    histories = {}
    for name, make in (
        ("theirs", lambda model: theirs.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)),
        ("ours", lambda model: losses.InBatchNegatives(model, mini_batch_size=2)),
    ):
        model = _model(minilm_dir)
        arguments = library.SentenceTransformerTrainingArguments(
            str(tmp_path / name), num_train_epochs=2, per_device_train_batch_size=5, logging_steps=1, report_to="none",
            save_strategy="no", learning_rate=1e-4, seed=1, use_cpu=True, disable_tqdm=True, eval_strategy="epoch",
        )  # fmt: skip
        trainer = library.SentenceTransformerTrainer(
            model, arguments, train_dataset=rows, eval_dataset=rows, loss=make(model)
        )
        trainer.train()
        model.save_pretrained(str(tmp_path / name / "model"))
        histories[name] = [
            entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry
        ]
    assert len(histories["ours"]) == 10 and histories["ours"][-1] < 0.9 * histories["ours"][0]
    torch.testing.assert_close(
        torch.tensor(histories["ours"]), torch.tensor(histories["theirs"]), rtol=0, atol=ABSOLUTE["short_run"]
    )
    card = (tmp_path / "ours" / "model" / "README.md").read_text(encoding="utf-8")
    assert '"mini_batch_size": 2' in card and "InBatchNegatives" in card


def test_bad_arguments(minilm_dir: Path) -> None:
    model = _model(minilm_dir)
    with pytest.raises(ValueError, match="mini_batch_size: expected at least 1 or None, got 0"):
        losses.InBatchNegatives(model, mini_batch_size=0)
    with pytest.raises(ValueError, match="mini_batch_num_tokens: expected at least 1 or None, got 0"):
        losses.InBatchNegatives(model, mini_batch_num_tokens=0)
    with pytest.raises(ValueError, match="mini_batch_num_tokens: expected None beside mini_batch_size, got both"):
        losses.InBatchNegatives(model, mini_batch_size=2, mini_batch_num_tokens=100)
    loss = losses.InBatchNegatives(model, mini_batch_size=2)
    features = [dict(model.preprocess(texts)) for texts in COLUMNS]
    without_mask = [{name: one for name, one in column.items() if name != "attention_mask"} for column in features]
    with pytest.raises(ValueError, match="expected an attention_mask with mini_batch_num_tokens, got none"):
        losses.InBatchNegatives(model, mini_batch_num_tokens=100)(without_mask)
    with pytest.raises(ValueError, match="expected queries and documents, got 1 columns"):
        loss(features[:1])
    flat = [_tensors(column, lambda one: one.flatten()[None]) for column in features]
    flat[0] = features[0]
    with pytest.raises(ValueError, match=r"expected \w+ of 5 rows with mini-batches, got \[1, \d+\]: texts that are"):
        loss(flat)
