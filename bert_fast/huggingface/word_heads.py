"""transformers' models that predict words, on a fused BertModel: scores of kept tokens only, 0 on padding."""

import functools
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions, MaskedLMOutput
from transformers.models.bert import modeling_bert as hf

from bert_fast.huggingface.classes import replaces
from bert_fast.huggingface.models import by_name, chosen, encode_arguments, is_fused_bert, positional
from bert_fast.huggingface.reasons import reasons, setting
from bert_fast.huggingface.swapping import FusedModel
from bert_fast.models.bert import Encoded
from bert_fast.models.heads import predict_words
from bert_fast.models.losses import class_loss
from bert_fast.modules.plain_linear import is_watched

__all__ = ["FusedBertForMaskedLM", "FusedBertForPreTraining", "FusedBertLMHeadModel"]

_HEAD_ARGUMENTS = ("labels", "next_sentence_label", "logits_to_keep", "output_logits")


class _WordModel(FusedModel):
    """forward takes one argument more, output_logits: False leaves them out, and computes those of labelled tokens."""

    bert: Any
    cls: Any
    config: Any

    def _predict(self, inputs: dict[str, Any], labels: Tensor | None, **how: Any) -> tuple[Any, Any, Encoded]:
        """(loss, scores, what the encoder made), see `predict_words`."""
        output_logits = inputs.get("output_logits")
        how["output_logits"] = True if output_logits is None else output_logits
        return predict_words(self.bert, self.cls.predictions, encode_arguments(inputs), labels, **how)

    def _inputs(self, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """The call's arguments by name; None where transformers' code is to run it."""
        inputs = by_name(names, args, kwargs)
        if inputs is None or not _are_all(inputs.get("logits_to_keep", 0)):
            return None
        if not is_fused_bert(self.bert) or is_watched(self.bert) or is_watched(self.cls):  # who are not called here
            return None
        tokens, labels = inputs.get("input_ids"), inputs.get("labels")
        shape = None if tokens is None else tokens.shape
        if tokens is None and inputs.get("inputs_embeds") is not None:
            shape = inputs["inputs_embeds"].shape[:-1]
        if labels is not None and labels.shape != shape:
            return None
        return None if reasons(self, {k: v for k, v in inputs.items() if k not in _HEAD_ARGUMENTS}) else inputs

    def _finish(self, kind: Any, inputs: dict[str, Any], encoded: Encoded, **fields: Any) -> Any:
        states = chosen(encoded.hidden_states, setting(inputs, self.config, "output_hidden_states"))
        output = kind(hidden_states=states, **fields)
        return output if setting(inputs, self.config, "return_dict") else output.to_tuple()


def _are_all(logits_to_keep: Any) -> bool:
    return isinstance(logits_to_keep, int) and logits_to_keep == 0


def _own(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments without the one that transformers does not know."""
    return {name: value for name, value in kwargs.items() if name != "output_logits"}


@replaces(hf.BertForMaskedLM)
class FusedBertForMaskedLM(_WordModel, hf.BertForMaskedLM):
    """Labels of padding do not count, and the loss where there is none is 0."""

    @functools.wraps(hf.BertForMaskedLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own, with scores of 0 on padding."""
        inputs = self._inputs(_MASKED_LM, args, kwargs)
        if inputs is None:
            return super().forward(*args, **_own(kwargs))
        loss, scores, encoded = self._predict(inputs, inputs.get("labels"))
        return self._finish(MaskedLMOutput, inputs, encoded, loss=loss, logits=scores)


@replaces(hf.BertForPreTraining)
class FusedBertForPreTraining(_WordModel, hf.BertForPreTraining):
    """Labels of padding do not count, and the loss where there is none is 0."""

    @functools.wraps(hf.BertForPreTraining.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own, with scores of 0 on padding."""
        inputs = self._inputs(_PRE_TRAINING, args, kwargs)
        if inputs is None:
            return super().forward(*args, **_own(kwargs))
        labels, next_sentence_label = inputs.get("labels"), inputs.get("next_sentence_label")
        loss, scores, encoded = self._predict(inputs, None if next_sentence_label is None else labels, pooled=True)
        relationship = self.cls.seq_relationship(self.bert.pool(encoded))
        if loss is not None and next_sentence_label is not None:
            loss = loss + class_loss(relationship, next_sentence_label.flatten(), "next_sentence_label")
        return self._finish(
            hf.BertForPreTrainingOutput, inputs, encoded, loss=loss, prediction_logits=scores,
            seq_relationship_logits=relationship,
        )  # fmt: skip


@replaces(hf.BertLMHeadModel)
class FusedBertLMHeadModel(_WordModel, hf.BertLMHeadModel):
    """The loss is transformers' own, `loss_function`, save for packed input."""

    @functools.wraps(hf.BertLMHeadModel.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own, with scores of 0 on padding."""
        own = _own(kwargs)
        if kwargs.get("labels") is not None:
            kwargs["use_cache"] = False
        inputs = self._inputs(_CAUSAL_LM, args, kwargs)
        if inputs is None:
            return super().forward(*args, **own)
        labels = inputs.get("labels")
        if inputs.get("cu_seqlens") is not None or inputs.get("output_logits") is False:
            loss, scores, encoded = self._predict(inputs, labels, next_words=True)
        else:
            _, scores, encoded = self._predict(inputs, None)
            loss = None
            if labels is not None:
                count = {"num_items_in_batch": inputs["num_items_in_batch"]} if "num_items_in_batch" in inputs else {}
                loss = self.loss_function(logits=scores, labels=labels, vocab_size=self.config.vocab_size, **count)
        return self._finish(CausalLMOutputWithCrossAttentions, inputs, encoded, loss=loss, logits=scores)


_MASKED_LM = positional(hf.BertForMaskedLM.forward)
_PRE_TRAINING = positional(hf.BertForPreTraining.forward)
_CAUSAL_LM = positional(hf.BertLMHeadModel.forward)
