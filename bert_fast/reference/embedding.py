"""BERT's input: the sum of three embeddings, normalised.

    h = word_table[id] + type_table[token type] + position_table[position]
    y = dropout(LayerNorm(h))

`words` may hold the word vectors themselves (Hugging Face's inputs_embeds) in place of ids. With relative positions
there is no position table.

Backward: dh by dropout and LayerNorm backward; a table's row receives the sum of dh over the tokens that looked it up,
except the word table's row `padding_idx`, whose gradient stays 0.

Saved for backward: ids, mean, rstd (h is looked up again). Source: Devlin et al. 2019 (arXiv:1810.04805), figure 2.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bert_fast.reference.dropout import dropout_bwd, dropout_fwd
from bert_fast.reference.layer_norm import layer_norm_bwd, layer_norm_fwd
from bert_fast.reference.precision import wide

__all__ = ["EmbeddingGradients", "embedding_bwd", "embedding_fwd"]


class EmbeddingGradients(NamedTuple):
    """dwords: of the word table [V, H] where words are ids, of the vectors [T, H] where they are vectors."""

    dwords: Tensor
    dposition_table: Tensor | None
    dtype_table: Tensor
    dweight: Tensor
    dbias: Tensor


def _sum(
    words: Tensor,
    token_type_ids: Tensor,
    position_ids: Tensor,
    word_table: Tensor,
    position_table: Tensor | None,
    type_table: Tensor,
    padding_idx: int | None,
) -> Tensor:
    """h [T, H], wide."""
    vectors = words if words.is_floating_point() else F.embedding(words, word_table, padding_idx)
    h = wide(vectors) + wide(F.embedding(token_type_ids, type_table))
    return h if position_table is None else h + wide(F.embedding(position_ids, position_table))


def embedding_fwd(
    words: Tensor,
    token_type_ids: Tensor,
    position_ids: Tensor,
    word_table: Tensor,
    position_table: Tensor | None,
    type_table: Tensor,
    padding_idx: int | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
    coords: Tensor | None,
    site: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The embedding of every token.

    words (Tensor [T], int: ids, or Tensor [T, H], floating: vectors); token_type_ids, position_ids (Tensors [T], int).
    word_table (Tensor [V, H]); position_table (Tensor [M, H] or None); type_table (Tensor [2, H]).
    padding_idx: the word id whose row receives no gradient; None for none.
    weight, bias (Tensors [H]); eps: of LayerNorm. dropout_p, seed, coords, site: see reference/dropout.py.
    Returns: y (Tensor [T, H], dtype of the tables); mean, rstd (Tensors [T], fp32; fp64 for fp64 inputs).
    """
    h = _sum(words, token_type_ids, position_ids, word_table, position_table, type_table, padding_idx)
    y, mean, rstd = layer_norm_fwd(h, weight, bias, eps)
    return dropout_fwd(y, dropout_p, seed, coords, site).to(type_table.dtype), mean, rstd


def embedding_bwd(
    dy: Tensor,
    words: Tensor,
    token_type_ids: Tensor,
    position_ids: Tensor,
    word_table: Tensor,
    position_table: Tensor | None,
    type_table: Tensor,
    padding_idx: int | None,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    coords: Tensor | None,
    site: int,
) -> EmbeddingGradients:
    """Gradients of `embedding_fwd`, each in the shape and dtype of its tensor."""
    h = _sum(words, token_type_ids, position_ids, word_table, position_table, type_table, padding_idx)
    dnormalised = dropout_bwd(wide(dy), dropout_p, seed, coords, site)
    dh, dweight, dbias = layer_norm_bwd(dnormalised, h, wide(weight), mean, rstd)

    def scattered(ids: Tensor, table: Tensor) -> Tensor:
        return torch.zeros_like(table, dtype=dh.dtype).index_add_(0, ids, dh).to(table.dtype)

    if words.is_floating_point():
        dwords = dh.to(words.dtype)
    else:
        dwords = scattered(words, word_table)
        if padding_idx is not None:
            dwords[padding_idx] = 0.0
    return EmbeddingGradients(
        dwords,
        None if position_table is None else scattered(position_ids, position_table),
        scattered(token_type_ids, type_table),
        dweight.to(weight.dtype),
        dbias.to(weight.dtype),
    )
