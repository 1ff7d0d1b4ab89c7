"""BERT's input: the sum of three embeddings, normalised.

    h = word_table[id] + type_table[token type] + position_table[position]
    y = dropout(LayerNorm(h))

`words` may hold the word vectors themselves (Hugging Face's inputs_embeds) in place of ids. With relative positions
there is no position table. Without token types every token is of type 0.

Backward: dh by dropout and LayerNorm backward; a table's row receives the sum of dh over the tokens that looked it up,
except the word table's row `padding_idx`, whose gradient stays 0.

Saved for backward: ids, mean, rstd (h is looked up again). Source: Devlin et al. 2019 (arXiv:1810.04805), figure 2.
"""

from collections.abc import Set
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bert_fast.reference.dropout import dropout_bwd, dropout_fwd
from bert_fast.reference.layer_norm import LayerNorm, layer_norm_bwd, layer_norm_fwd
from bert_fast.reference.precision import wide

LOOKED_UP = frozenset({"words", "word_table", "position_table", "type_table"})  # whose gradients are made if wanted


class Embedding(NamedTuple):
    """The arguments; tables of one dtype, LayerNorm's parameters of that or, beside half precision, fp32."""

    words: Tensor  # ids (Tensor [T], int64 or int32), or vectors (Tensor [T, H], floating) that are looked up nowhere
    token_type_ids: Tensor | None  # [T], int64 or int32; None: all of type 0
    position_ids: Tensor | None  # [T], int64 or int32; not used without a position table
    word_table: Annotated[Tensor | None, "x V H"]  # not used where words are vectors
    position_table: Annotated[Tensor | None, "x M H"]
    type_table: Annotated[Tensor, "x K+ H+"]
    padding_idx: int | None  # the word whose row receives no gradient
    weight: Annotated[Tensor, "p H"]  # of LayerNorm
    bias: Annotated[Tensor, "p H"]
    eps: float
    dropout_p: float  # as of `reference/dropout.py`, and what names the mask
    seed: Tensor | None
    coords: Tensor | None
    site: int
    out_dtype: torch.dtype  # of y

    @property
    def word_source(self) -> str:
        """The field that words come from, and whose gradient they have."""
        return "words" if self.words.is_floating_point() else "word_table"


def _sum(a: Embedding) -> Tensor:
    """h [T, H], wide."""
    if a.words.is_floating_point():
        h = wide(a.words).to(wide(a.type_table).dtype)
    else:
        assert a.word_table is not None
        h = wide(F.embedding(a.words, a.word_table, a.padding_idx))
    h = h + wide(a.type_table[0] if a.token_type_ids is None else F.embedding(a.token_type_ids, a.type_table))
    if a.position_table is None:
        return h
    assert a.position_ids is not None
    return h + wide(F.embedding(a.position_ids, a.position_table))


def embedding_fwd(a: Embedding) -> tuple[Tensor, Tensor, Tensor]:
    """y (Tensor [T, H], out_dtype); mean, rstd (Tensors [T], fp32; fp64 for fp64 tables)."""
    y, mean, rstd = layer_norm_fwd(LayerNorm(_sum(a), a.weight, a.bias, a.eps))
    return dropout_fwd(y, a.dropout_p, a.seed, a.coords, a.site).to(a.out_dtype), mean, rstd


def embedding_bwd(
    a: Embedding, dy: Tensor, mean: Tensor, rstd: Tensor, wants: Set[str] = LOOKED_UP
) -> dict[str, Tensor]:
    """Gradients by name, of the shapes and dtypes of their fields; bias, eps and out_dtype are not read, may be None.

    dy (Tensor [T, H], floating); wants: of `LOOKED_UP`; what the call does not look up has no gradient.
    """
    h = _sum(a)
    dnormalised = dropout_bwd(dy.to(h.dtype), a.dropout_p, a.seed, a.coords, a.site)
    norm = LayerNorm(h, wide(a.weight), None, None)  # type: ignore[arg-type]  # what its backward reads
    dh, dweight, dbias = layer_norm_bwd(norm, dnormalised, mean, rstd).values()

    def scattered(ids: Tensor | None, table: Tensor) -> Tensor:
        if ids is None:
            ids = torch.zeros(len(dh), dtype=torch.int64, device=dh.device)
        return torch.zeros_like(table, dtype=dh.dtype).index_add_(0, ids, dh).to(table.dtype)

    made = {"weight": dweight.to(a.weight.dtype), "bias": dbias.to(a.weight.dtype)}
    if "words" in wants and a.word_source == "words":
        made["words"] = dh.to(a.words.dtype)
    elif "word_table" in wants and a.word_source == "word_table":
        assert a.word_table is not None
        made["word_table"] = scattered(a.words, a.word_table)
        if a.padding_idx is not None:
            made["word_table"][a.padding_idx] = 0.0
    if "position_table" in wants and a.position_table is not None:
        made["position_table"] = scattered(a.position_ids, a.position_table)
    if "type_table" in wants:
        made["type_table"] = scattered(a.token_type_ids, a.type_table)
    return made
