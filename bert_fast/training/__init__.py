"""Pre-training and fine-tuning: tasks, the loop, checkpoints, and what a person sees of a run."""

from bert_fast.training.config import TrainingConfig
from bert_fast.training.loop import TrainingResult
from bert_fast.training.observers import Evaluation, Observer, Plan, Step
from bert_fast.training.task import Predictions, Task
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
