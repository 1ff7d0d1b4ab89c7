"""What heads compute from packed hidden states, for our models and for transformers' modules of the same names.

They work only on the rows they need: words on the tokens that carry a label (15 % in pre-training), pooled sequences on
first tokens; and so does the last layer of the encoder.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.checks import check_dtype, check_ids, check_same_device, check_shape
from bert_fast.models.forward import Inputs
from bert_fast.models.losses import (
    IGNORE_INDEX,
    class_loss,
    next_token_labels,
    num_labelled,
    pack_labels,
    share_of_step,
    span_labels,
)
from bert_fast.models.packed import Encoded, PackedBertModel
from bert_fast.modules.call import Call, first_rows
from bert_fast.modules.fusable import activated_linear, is_plain
from bert_fast.modules.residual_norm import is_plain_norm
from bert_fast.ops.cross_entropy import cross_entropy
from bert_fast.ops.dropout import DropoutSite, draw_seed, dropout, dropout_site
from bert_fast.ops.layer_norm import layer_norm
from bert_fast.ops.linear import linear
from bert_fast.ops.linear_cross_entropy import linear_cross_entropy
from bert_fast.ops.packing import Packing
from bert_fast.ops.splade import splade


class PackedPredictionTransform:
    """LN(act(dense(x))), before the vocabulary projection."""

    dense: nn.Linear
    LayerNorm: nn.LayerNorm
    hidden_act: str | Callable[[Tensor], Tensor]

    def forward_packed(self, x: Tensor, *, call: Call | None = None) -> Tensor:
        """[M, H] to [M, H]."""
        x, norm = activated_linear(x, self.dense, self.hidden_act), self.LayerNorm
        return layer_norm(x, norm.weight, norm.bias, eps=norm.eps) if is_plain_norm(norm) else norm(x)


class PackedPredictionHead:
    """Hidden states to vocabulary logits or to their loss."""

    transform: Any
    decoder: nn.Linear

    def forward_packed(self, x: Tensor, labels: Tensor | None = None, *, call: Call | None = None) -> Tensor:
        """[M, H] to scores [M, V]; with labels [M] to their mean cross entropy, without the scores of all rows."""
        x, scoring = self.transform(x, call=call), self.scoring()
        if labels is not None and scoring is not None:
            return linear_cross_entropy(x, *scoring, labels, ignore_index=IGNORE_INDEX)
        scores = self.decoder(x) if scoring is None else linear(x, *scoring)
        return scores if labels is None else cross_entropy(scores, labels, ignore_index=IGNORE_INDEX)

    def word_vectors(self, x: Tensor, activation: str, *, call: Call) -> Tensor:
        """[T, H] to SPLADE's vectors of texts, [B, V], without the scores of all tokens (`ops.splade`).

        The decoder must be plain (`is_plain`).
        """
        x, scoring = self.transform(x, call=call), self.scoring()
        assert scoring is not None
        return splade(x, *scoring, call.packing.cu_seqlens, activation=activation)

    def scoring(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias that make scores; None where a module must be called for them."""
        decoder = self.decoder
        return (decoder.weight, decoder.bias) if is_plain(decoder) else None


def predict_words(
    bert: PackedBertModel,
    head: Any,
    inputs: Inputs,
    labels: Tensor | None,
    *,
    positions: Tensor | None = None,
    output_logits: bool | None = None,
    next_words: bool = False,
    pooled: bool = False,
    num_items_in_batch: Tensor | float | None = None,
) -> tuple[Tensor | None, Tensor | None, Encoded]:
    """(loss or None, scores of words or None, what the encoder made), by a model and its prediction head.

    labels (Tensor [B, S], or [T] for packed input, int): words, -100 elsewhere. With positions: Tensor [M].
    positions (Tensor [M], int): of the tokens to predict, counted over the flattened [B * S] (or [T]).
    output_logits: make scores: [B, S, V] with 0 on padding ([T, V] for packed input), or [M, V] of the positions.
        Default: yes, except in training with labels. Where not, only labelled rows go through the head.
    next_words: the label of a token is that of the next column. pooled: the first token of every sequence is needed
        of the encoder too.
    num_items_in_batch: see `share_of_step`.

    Raises: TypeError, ValueError for labels or positions that do not fit the input or are out of range.
    """
    if output_logits is None:
        output_logits = labels is None or not bert.training

    def targets(packing: Packing) -> Tensor:  # [T]
        assert labels is not None
        packed = pack_labels(labels, packing)
        return next_token_labels(packed, packing) if next_words else packed

    def rows(packing: Packing) -> Tensor | None:
        if packing.coords.is_meta:
            return None
        if positions is not None:
            _check_positions(positions, labels, packing)
            if positions.device.type != "cpu" or torch.compiler.is_compiling():
                return None  # their number, each counted once, would cost a device sync
            wanted = packing.pack(_marked(positions, packing))
        elif output_logits:
            return None
        elif labels is not None:
            wanted = targets(packing) != IGNORE_INDEX
        else:
            wanted = torch.zeros_like(packing.coords[:, 0], dtype=torch.bool)
        if pooled:
            wanted = wanted.index_fill(0, first_rows(packing), True)
        return wanted.nonzero().squeeze(1)

    encoded = bert.encode(**inputs, rows=rows)
    hidden, packing, call = encoded.hidden, encoded.packing, Call(encoded.packing, encoded.seed)
    if positions is not None:
        hidden = _at(positions, encoded)
    elif labels is not None:
        labels = targets(packing)
        labels = labels if encoded.rows is None else labels.index_select(0, encoded.rows)
    if output_logits:
        scores = head(hidden, call=call)
        loss = None if labels is None else class_loss(scores, labels, num_items_in_batch=num_items_in_batch)
        return loss, scores if positions is not None else packing.unpack(scores), encoded
    loss = None
    if labels is not None:
        loss = head(hidden, labels, call=call)
        if num_items_in_batch is not None:
            loss = share_of_step(loss, num_labelled(labels), num_items_in_batch)
    return loss, None, encoded


