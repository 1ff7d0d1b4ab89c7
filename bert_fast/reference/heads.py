"""BERT with a task on top: the nine models of the paper and of Hugging Face, as textbook modules.

    masked LM, pre-training, decoder    LayerNorm(act(x W + b)) E^T + c, E the word embeddings
    next sentence, pre-training         pooled W + b
    sequence classes, multiple choice   dropout(pooled) W + b
    token classes                       dropout(x) W + b
    question answering                  x W + b: start and end

Losses are means over what is labelled, in fp32 (fp64 for fp64). Rows of padding have no logits (exactly 0) and no loss,
whatever their label; start and end scores, which compete over positions, are the most negative number there, so that
no probability goes to padding. Where nothing is labelled a loss is 0. (Hugging Face gives padding the scores of
undefined hidden states, lets labels on padding count, and has NaN for no labels.)

Source: Devlin et al. 2019 (arXiv:1810.04805), sections 3.1 and 4.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_fast.reference.activations import activation_fwd
from bert_fast.reference.cross_entropy import CrossEntropy, cross_entropy_fwd
from bert_fast.reference.dropout import DropoutSite, dropout_fwd, dropout_site
from bert_fast.reference.layer_norm import LayerNorm, layer_norm_fwd
from bert_fast.reference.layers import initialize
from bert_fast.reference.linear import Linear, linear_fwd
from bert_fast.reference.model import ReferenceBertModel, ReferenceModelOutput
from bert_fast.reference.precision import wide

IGNORE_INDEX = -100


@dataclass(frozen=True)
class ReferenceHeadOutput:
    """loss (Tensor [] or None without labels), the head's scores under Hugging Face's names, and the model's output."""

    loss: Tensor | None
    model: ReferenceModelOutput
    logits: Tensor | None = None
    prediction_logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None
    start_logits: Tensor | None = None
    end_logits: Tensor | None = None


def _linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """x [..., K] W^T + b."""
    return linear_fwd(Linear(x.flatten(0, -2), layer.weight, layer.bias)).unflatten(0, x.shape[:-1])


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over labelled rows of logits [..., C], labels [...]."""
    return cross_entropy_fwd(CrossEntropy(logits.flatten(0, -2), labels.flatten(), IGNORE_INDEX))[0]


def _without_padding(labels: Tensor, output: ReferenceModelOutput) -> Tensor:
    return labels.masked_fill(~output.packing.keep, IGNORE_INDEX)


def _drop(x: Tensor, dropout_p: float, output: ReferenceModelOutput, coords: Tensor) -> Tensor:
    """Dropout of x [N, H] before a classifier."""
    p = 0.0 if output.seed is None else dropout_p
    return dropout_fwd(x, p, output.seed, coords, dropout_site(DropoutSite.HEAD))


def _drop_pooled(output: ReferenceModelOutput, dropout_p: float) -> Tensor:
    """Dropout of pooled rows, named (row, 0)."""
    assert output.pooler_output is not None
    rows = torch.arange(len(output.pooler_output), device=output.pooler_output.device)
    coords = torch.stack([rows, torch.zeros_like(rows)], dim=1).int()
    return _drop(output.pooler_output, dropout_p, output, coords)


def _classifier_dropout(config: Any) -> float:
    own = getattr(config, "classifier_dropout", None)
    return config.hidden_dropout_prob if own is None else own


class PredictionTransform(nn.Module):
    """LayerNorm(act(x W + b))."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.hidden_act = config.hidden_act

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] to [N, H]."""
        activated = activation_fwd(_linear(x, self.dense), self.hidden_act)
        norm = self.LayerNorm
        return layer_norm_fwd(LayerNorm(activated, norm.weight, norm.bias, norm.eps))[0]


class LMPredictionHead(nn.Module):
    """Scores of all words. The decoder's bias is known by two names in state_dicts, as in Hugging Face's."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.transform = PredictionTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = self.decoder.bias

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] to [N, V]."""
        return _linear(self.transform(x), self.decoder)


class Heads(nn.Module):
    """`cls`: the masked-LM head, the next-sentence head, or both."""

    predictions: LMPredictionHead
    seq_relationship: nn.Linear

    def __init__(self, config: Any, predictions: bool = False, seq_relationship: bool = False) -> None:
        super().__init__()
        if predictions:
            self.predictions = LMPredictionHead(config)
        if seq_relationship:
            self.seq_relationship = nn.Linear(config.hidden_size, 2)


class _HeadModel(nn.Module):
    """The model and its configuration; subclasses add the head and call `_finish`."""

    cls: Heads

    def __init__(self, config: Any, add_pooling_layer: bool) -> None:
        super().__init__()
        self.config = config
        self.bert = ReferenceBertModel(config, add_pooling_layer)

    def _finish(self) -> None:
        """Initial values, and the word table shared with the decoder."""
        initialize(self, self.config)
        predicts = hasattr(self, "cls") and hasattr(self.cls, "predictions")
        if predicts and getattr(self.config, "tie_word_embeddings", True):
            self.cls.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight

    def _predictions(self, output: ReferenceModelOutput, positions: Tensor | None = None) -> Tensor:
        """Scores of words [B, S, V], 0 on padding; or [M, V] of the given tokens, counted over [B * S]."""
        if positions is not None:
            rows: Tensor = self.cls.predictions(output.last_hidden_state.flatten(0, 1)[positions])
            return rows
        packing = output.packing
        return packing.pad(self.cls.predictions(packing.pack(output.last_hidden_state)))


class ReferenceBertForMaskedLM(_HeadModel):
    """Words from their surroundings."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, add_pooling_layer=False)
        self.cls = Heads(config, predictions=True)
        self._finish()

    def forward(
        self, *args: Any, labels: Tensor | None = None, masked_lm_positions: Tensor | None = None, **kwargs: Any
    ) -> ReferenceHeadOutput:
        """The arguments of `ReferenceBertModel.forward` and labels.

        labels (Tensor [B, S], int): a word id or -100; or, with masked_lm_positions (Tensor [M], int: tokens counted
            over the flattened [B * S]), [M].
        """
        output = self.bert(*args, **kwargs)
        logits = self._predictions(output, masked_lm_positions)
        loss = None
        if labels is not None:
            labels = labels if masked_lm_positions is not None else _without_padding(labels, output)
            loss = _cross_entropy(logits, labels)
        return ReferenceHeadOutput(loss, output, logits=logits)


