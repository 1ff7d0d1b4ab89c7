"""What all layers of one forward pass share, and which of their rows the last one computes."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bert_fast.ops.encoder_layer import of_call
from bert_fast.ops.packing import Packing
from bert_fast.reference.encoder_layer import OfCall

# The packed indices of the tokens that a head reads, int64 [M], rising; None: all.
RowChoice = Callable[[Packing], Tensor | None]


@dataclass(frozen=True, eq=False)
class Call:
    """Where this call's tokens come from, what they see, and what is to be kept of them.

    packing: of the tokens [T] of this call. seed (Tensor [1], int64, or None): of dropout; None: nothing is dropped.
    keys: with a cache, the layout of the cached tokens and this call's; None: the tokens themselves.
    causal: a token sees none behind it.
    rotary (Tensors [T, D / 2], or None): cosine and sine of the angles by which queries and keys are turned, see
        `ops.rotary`.
    relative: embeddings of the distances between tokens, see `modules.disentangled`; None: there are none.
    bias (Tensor [B or 1, A or 1, S or 1, Sk or 1]): added to the scores, by original row and position.
    head_mask (Tensor [L, B or 1, A, S or 1, Sk or 1]): factors of the probabilities, by padded row and column; layers
        then compute all tokens, with PyTorch's operators.
    memory_packing, memory_bias: the same of what a decoder looks at; the memory [Tm, H] itself is an argument of the
        layers, so that gradient checkpointing sees it.
    cache: keys and values of earlier calls, which layers extend, see `modules/cache.py`.
    hidden_states, attentions, cross_attentions: lists to which layers append what callers see, padded; None: not asked
        for.
    rows (Tensor [M], int64), row_packing: the tokens that are wanted of the last layer, and their layout; None: all.
    shows_padded: hooks of linear layers see all tokens, padded; there are no rows then.
    """

    packing: Packing
    seed: Tensor | None = None
    keys: Packing | None = None
    causal: bool = False
    rotary: tuple[Tensor, Tensor] | None = None
    relative: Any = None
    bias: Tensor | None = None
    head_mask: Tensor | None = None
    memory_packing: Packing | None = None
    memory_bias: Tensor | None = None
    cache: Any = None
    hidden_states: list[Tensor] | None = None
    attentions: list[Tensor] | None = None
    cross_attentions: list[Tensor] | None = None
    rows: Tensor | None = None
    row_packing: Packing | None = None
    shows_padded: bool = False

    @functools.cached_property
    def of_layers(self) -> OfCall:
        """What ops of whole layers are given of the call."""
        queries, keys = self.queries, self.packing
        tensors = (
            self.rows, queries.cu_seqlens, keys.cu_seqlens, queries.coords, keys.coords, queries.order, self.seed,
        )  # fmt: skip
        return of_call(tensors, queries.max_seqlen, keys.max_seqlen, self.causal)

    @property
    def queries(self) -> Packing:
        """The layout of what a layer computes: all tokens, or the rows."""
        return self.packing if self.row_packing is None else self.row_packing

    @property
    def inputs(self) -> Packing:
        """The layout of what a layer is given: all tokens; rows that were picked before, see `picked`."""
        return self.packing if self.rows is not None else self.queries

    def picked(self) -> "Call":
        """The same call for a layer of which others have picked the rows: it is given these alone, [M, H]."""
        return self if self.rows is None else self._with(rows=None)

    def of_rows(self, x: Tensor) -> Tensor:
        """x [T, ...] where a layer computes it: all of it, or [M, ...]."""
        return x if self.rows is None else x.index_select(0, self.rows)

    def shown(self, x: Tensor) -> Tensor:
        """x [T, H], by way of the tensor that callers see of it, where they asked for hidden states.

        So that what they see is what all that follows depends on, and gets its gradient.
        """
        if self.hidden_states is None:
            return x
        padded = self.packing.unpack(x)
        self.hidden_states.append(padded)
        return self.packing.pack(padded)

    def dropout_p(self, module: Any) -> float:
        """The probability with which a module drops in this call."""
        return module.dropout_p if self.seed is not None and module.training else 0.0

    def with_rows(self, rows: Tensor | None) -> "Call":
        """The same call for a layer of which only these tokens are wanted (None: all)."""
        return self._with(rows=rows, row_packing=None if rows is None else _layout(self.packing, rows))

    def of_tokens(self, start: int, stop: int) -> "Call":
        """The same call for what works on each token by itself and is given some of its queries only."""
        queries = self.queries
        return self._with(row_packing=replace(queries, coords=queries.coords[start:stop]))

    def _with(self, **changes: Any) -> "Call":
        """Returns a copy with these fields changed. `dataclasses.replace` would run `__init__` with all 17 fields."""
        made = object.__new__(Call)
        made.__dict__.update(self.__dict__)
        made.__dict__.pop("of_layers", None)
        made.__dict__.update(changes)
        return made


def first_rows(packing: Packing) -> Tensor:
    """The first token of every sequence, int64; sequences without tokens may be left out or name a neighbour's."""
    if packing.min_seqlen and not torch.compiler.is_compiling():
        return packing.starts
    starts, ends = packing.cu_seqlens[:-1].long(), packing.cu_seqlens[1:]
    if packing.indices is None and packing.padded_shape is not None and packing.padded_shape[1]:
        return starts  # no padding: no sequence is empty
    if not torch.compiler.is_compiling() and not packing.coords.shape[0]:
        return starts[:0]
    if starts.device.type == "cpu" and not torch.compiler.is_compiling():
        return starts[ends > starts]
    return starts.clamp(max=packing.coords.shape[0] - 1)  # to leave them out would need their number


def first_tokens(packing: Packing, hidden: Tensor, rows: Tensor | None) -> Tensor:
    """Every sequence's first token, [B, H], exactly 0 where it has none.

    hidden (Tensor [T, H], or [M, H] of those `rows`, [CLS] of every sequence among them).
    """
    if rows is None:
        return packing.first_tokens(hidden)
    if _are_first(packing, rows):
        return hidden
    if not torch.compiler.is_compiling() and not len(hidden):
        return hidden.new_zeros((packing.num_sequences, hidden.shape[1]))
    starts, ends = packing.cu_seqlens[:-1].long(), packing.cu_seqlens[1:]
    places = torch.searchsorted(rows, starts).clamp(max=hidden.shape[0] - 1)
    return hidden.index_select(0, places).masked_fill((ends <= starts).unsqueeze(1), 0.0)


def _layout(packing: Packing, rows: Tensor) -> Packing:
    """The packing of the tokens `rows` alone; they keep their coords."""
    coords = packing.coords.index_select(0, rows)
    if _are_first(packing, rows):
        cu_seqlens = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
        return Packing(cu_seqlens, 1, coords, None, None, packing.order, 1)
    cu_seqlens = torch.searchsorted(rows, packing.cu_seqlens.long(), out_int32=True)
    # Sequences without tokens may all have named one row of a neighbour's.
    max_seqlen = torch.sym_max(packing.max_seqlen, packing.num_sequences)
    if rows.device.type == "cpu" and not torch.compiler.is_compiling():
        max_seqlen = max(cu_seqlens.diff().tolist(), default=0)
    return Packing(cu_seqlens, max_seqlen, coords, None, None, packing.order)


def _are_first(packing: Packing, rows: Tensor) -> bool:
    """Whether rows are what `first_rows` returned, of sequences that all have tokens."""
    return bool(packing.min_seqlen) and not torch.compiler.is_compiling() and rows is packing.starts
