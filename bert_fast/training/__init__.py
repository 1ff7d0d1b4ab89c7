"""Training on transformers' Trainer, by batches without padding."""

from bert_fast.training.arguments import TrainingArguments
from bert_fast.training.checkpoints import last_checkpoint
from bert_fast.training.trainer import Trainer

__all__ = ["Trainer", "TrainingArguments", "last_checkpoint"]
