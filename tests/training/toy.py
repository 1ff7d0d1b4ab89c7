"""A task small enough to train hundreds of times in tests: is there a token above the middle of the vocabulary?"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from bert_fast import BertConfig, BertForSequenceClassification
from bert_fast.tokenization.pack import PackedBatch
from bert_fast.training import Trainer, TrainingArguments

SIZES = dict(
    vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=16, num_labels=2,
)  # fmt: skip


class ToySource:
    """Random sequences of 2 to 12 tokens."""

    def __init__(self, count: int = 50, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.sequences = [generator.integers(1, 40, length) for length in generator.integers(2, 13, count)]
        self.labels = np.array([int((sequence > 30).any()) for sequence in self.sequences])

    def __len__(self) -> int:
        return len(self.sequences)

    def lengths(self, epoch: int) -> np.ndarray:
        return np.array([len(sequence) for sequence in self.sequences], dtype=np.int32)

    def batch(self, epoch: int, indices: np.ndarray) -> PackedBatch:
        chosen = [self.sequences[index] for index in indices]
        lengths = [len(sequence) for sequence in chosen]
        return PackedBatch(
            input_ids=torch.from_numpy(np.concatenate(chosen)),
            cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
            max_seqlen=max(lengths),
            labels=torch.from_numpy(self.labels[indices]),
        )


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def toy_model(dropout: float = 0.1, **sizes: Any) -> BertForSequenceClassification:
    torch.manual_seed(7)
    config = BertConfig(**SIZES | dict(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout) | sizes)
    return BertForSequenceClassification(config)


def toy_arguments(folder: Path | str, **changes: Any) -> TrainingArguments:
    defaults = dict(
        max_steps=12, per_device_train_batch_size=8, learning_rate=1e-3, logging_steps=4, save_steps=3, warmup_steps=2,
        weight_decay=0.01, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    return TrainingArguments(str(folder), **defaults | changes)


def toy_trainer(folder: Path | str, model: Any = None, train: Any = None, valid: Any = None, **changes: Any) -> Trainer:
    return Trainer(
        toy_model() if model is None else model,
        toy_arguments(folder, **changes),
        train_dataset=ToySource() if train is None else train,
        eval_dataset=ToySource(30, seed=1) if valid is None else valid,
        compute_metrics=accuracy,
    )