def _check_positions(positions: Tensor, labels: Tensor | None, packing: Packing) -> None:
    check_shape("masked_lm_positions", positions, ("M",))
    check_dtype("masked_lm_positions", positions, (torch.int64, torch.int32))
    check_same_device("masked_lm_positions", positions, "the tokens", packing.coords)
    check_ids("masked_lm_positions", positions, _num_places(packing))
    if labels is not None:
        check_shape("labels", labels, (positions.shape[0],))
        check_dtype("labels", labels, (torch.int64, torch.int32))
        check_same_device("labels", labels, "the tokens", packing.coords)


def _num_places(packing: Packing) -> int:
    """B * S, or T for packed input."""
    shape = packing.padded_shape
    return packing.coords.shape[0] if shape is None else shape[0] * shape[1]


def _marked(positions: Tensor, packing: Packing) -> Tensor:
    """Where positions are: bool [B, S], or [T] for packed input."""
    marks = torch.zeros(_num_places(packing), dtype=torch.bool, device=positions.device)
    marks[positions.long()] = True
    return marks if packing.padded_shape is None else marks.view(packing.padded_shape)


def _at(positions: Tensor, encoded: Encoded) -> Tensor:
    """Hidden states [M, H] of positions in the flattened input; 0 for padding."""
    hidden, packing = encoded.hidden, encoded.packing
    if encoded.rows is not None:
        hidden = hidden.new_zeros(packing.coords.shape[0], hidden.shape[1]).index_copy(0, encoded.rows, hidden)
    return packing.unpack(hidden).flatten(0, -2).index_select(0, positions.long())


def predict_spans(
    scores: Tensor,
    packing: Packing,
    start_positions: Tensor | None,
    end_positions: Tensor | None,
    num_items_in_batch: Tensor | float | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """(loss or None, start scores, end scores) of answers, from two scores of every token, [T, 2].

    start_positions, end_positions: as `span_labels` takes them; a loss needs both.
    num_items_in_batch: see `share_of_step`; an item is an answer.
    Returns: scores [B, S] with the most negative number on padding, so that no probability goes there ([T] for packed
        input), and the mean of the two cross entropies.
    """
    batch_size, length = packing.padded_shape or (packing.num_sequences, packing.max_seqlen)
    if packing.padded_shape is None and not torch.compiler.is_compiling():
        length = min(length, packing.num_tokens)  # max_seqlen may be any number
    if packing.padded_shape is not None and packing.indices is None:
        places = torch.arange(len(scores), device=scores.device)
    else:
        row, position = packing.coords.long().unbind(1)
        places = row * length + position
    padded = scores.new_full((batch_size * length, 2), torch.finfo(scores.dtype).min).index_copy(0, places, scores)
    start_scores, end_scores = padded.view(batch_size, length, 2).unbind(-1)
    loss = None
    if start_positions is not None and end_positions is not None:
        kept = torch.zeros_like(padded[:, 0], dtype=torch.bool).index_fill(0, places, True).view(batch_size, length)
        starts = span_labels(start_positions, kept, "start_positions")
        ends = span_labels(end_positions, kept, "end_positions")
        loss = class_loss(start_scores, starts, num_items_in_batch=num_items_in_batch)
        loss = (loss + class_loss(end_scores, ends, num_items_in_batch=num_items_in_batch)) / 2
    if packing.padded_shape is None:
        start_scores, end_scores = scores.unbind(-1)
    return loss, start_scores.contiguous(), end_scores.contiguous()


def pooled_sequences(bert: PackedBertModel, inputs: Inputs, dropout_p: float = 0.0) -> tuple[Tensor, Encoded]:
    """The pooled first tokens [B, H] after the dropout before a classifier, and what the encoder made."""
    encoded = bert.encode(**inputs, rows=first_rows)
    pooled = bert.pool(encoded)
    rows = torch.arange(pooled.shape[0], dtype=torch.int32, device=pooled.device)
    return drop(pooled, dropout_p, torch.stack((rows, torch.zeros_like(rows)), dim=1), encoded.seed), encoded


def drop(x: Tensor, dropout_p: float, coords: Tensor, seed: Tensor | None) -> Tensor:
    """Dropout of x [N, H] before a classifier.

    dropout_p: 0 in evaluation. seed: of the model's call; None where that drops nothing, and then one is drawn.
    """
    if seed is None and dropout_p:
        seed = draw_seed(x.device)
    return dropout(x, dropout_p, seed=seed, coords=coords, site=dropout_site(DropoutSite.HEAD))
