"""BERT that predicts words: masked ones, as it was pre-trained, or the next one, as a decoder."""

import warnings

import torch
from torch import Tensor, nn

from bert_fast.checks import check_dtype, check_ids, check_integer, check_same_device, check_shape
from bert_fast.models.argument_checks import check_layer
from bert_fast.models.bert import BertModel, BertPreTrainedModel
from bert_fast.models.config import BertConfig
from bert_fast.models.forward import Inputs, takes_model_arguments
from bert_fast.models.heads import PackedPredictionHead, PackedPredictionTransform, predict_words
from bert_fast.models.initial_values import undrawn
from bert_fast.models.losses import class_loss
from bert_fast.models.outputs import BertForPreTrainingOutput, CausalLMOutputWithCrossAttentions, MaskedLMOutput
from bert_fast.modules.fusable import head_linear
from bert_fast.modules.layer_norm import LayerNorm


class BertPredictionHeadTransform(PackedPredictionTransform, nn.Module):
    """LN(act(dense(x))); parameters named as in Hugging Face's class."""

    forward = PackedPredictionTransform.forward_packed

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.hidden_act = config.hidden_act


class BertLMPredictionHead(PackedPredictionHead, nn.Module):
    """Hidden states to vocabulary logits or to their loss.

    The decoder's bias is one parameter under Hugging Face's two names.
    """

    forward = PackedPredictionHead.forward_packed

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = self.decoder.bias


class BertOnlyMLMHead(nn.Module):
    """`cls` of BertForMaskedLM and BertLMHeadModel."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)


class BertPreTrainingHeads(BertOnlyMLMHead):
    """`cls` of BertForPreTraining: masked LM and next sentence."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)