class ReferenceBertForPreTraining(_HeadModel):
    """Masked words, and whether the second sentence follows the first."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, add_pooling_layer=True)
        self.cls = Heads(config, predictions=True, seq_relationship=True)
        self._finish()

    def forward(
        self,
        *args: Any,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        masked_lm_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> ReferenceHeadOutput:
        """The arguments of `ReferenceBertForMaskedLM.forward` and next_sentence_label (Tensor [B], int; 0 = follows).

        loss is the sum of both losses and needs both labels.
        """
        output = self.bert(*args, **kwargs)
        logits = self._predictions(output, masked_lm_positions)
        relationship = _linear(output.pooler_output, self.cls.seq_relationship)
        loss = None
        if labels is not None and next_sentence_label is not None:
            labels = labels if masked_lm_positions is not None else _without_padding(labels, output)
            loss = _cross_entropy(logits, labels) + _cross_entropy(relationship, next_sentence_label)
        return ReferenceHeadOutput(loss, output, prediction_logits=logits, seq_relationship_logits=relationship)


class ReferenceBertLMHeadModel(_HeadModel):
    """The next word, by a decoder."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, add_pooling_layer=False)
        self.cls = Heads(config, predictions=True)
        self._finish()

    def forward(
        self, *args: Any, labels: Tensor | None = None, use_cache: bool | None = None, **kwargs: Any
    ) -> ReferenceHeadOutput:
        """The arguments of `ReferenceBertModel.forward` and labels (Tensor [B, S], int): column s predicts s + 1's."""
        output = self.bert(*args, use_cache=False if labels is not None else use_cache, **kwargs)
        logits = self._predictions(output)
        loss = None
        if labels is not None:
            # Neither does padding predict anything, nor is it to be predicted.
            following = F.pad(_without_padding(labels, output), (0, 1), value=IGNORE_INDEX)[:, 1:]
            loss = _cross_entropy(logits, _without_padding(following, output))
        return ReferenceHeadOutput(loss, output, logits=logits)


