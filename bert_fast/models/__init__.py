"""Configuration, encoder, task models, checkpoints."""

from bert_fast.models.bert import BertModel, BertPreTrainedModel
from bert_fast.models.classification import (
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from bert_fast.models.config import BertConfig
from bert_fast.models.masked_lm import BertForMaskedLM, BertForPreTraining, BertLMHeadModel
from bert_fast.models.question_answering import BertForQuestionAnswering

__all__ = [
    "BertConfig",
    "BertForMaskedLM",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertLMHeadModel",
    "BertModel",
    "BertPreTrainedModel",
]
