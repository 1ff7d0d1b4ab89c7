"""Pre-training as a task: what it reads, and metrics by their definitions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bert_fast import BertConfig, BertForMaskedLM, BertForPreTraining, BertTokenizer
from bert_fast.data import tokenize_files
from bert_fast.data.pretraining import PretrainingSource, token_counts, unigram_entropy
from bert_fast.data.pretraining_checks import context_free_loss
from bert_fast.errors import SourceError, StoreError
from bert_fast.training import Trainer
from bert_fast.training.tasks.pretraining import Pretraining, PretrainingArguments
from tests.training.toy import toy_arguments

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", "##x"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    lines = [" ".join(draw.choice(list("abcdefgh"), draw.integers(1, 12))) for _ in range(60)]
    path = tmp_path / "corpus.txt"
    path.write_text("\n\n".join("\n".join(lines[start : start + 6]) for start in range(0, 60, 6)))
    return path


@pytest.fixture
def tokenizer() -> BertTokenizer:
    return BertTokenizer(WORDS)


def task_of(tokenizer: BertTokenizer, **options: Any) -> Pretraining:
    return Pretraining(PretrainingArguments(**{"train_file": [], "max_seq_length": 32} | options), tokenizer)


def same(one: PretrainingSource, other: PretrainingSource) -> bool:
    batches = [source.batch(0, np.arange(5)) for source in (one, other)]
    return torch.equal(batches[0]["input_ids"], batches[1]["input_ids"])


def test_text_and_its_store_are_the_same_examples(text: Path, tokenizer: BertTokenizer, tmp_path: Path) -> None:
    task = task_of(tokenizer)
    kept = task.read([str(text)], 3, tmp_path / "run" / "tokens")
    tokenize_files([text], tmp_path / "store", tokenizer)
    assert (tmp_path / "run" / "tokens").is_dir()
    assert same(kept, task.read([str(tmp_path / "store")], 3)) and same(kept, task.read([str(text)], 3))
    assert same(kept, task.read([str(text)], 3, tmp_path / "run" / "tokens"))
    assert not same(kept, task.read([str(text)], 4))
    assert kept.lengths(0).max() <= 32


def test_arguments_arrive(text: Path, tokenizer: BertTokenizer) -> None:
    source = task_of(tokenizer, next_sentence=False, mlm_probability=0.5).read([str(text)], 0)
    batch = source.batch(0, np.arange(10))
    assert "next_sentence_label" not in batch
    assert 0.3 < len(batch["labels"]) / len(batch["input_ids"]) < 0.6
    assert task_of(tokenizer).model_class is BertForPreTraining
    assert task_of(tokenizer, next_sentence=False).model_class is BertForMaskedLM


def test_what_cannot_be_read(text: Path, tokenizer: BertTokenizer, tmp_path: Path) -> None:
    task = task_of(tokenizer)
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "folder").mkdir()
    place = tmp_path / "run" / "tokens"
    with pytest.raises(SourceError, match=r"blank\.txt: expected text, got none that makes tokens"):
        task.read([str(tmp_path / "blank.txt")], 0, place)
    assert not place.exists()  # and is not in the way
    with pytest.raises(FileNotFoundError):
        task.read([str(tmp_path / "none.txt")], 0)
    with pytest.raises(ValueError, match="train_file: expected text files, or one token store, got "):
        task.read([str(tmp_path / "folder"), str(text)], 0)
    with pytest.raises(StoreError):
        task.read([str(tmp_path / "folder")], 0)
    task.read([str(text)], 0, place)
    with pytest.raises(StoreError, match="was begun with other files"):
        task.read([str(tmp_path / "blank.txt")], 0, place)


def test_answers() -> None:
    scores = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    (is_right,) = Pretraining.answers(scores, torch.tensor([1, 2]))
    assert is_right.tolist() == [True, False]
    pairs = torch.tensor([[0.0, 1.0]])
    found: tuple[Tensor, ...] = Pretraining.answers((scores, pairs), (torch.tensor([2, 0]), torch.tensor([1])))
    assert found[0].tolist() == [False, True] and found[1] is pairs


@pytest.mark.parametrize("next_sentence", [True, False])
def test_metrics_are_their_definitions(
    next_sentence: bool, text: Path, tokenizer: BertTokenizer, tmp_path: Path
) -> None:
    """Over all examples, as the Trainer collects them, against one batch of all of them."""
    torch.set_num_threads(1)
    task = task_of(tokenizer, next_sentence=next_sentence)
    source = task.read([str(text)], 0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, initializer_range=0.5,
    )  # fmt: skip
    model = task.model_class(config)
    trainer = Trainer(
        model, toy_arguments(tmp_path, per_device_eval_batch_tokens=100), eval_dataset=source,
        compute_metrics=lambda said: task.metrics(source, source, said.predictions, said.label_ids),
        preprocess_logits_for_metrics=task.answers,
    )  # fmt: skip
    found = trainer.evaluate()
    batch = source.batch(0, np.arange(len(source.lengths(0))))
    with torch.no_grad():
        outputs = model.eval()(**batch)
    scores = outputs.prediction_logits if next_sentence else outputs.logits
    assert found["eval_masked_accuracy"] == pytest.approx((scores.argmax(1) == batch["labels"]).double().mean().item())
    assert found["eval_unigram_entropy"] == unigram_entropy(source.store, tokenizer)
    assert found["eval_context_free_loss"] == context_free_loss(source, token_counts(source.store, tokenizer))
    assert found["eval_loss"] == pytest.approx(outputs.loss.item())
    assert ("eval_next_sentence_accuracy" in found) is next_sentence
    if next_sentence:
        guesses = outputs.seq_relationship_logits.argmax(1)
        share = (guesses == batch["next_sentence_label"]).double().mean().item()
        assert found["eval_next_sentence_accuracy"] == pytest.approx(share)
