"""BERT with a task on top: masked LM, pre-training, sequence classification.

Heads work on the packed hidden states and only on the rows they need: the masked-LM head on the rows that carry a label
(15 % in pre-training), the pooler on first tokens.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bert_fast.checks import check_dtype, check_ids, check_shape, check_tensor
from bert_fast.models.argument_checks import refuse_decoder_arguments
from bert_fast.models.base import BertPreTrainedModel
from bert_fast.models.bert import BertModel, Encoded
from bert_fast.models.config import BertConfig
from bert_fast.models.outputs import BertForPreTrainingOutput, MaskedLMOutput, SequenceClassifierOutput
from bert_fast.modules.activated_linear import activated_linear
from bert_fast.modules.layer_norm import LayerNorm
from bert_fast.modules.plain_linear import is_plain
from bert_fast.ops.cross_entropy import check_labels, cross_entropy
from bert_fast.ops.dropout import DropoutSite, dropout, dropout_site
from bert_fast.ops.linear import linear
from bert_fast.ops.linear_cross_entropy import linear_cross_entropy

__all__ = ["BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification"]

IGNORE_INDEX = -100


class BertPredictionHeadTransform(nn.Module):
    """LN(act(dense(x))), before the vocabulary projection."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.hidden_act = config.hidden_act

    def forward(self, x: Tensor) -> Tensor:
        """[M, H] to [M, H]."""
        return self.LayerNorm(activated_linear(x, self.dense, self.hidden_act))


class BertLMPredictionHead(nn.Module):
    """Hidden states to vocabulary logits or to their loss.

    The decoder's bias is one parameter under Hugging Face's two names.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = self.decoder.bias

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """[M, H] to scores [M, V]; with labels [M] to their mean cross entropy, without the scores of all rows."""
        x, decoder = self.transform(x), self.decoder
        if labels is not None and is_plain(decoder):
            return linear_cross_entropy(x, decoder.weight, decoder.bias, labels, ignore_index=IGNORE_INDEX)
        scores = linear(x, decoder.weight, decoder.bias) if is_plain(decoder) else decoder(x)
        return scores if labels is None else cross_entropy(scores, labels, ignore_index=IGNORE_INDEX)


class BertOnlyMLMHead(nn.Module):
    """`cls` of BertForMaskedLM."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)


class BertPreTrainingHeads(BertOnlyMLMHead):
    """`cls` of BertForPreTraining: masked LM and next sentence."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)


class _MaskedLMModel(BertPreTrainedModel):
    """What the two models with a masked-LM head share."""

    bert: BertModel
    cls: BertOnlyMLMHead

    def tie_weights(self) -> None:
        """Makes the decoder share the word embedding table, unless config.tie_word_embeddings is False."""
        if self.config.tie_word_embeddings:
            self.cls.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight
        self.cls.predictions.bias = self.cls.predictions.decoder.bias

    def get_output_embeddings(self) -> nn.Linear:
        """The vocabulary projection."""
        return self.cls.predictions.decoder

    def masked_lm(
        self,
        encoded: Encoded,
        labels: Tensor | None,
        masked_lm_positions: Tensor | None,
        output_logits: bool | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """(loss or None, logits or None) from the encoder's packed hidden states."""
        hidden, packing = encoded.hidden, encoded.packing
        if masked_lm_positions is not None:
            check_shape("masked_lm_positions", masked_lm_positions, ("M",))
            check_dtype("masked_lm_positions", masked_lm_positions, (torch.int64, torch.int32))
            if labels is not None:
                check_shape("labels", labels, (len(masked_lm_positions),))
            tokens = packing.unpack(hidden).flatten(0, -2)
            check_ids("masked_lm_positions", masked_lm_positions, len(tokens))
            hidden = tokens.index_select(0, masked_lm_positions.long())
        elif labels is not None:
            check_shape("labels", labels, packing.padded_shape or (hidden.shape[0],))
            labels = packing.pack(labels)
        if output_logits is None:
            output_logits = labels is None or not self.training
        if output_logits:
            logits = self.cls.predictions(hidden)  # [T, V] or [M, V]
            loss = None if labels is None else _cross_entropy(logits, labels)
            return loss, logits if masked_lm_positions is not None else packing.unpack(logits)
        if labels is None:
            return None, None
        if masked_lm_positions is None:
            rows = (labels != IGNORE_INDEX).nonzero().squeeze(1)
            hidden, labels = hidden.index_select(0, rows), labels[rows]
        return self.cls.predictions(hidden, labels), None


