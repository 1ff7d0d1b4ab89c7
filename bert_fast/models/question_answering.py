"""BERT that finds the answer to a question in a text: scores for where it starts and where it ends."""

from torch import Tensor, nn

from bert_fast.models.bert import BertModel, BertPreTrainedModel
from bert_fast.models.config import BertConfig
from bert_fast.models.forward import Inputs, takes_model_arguments
from bert_fast.models.heads import predict_spans
from bert_fast.models.outputs import QuestionAnsweringModelOutput
from bert_fast.modules.fusable import head_linear


class BertForQuestionAnswering(BertPreTrainedModel):
    """BERT with two scores for every token.

    Args:
        config (BertConfig): sizes, dropout probabilities, labels.

    Example:
        >>> config = BertConfig(
        ...     vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20
        ... )
        >>> bert_fast.BertForQuestionAnswering(config)(torch.tensor([[1, 2, 3]])).start_logits.shape
        torch.Size([1, 3])
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @takes_model_arguments
    def forward(
        self,
        inputs: Inputs,
        *,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> QuestionAnsweringModelOutput | tuple:
        """Two scores [B, S] ([T] for packed input) and the mean of their losses; `BertModel.forward`'s arguments and:

        start_positions, end_positions (Tensors [B] or [B, 1], int): of the first and last token of the answer, counted
            in its sequence. Positions of padding or beyond the sequence mean "not in this window" and count for
            nothing; negative ones mean 0. A loss needs both.
        num_items_in_batch: answers in all batches of a step, see `BertForMaskedLM.forward`.

        Scores of padding are the most negative number, so that no probability goes there.
        """
        encoded = self.bert.encode(**inputs)
        loss, start_logits, end_logits = predict_spans(
            head_linear(encoded.hidden, self.qa_outputs),
            encoded.packing,
            start_positions,
            end_positions,
            num_items_in_batch,
        )
        return QuestionAnsweringModelOutput(loss, start_logits, end_logits, encoded.hidden_states, encoded.attentions)
