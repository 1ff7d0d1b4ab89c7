"""transformers' models that predict words, on a fused one without a head: scores of kept tokens only, 0 on padding."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions, MaskedLMOutput

from bert_fast.huggingface.containers import fused_name
from bert_fast.huggingface.fused import part
from bert_fast.huggingface.models import beside_tokens, encode_arguments, kept_tokens
from bert_fast.huggingface.token_heads import TokenModel, output_class
from bert_fast.models.heads import PackedPredictionHead, PackedPredictionTransform, predict_words
from bert_fast.models.losses import IGNORE_INDEX, class_loss
from bert_fast.models.packed import Encoded
from bert_fast.modules.fusable import head_linear


class _WordModel(TokenModel):
    """forward takes one argument more, output_logits: False leaves them out, and computes those of labelled tokens."""

    own_arguments = ("labels", "next_sentence_label", "logits_to_keep", "output_logits")

    def _predict(self, inputs: dict[str, Any], labels: Tensor | None, **how: Any) -> tuple[Any, Any, Encoded]:
        """(loss, scores, what the encoder made), see `predict_words`."""
        output_logits = inputs.get("output_logits")
        how["output_logits"] = True if output_logits is None else output_logits
        return predict_words(self.inner, self.head(), encode_arguments(self.inner, inputs), labels, **how)

    def head(self) -> Any:
        """What makes scores of hidden states: a `PackedPredictionHead`."""
        words = self.fused_family.words
        return part(self, words["head"]) if "head" in words else _Apart(self, words)

    def _parts(self) -> tuple[Any, ...]:
        return self.word_modules()

    def word_modules(self) -> tuple[Any, ...]:
        """Children that the packed path does not call."""
        return tuple(getattr(self, name) for name in self.fused_family.word_parts)

    def _is_packed(self, inputs: Mapping[str, Any]) -> bool:
        return _are_all(inputs.get("logits_to_keep", 0)) and super()._is_packed(inputs)

    def _theirs(self, forward: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
        return super()._theirs(forward, {name: value for name, value in inputs.items() if name != "output_logits"})


class _Apart(PackedPredictionHead, PackedPredictionTransform):
    """Scores of words by parts that lie apart in a model."""

    def __init__(self, model: Any, words: Mapping[str, str]) -> None:
        for ours, theirs in words.items():
            setattr(self, ours, part(model, theirs))
        if "transform" not in words:
            self.hidden_act = fused_name(self.activation)
            self.transform = self._transformed

    activation: Any

    def _transformed(self, x: Tensor, *, call: Any = None) -> Tensor:
        return PackedPredictionTransform.forward_packed(self, x, call=call)

    __call__ = PackedPredictionHead.forward_packed


def _are_all(logits_to_keep: Any) -> bool:
    return isinstance(logits_to_keep, int) and logits_to_keep == 0


class FusedForMaskedLM(_WordModel):
    """Labels of padding do not count, its scores are 0, and the loss where there is none is 0."""

    def _packed(self, inputs: dict[str, Any]) -> Any:
        loss, scores, encoded = self._predict(inputs, inputs.get("labels"))
        return self._finish(MaskedLMOutput, inputs, encoded, loss=loss, logits=scores)


class FusedForPreTraining(_WordModel):
    """BERT's two heads: labels of padding do not count, its scores are 0, and the loss where there is none is 0."""

    cls: Any

    def _packed(self, inputs: dict[str, Any]) -> Any:
        labels, next_sentence_label = inputs.get("labels"), inputs.get("next_sentence_label")
        loss, scores, encoded = self._predict(inputs, None if next_sentence_label is None else labels, pooled=True)
        relationship = head_linear(self.inner.pool(encoded), self.cls.seq_relationship)
        if loss is not None and next_sentence_label is not None:
            loss = loss + class_loss(relationship, next_sentence_label.flatten(), "next_sentence_label")
        return self._finish(
            output_class(self), inputs, encoded, loss=loss, prediction_logits=scores,
            seq_relationship_logits=relationship,
        )  # fmt: skip


class FusedForCausalLM(_WordModel):
    """The loss is transformers' own, `loss_function`, save for packed input; padding neither is nor has a next word."""

    loss_function: Any
    in_bert = "BertLMHeadModel"

    def _is_packed(self, inputs: Mapping[str, Any]) -> bool:
        # Beside labels nothing is cached.
        return super()._is_packed(inputs if inputs.get("labels") is None else {**inputs, "use_cache": False})

    def _counts(self, kept: Tensor) -> Tensor:
        return kept & F.pad(kept, (1, 0))[:, :-1]

    def _shown(self, kept: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        tokens = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
        kept, keep = kept[:, -tokens.shape[1] :], inputs.get("logits_to_keep", 0)  # beside a cache, a mask is of all
        return kept[:, -keep:] if isinstance(keep, int) else kept[:, keep]

    def _packed(self, inputs: dict[str, Any]) -> Any:
        labels = inputs.get("labels")
        if inputs.get("cu_seqlens") is not None or inputs.get("output_logits") is False:
            count = inputs.get("num_items_in_batch")
            loss, scores, encoded = self._predict(inputs, labels, next_words=True, num_items_in_batch=count)
        else:
            _, scores, encoded = self._predict(inputs, None)
            loss = None
            if labels is not None:
                if (kept := kept_tokens(beside_tokens(inputs))) is not None:
                    labels = labels.masked_fill(~self._counts(kept), IGNORE_INDEX)
                count = {"num_items_in_batch": inputs["num_items_in_batch"]} if "num_items_in_batch" in inputs else {}
                loss = self.loss_function(logits=scores, labels=labels, vocab_size=self.config.vocab_size, **count)
        return self._finish(CausalLMOutputWithCrossAttentions, inputs, encoded, loss=loss, logits=scores)