class BertForMaskedLM(_MaskedLMModel):
    """BERT with the masked-LM head."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.cls = BertOnlyMLMHead(config)
        self.init_weights()
        self.tie_weights()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        encoder_hidden_states: None = None,
        encoder_attention_mask: None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        masked_lm_positions: Tensor | None = None,
        output_logits: bool | None = None,
        dropout_seed: Tensor | None = None,
    ) -> MaskedLMOutput | tuple:
        """Masked-LM loss and logits; the arguments of `BertModel.forward` and:

        labels (Tensor like input_ids, int64): token to predict, -100 elsewhere; mean cross-entropy over the labelled
            tokens, 0 where there is none; finding them in training costs one more device sync. With
            masked_lm_positions: Tensor [M], and no sync.
        masked_lm_positions (Tensor [M], int64): indices into the flattened tokens ([B * S] or [T]); only these rows go
            through the head, and logits are [M, V].
        output_logits: return logits, of all tokens or of masked_lm_positions. Default: yes, except in training with
            labels, where logits are None: only labelled rows go through the head, and the loss is taken from a chunk of
            their scores at a time (`ops.linear_cross_entropy`).
        """
        refuse_decoder_arguments(
            encoder_hidden_states=encoder_hidden_states, encoder_attention_mask=encoder_attention_mask
        )
        encoded = self.bert.encode(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids,
            position_ids=position_ids, head_mask=head_mask, inputs_embeds=inputs_embeds,
            output_attentions=output_attentions, output_hidden_states=output_hidden_states, cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen, dropout_seed=dropout_seed,
        )  # fmt: skip
        loss, logits = self.masked_lm(encoded, labels, masked_lm_positions, output_logits)
        output = MaskedLMOutput(loss, logits, encoded.hidden_states, encoded.attentions)
        return self.finish(output, return_dict)


class BertForPreTraining(_MaskedLMModel):
    """BERT with the masked-LM and the next-sentence head, as pre-trained."""

    cls: BertPreTrainingHeads

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.cls = BertPreTrainingHeads(config)
        self.init_weights()
        self.tie_weights()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        masked_lm_positions: Tensor | None = None,
        output_logits: bool | None = None,
        dropout_seed: Tensor | None = None,
    ) -> BertForPreTrainingOutput | tuple:
        """Masked-LM plus next-sentence loss; the arguments of `BertForMaskedLM.forward` and:

        next_sentence_label (Tensor [B], int64): 0 where the second part follows the first, 1 where it is random. As in
            Hugging Face, `loss` needs both kinds of labels.
        """
        encoded = self.bert.encode(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids,
            position_ids=position_ids, head_mask=head_mask, inputs_embeds=inputs_embeds,
            output_attentions=output_attentions, output_hidden_states=output_hidden_states, cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen, dropout_seed=dropout_seed,
        )  # fmt: skip
        relationship = self.cls.seq_relationship(self.bert.pool(encoded))
        loss, logits = self.masked_lm(encoded, labels, masked_lm_positions, output_logits)
        if loss is not None and next_sentence_label is not None:
            loss = loss + _cross_entropy(relationship, next_sentence_label.flatten(), "next_sentence_label")
        else:
            loss = None
        output = BertForPreTrainingOutput(loss, logits, relationship, encoded.hidden_states, encoded.attentions)
        return self.finish(output, return_dict)


class BertForSequenceClassification(BertPreTrainedModel):
    """BERT with a linear layer on the dropped-out pooled first token: classification or regression."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = BertModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        given = config.classifier_dropout
        self.dropout_p = config.hidden_dropout_prob if given is None else given
        self.init_weights()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        dropout_seed: Tensor | None = None,
    ) -> SequenceClassifierOutput | tuple:
        """Logits [B, num_labels] and a loss by config.problem_type; the arguments of `BertModel.forward` and:

        labels (Tensor [B] of class ids, [B] or [B, 1] of numbers for regression, [B, num_labels] of 0/1 for
            multi-label): without a problem_type, one label means regression, integers single-label, floats multi-label.
        """
        encoded = self.bert.encode(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids,
            position_ids=position_ids, head_mask=head_mask, inputs_embeds=inputs_embeds,
            output_attentions=output_attentions, output_hidden_states=output_hidden_states, cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen, dropout_seed=dropout_seed,
        )  # fmt: skip
        pooled = self.bert.pool(encoded)  # [B, H]
        if self.training:
            rows = torch.arange(len(pooled), dtype=torch.int32, device=pooled.device)
            coords = torch.stack((rows, torch.zeros_like(rows)), dim=1)
            pooled = dropout(
                pooled, self.dropout_p, seed=encoded.seed, coords=coords, site=dropout_site(DropoutSite.HEAD)
            )
        logits = self.classifier(pooled)
        loss = None if labels is None else self._loss(logits, labels)
        output = SequenceClassifierOutput(loss, logits, encoded.hidden_states, encoded.attentions)
        return self.finish(output, return_dict)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        check_tensor("labels", labels)
        problem = self.config.problem_type
        if problem is None:
            integers = labels.dtype in (torch.int64, torch.int32)
            single = "single_label_classification" if integers else "multi_label_classification"
            problem = "regression" if self.num_labels == 1 else single
        if problem == "regression":
            if labels.shape not in (logits.shape, logits.squeeze(1).shape):  # mse_loss would broadcast
                raise ValueError(f"labels: expected shape {list(logits.shape)}, got {list(labels.shape)}")
            return F.mse_loss(logits, labels.view_as(logits).to(logits.dtype))
        if problem == "single_label_classification":
            return _cross_entropy(logits, labels.flatten())
        check_shape("labels", labels, tuple(logits.shape))
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))


def _cross_entropy(logits: Tensor, labels: Tensor, name: str = "labels") -> Tensor:
    """Mean cross-entropy, at least in fp32, over rows whose label is not -100; 0 with zero gradients where none is."""
    # Here too: under the name that the caller knows.
    check_labels(name, labels, "logits", logits, logits.shape[1], IGNORE_INDEX)
    return cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)
