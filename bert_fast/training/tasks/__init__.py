"""The tasks: one module for each, with its settings, examples, model, loss, metrics and predictions."""

from bert_fast.training.tasks.base import TaskSettings
from bert_fast.training.tasks.classification import ClassificationTask, ClassifySettings
from bert_fast.training.tasks.multiple_choice import ChoiceSettings, MultipleChoiceTask
from bert_fast.training.tasks.pretraining import PretrainingTask, PretrainSettings
from bert_fast.training.tasks.question_answering import QaSettings, QuestionAnsweringTask
from bert_fast.training.tasks.token_classification import NerSettings, TokenClassificationTask

__all__ = [
    "TASKS",
    "ClassificationTask",
    "MultipleChoiceTask",
    "PretrainingTask",
    "QuestionAnsweringTask",
    "TaskSettings",
    "TokenClassificationTask",
]

# The word of the command line and of YAML files -> the settings, from which all else follows.
TASKS: dict[str, type[TaskSettings]] = {
    "pretrain": PretrainSettings,
    "classify": ClassifySettings,
    "ner": NerSettings,
    "qa": QaSettings,
    "choice": ChoiceSettings,
}
