"""The pre-training task: parts of the loss, metrics by their definitions, guesses in a file."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bert_fast import BertConfig, BertForMaskedLM, BertForPreTraining, BertTokenizer
from bert_fast.data import tokenize_files
from bert_fast.data.batches import Batches
from bert_fast.data.pretraining import PretrainingSource, unigram_entropy
from bert_fast.models.outputs import BertForPreTrainingOutput, MaskedLMOutput
from bert_fast.training.task import Predictions, Task
from bert_fast.training.tasks.pretraining import PretrainingTask

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "##x"]


def make_source(folder: Path, next_sentence: bool, **options: Any) -> PretrainingSource:
    tokenizer = BertTokenizer(WORDS)
    draw = np.random.default_rng(0)
    lines = [" ".join(draw.choice(list("abcdefgh"), draw.integers(1, 12))) for _ in range(60)]
    folder.mkdir(exist_ok=True)
    path = folder / "corpus.txt"
    path.write_text("\n\n".join("\n".join(lines[start : start + 6]) for start in range(0, 60, 6)))
    store = tokenize_files([path], folder / "store", tokenizer)
    return PretrainingSource(store, tokenizer, max_length=32, next_sentence=next_sentence, **options)


@pytest.fixture(params=[True, False], ids=["pairs", "words"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> PretrainingSource:
    return make_source(tmp_path, request.param)


def make_model(source: PretrainingSource, **options: Any) -> nn.Module:
    torch.set_num_threads(1)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, **options,
    )  # fmt: skip
    model = (BertForPreTraining if source.next_sentence else BertForMaskedLM)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


class Oracle(nn.Module):
    """A model that knows the labels; where `wrong`, it says the opposite."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, labels: Tensor, next_sentence_label: Tensor | None = None, **inputs: Any) -> Any:
        assert inputs["output_logits"]
        scores = F.one_hot(labels, len(WORDS)) * (-10.0 if self.wrong else 10.0)
        loss = F.cross_entropy(scores, labels)
        if next_sentence_label is None:
            return MaskedLMOutput(loss, scores)
        pairs = F.one_hot(next_sentence_label, 2) * (-10.0 if self.wrong else 10.0)
        return BertForPreTrainingOutput(loss + F.cross_entropy(pairs, next_sentence_label), scores, pairs)


def predictions_of(
    task: Task, model: nn.Module, source: PretrainingSource, max_tokens: int = 128, shuffle: bool = True
) -> tuple[Predictions, dict[str, float]]:
    """All predictions, and the means of the parts of the loss over all labels."""
    batches = Batches(source, max_tokens=max_tokens, shuffle=shuffle)
    plan, found = batches.plan(0), Predictions(source.lengths(0))
    sums: dict[str, float] = {}
    labels: dict[str, int] = {}
    with torch.no_grad():
        for number in range(len(plan)):
            batch = batches.batch(0, number)
            parts, said = task.predict(model, batch)
            found.add(plan.indices(number), {name: value.numpy() for name, value in said.items()})
            for name, count in task.label_counts(batch).items():
                sums[name] = sums.get(name, 0.0) + float(parts[name]) * count
                labels[name] = labels.get(name, 0) + count
    return found, {name: total / labels[name] for name, total in sums.items()}