class ReferenceBertForNextSentencePrediction(_HeadModel):
    """Whether the second sentence follows the first."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, add_pooling_layer=True)
        self.cls = Heads(config, seq_relationship=True)
        self._finish()

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> ReferenceHeadOutput:
        """The arguments of `ReferenceBertModel.forward` and labels (Tensor [B], int): 0 = follows, 1 = random."""
        output = self.bert(*args, **kwargs)
        logits = _linear(output.pooler_output, self.cls.seq_relationship)
        return ReferenceHeadOutput(None if labels is None else _cross_entropy(logits, labels), output, logits=logits)


class ReferenceBertForSequenceClassification(_HeadModel):
    """One or several classes, or numbers, for a text."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, add_pooling_layer=True)
        self.dropout_p = _classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self._finish()

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> ReferenceHeadOutput:
        """The arguments of `ReferenceBertModel.forward` and labels, whose meaning config.problem_type decides.

        labels: single_label_classification: Tensor [B], int. regression: [B] or [B, num_labels].
            multi_label_classification: [B, num_labels] of 0 and 1. Without a problem_type: one label means regression,
            integers a single label, anything else several.
        """
        output = self.bert(*args, **kwargs)
        logits = _linear(_drop_pooled(output, self.dropout_p), self.classifier)
        return ReferenceHeadOutput(None if labels is None else self._loss(logits, labels), output, logits=logits)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        problem = getattr(self.config, "problem_type", None)
        if problem is None:
            classes = "multi_label" if labels.is_floating_point() else "single_label"
            problem = "regression" if logits.shape[1] == 1 else f"{classes}_classification"
        if problem == "single_label_classification":
            return _cross_entropy(logits, labels)
        z, target = wide(logits), labels.to(wide(logits).dtype).reshape_as(logits)
        if problem == "regression":
            return (z - target).square().mean()
        # binary cross entropy: -t log sigmoid(z) - (1 - t) log sigmoid(-z)
        return -(target * F.logsigmoid(z) + (1.0 - target) * F.logsigmoid(-z)).mean()


class ReferenceBertForMultipleChoice(_HeadModel):
    """The best of several continuations."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, add_pooling_layer=True)
        self.dropout_p = _classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self._finish()

    def forward(self, labels: Tensor | None = None, **kwargs: Any) -> ReferenceHeadOutput:
        """As `ReferenceBertModel.forward`, by keyword, every batch argument with a dimension of choices: [B, C, ...].

        labels (Tensor [B], int): the right choice. The choices are rows of one batch of B * C, also to dropout.
        """
        num_choices = kwargs["inputs_embeds" if kwargs.get("input_ids") is None else "input_ids"].shape[1]
        batched = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids")
        flat = {k: v.flatten(0, 1) if k in batched and v is not None else v for k, v in kwargs.items()}
        output = self.bert(**flat)
        logits = _linear(_drop_pooled(output, self.dropout_p), self.classifier).view(-1, num_choices)
        return ReferenceHeadOutput(None if labels is None else _cross_entropy(logits, labels), output, logits=logits)


class ReferenceBertForTokenClassification(_HeadModel):
    """A class for every token."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, add_pooling_layer=False)
        self.dropout_p = _classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self._finish()

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> ReferenceHeadOutput:
        """The arguments of `ReferenceBertModel.forward` and labels (Tensor [B, S], int): a class or -100."""
        output = self.bert(*args, **kwargs)
        packing = output.packing
        x = _drop(packing.pack(output.last_hidden_state), self.dropout_p, output, packing.coords)
        logits = packing.pad(_linear(x, self.classifier))
        loss = None if labels is None else _cross_entropy(logits, _without_padding(labels, output))
        return ReferenceHeadOutput(loss, output, logits=logits)


class ReferenceBertForQuestionAnswering(_HeadModel):
    """Where an answer starts and ends."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self._finish()

    def forward(
        self, *args: Any, start_positions: Tensor | None = None, end_positions: Tensor | None = None, **kwargs: Any
    ) -> ReferenceHeadOutput:
        """The arguments of `ReferenceBertModel.forward` and both positions (Tensors [B] or [B, 1], int).

        Positions of padding, and those at or beyond S, mean "not in this window" and count for nothing; negative ones
        mean 0.
        """
        output = self.bert(*args, **kwargs)
        scores = _linear(output.last_hidden_state, self.qa_outputs)
        keep = output.packing.keep
        scores = scores.masked_fill(~keep[:, :, None], torch.finfo(scores.dtype).min)
        start_logits, end_logits = scores.unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            losses, length = [], keep.shape[1]
            counts = torch.cat((keep, keep.new_zeros((len(keep), 1))), dim=1)  # position S counts for nothing
            for logits, positions in ((start_logits, start_positions), (end_logits, end_positions)):
                labels = positions.flatten().clamp(0, length)
                labels = torch.where(counts.gather(1, labels[:, None]).squeeze(1), labels, length)
                losses.append(cross_entropy_fwd(CrossEntropy(logits, labels, ignore_index=length))[0])
            loss = (losses[0] + losses[1]) / 2
        return ReferenceHeadOutput(loss, output, start_logits=start_logits, end_logits=end_logits)
