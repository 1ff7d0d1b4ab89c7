"""Training on transformers' Trainer, by batches without padding."""

from bert_fast.training.arguments import TrainingArguments
from bert_fast.training.trainer import Trainer, last_checkpoint

__all__ = ["Trainer", "TrainingArguments", "last_checkpoint"]
