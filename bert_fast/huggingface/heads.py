"""transformers' models with a head on a fused BertModel; those that read little of its output have little computed."""

import functools
from typing import Any

from transformers.models.bert import modeling_bert as hf

from bert_fast.huggingface.fused import Fused
from bert_fast.huggingface.models import IS_VERSION_4, is_fused_bert
from bert_fast.huggingface.reasons import is_watched
from bert_fast.modules.call import first_rows

__all__ = [
    "FusedBertForMultipleChoice",
    "FusedBertForNextSentencePrediction",
    "FusedBertForSequenceClassification",
]


class _PooledHead(Fused):
    """A head on the pooled sequence: of the last layer, only the first tokens' rows are computed."""

    bert: Any

    def _forward_pooled(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        # Nobody else looks at what the BertModel returns; and version 4 passes on no arguments but its own.
        if is_fused_bert(self.bert) and not is_watched(self.bert) and not IS_VERSION_4:
            kwargs["rows"] = first_rows
        return forward(*args, **kwargs)


class FusedBertForSequenceClassification(_PooledHead, hf.BertForSequenceClassification):
    """Classes of texts, from pooled sequences."""

    @functools.wraps(hf.BertForSequenceClassification.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own."""
        return self._forward_pooled(super().forward, *args, **kwargs)


class FusedBertForMultipleChoice(_PooledHead, hf.BertForMultipleChoice):
    """A choice among texts, from pooled sequences."""

    @functools.wraps(hf.BertForMultipleChoice.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own."""
        return self._forward_pooled(super().forward, *args, **kwargs)


class FusedBertForNextSentencePrediction(_PooledHead, hf.BertForNextSentencePrediction):
    """Whether a text goes on, from pooled sequences."""

    @functools.wraps(hf.BertForNextSentencePrediction.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own."""
        return self._forward_pooled(super().forward, *args, **kwargs)
