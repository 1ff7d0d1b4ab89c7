"""A task small enough to train hundreds of times in tests: is there a token above the middle of the vocabulary?"""

from pathlib import Path

import numpy as np
import torch

from bert_fast import BertConfig, BertForSequenceClassification
from bert_fast.data.batches import Source
from bert_fast.tokenization.pack import PackedBatch
from bert_fast.training.config import TrainingConfig
from bert_fast.training.task import Predictions, Task

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


class ToyTask(Task):
    name = "toy"
    metric = "accuracy"
    higher_is_better = True

    def __init__(self, train: Source | None = None, valid: Source | None = None) -> None:
        self.train, self.valid = train or ToySource(), valid

    def predict(self, model, batch):
        output = model(**batch)
        return {"loss": output.loss}, {"logits": output.logits}

    def score(self, source, predictions: Predictions) -> dict[str, float]:
        return {"accuracy": float((predictions.rows("logits").argmax(1) == source.labels).mean())}

    def write_predictions(self, path: Path, source, predictions: Predictions) -> list[Path]:
        file = path.with_suffix(".txt")
        file.write_text("\n".join(map(str, predictions.rows("logits").argmax(1))))
        return [file]


def toy_model(dropout: float = 0.1, **sizes) -> BertForSequenceClassification:
    torch.manual_seed(7)
    config = BertConfig(**SIZES | dict(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout) | sizes)
    return BertForSequenceClassification(config)


def toy_config(output_dir: Path, **changes) -> TrainingConfig:
    defaults = dict(steps=12, batch_size=8, learning_rate=1e-3, log_every=4, eval_every=4, save_every=3, warmup=2)
    return TrainingConfig(output_dir=output_dir, **{**defaults, **changes})
