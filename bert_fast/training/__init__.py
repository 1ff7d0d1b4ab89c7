"""Pre-training and fine-tuning: tasks, the loop, checkpoints, and what a person sees of a run."""

from bert_fast.training.config import TrainingConfig
from bert_fast.training.events import Evaluation, Observer, Plan, Step
from bert_fast.training.predictions import Predictions
from bert_fast.training.run import TrainingResult
from bert_fast.training.task import Task
from bert_fast.training.trainer import Trainer

__all__ = [
    "Evaluation",
    "Observer",
    "Plan",
    "Predictions",
    "Step",
    "Task",
    "Trainer",
    "TrainingConfig",
    "TrainingResult",
]
