"""BERT that finds the answer to a question in a text: scores for where it starts and where it ends."""

import torch
from torch import Tensor, nn

from bert_fast.models.base import BertPreTrainedModel
from bert_fast.models.bert import BertModel
from bert_fast.models.config import BertConfig
from bert_fast.models.forward import Inputs, takes_model_arguments
from bert_fast.models.losses import span_loss
from bert_fast.models.outputs import QuestionAnsweringModelOutput
from bert_fast.ops.packing import Packing

__all__ = ["BertForQuestionAnswering"]


class BertForQuestionAnswering(BertPreTrainedModel):
    """BERT with two scores for every token."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @takes_model_arguments
    def forward(
        self, inputs: Inputs, *, start_positions: Tensor | None = None, end_positions: Tensor | None = None
    ) -> QuestionAnsweringModelOutput | tuple:
        """Two scores [B, S] ([T] for packed input) and the mean of their losses; `BertModel.forward`'s arguments and:

        start_positions, end_positions (Tensors [B] or [B, 1], int): of the first and last token of the answer, counted
            in its sequence. Positions at or beyond S (for packed input: beyond the sequence) mean "not in this window"
            and count for nothing; negative ones mean 0. A loss needs both.

        Scores of padding are the most negative number, so that no probability goes there.
        """
        encoded = self.bert.encode(**inputs)
        packing = encoded.packing
        scores = self.qa_outputs(encoded.hidden)  # [T, 2]
        padded = _padded_scores(scores, packing)
        loss = None
        if start_positions is not None and end_positions is not None:
            length = packing.cu_seqlens.diff() if packing.padded_shape is None else packing.padded_shape[1]
            starts = span_loss(padded[..., 0], start_positions, length, "start_positions")
            loss = (starts + span_loss(padded[..., 1], end_positions, length, "end_positions")) / 2
        start_logits, end_logits = (scores if packing.padded_shape is None else padded).unbind(-1)
        return QuestionAnsweringModelOutput(
            loss, start_logits.contiguous(), end_logits.contiguous(), encoded.hidden_states, encoded.attentions
        )


def _padded_scores(scores: Tensor, packing: Packing) -> Tensor:
    """[T, 2] as [B, S, 2], S the longest sequence of packed input; the most negative number on padding."""
    batch_size, length = packing.padded_shape or (packing.num_sequences, packing.max_seqlen)
    row, position = packing.coords.long().unbind(1)
    padded = scores.new_full((batch_size * length, 2), torch.finfo(scores.dtype).min)
    return padded.index_copy(0, row * length + position, scores).view(batch_size, length, 2)
