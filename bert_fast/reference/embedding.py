"""BERT's input: the sum of three embeddings, normalised.

    h = word_table[id] + type_table[token type] + position_table[position]
    y = dropout(LayerNorm(h))

`words` may hold the word vectors themselves (Hugging Face's inputs_embeds) in place of ids. With relative positions
there is no position table. Without token types every token is of type 0.

Backward: dh by dropout and LayerNorm backward; a table's row receives the sum of dh over the tokens that looked it up,
except the word table's row `padding_idx`, whose gradient stays 0.

Saved for backward: ids, mean, rstd (h is looked up again). Source: Devlin et al. 2019 (arXiv:1810.04805), figure 2.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bert_fast.reference.dropout import dropout_bwd, dropout_fwd
from bert_fast.reference.layer_norm import LayerNorm, layer_norm_bwd, layer_norm_fwd
from bert_fast.reference.precision import wide

__all__ = ["EmbeddingGradients", "embedding_bwd", "embedding_fwd"]


class EmbeddingGradients(NamedTuple):
    """dwords: of the word table [V, H] where words are ids, of the vectors [T, H] where they are vectors.

    dwords, dposition_table and dtype_table are None where nobody asked for them.
    """

    dwords: Tensor | None
    dposition_table: Tensor | None
    dtype_table: Tensor | None
    dweight: Tensor
    dbias: Tensor


def _sum(
    words: Tensor,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    word_table: Tensor | None,
    position_table: Tensor | None,
    type_table: Tensor,
    padding_idx: int | None,
) -> Tensor:
    """h [T, H], wide."""
    if words.is_floating_point():
        h = wide(words).to(wide(type_table).dtype)
    else:
        assert word_table is not None
        h = wide(F.embedding(words, word_table, padding_idx))
    h = h + wide(type_table[0] if token_type_ids is None else F.embedding(token_type_ids, type_table))
    if position_table is None:
        return h
    assert position_ids is not None
    return h + wide(F.embedding(position_ids, position_table))


def embedding_fwd(
    words: Tensor,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    word_table: Tensor | None,
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
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The embedding of every token.

    words (Tensor [T], int: ids, or Tensor [T, H], floating: vectors).
    token_type_ids (Tensor [T], int, or None: all 0); position_ids (Tensor [T], int; unused without a position table).
    word_table (Tensor [V, H]; unused where words are vectors); position_table (Tensor [M, H] or None);
    type_table (Tensor [K, H]): all of one dtype.
    padding_idx: the word id whose row receives no gradient; None for none.
    weight, bias (Tensors [H]); eps: of LayerNorm. dropout_p, seed, coords, site: see reference/dropout.py.
    out_dtype: of y; None for that of the tables.
    Returns: y (Tensor [T, H]); mean, rstd (Tensors [T], fp32; fp64 for fp64 tables).
    """
    h = _sum(words, token_type_ids, position_ids, word_table, position_table, type_table, padding_idx)
    y, mean, rstd = layer_norm_fwd(LayerNorm(h, weight, bias, eps))
    return dropout_fwd(y, dropout_p, seed, coords, site).to(out_dtype or type_table.dtype), mean, rstd


def embedding_bwd(
    dy: Tensor,
    words: Tensor,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    word_table: Tensor | None,
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
    needs_words: bool = True,
    needs_positions: bool = True,
    needs_types: bool = True,
) -> EmbeddingGradients:
    """Gradients of `embedding_fwd`, each in the shape and dtype of its tensor.

    needs_words, needs_positions, needs_types: whether dwords, dposition_table and dtype_table are wanted.
    """
    h = _sum(words, token_type_ids, position_ids, word_table, position_table, type_table, padding_idx)
    dnormalised = dropout_bwd(dy.to(h.dtype), dropout_p, seed, coords, site)
    norm = LayerNorm(h, wide(weight), None, None)  # type: ignore[arg-type]  # what its backward reads
    dh, dweight, dbias = layer_norm_bwd(norm, dnormalised, mean, rstd).values()

    def scattered(ids: Tensor | None, table: Tensor) -> Tensor:
        if ids is None:
            ids = torch.zeros(len(dh), dtype=torch.int64, device=dh.device)
        return torch.zeros_like(table, dtype=dh.dtype).index_add_(0, ids, dh).to(table.dtype)

    dwords = None
    if needs_words and words.is_floating_point():
        dwords = dh.to(words.dtype)
    elif needs_words:
        assert word_table is not None
        dwords = scattered(words, word_table)
        if padding_idx is not None:
            dwords[padding_idx] = 0.0
    return EmbeddingGradients(
        dwords,
        scattered(position_ids, position_table) if needs_positions and position_table is not None else None,
        scattered(token_type_ids, type_table) if needs_types else None,
        dweight.to(weight.dtype),
        dbias.to(weight.dtype),
    )
