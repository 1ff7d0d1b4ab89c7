"""Word, position and type embeddings, LayerNorm, dropout, on packed tokens, in one op."""

from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.checks import check_ids
from bert_fast.modules.call import Call
from bert_fast.modules.fusable import plain_linear, runs_hooks
from bert_fast.modules.layer_norm import LayerNorm
from bert_fast.modules.residual_norm import is_plain_norm
from bert_fast.ops.dropout import DropoutSite, dropout, dropout_site
from bert_fast.ops.embedding import embedding_of_model
from bert_fast.reference.embedding import Embedding

_SITE = dropout_site(DropoutSite.EMBEDDING)


class PackedEmbeddings:
    """The computation of BertEmbeddings, for any module that has its parts under these names.

    Where there are no types (None in place of their table), nothing is added for them. A row of padding in the position
    table gets no gradient, as in the table of words. With relative positions the position table has no part in it. A
    table that is more than its weight, or another module in its place, is called with ids [T]; it needs no attributes
    of an `nn.Embedding`. `projection`, if there is one, is applied to the sum, before LayerNorm.
    """

    word_embeddings: nn.Embedding
    position_embeddings: nn.Embedding
    token_type_embeddings: Any  # nn.Embedding or None
    LayerNorm: nn.LayerNorm
    dropout_p: float
    position_embedding_type = "absolute"
    projection: nn.Linear | None = None

    def forward_packed(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        call: Call,
    ) -> Tensor:
        """Packed tokens to hidden states.

        input_ids (Tensor [T], int) or inputs_embeds (Tensor [T, H]); token_type_ids (default 0) and position_ids
        (default: the token's position, see `Packing.coords`), Tensor [T], int.
        Returns: Tensor [T, H], of the tables' dtype, under autocast of its dtype.

        Raises:
            ValueError: an id is outside its table (checked on the CPU, elsewhere with BERT_FAST_DEBUG=1).
        """
        words, positions, types = self.word_embeddings, self.position_embeddings, self.token_type_embeddings
        is_absolute = self.position_embedding_type == "absolute"
        if not is_absolute:
            position_ids = None
        elif position_ids is None:
            position_ids = call.packing.coords[:, 1]
        if types is None:
            token_type_ids = None
        # Here and not by the op, which does not know what its caller's arguments are called. A module that is called
        # looks itself.
        ranges = {}
        for name, ids, table in (
            ("input_ids", input_ids, words),
            ("position_ids", position_ids, positions),
            ("token_type_ids", token_type_ids, types),
        ):
            if ids is not None and is_plain_table(table):
                ranges[name] = check_ids(name, ids, table.num_embeddings)
        given, word_table, padding_idx = inputs_embeds, None, None
        if given is None:
            assert input_ids is not None
            if is_plain_table(words):
                given, word_table, padding_idx = input_ids, words.weight, words.padding_idx
            else:
                given = words(input_ids)
        norm, dropout_p = self.LayerNorm, call.dropout_p(self)
        plain_types = types is None or is_plain_table(types)
        is_plain = plain_types and (is_plain_table(positions) or not is_absolute) and self.projection is None
        if is_plain and is_plain_norm(norm):
            position_table = positions.weight if is_absolute else None
            type_table = norm.weight.new_zeros(1, norm.weight.shape[0]) if types is None else types.weight
            if position_table is not None and torch.is_grad_enabled():
                row = positions.padding_idx
                if row is not None and _may_hold(ranges.get("position_ids"), row):
                    position_table = _WithoutRow.apply(position_table, row)
            if _are_of_one_dtype(given, word_table, type_table, position_table):
                return embedding_of_model(
                    Embedding(
                        given, token_type_ids, position_ids, word_table, position_table, type_table, padding_idx,
                        norm.weight, norm.bias, norm.eps, dropout_p, call.seed, call.packing.coords, _SITE,
                        type_table.dtype,
                    )
                )  # fmt: skip
        if not given.is_floating_point():
            given = words(given)
        summed = given
        if types is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(len(given), dtype=torch.long, device=given.device)
            summed = given + types(token_type_ids)
        if position_ids is not None:
            summed = summed + positions(position_ids.contiguous())
        if self.projection is not None:
            summed = plain_linear(summed, self.projection)
        return dropout(norm(summed), dropout_p, seed=call.seed, coords=call.packing.coords, site=_SITE)


class BertEmbeddings(PackedEmbeddings, nn.Module):
    """LN(word + type + position), then dropout; parameters named as in Hugging Face's BertEmbeddings."""

    forward = PackedEmbeddings.forward_packed

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout_p = config.hidden_dropout_prob
        self.position_embedding_type = config.position_embedding_type


class _WithoutRow(torch.autograd.Function):
    """A table as it is, whose gradient is 0 in one row."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, row: int) -> Tensor:
        ctx.row = row
        return table.view_as(table)

    @staticmethod
    def backward(ctx: Any, dtable: Tensor) -> tuple[Tensor, None]:
        dtable = dtable.clone()
        dtable[ctx.row] = 0.0
        return dtable, None


def _may_hold(ids: tuple[int, int] | None, row: int) -> bool:
    """Whether ids of this range, None where it is not known, may name a row."""
    return ids is None or ids[0] <= row <= ids[1]


def is_plain_table(table: nn.Module) -> bool:
    """Whether `table` is an `nn.Embedding` that only looks up; adapters, hooks and norms to keep want to be called."""
    return (
        type(table) is nn.Embedding
        and table.max_norm is None
        and not (table.sparse or table.scale_grad_by_freq)
        and not runs_hooks(table)
    )


def _are_of_one_dtype(
    given: Tensor, word_table: Tensor | None, type_table: Tensor, position_table: Tensor | None
) -> bool:
    """Whether the op adds these up; vectors may be of a dtype that the tables' holds."""
    dtype = type_table.dtype
    words = torch.promote_types(given.dtype, dtype) if word_table is None else word_table.dtype
    return words == dtype and (position_table is None or position_table.dtype == dtype)
