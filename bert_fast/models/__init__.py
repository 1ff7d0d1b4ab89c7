"""Configuration, encoder, task models, checkpoints."""

from bert_fast.models.bert import BertModel
from bert_fast.models.config import BertConfig
from bert_fast.models.heads import BertForMaskedLM, BertForPreTraining, BertForSequenceClassification

__all__ = ["BertConfig", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification", "BertModel"]
