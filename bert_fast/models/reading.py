"""From the arguments of a call to what layers work on: where tokens lie, what they see, what they look at."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bert_fast.checks import (
    check_dtype,
    check_floating,
    check_host_or_same,
    check_like,
    check_same_device,
    check_shape,
    check_tensor,
)
from bert_fast.models.argument_checks import check_inputs_embeds, check_pruned
from bert_fast.models.masks import behind, read_attention_mask
from bert_fast.models.positions import check_numbered_length, numbered_positions
from bert_fast.modules.cache import KeyValueCache, as_cache
from bert_fast.ops.packing import Packing

_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a call, as they came.

    name: what the caller calls them; shape: (B, S), or (T,) of packed ones; ids or vectors, the other is None.
    padding_idx: None, or positions that are not given are counted as `models/positions.py` does.
    """

    name: str
    shape: tuple[int, ...]
    device: torch.device
    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    token_type_ids: Tensor | None
    position_ids: Tensor | None
    padding_idx: int | None = None

    def with_positions(self) -> "Tokens":
        """The same tokens, and where no positions were given and none are counted behind an id, their columns."""
        if self.position_ids is not None or self.padding_idx is not None:
            return self
        columns = torch.arange(self.shape[1], device=self.device)
        return replace(self, position_ids=columns.expand(self.shape))

    def packed(self, packing: Packing) -> tuple[Tensor | None, ...]:
        """ids, types, positions and vectors as `PackedEmbeddings` takes them."""
        given = (self.input_ids, self.token_type_ids, self.position_ids, self.inputs_embeds)
        ids, types, positions, vectors = [None if t is None else packing.pack(t) for t in given]
        if positions is None and self.padding_idx is not None:
            positions = numbered_positions(self.input_ids, self.padding_idx, packing)
        return ids, types, positions, vectors


@dataclass(frozen=True, eq=False)
class View:
    """Where the tokens lie and what they see; the fields of `Call`."""

    packing: Packing
    keys: Packing | None
    bias: Tensor | None
    causal: bool


@dataclass(frozen=True, eq=False)
class Memory:
    """What a decoder looks at: states [Tm, H], their layout, what is added to the scores."""

    states: Tensor
    packing: Packing
    bias: Tensor | None


def read_tokens(
    config: Any,
    dtype: torch.dtype,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    padding_idx: int | None = None,
    vector_size: int | None = None,
) -> Tokens:
    """Checks that exactly one of ids and vectors came, and that types and positions fit or broadcast.

    padding_idx as in `Tokens`; vector_size: of inputs_embeds, None: config.hidden_size.
    """
    name, given = _given(input_ids, inputs_embeds)
    if inputs_embeds is None:
        check_dtype("input_ids", given, _INTEGERS)
        shape = tuple(given.shape)
    else:
        check_inputs_embeds(given, config.hidden_size if vector_size is None else vector_size, dtype)
        shape = tuple(given.shape[:-1])
    for ids_name, ids in (("token_type_ids", token_type_ids), ("position_ids", position_ids)):
        if ids is not None:
            check_tensor(ids_name, ids)
            check_dtype(ids_name, ids, _INTEGERS)
            check_same_device(ids_name, ids, name, given)
    if len(shape) == 2 and (
        (token_type_ids is not None and token_type_ids.shape != shape)
        or (position_ids is not None and position_ids.shape != shape)
    ):
        rows = _rows(shape[0], token_type_ids, position_ids)
        if rows != shape[0]:  # one row, for each of theirs
            shape = (rows, shape[1])
            input_ids = None if input_ids is None else input_ids.expand(shape)
            inputs_embeds = None if inputs_embeds is None else inputs_embeds.expand(rows, -1, -1)
        token_type_ids, position_ids = _broadcast(token_type_ids, shape), _broadcast(position_ids, shape)
    for ids_name, ids in (("token_type_ids", token_type_ids), ("position_ids", position_ids)):
        if ids is not None:
            check_shape(ids_name, ids, shape)
    return Tokens(name, shape, given.device, input_ids, inputs_embeds, token_type_ids, position_ids, padding_idx)


