"""Word, position and type embeddings, LayerNorm, dropout, on packed tokens."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from bert_fast.checks import check_ids
from bert_fast.ops.dropout import DropoutSite, dropout, dropout_site
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
        Returns: Tensor [T, H].

        Raises:
            ValueError: an id is outside its table (checked on the CPU, elsewhere with BERT_FAST_DEBUG=1).
        """
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self._lookup("input_ids", input_ids, self.word_embeddings)
        if position_ids is None:
            position_ids = packing.coords[:, 1]
        x = inputs_embeds + self._lookup("position_ids", position_ids, self.position_embeddings)
        if token_type_ids is None:
            x = x + self.token_type_embeddings.weight[0]
        else:
            x = x + self._lookup("token_type_ids", token_type_ids, self.token_type_embeddings)
        x = self.LayerNorm(x)  # [T, H]
        if not self.training:
            return x
        return dropout(x, self.dropout_p, seed=seed, coords=packing.coords, site=dropout_site(DropoutSite.EMBEDDING))

    @staticmethod
    def _lookup(name: str, ids: Tensor, table: nn.Embedding) -> Tensor:
        check_ids(name, ids, table.num_embeddings)
        return F.embedding(ids, table.weight, padding_idx=table.padding_idx)
