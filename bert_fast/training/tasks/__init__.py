"""The tasks: data, loss, metrics and predictions of one kind of run each."""

from bert_fast.training.tasks.classification import ClassificationTask
from bert_fast.training.tasks.multiple_choice import MultipleChoiceTask
from bert_fast.training.tasks.pretraining import PretrainingTask
from bert_fast.training.tasks.question_answering import QuestionAnsweringTask
from bert_fast.training.tasks.token_classification import TokenClassificationTask

__all__ = [
    "ClassificationTask",
    "MultipleChoiceTask",
    "PretrainingTask",
    "QuestionAnsweringTask",
    "TokenClassificationTask",
]
