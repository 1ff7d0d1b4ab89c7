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
from bert_fast.models.text_embedding import BertForTextEmbedding

__all__ = [
    "BertConfig",
    "BertForMaskedLM",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "BertForTextEmbedding",
    "BertForTokenClassification",
    "BertLMHeadModel",
    "BertModel",
    "BertPreTrainedModel",
]
