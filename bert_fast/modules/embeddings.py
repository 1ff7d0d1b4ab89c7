"""Word, position and type embeddings, LayerNorm, dropout, on packed tokens, in one op."""

from typing import Any

from torch import Tensor, nn

from bert_fast.checks import check_ids
from bert_fast.ops.dropout import DropoutSite, dropout_site
from bert_fast.ops.embedding import embedding
from bert_fast.ops.packing import Packing

__all__ = ["BertEmbeddings"]


class BertEmbeddings(nn.Module):
    """LN(word + type + position), then dropout; parameters named as in Hugging Face's BertEmbeddings."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout_p = config.hidden_dropout_prob

    def forward(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        packing: Packing,
        seed: Tensor | None,
    ) -> Tensor:
        """Packed tokens to hidden states.

        input_ids (Tensor [T], int) or inputs_embeds (Tensor [T, H]); token_type_ids (default 0) and position_ids
        (default: the token's column in its row), Tensor [T], int.
        Returns: Tensor [T, H], of the tables' dtype, under autocast of its dtype.

        Raises:
            ValueError: an id is outside its table (checked on the CPU, elsewhere with BERT_FAST_DEBUG=1).
        """
        if position_ids is None:
            position_ids = packing.coords[:, 1]
        # The op checks too, but does not know what its caller's arguments are called.
        for name, ids, table in (
            ("input_ids", input_ids, self.word_embeddings),
            ("position_ids", position_ids, self.position_embeddings),
            ("token_type_ids", token_type_ids, self.token_type_embeddings),
        ):
            if ids is not None:
                check_ids(name, ids, table.num_embeddings)
        words = input_ids if inputs_embeds is None else inputs_embeds
        assert words is not None
        return embedding(
            words,
            self.word_embeddings.weight,
            self.token_type_embeddings.weight,
            self.LayerNorm.weight,
            self.LayerNorm.bias,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            position_table=self.position_embeddings.weight,
            padding_idx=self.word_embeddings.padding_idx,
            eps=self.LayerNorm.eps,
            dropout_p=self.dropout_p if self.training else 0.0,
            seed=seed,
            coords=packing.coords,
            site=dropout_site(DropoutSite.EMBEDDING),
        )
