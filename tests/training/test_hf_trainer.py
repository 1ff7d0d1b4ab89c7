"""transformers' Trainer on this library's examples and batches: the steps of this library's Trainer, bit for bit."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, SequentialSampler

from bert_fast import BertConfig, BertForSequenceClassification, BertTokenizer, PackedCollator
from bert_fast.data.batches import Batches, only
from bert_fast.data.classification import ClassificationSource
from bert_fast.optim import AdamW, weight_decay_groups
from bert_fast.training import Trainer, TrainingConfig
from bert_fast.training.tasks.classification import ClassificationTask

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own deprecations

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "long", "and", "the", "##s"]
LEARNING_RATE = 1e-2
SEED = 3


@pytest.fixture(scope="module")
def source() -> ClassificationSource:
    """Twenty-two texts of 1 to 12 words; whether "good" is among them."""
    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(WORDS[5:11], draw.integers(1, 13))) for _ in range(22)]
    rows = [{"text": text, "label": int("good" in text)} for text in texts]
    return ClassificationSource.read(rows, BertTokenizer(WORDS))


def make_model() -> BertForSequenceClassification:
    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def losses_of(model: nn.Module) -> list[float]:
    """Filled with the loss of every forward pass in training from now on."""
    losses: list[float] = []

    def note(module: nn.Module, arguments: Any, output: Any) -> None:
        if module.training:
            losses.append(output["loss"].item())

    model.register_forward_hook(note)
    return losses


def trained_by_ours(source: ClassificationSource, folder: Path, **options: Any) -> tuple[list[float], nn.Module]:
    config = TrainingConfig(
        folder, epochs=1, schedule="constant", learning_rate=LEARNING_RATE, seed=SEED, **options
    )  # fmt: skip
    model = make_model()
    losses = losses_of(model)
    Trainer(model, ClassificationTask(source), config, observers=[]).train()
    return losses, model


class InOrder(transformers.Trainer):
    """Takes the examples as they come."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


def make_theirs(
    folder: Path, examples: Dataset[Any], collate: Callable[[Sequence[Any]], Any], **options: Any
) -> transformers.Trainer:
    """Their Trainer with this library's optimizer, which clips by itself."""
    model = make_model()
    optimizer = AdamW(weight_decay_groups(model, 0.01), lr=LEARNING_RATE, max_grad_norm=1.0)
    arguments = transformers.TrainingArguments(
        str(folder), num_train_epochs=1, lr_scheduler_type="constant", max_grad_norm=0.0, use_cpu=True, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    return InOrder(
        model, arguments, train_dataset=examples, data_collator=collate, optimizers=(optimizer, None)
    )  # fmt: skip


def assert_same(ours: tuple[list[float], nn.Module], losses: list[float], theirs: nn.Module, steps: int) -> None:
    assert len(losses) == steps
    assert losses == ours[0]
    assert losses[0] != losses[-1]
    state, start = theirs.state_dict(), make_model().state_dict()
    assert all(torch.equal(value, state[name]) for name, value in ours[1].state_dict().items())
    assert sum(not torch.equal(value, state[name]) for name, value in start.items()) > 20, "nothing was trained"


def test_batches_by_tokens(source: ClassificationSource, tmp_path: Path) -> None:
    """`Batches.epoch` gives their Trainer whole batches, here of up to 40 tokens."""
    batches = Batches(source, max_tokens=40, seed=SEED).epoch(0)
    theirs = make_theirs(tmp_path / "theirs", batches, only, per_device_train_batch_size=1)
    losses = losses_of(theirs.model)
    theirs.train()
    ours = trained_by_ours(source, tmp_path / "ours", batch_size=None, batch_tokens=40)
    assert_same(ours, losses, theirs.model, len(batches))
    assert len({batch.num_sequences for batch in batches}) > 1


def test_batches_made_by_workers(source: ClassificationSource, tmp_path: Path) -> None:
    batches = Batches(source, max_tokens=40, seed=SEED).epoch(0)
    options = {"per_device_train_batch_size": 1, "dataloader_num_workers": 1}
    theirs = make_theirs(tmp_path / "theirs", batches, only, **options)
    losses = losses_of(theirs.model)
    theirs.train()
    assert losses == trained_by_ours(source, tmp_path / "ours", batch_size=None, batch_tokens=40)[0]


def test_single_examples_joined_by_the_collator(source: ClassificationSource, tmp_path: Path) -> None:
    plan = Batches(source, batch_size=4, seed=SEED).plan(0)
    theirs = make_theirs(
        tmp_path / "theirs", source.take(plan.order), PackedCollator(), per_device_train_batch_size=4
    )  # fmt: skip
    losses = losses_of(theirs.model)
    theirs.train()
    assert_same(trained_by_ours(source, tmp_path / "ours", batch_size=4), losses, theirs.model, 6)


def test_predictions_are_those_of_our_trainer(source: ClassificationSource, tmp_path: Path) -> None:
    theirs = make_theirs(tmp_path / "theirs", source, PackedCollator(), per_device_eval_batch_size=8)
    said = theirs.predict(source)  # type: ignore[arg-type]
    config = TrainingConfig(tmp_path / "ours", steps=1)
    ours = Trainer(make_model(), ClassificationTask(source), config, observers=[]).predict(source).rows("logits")
    assert said.predictions.shape == ours.shape
    assert (said.predictions.argmax(1) == ours.argmax(1)).all()
    assert (said.label_ids == source.labels).all()
