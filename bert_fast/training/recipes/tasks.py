"""Which sources, task and model belong to the settings of a run."""

import os
from collections.abc import Sequence
from typing import Any

from bert_fast.data.source import Source
from bert_fast.models import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertPreTrainedModel,
)
from bert_fast.tokenization import BertTokenizer
from bert_fast.training.recipes.settings import (
    ChoiceData,
    ClassifyData,
    Data,
    NerData,
    PretrainData,
    QaData,
)

__all__ = ["make_task", "model_class", "read_source"]

FinetuneData = ClassifyData | NerData | QaData | ChoiceData


def model_class(data: Data) -> type[BertPreTrainedModel]:
    """The model that a task trains."""
    if isinstance(data, PretrainData):
        return BertForPreTraining if data.next_sentence else BertForMaskedLM
    if isinstance(data, ClassifyData):
        return BertForSequenceClassification
    if isinstance(data, NerData):
        return BertForTokenClassification
    return BertForQuestionAnswering if isinstance(data, QaData) else BertForMultipleChoice


def read_source(
    data: FinetuneData,
    tokenizer: BertTokenizer,
    examples: Any,
    *,
    labels: Sequence[str] | None = None,
    is_labelled: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Any:
    """The examples of a file, or of rows in memory, for fine-tuning.

    Args:
        data: how they are read.
        tokenizer: as the model's.
        examples: a path, or a list of mappings.
        labels: all labels, in the order of their numbers; None: those that data names, else those that occur.
        is_labelled: False: there are none.
        cache_dir: where tokens are kept for the next run; None: nowhere.

    Raises:
        SourceError, OSError, ValueError: see the sources.
    """
    if isinstance(data, ClassifyData):
        from bert_fast.data.classification import ClassificationSource

        return ClassificationSource.read(
            examples,
            tokenizer,
            text=data.text,
            text_pair=data.text_pair,
            label=data.label if is_labelled else None,
            labels=data.labels if labels is None else labels,
            regression=data.regression,
            max_length=data.max_length,
            cache_dir=cache_dir,
        )
    if isinstance(data, NerData):
        from bert_fast.data.token_classification import TokenClassificationSource

        columns: dict[str, Any] = {}
        if isinstance(examples, str | os.PathLike):
            columns = {"word_column": data.word_column, "label_column": data.label_column if is_labelled else None}
        elif not is_labelled:
            columns = {"label_column": None}
        return TokenClassificationSource.read(
            examples,
            tokenizer,
            labels=data.labels if labels is None else labels,
            max_length=data.max_length,
            truncate=data.truncate,
            **columns,
        )
    if isinstance(data, QaData):
        from bert_fast.data.question_answering import QuestionAnsweringSource

        return QuestionAnsweringSource.read(
            examples,
            tokenizer,
            max_length=data.max_length,
            stride=data.stride,
            skip_wrong_answers=data.skip_wrong_answers,
            cache_dir=cache_dir,
        )
    from bert_fast.data.multiple_choice import MultipleChoiceSource

    return MultipleChoiceSource.read(
        examples,
        tokenizer,
        label=data.label if is_labelled else None,
        max_length=data.max_length,
        cache_dir=cache_dir,
    )


def make_task(data: Data, train: Source | None, valid: Source | None) -> Any:
    """The `Task` of some sources, which `read_source` or `pretraining_source` made.

    Raises:
        ValueError: their labels differ.
    """
    sources: dict[str, Any] = {"train": train, "valid": valid}
    if isinstance(data, PretrainData):
        from bert_fast.training.tasks.pretraining import PretrainingTask

        return PretrainingTask(**sources)
    if isinstance(data, ClassifyData):
        from bert_fast.training.tasks.classification import ClassificationTask

        return ClassificationTask(**sources)
    if isinstance(data, NerData):
        from bert_fast.training.tasks.token_classification import TokenClassificationTask

        return TokenClassificationTask(**sources)
    if isinstance(data, QaData):
        from bert_fast.training.tasks.question_answering import QuestionAnsweringTask

        return QuestionAnsweringTask(
            **sources,
            max_answer_length=data.max_answer_length,
            may_abstain=data.may_abstain,
            null_threshold=data.null_threshold,
        )
    from bert_fast.training.tasks.multiple_choice import MultipleChoiceTask

    return MultipleChoiceTask(**sources)
