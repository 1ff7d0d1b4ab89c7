"""transformers' models with a head on a fused BertModel; those that read little of its output have little computed."""

import functools
from typing import Any

from transformers.models.bert import modeling_bert as hf

from bert_fast.huggingface.classes import replaces
from bert_fast.huggingface.models import IS_VERSION_4, FusedBertModel
from bert_fast.huggingface.reasons import is_watched
from bert_fast.huggingface.swapping import FusedModel
from bert_fast.modules.call import first_rows

__all__ = ["FUSED_MODELS"]


def is_fused_bert(bert: Any) -> bool:
    """Whether a head may ask `bert` for what only FusedBertModel knows, and nobody looks at what it returns."""
    forward = getattr(type(bert), "forward", None)
    return forward is FusedBertModel.forward and "forward" not in bert.__dict__ and not is_watched(bert)


class _PooledHead(FusedModel):
    """A head on the pooled sequence: of the last layer, only the first tokens' rows are computed."""

    bert: Any

    def _forward_pooled(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if not IS_VERSION_4 and is_fused_bert(self.bert):  # version 4 passes on no arguments but its own
            kwargs["rows"] = first_rows
        return forward(*args, **kwargs)


@replaces(hf.BertForSequenceClassification)
class FusedBertForSequenceClassification(_PooledHead, hf.BertForSequenceClassification):
    @functools.wraps(hf.BertForSequenceClassification.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_pooled(super().forward, *args, **kwargs)


@replaces(hf.BertForMultipleChoice)
class FusedBertForMultipleChoice(_PooledHead, hf.BertForMultipleChoice):
    @functools.wraps(hf.BertForMultipleChoice.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_pooled(super().forward, *args, **kwargs)


@replaces(hf.BertForNextSentencePrediction)
class FusedBertForNextSentencePrediction(_PooledHead, hf.BertForNextSentencePrediction):
    @functools.wraps(hf.BertForNextSentencePrediction.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_pooled(super().forward, *args, **kwargs)


@replaces(hf.BertForTokenClassification)
class FusedBertForTokenClassification(FusedModel, hf.BertForTokenClassification):
    pass


@replaces(hf.BertForQuestionAnswering)
class FusedBertForQuestionAnswering(FusedModel, hf.BertForQuestionAnswering):
    pass


@replaces(hf.BertForMaskedLM)
class FusedBertForMaskedLM(FusedModel, hf.BertForMaskedLM):
    pass


@replaces(hf.BertForPreTraining)
class FusedBertForPreTraining(FusedModel, hf.BertForPreTraining):
    pass


@replaces(hf.BertLMHeadModel)
class FusedBertLMHeadModel(FusedModel, hf.BertLMHeadModel):
    pass


FUSED_MODELS = (
    hf.BertModel, hf.BertForSequenceClassification, hf.BertForMultipleChoice, hf.BertForNextSentencePrediction,
    hf.BertForTokenClassification, hf.BertForQuestionAnswering, hf.BertForMaskedLM, hf.BertForPreTraining,
    hf.BertLMHeadModel,
)  # fmt: skip
