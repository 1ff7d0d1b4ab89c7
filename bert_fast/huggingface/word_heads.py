"""transformers' models that predict words, on a fused BertModel: scores of kept tokens only, 0 on padding."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions, MaskedLMOutput
from transformers.models.bert import modeling_bert as hf

from bert_fast.huggingface.models import beside_tokens, encode_arguments, kept_tokens
from bert_fast.huggingface.token_heads import TokenModel, forward_of
from bert_fast.models.heads import predict_words
from bert_fast.models.losses import IGNORE_INDEX, class_loss
from bert_fast.models.packed import Encoded

__all__ = ["FusedBertForMaskedLM", "FusedBertForPreTraining", "FusedBertLMHeadModel"]


class _WordModel(TokenModel):
    """forward takes one argument more, output_logits: False leaves them out, and computes those of labelled tokens."""

    cls: Any
    own_arguments = ("labels", "next_sentence_label", "logits_to_keep", "output_logits")
    parts = ("cls",)

    def _predict(self, inputs: dict[str, Any], labels: Tensor | None, **how: Any) -> tuple[Any, Any, Encoded]:
        """(loss, scores, what the encoder made), see `predict_words`."""
        output_logits = inputs.get("output_logits")
        how["output_logits"] = True if output_logits is None else output_logits
        return predict_words(self.bert, self.cls.predictions, encode_arguments(inputs), labels, **how)

    def _is_packed(self, inputs: Mapping[str, Any]) -> bool:
        return _are_all(inputs.get("logits_to_keep", 0)) and super()._is_packed(inputs)

    def _theirs(self, forward: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
        return super()._theirs(forward, {name: value for name, value in inputs.items() if name != "output_logits"})


def _are_all(logits_to_keep: Any) -> bool:
    return isinstance(logits_to_keep, int) and logits_to_keep == 0


class FusedBertForMaskedLM(_WordModel, hf.BertForMaskedLM):
    """Labels of padding do not count, and the loss where there is none is 0."""

    @forward_of(hf.BertForMaskedLM)
    def forward(self, inputs: dict[str, Any]) -> Any:
        """As transformers' own, with scores of 0 on padding."""
        loss, scores, encoded = self._predict(inputs, inputs.get("labels"))
        return self._finish(MaskedLMOutput, inputs, encoded, loss=loss, logits=scores)


class FusedBertForPreTraining(_WordModel, hf.BertForPreTraining):
    """Labels of padding do not count, and the loss where there is none is 0."""

    @forward_of(hf.BertForPreTraining)
    def forward(self, inputs: dict[str, Any]) -> Any:
        """As transformers' own, with scores of 0 on padding."""
        labels, next_sentence_label = inputs.get("labels"), inputs.get("next_sentence_label")
        loss, scores, encoded = self._predict(inputs, None if next_sentence_label is None else labels, pooled=True)
        relationship = self.cls.seq_relationship(self.bert.pool(encoded))
        if loss is not None and next_sentence_label is not None:
            loss = loss + class_loss(relationship, next_sentence_label.flatten(), "next_sentence_label")
        return self._finish(
            hf.BertForPreTrainingOutput, inputs, encoded, loss=loss, prediction_logits=scores,
            seq_relationship_logits=relationship,
        )  # fmt: skip


class FusedBertLMHeadModel(_WordModel, hf.BertLMHeadModel):
    """The loss is transformers' own, `loss_function`, save for packed input; padding neither is nor has a next word."""

    def _is_packed(self, inputs: Mapping[str, Any]) -> bool:
        # Beside labels nothing is cached.
        return super()._is_packed(inputs if inputs.get("labels") is None else {**inputs, "use_cache": False})

    def _counts(self, kept: Tensor) -> Tensor:
        return kept & F.pad(kept, (1, 0))[:, :-1]

    @forward_of(hf.BertLMHeadModel)
    def forward(self, inputs: dict[str, Any]) -> Any:
        """As transformers' own, with scores of 0 on padding."""
        labels = inputs.get("labels")
        if inputs.get("cu_seqlens") is not None or inputs.get("output_logits") is False:
            loss, scores, encoded = self._predict(inputs, labels, next_words=True)
        else:
            _, scores, encoded = self._predict(inputs, None)
            loss = None
            if labels is not None:
                if (kept := kept_tokens(beside_tokens(inputs))) is not None:
                    labels = labels.masked_fill(~self._counts(kept), IGNORE_INDEX)
                count = {"num_items_in_batch": inputs["num_items_in_batch"]} if "num_items_in_batch" in inputs else {}
                loss = self.loss_function(logits=scores, labels=labels, vocab_size=self.config.vocab_size, **count)
        return self._finish(CausalLMOutputWithCrossAttentions, inputs, encoded, loss=loss, logits=scores)
