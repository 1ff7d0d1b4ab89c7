"""BERT with a linear layer on the pooled first token, or on every token."""

import warnings

from torch import Tensor, nn

from bert_fast.checks import check_integer, check_shape, check_tensor
from bert_fast.models.bert import BertModel, BertPreTrainedModel
from bert_fast.models.config import BertConfig
from bert_fast.models.forward import Inputs, takes_model_arguments
from bert_fast.models.heads import drop, pooled_sequences
from bert_fast.models.losses import class_loss, pack_labels, text_loss
from bert_fast.models.outputs import (
    MultipleChoiceModelOutput,
    NextSentencePredictorOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from bert_fast.modules.fusable import head_linear


def _classifier_dropout(config: BertConfig) -> float:
    return config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout


class BertForSequenceClassification(BertPreTrainedModel):
    """BERT with a linear layer on the dropped-out pooled first token: classification or regression.

    Args:
        config (BertConfig): sizes, dropout probabilities, labels.

    Example:
        >>> config = BertConfig(
        ...     vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20
        ... )
        >>> model = bert_fast.BertForSequenceClassification(config)
        >>> model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([1])).logits.shape
        torch.Size([1, 2])
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = BertModel(config)
        self.dropout_p = _classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @takes_model_arguments
    def forward(
        self,
        inputs: Inputs,
        *,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> SequenceClassifierOutput | tuple:
        """Logits [B, num_labels] and a loss by config.problem_type; the arguments of `BertModel.forward` and:

        labels (Tensor [B] of class ids, [B] or [B, 1] of numbers for regression, [B, num_labels] of 0/1 for
            multi-label): without a problem_type, one label means regression, integers single-label, floats multi-label.
        loss_mask (Tensor [B], bool): the sequences whose label counts in the loss; None: all.
        num_items_in_batch: labels in all batches of a step, see `BertForMaskedLM.forward`; of multi-label
            classification, every 0 or 1 is one.
        """
        pooled, encoded = pooled_sequences(self.bert, inputs, self.dropout_p if self.training else 0.0)
        logits = head_linear(pooled, self.classifier)
        loss = None
        if labels is not None:
            loss = text_loss(logits, labels, self.config.problem_type, loss_mask, num_items_in_batch)
        return SequenceClassifierOutput(loss, logits, encoded.hidden_states, encoded.attentions)


class BertForNextSentencePrediction(BertPreTrainedModel):
    """BERT that tells whether the second part of a text follows the first.

    Args:
        config (BertConfig): sizes, dropout probabilities, labels.

    Example:
        >>> config = BertConfig(
        ...     vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20
        ... )
        >>> bert_fast.BertForNextSentencePrediction(config)(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 2])
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.cls = BertOnlyNSPHead(config)
        self.post_init()

    @takes_model_arguments
    def forward(
        self,
        inputs: Inputs,
        *,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        loss_mask: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> NextSentencePredictorOutput | tuple:
        """Logits [B, 2]; the arguments of `BertModel.forward` and:

        labels (Tensor [B], int): 0 where the second part follows the first, 1 where it is random.
        next_sentence_label: the old name of labels.
        loss_mask (Tensor [B], bool): the sequences whose label counts in the loss; None: all.
        num_items_in_batch: labels in all batches of a step, see `BertForMaskedLM.forward`.
        """
        if next_sentence_label is not None:
            if labels is not None:
                raise ValueError("next_sentence_label: expected None beside labels, whose old name it is, got both")
            warnings.warn("next_sentence_label is deprecated, use labels", FutureWarning, stacklevel=5)
            labels = next_sentence_label
        pooled, encoded = pooled_sequences(self.bert, inputs)
        logits = head_linear(pooled, self.cls.seq_relationship)
        loss = None
        if labels is not None:
            loss = text_loss(logits, labels, "single_label_classification", loss_mask, num_items_in_batch)
        return NextSentencePredictorOutput(loss, logits, encoded.hidden_states, encoded.attentions)


class BertOnlyNSPHead(nn.Module):
    """`cls` of BertForNextSentencePrediction."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.seq_relationship = nn.Linear(config.hidden_size, 2)


class BertForMultipleChoice(BertPreTrainedModel):
    """BERT that scores every choice by itself and takes the softmax over choices.

    Args:
        config (BertConfig): sizes, dropout probabilities, labels.

    Example:
        >>> config = BertConfig(
        ...     vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20
        ... )
        >>> bert_fast.BertForMultipleChoice(config)(torch.ones(1, 4, 3, dtype=torch.long)).logits.shape
        torch.Size([1, 4])
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.dropout_p = _classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    @takes_model_arguments
    def forward(
        self,
        inputs: Inputs,
        *,
        labels: Tensor | None = None,
        num_choices: int | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> MultipleChoiceModelOutput | tuple:
        """Logits [B, C] for C choices; the arguments of `BertModel.forward`, with [B, C, S] for [B, S], and:

        labels (Tensor [B], int): the right choice.
        num_choices (int): C, for packed input, whose sequences are the choices of the first question, then of the
            second, and so on.
        num_items_in_batch: questions in all batches of a step, see `BertForMaskedLM.forward`.
        """
        num_choices = _num_choices(inputs, num_choices)
        pooled, encoded = pooled_sequences(self.bert, _flat_choices(inputs), self.dropout_p if self.training else 0.0)
        logits = head_linear(pooled, self.classifier).view(-1, num_choices)
        loss = None if labels is None else class_loss(logits, labels, num_items_in_batch=num_items_in_batch)
        return MultipleChoiceModelOutput(loss, logits, encoded.hidden_states, encoded.attentions)


def _num_choices(inputs: Inputs, num_choices: int | None) -> int:
    if num_choices is not None:
        num_choices = check_integer("num_choices", num_choices)
    cu_seqlens = inputs.get("cu_seqlens")
    if cu_seqlens is not None:
        check_shape("cu_seqlens", cu_seqlens, ("B + 1",))
        num_sequences = cu_seqlens.shape[0] - 1
        if num_choices is None or num_choices < 1 or num_sequences % num_choices:
            raise ValueError(
                f"num_choices: expected a divisor of the number of sequences ({num_sequences}) beside cu_seqlens, "
                f"got {num_choices}"
            )
        return num_choices
    name, dims = ("inputs_embeds", "[B, C, S, H]") if inputs["input_ids"] is None else ("input_ids", "[B, C, S]")
    given = inputs[name]
    if given is None:
        return 1  # the encoder will say what is missing
    check_tensor(name, given)
    if given.dim() != dims.count(",") + 1:
        raise ValueError(f"{name}: expected choices {dims}, got shape {list(given.shape)}")
    if given.shape[1] == 0:
        raise ValueError(f"{name}: expected at least one choice, got shape {list(given.shape)}")
    found = given.shape[1]
    if num_choices not in (None, found):
        raise ValueError(f"num_choices: expected {found}, as {name} has, or None, got {num_choices}")
    return found


def _flat_choices(inputs: Inputs) -> Inputs:
    """[B, C, S, ...] as [B * C, S, ...]; packed input as it is."""
    names = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids")
    if inputs.get("cu_seqlens") is not None:
        return inputs
    flat = {name: value.flatten(0, 1) for name in names if (value := _of_choices(name, inputs[name])) is not None}
    return inputs | flat


def _of_choices(name: str, value: Tensor | None) -> Tensor | None:
    """The argument where it has a dimension of choices."""
    if value is None:
        return None
    check_tensor(name, value)
    return value if value.dim() > 2 else None


class BertForTokenClassification(BertPreTrainedModel):
    """BERT with a linear layer on every dropped-out token.

    Args:
        config (BertConfig): sizes, dropout probabilities, labels.

    Example:
        >>> config = BertConfig(
        ...     vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20
        ... )
        >>> bert_fast.BertForTokenClassification(config)(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 2])
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = BertModel(config, add_pooling_layer=False)
        self.dropout_p = _classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @takes_model_arguments
    def forward(
        self, inputs: Inputs, *, labels: Tensor | None = None, num_items_in_batch: Tensor | float | None = None
    ) -> TokenClassifierOutput | tuple:
        """Logits [B, S, num_labels], 0 on padding; the arguments of `BertModel.forward` and:

        labels (Tensor like input_ids, int): the class of every token, -100 where it does not count.
        num_items_in_batch: labels in all batches of a step, see `BertForMaskedLM.forward`.
        """
        encoded = self.bert.encode(**inputs)
        packing = encoded.packing
        targets = None if labels is None else pack_labels(labels, packing)
        dropout_p = self.dropout_p if self.training else 0.0
        logits = head_linear(drop(encoded.hidden, dropout_p, packing.coords, encoded.seed), self.classifier)
        loss = None if targets is None else class_loss(logits, targets, num_items_in_batch=num_items_in_batch)
        return TokenClassifierOutput(loss, packing.unpack(logits), encoded.hidden_states, encoded.attentions)