class _WordModel(BertPreTrainedModel):
    """What the three models with a prediction head share: the table of words, used twice."""

    bert: BertModel
    cls: BertOnlyMLMHead

    def get_output_embeddings(self) -> nn.Linear:
        """The vocabulary projection."""
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replaces the vocabulary projection; `tie_weights` would give it the word table again."""
        check_layer("new_embeddings", new_embeddings, self.config.hidden_size)
        self.cls.predictions.decoder = new_embeddings
        self.cls.predictions.bias = new_embeddings.bias

    def tie_weights(self) -> None:
        """Makes the decoder share the word embedding table, unless config.tie_word_embeddings is False.

        A bias of another length is cut, or continued with zeros.
        """
        predictions = self.cls.predictions
        decoder = predictions.decoder
        if self.config.tie_word_embeddings:
            words = self.bert.embeddings.word_embeddings
            if not isinstance(getattr(words, "weight", None), nn.Parameter):
                raise ValueError(
                    f"config.tie_word_embeddings: expected False for words from a {type(words).__name__}, got True"
                )
            decoder.weight = words.weight
            decoder.out_features = len(decoder.weight)
            if decoder.bias is not None and (more := decoder.out_features - len(decoder.bias)):
                decoder.bias.data = nn.functional.pad(decoder.bias.data, (0, more))
        predictions.bias = decoder.bias


class BertForMaskedLM(_WordModel):
    """BERT with the masked-LM head.

    Args:
        config (BertConfig): sizes, dropout probabilities, labels.

    Example:
        >>> config = BertConfig(
        ...     vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20
        ... )
        >>> model, ids = bert_fast.BertForMaskedLM(config), torch.tensor([[1, 2, 3]])
        >>> model(ids, labels=ids).loss.shape
        torch.Size([])
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        with undrawn(self):
            self.cls = BertOnlyMLMHead(config)
        self.post_init()

    @takes_model_arguments
    def forward(
        self,
        inputs: Inputs,
        *,
        labels: Tensor | None = None,
        masked_lm_positions: Tensor | None = None,
        output_logits: bool | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> MaskedLMOutput | tuple:
        """Masked-LM loss and logits; the arguments of `BertModel.forward` and:

        labels (Tensor like input_ids, int): token to predict, -100 elsewhere; mean cross-entropy over the labelled
            tokens, 0 where there is none; finding them in training costs one more device sync. With
            masked_lm_positions: Tensor [M], and no sync.
        masked_lm_positions (Tensor [M], int): indices into the flattened tokens ([B * S] or [T]); only these rows go
            through the head, and logits are [M, V].
        output_logits: return logits, of all tokens or of masked_lm_positions. Default: yes, except in training with
            labels, where logits are None: only labelled rows go through the head and the last layer, and the loss is
            taken from a chunk of their scores at a time (`ops.linear_cross_entropy`).
        num_items_in_batch (number, or Tensor with one element): labels in all batches of a step. The losses of the
            batches then add up to the mean over all these labels: sum / num_items_in_batch, as of transformers' loss
            functions, whose Trainer passes it. Default: the mean over the labels of this batch.
        """
        loss, logits, encoded = predict_words(
            self.bert, self.cls.predictions, inputs, labels, positions=masked_lm_positions,
            output_logits=output_logits, num_items_in_batch=num_items_in_batch,
        )  # fmt: skip
        return MaskedLMOutput(loss, logits, encoded.hidden_states, encoded.attentions)


class BertForPreTraining(_WordModel):
    """BERT with the masked-LM and the next-sentence head, as pre-trained.

    Args:
        config (BertConfig): sizes, dropout probabilities, labels.

    Example:
        >>> config = BertConfig(
        ...     vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20
        ... )
        >>> output = bert_fast.BertForPreTraining(config).eval()(torch.tensor([[1, 2, 3]]))
        >>> output.prediction_logits.shape, output.seq_relationship_logits.shape
        (torch.Size([1, 3, 30]), torch.Size([1, 2]))
    """

    cls: BertPreTrainingHeads

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        with undrawn(self):
            self.cls = BertPreTrainingHeads(config)
        self.post_init()

    @takes_model_arguments
    def forward(
        self,
        inputs: Inputs,
        *,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        masked_lm_positions: Tensor | None = None,
        output_logits: bool | None = None,
    ) -> BertForPreTrainingOutput | tuple:
        """Masked-LM plus next-sentence loss; the arguments of `BertForMaskedLM.forward` and:

        next_sentence_label (Tensor [B], int): 0 where the second part follows the first, 1 where it is random. As in
            Hugging Face, `loss` needs both kinds of labels.
        """
        loss, logits, encoded = predict_words(
            self.bert, self.cls.predictions, inputs, labels, positions=masked_lm_positions,
            output_logits=output_logits, pooled=True,
        )  # fmt: skip
        relationship = head_linear(self.bert.pool(encoded), self.cls.seq_relationship)
        if loss is not None and next_sentence_label is not None:
            loss = loss + class_loss(relationship, next_sentence_label, "next_sentence_label")
        else:
            loss = None
        return BertForPreTrainingOutput(loss, logits, relationship, encoded.hidden_states, encoded.attentions)


class BertLMHeadModel(_WordModel):
    """BERT as a left-to-right language model: config.is_decoder makes every token see only those before it.

    Args:
        config (BertConfig): sizes, dropout probabilities, labels.

    Example:
        >>> config = BertConfig(
        ...     vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20,
        ...     is_decoder=True,
        ... )
        >>> bert_fast.BertLMHeadModel(config)(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 30])
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        if not config.is_decoder:
            warnings.warn("BertLMHeadModel: without config.is_decoder every token sees the next one", stacklevel=2)
        self.bert = BertModel(config, add_pooling_layer=False)
        with undrawn(self):
            self.cls = BertOnlyMLMHead(config)
        self.post_init()

    @takes_model_arguments
    def forward(
        self,
        inputs: Inputs,
        *,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_logits: bool | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> CausalLMOutputWithCrossAttentions | tuple:
        """Next-word loss and logits; the arguments of `BertModel.forward` and:

        labels (Tensor like input_ids, int): the tokens themselves, -100 where they are not to be predicted; the scores
            of a column are held against the label of the next. Nothing is cached then.
        logits_to_keep: of padded input only the logits of this many last columns, or of the columns named (Tensor [K],
            int64): [B, K, V]; 0: all. Not beside labels.
        output_logits, num_items_in_batch: as in `BertForMaskedLM.forward`.
        """
        inputs = inputs | {"use_cache": use_cache if labels is None else False}
        columns = _columns(inputs, labels, logits_to_keep)
        loss, logits, encoded = predict_words(
            self.bert, self.cls.predictions, inputs, labels, positions=None if columns is None else columns.flatten(),
            output_logits=output_logits, next_words=True, num_items_in_batch=num_items_in_batch,
        )  # fmt: skip
        if columns is not None and logits is not None:
            kept = encoded.packing.unpack(torch.ones_like(encoded.packing.coords[:, 0], dtype=torch.bool))
            logits = logits.unflatten(0, columns.shape) * kept.take(columns).unsqueeze(-1)
        return CausalLMOutputWithCrossAttentions(
            loss, logits, encoded.past_key_values, encoded.hidden_states, encoded.attentions, encoded.cross_attentions
        )


def _columns(inputs: Inputs, labels: Tensor | None, logits_to_keep: int | Tensor) -> Tensor | None:
    """Places in the flattened input of the columns whose logits are wanted, [B, K]; None: all."""
    given = inputs["inputs_embeds"] if inputs["input_ids"] is None else inputs["input_ids"]
    if not isinstance(logits_to_keep, Tensor) and check_integer("logits_to_keep", logits_to_keep) < 0:
        raise ValueError(f"logits_to_keep: expected a number of at least 0, got {logits_to_keep}")
    if given is None or (not isinstance(logits_to_keep, Tensor) and logits_to_keep == 0):
        return None
    if labels is not None or inputs.get("cu_seqlens") is not None:
        raise ValueError(f"logits_to_keep: expected 0 beside labels and for packed input, got {logits_to_keep}")
    if not isinstance(given, Tensor) or given.dim() < 2:
        return None  # the encoder will say what is wrong
    batch_size, length = given.shape[:2]
    places = torch.arange(batch_size * length, device=given.device).view(batch_size, length)
    if not isinstance(logits_to_keep, Tensor):
        return places[:, -logits_to_keep:]
    check_shape("logits_to_keep", logits_to_keep, ("K",))
    check_dtype("logits_to_keep", logits_to_keep, (torch.int64, torch.int32))
    check_same_device("logits_to_keep", logits_to_keep, "the tokens", given)
    check_ids("logits_to_keep", torch.where(logits_to_keep < 0, logits_to_keep + length, logits_to_keep), length)
    return places[:, logits_to_keep]