def test_parts_of_the_loss(source: PretrainingSource) -> None:
    task, model = PretrainingTask(source), make_model(source, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    batch = source.batch(0, np.arange(12))
    parts = task.loss_parts(model.train(), batch)
    with torch.no_grad():
        output = model.eval()(**batch)
    scores = output.prediction_logits if source.next_sentence else output.logits
    expected = {"masked_lm": F.cross_entropy(scores, batch["labels"])}
    counts = {"masked_lm": len(batch["labels"])}
    if source.next_sentence:
        expected["next_sentence"] = F.cross_entropy(output.seq_relationship_logits, batch["next_sentence_label"])
        counts["next_sentence"] = 12
    assert {name: part.item() for name, part in parts.items()} == pytest.approx(
        {name: part.item() for name, part in expected.items()}
    )
    assert task.label_counts(batch) == counts
    sum(parts.values()).backward()  # type: ignore[union-attr]
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_parts_may_be_weighted_apart(tmp_path: Path) -> None:
    """Each part's gradient is its own: that of one does not reach what only the other uses."""
    source = make_source(tmp_path, True)
    model = make_model(source)
    assert isinstance(model, BertForPreTraining)
    parts = PretrainingTask(source).loss_parts(model.train(), source.batch(0, np.arange(12)))
    head, words = model.cls.seq_relationship.weight, model.cls.predictions.bias
    from_words = torch.autograd.grad(parts["masked_lm"], (head, words), retain_graph=True)
    from_pairs = torch.autograd.grad(parts["next_sentence"], (head, words), allow_unused=True)
    assert from_words[1].abs().max() > 0 and from_pairs[0].abs().max() > 0
    assert torch.equal(from_words[0], torch.zeros_like(head))
    assert from_pairs[1] is None


def test_metrics_of_a_model_that_knows_and_of_one_that_errs(source: PretrainingSource) -> None:
    task = PretrainingTask(source, source)
    for wrong, share in ((False, 1.0), (True, 0.0)):
        predictions, parts = predictions_of(task, Oracle(wrong), source)
        metrics = task.score(source, predictions)
        assert metrics["masked_accuracy"] == share
        assert metrics.get("next_sentence_accuracy") == (share if source.next_sentence else None)
        assert math.log(metrics["perplexity"]) == pytest.approx(parts["masked_lm"])
        assert metrics["unigram_entropy"] == unigram_entropy(source.store, source.tokenizer)


def test_metrics_do_not_depend_on_the_batches(source: PretrainingSource) -> None:
    task, model = PretrainingTask(valid=source), make_model(source).eval()
    first, parts = predictions_of(task, model, source)
    second, _ = predictions_of(task, model, source, max_tokens=1000, shuffle=False)
    metrics = task.score(source, first)
    assert metrics == pytest.approx(task.score(source, second))
    assert math.log(metrics["perplexity"]) == pytest.approx(parts["masked_lm"])
    assert 0 <= metrics["masked_accuracy"] <= 1


def test_guesses_are_the_likeliest_tokens(source: PretrainingSource) -> None:
    task, model = PretrainingTask(source), make_model(source).eval()
    batch = source.batch(0, np.arange(15))
    with torch.no_grad():
        _, said = task.predict(model, batch)
        output = model(**batch)
    scores = output.prediction_logits if source.next_sentence else output.logits
    positions = batch["masked_lm_positions"]
    assert said["guesses"].shape == (len(batch["input_ids"]), 5) and said["guesses"].dtype == torch.int32
    assert torch.equal(said["guesses"][positions].long(), scores.argsort(dim=1, descending=True)[:, :5])
    others = torch.ones(len(batch["input_ids"]), dtype=torch.bool)
    others[positions] = False
    assert (said["guesses"][others] == -1).all() and not said["surprise"][others].any()
    assert torch.equal(said["is_right"][positions], scores.argmax(dim=1) == batch["labels"])
    assert said["surprise"][positions].mean().item() == pytest.approx(F.cross_entropy(scores, batch["labels"]).item())


def test_more_masked_words_than_are_scored_at_once(tmp_path: Path) -> None:
    source = make_source(tmp_path, False, mask_probability=1.0)
    task = PretrainingTask(source)
    indices = np.tile(np.arange(len(source.lengths(0))), 4)
    batch = source.batch(0, indices)
    assert len(batch["labels"]) > 2 * 512
    _, said = task.predict(Oracle(), batch)
    assert said["is_right"].sum() == len(batch["labels"])


def test_batches_without_masked_words(source: PretrainingSource) -> None:
    task, model = PretrainingTask(source), make_model(source)
    batch = source.batch(0, np.arange(3))
    batch["labels"], batch["masked_lm_positions"] = (torch.zeros(0, dtype=torch.int64) for _ in range(2))
    assert task.label_counts(batch)["masked_lm"] == 0
    assert task.loss_parts(model.train(), batch)["masked_lm"].abs().item() < 1e-6
    _, said = task.predict(model.eval(), batch)
    assert (said["guesses"] == -1).all()


def test_predictions_as_lines(source: PretrainingSource, tmp_path: Path) -> None:
    task = PretrainingTask(source, source)
    predictions, _ = predictions_of(task, Oracle(), source)
    (file,) = task.write_predictions(tmp_path / "valid", source, predictions)
    assert file == tmp_path / "valid.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [row["index"] for row in rows] == list(range(len(source.lengths(0))))
    for row in rows:
        batch = source.batch(0, np.array([row["index"]]))
        words = row["text"].split(" ")
        assert words == source.tokenizer.convert_ids_to_tokens(batch["input_ids"].tolist())
        assert [mask["place"] for mask in row["masked"]] == batch["masked_lm_positions"].tolist()
        for mask in row["masked"]:
            assert mask["guesses"][0] == mask["word"] and len(mask["guesses"]) == 5
            assert mask["shown"] == words[mask["place"]]
        if source.next_sentence:
            label = int(batch["next_sentence_label"])
            assert row["label"] == ("follows", "random")[label] and round(row["follows"]) == 1 - label
        else:
            assert "label" not in row and "follows" not in row


def test_what_else_a_task_says(source: PretrainingSource) -> None:
    task = PretrainingTask(source)
    assert (task.name, task.metric, task.higher_is_better, task.valid) == ("pretrain", "loss", False, None)
    assert task.model_config() == {}
    assert task.describe(source, 2) == source.decode(0, 2)


def test_bad_sources(tmp_path: Path) -> None:
    pairs, words = (make_source(tmp_path / str(flag), flag) for flag in (True, False))
    with pytest.raises(ValueError, match="valid: expected next_sentence=True, as in train, got the other"):
        PretrainingTask(pairs, words)
    with pytest.raises(TypeError, match="source: expected a PretrainingSource, got str"):
        PretrainingTask(pairs).describe("x", 0)  # type: ignore[arg-type]
