"""BERT-shaped encoders, trained and run in less time: fused models of transformers, classes, operations, tokenizers."""

from bert_fast import _requirements as _requirements  # first: it says so where torch is too old

# isort: split
from bert_fast import graphs, losses, ops, optim
from bert_fast._version import __version__
from bert_fast.backend import explain, use_backend
from bert_fast.batch_invariance import batch_invariant
from bert_fast.data import PackedCollator
from bert_fast.errors import BackendError, CheckpointError
from bert_fast.huggingface import fuse, patch_transformers, register_attention, unfuse, why_not
from bert_fast.models import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTextEmbedding,
    BertForTokenClassification,
    BertLMHeadModel,
    BertModel,
    BertPreTrainedModel,
)
from bert_fast.modules.quantizing import quantize, unquantize
from bert_fast.ops import repad, unpad
from bert_fast.tokenization import BertTokenizer, RaggedBatch, XLMRobertaTokenizer
from bert_fast.warming import warm_up

__all__ = [
    "BackendError",
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
    "BertTokenizer",
    "CheckpointError",
    "PackedCollator",
    "RaggedBatch",
    "XLMRobertaTokenizer",
    "__version__",
    "batch_invariant",
    "explain",
    "fuse",
    "graphs",
    "losses",
    "ops",
    "optim",
    "patch_transformers",
    "quantize",
    "register_attention",
    "repad",
    "unfuse",
    "unpad",
    "unquantize",
    "use_backend",
    "warm_up",
    "why_not",
]
