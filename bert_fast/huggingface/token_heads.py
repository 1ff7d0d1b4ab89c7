"""transformers' models with a head on every token: padding has no score, no label and no probability.

What a fused model returns for padding is 0, not the hidden state that transformers computes there, and means
nothing to a head. So heads leave padding out whichever path a call takes: on the packed one they never see it, on
transformers' own its labels are ignored and its scores replaced. The value of a call does not depend on the path.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_outputs import QuestionAnsweringModelOutput, TokenClassifierOutput

from bert_fast.checks import check_shape
from bert_fast.huggingface.family import Family
from bert_fast.huggingface.fused import Fused
from bert_fast.huggingface.models import (
    beside_tokens,
    by_name,
    chosen,
    encode_arguments,
    is_fused_model,
    kept_tokens,
    positional,
)
from bert_fast.huggingface.reasons import ARGUMENTS, has_noticing_hooks, reasons, setting
from bert_fast.models.heads import drop, predict_spans
from bert_fast.models.losses import IGNORE_INDEX, class_loss, pack_labels, span_labels
from bert_fast.models.packed import Encoded
from bert_fast.modules.call import Call
from bert_fast.modules.fusable import head_linear

_POSITIONS = ("start_positions", "end_positions")


class TokenModel(Fused):
    """What these models share: a forward that computes packed calls by `_packed`."""

    inner: Any  # the model without a head
    config: Any
    own_arguments: tuple[str, ...] = ("labels",)  # those of forward that `inner` does not have
    labels: tuple[str, ...] = ("labels",)  # of these, what a loss is made of

    @classmethod
    def forward_for(cls, original: Any, family: Family) -> Callable[..., Any]:
        """As transformers' own; padding is left out."""
        theirs = original.forward
        names = positional(theirs)

        @functools.wraps(theirs)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = None if self.is_replaced() else by_name(names, args, kwargs)
            if inputs is None:  # their code says what is wrong with the arguments
                return original.forward(self, *args, **kwargs)
            if self._is_packed(inputs):
                return self._packed(inputs)
            return self._theirs(functools.partial(theirs, self), beside_tokens(inputs))

        return forward

    def _packed(self, inputs: dict[str, Any]) -> Any:
        """A packed call, from its arguments by name."""
        raise NotImplementedError

    def _parts(self) -> tuple[Any, ...]:
        """Modules that the packed path does not call."""
        return ()

    def _is_packed(self, inputs: Mapping[str, Any]) -> bool:
        """Whether a call is computed here; else transformers' code runs it."""
        if not is_fused_model(self.inner) or any(map(has_noticing_hooks, (self.inner, *self._parts()))):
            return False
        tokens, labels = inputs.get("input_ids"), inputs.get("labels")
        shape = None if tokens is None else tokens.shape
        if tokens is None and inputs.get("inputs_embeds") is not None:
            shape = inputs["inputs_embeds"].shape[:-1]
        if labels is not None and labels.shape != shape:
            return False
        if any(inputs.get(name) is not None for name in self.labels) and not inputs.keys() <= ARGUMENTS | set(
            self.own_arguments
        ):
            return False  # the loss may read them
        return not reasons(self, {k: v for k, v in inputs.items() if k not in self.own_arguments})

    def _theirs(self, forward: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
        """A call by transformers' code: labels of padding do not count, and its scores are 0."""
        kept = kept_tokens(inputs)
        if kept is None:
            return forward(**inputs)
        labels = inputs.get("labels")
        if labels is not None and labels.shape == kept.shape:
            inputs = {**inputs, "labels": labels.masked_fill(~self._counts(kept), IGNORE_INDEX)}
        output = forward(**{**inputs, "return_dict": True})
        shown = self._shown(kept, inputs)
        for name in ("logits", "prediction_logits"):
            scores = output.get(name)
            if scores is not None and scores.shape[:2] == shown.shape:
                output[name] = scores.masked_fill(~shown.view(*shown.shape, *[1] * (scores.dim() - 2)), 0.0)
        return self._as_asked(output, inputs)

    def _shown(self, kept: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Of bool [B, S], the columns that a call returns scores of."""
        return kept

    def _counts(self, kept: Tensor) -> Tensor:
        """Whether the label of a column counts, bool [B, S]."""
        return kept

    def _finish(self, kind: Any, inputs: Mapping[str, Any], encoded: Encoded, **fields: Any) -> Any:
        """What forward returns on the packed path: an output class with these fields, or a tuple."""
        states = chosen(encoded.hidden_states, setting(inputs, self.config, "output_hidden_states"))
        return self._as_asked(kind(hidden_states=states, **fields), inputs)

    def _as_asked(self, output: Any, inputs: Mapping[str, Any]) -> Any:
        return output if setting(inputs, self.config, "return_dict") else output.to_tuple()


def output_class(model: Any) -> Any:
    """The class of what a model of pre-training returns."""
    original = model.fused_original
    return getattr(sys.modules[original.__module__], f"{original.__name__}Output")


class FusedForTokenClassification(TokenModel):
    """Labels of padding do not count, its scores are 0, and the loss where there is none is 0."""

    dropout: Any
    classifier: Any

    def _packed(self, inputs: dict[str, Any]) -> Any:
        encoded = self.inner.encode(**encode_arguments(self.inner, inputs))
        packing, labels = encoded.packing, inputs.get("labels")
        dropout_p = self.dropout.p if self.dropout.training else 0.0
        logits = head_linear(drop(encoded.hidden, dropout_p, packing.coords, encoded.seed), self.classifier)
        loss = None if labels is None else class_loss(logits, pack_labels(labels, packing))
        return self._finish(TokenClassifierOutput, inputs, encoded, loss=loss, logits=packing.unpack(logits))


class FusedDiscriminator(TokenModel):
    """Which tokens were replaced (Clark et al. 2020): padding has no score and does not count."""

    discriminator_predictions: Any
    in_bert = "BertForTokenClassification"

    def _parts(self) -> tuple[Any, ...]:
        return (self.discriminator_predictions,)

    def _packed(self, inputs: dict[str, Any]) -> Any:
        encoded = self.inner.encode(**encode_arguments(self.inner, inputs))
        packing, labels = encoded.packing, inputs.get("labels")
        logits = self.discriminator_predictions(encoded.hidden, call=Call(packing, encoded.seed))
        loss = None
        if labels is not None:
            if torch.compiler.is_compiling() or len(logits):
                loss = F.binary_cross_entropy_with_logits(logits, packing.pack(labels).float())
            else:
                loss = logits.sum()
        return self._finish(output_class(self), inputs, encoded, loss=loss, logits=packing.unpack(logits))


class FusedForQuestionAnswering(TokenModel):
    """Only tokens compete for an answer; positions on padding are outside of the window, the loss without any is 0.

    Scores of padding are the most negative number.
    """

    qa_outputs: Any
    _modules: dict[str, Any]
    own_arguments = labels = _POSITIONS

    def _packed(self, inputs: dict[str, Any]) -> Any:
        encoded = self.inner.encode(**encode_arguments(self.inner, inputs))
        positions = (inputs.get(name) for name in _POSITIONS)
        hidden, dropout = encoded.hidden, self._modules.get("dropout")  # which few families have here
        if dropout is not None:
            hidden = drop(hidden, dropout.p if dropout.training else 0.0, encoded.packing.coords, encoded.seed)
        loss, starts, ends = predict_spans(head_linear(hidden, self.qa_outputs), encoded.packing, *positions)
        return self._finish(
            QuestionAnsweringModelOutput, inputs, encoded, loss=loss, start_logits=starts, end_logits=ends
        )

    def _theirs(self, forward: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
        kept = kept_tokens(inputs)
        if kept is None:
            return forward(**inputs)
        output = forward(**{**inputs, **dict.fromkeys(_POSITIONS), "return_dict": True})
        check_shape("attention_mask", kept, output.start_logits.shape)
        lowest = torch.finfo(output.start_logits.dtype).min
        scores = [scores.masked_fill(~kept, lowest) for scores in (output.start_logits, output.end_logits)]
        loss = None
        if all(inputs.get(name) is not None for name in _POSITIONS):
            labels = [span_labels(inputs[name], kept, name) for name in _POSITIONS]
            loss = sum(map(F.cross_entropy, scores, labels)) / 2  # its ignore_index is ours
        output = QuestionAnsweringModelOutput(loss, *scores, output.hidden_states, output.attentions)
        return self._as_asked(output, inputs)