def _rows(given: int, *ids: Tensor | None) -> int:
    """The rows of a batch whose ids or vectors have `given` rows: those of types or positions where that is one."""
    return given if given != 1 else max((t.shape[0] for t in ids if t is not None and t.dim() == 2), default=1)


def _broadcast(ids: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """ids as [B, S], a view, where they broadcast to it; else as they are."""
    if ids is None or ids.shape == shape or ids.dim() > 2:
        return ids
    fits = all(size in (1, whole) for size, whole in zip(ids.shape[::-1], shape[::-1], strict=False))
    return ids.expand(shape) if fits else ids


def _given(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[str, Tensor]:
    for name, given, other in (("input_ids", input_ids, inputs_embeds), ("inputs_embeds", inputs_embeds, input_ids)):
        if given is not None and other is None:
            check_tensor(name, given)
            return name, given
    got = "neither" if input_ids is None else "both"
    raise ValueError(f"input_ids, inputs_embeds: expected exactly one of the two, got {got}")


def read_cache(past_key_values: Any, config: Any, tokens: Tokens, cu_seqlens: Tensor | None) -> tuple[Any, int]:
    """The cache to extend, or None, and how many columns it holds."""
    cache = as_cache(past_key_values)
    if cache is None:
        return None, 0
    if cu_seqlens is not None:
        raise ValueError("past_key_values: expected None beside cu_seqlens (a cache has a padded batch's columns)")
    if isinstance(cache, KeyValueCache) and len(cache):
        _check_cache(cache, config, tokens)
    return cache, int(cache.get_seq_length())


def _check_cache(cache: KeyValueCache, config: Any, tokens: Tokens) -> None:
    """Raises unless the cache has every layer's keys and values, alike but for their heads, beside the tokens."""
    num_layers, batch_size = config.num_hidden_layers, tokens.shape[0]
    first = cache[0][0]
    if len(cache) != num_layers or first.shape[0] != batch_size:
        raise ValueError(
            f"past_key_values: expected {num_layers} layers of {batch_size} rows, "
            f"got {len(cache)} layers of {first.shape[0]} rows"
        )
    check_same_device("past_key_values", first, tokens.name, tokens)
    length, head_dim = first.shape[2], config.hidden_size // config.num_attention_heads
    for layer, (key, value, *memory) in enumerate(cache):
        num_heads = config.num_attention_heads - len(config.pruned_heads.get(layer, ()))
        for t in (key, value):
            check_like("past_key_values", t, (batch_size, num_heads, length, head_dim), "its first key", first)
        for t in memory:
            wanted = (batch_size, config.num_attention_heads, memory[0].shape[2], head_dim)
            check_like("past_key_values", t, wanted, "its first key", first)


def read_view(
    config: Any,
    tokens: Tokens,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    num_cached: int,
    has_position_table: bool = True,
) -> View:
    """The layout that a mask or offsets describe; a decoder adds causal order to a 2-D mask and to none."""
    if cu_seqlens is not None:
        if attention_mask is not None:
            raise ValueError("attention_mask: expected None beside cu_seqlens (packed input has no padding)")
        if len(tokens.shape) != 1:
            raise ValueError(
                f"{tokens.name}: expected packed tokens [T] beside cu_seqlens, got shape {_full_shape(tokens)}"
            )
        if max_seqlen is None:
            raise ValueError("max_seqlen: expected an int beside cu_seqlens, got None")
        check_shape("cu_seqlens", cu_seqlens, ("B + 1",))
        check_host_or_same("cu_seqlens", cu_seqlens, tokens.name, tokens)
        packing = Packing.from_cu_seqlens(cu_seqlens, max_seqlen, tokens.shape[0], tokens.device)
        if has_position_table:
            _check_length("max_seqlen", packing.max_seqlen, config, tokens, packing.cu_seqlens)
        return View(packing, None, None, getattr(config, "is_decoder", False))
    if len(tokens.shape) != 2:
        raise ValueError(f"{tokens.name}: expected a padded batch [B, S], got shape {_full_shape(tokens)}")
    batch_size, length = tokens.shape
    num_keys = num_cached + length
    if has_position_table:
        _check_length(tokens.name, num_keys, config, tokens)
    check_pruned(config, None, attention_mask)
    keep, bias = read_attention_mask(
        "attention_mask", attention_mask, batch_size, length, num_keys, config.num_attention_heads, tokens.device,
        all_columns=getattr(config, "is_decoder", False),
    )  # fmt: skip
    keys = _packing(keep, batch_size, num_keys, tokens.device)
    causal = getattr(config, "is_decoder", False) and bias is None
    if num_cached == 0:
        return View(keys, None, bias, causal)
    packing = _packing(None if keep is None else keep[:, num_cached:], batch_size, length, tokens.device)
    rows, positions = packing.coords.unbind(1)
    packing = replace(packing, coords=torch.stack((rows, positions + num_cached), dim=1))
    return View(packing, keys, behind(bias, num_cached), causal)


def read_memory(
    config: Any, states: Tensor | None, mask: Tensor | None, packing: Packing, cache: Any, num_cached: int
) -> Memory | None:
    """The memory without its padding.

    states (Tensor [B, Sm, H]) and mask: encoder_hidden_states and encoder_attention_mask; packing: of the tokens.
    """
    if states is None:
        return None
    if not getattr(config, "add_cross_attention", False):
        raise ValueError(
            "encoder_hidden_states: expected None in an encoder and in a decoder without cross-attention "
            f"(config.add_cross_attention), got {type(states).__name__}"
        )
    batch_size, length = packing.padded_shape or (packing.num_sequences, packing.max_seqlen)
    check_tensor("encoder_hidden_states", states)
    if states.dim() == 3 and states.shape[0] == 1:  # one memory for all
        states = states.expand(batch_size, -1, -1)
    check_shape("encoder_hidden_states", states, (batch_size, "Sm", config.hidden_size))
    check_floating("encoder_hidden_states", states)
    check_same_device("encoder_hidden_states", states, "the tokens", packing.coords)
    num_keys = states.shape[1]
    if isinstance(cache, KeyValueCache) and cache.memory and (kept := cache.memory[0][0].shape[2]) != num_keys:
        raise ValueError(
            f"encoder_hidden_states: expected {kept} columns (those of past_key_values' memory), got {num_keys}"
        )
    keep, bias = read_attention_mask(
        "encoder_attention_mask", mask, batch_size, length, num_keys, config.num_attention_heads, states.device
    )
    keys = _packing(keep, batch_size, num_keys, states.device)
    return Memory(keys.pack(states), keys, behind(bias, num_cached))


def _packing(keep: Tensor | None, batch_size: int, length: int, device: torch.device) -> Packing:
    return Packing.full(batch_size, length, device) if keep is None else Packing.from_keep_mask(keep, device)


def _full_shape(tokens: Tokens) -> list[int]:
    given = tokens.input_ids if tokens.inputs_embeds is None else tokens.inputs_embeds
    assert given is not None
    return list(given.shape)


def _check_length(name: str, length: int, config: Any, tokens: Tokens, cu_seqlens: Tensor | None = None) -> None:
    """Raises ValueError where positions, counted by column, by token or by distance, would leave their table."""
    is_absolute = getattr(config, "position_embedding_type", "absolute") == "absolute"
    if tokens.padding_idx is not None and is_absolute:
        if tokens.position_ids is None:
            check_numbered_length(name, config, tokens.padding_idx, tokens.input_ids, length, cu_seqlens)
        return
    if length > config.max_position_embeddings and not (is_absolute and tokens.position_ids is not None):
        raise ValueError(
            f"{name}: expected at most {config.max_position_embeddings} tokens a sequence "
            f"(max_position_embeddings), got {length}"
        )
