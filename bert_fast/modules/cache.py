"""Keys and values of earlier calls, for decoding a few tokens at a time.

Layers extend whatever cache they are given, ours or one of transformers (`DynamicCache`, `EncoderDecoderCache`): an
object with `update` and `get_seq_length`.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bert_fast.checks import check_dtype, check_ids, check_shape, check_tensor
from bert_fast.modules.call import Call
from bert_fast.ops.packing import Packing

KeyValue = tuple[Tensor, Tensor]


class KeyValueCache:
    """The keys and values of all layers, [B, A, S, D] each, zeros on padding; of the memory too in a decoder with one.

    It reads as the tuples did that transformers used before: `cache[layer]` is (key, value), or (key, value, memory's
    key, memory's value), and so it iterates. Calls extend it in place. A node of `torch.utils._pytree`, as outputs are.
    """

    def __init__(self, layers: Iterable[tuple[Tensor, ...]] = ()) -> None:
        self._own: dict[int, KeyValue] = {}
        self.memory: dict[int, KeyValue] = {}
        for index, (key, value, *memory) in enumerate(layers):
            self._own[index] = key, value
            if memory:
                self.memory[index] = memory[0], memory[1]

    def update(self, key: Tensor, value: Tensor, layer: int, cache_kwargs: Any = None) -> KeyValue:
        """Appends key and value [B, A, S, D] of new tokens to a layer's; returns all it has then."""
        if layer in self._own:
            past = self._own[layer]
            key, value = torch.cat((past[0], key), dim=2), torch.cat((past[1], value), dim=2)
        self._own[layer] = key, value
        return key, value

    def get_seq_length(self, layer: int = 0) -> int:
        """How many columns a layer holds, padding counted."""
        return self._own[layer][0].shape[2] if layer in self._own else 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces the rows of the batch by those at beam_idx (Tensor [B], int64), as beam search wants it."""
        check_shape("beam_idx", beam_idx, ("B",))
        check_dtype("beam_idx", beam_idx, (torch.int64, torch.int32))
        for key, _ in list(self._own.values())[:1]:
            check_ids("beam_idx", beam_idx, key.shape[0])
        for kept in (self._own, self.memory):
            for layer, (key, value) in kept.items():
                kept[layer] = key.index_select(0, beam_idx), value.index_select(0, beam_idx)

    def __len__(self) -> int:
        return len(self._own)

    def __getitem__(self, layer: int) -> tuple[Tensor, ...]:
        if layer not in self._own:
            raise IndexError(f"expected a layer in [0, {len(self)}), got {layer}")
        return (*self._own[layer], *self.memory.get(layer, ()))

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return (self[layer] for layer in range(len(self)))


pytree.register_pytree_node(
    KeyValueCache,
    lambda cache: (list(cache), None),
    lambda layers, _: KeyValueCache(layers),
    serialized_type_name=f"{KeyValueCache.__module__}.{KeyValueCache.__name__}",
)


def as_cache(past_key_values: Any) -> Any:
    """A cache that layers can extend: a given one itself, tuples of tensors as a new `KeyValueCache`, None for None.

    Raises:
        TypeError, ValueError: neither a cache nor tuples of two or four Tensors [B, A, S, D] for every layer.
    """
    if past_key_values is None or _is_cache(past_key_values):
        return past_key_values
    if not isinstance(past_key_values, tuple | list) or not all(isinstance(p, tuple | list) for p in past_key_values):
        raise TypeError(
            "past_key_values: expected a cache or a tuple with a tuple of keys and values for every layer, "
            f"got {type(past_key_values).__name__}"
        )
    # transformers 4.57 writes (key, value, None, None) where there is no memory.
    layers = [tuple(part for part in layer if part is not None) for layer in past_key_values]
    for layer in layers:
        for t in layer:
            if isinstance(t, Tensor):
                check_tensor("past_key_values", t)
        if len(layer) not in (2, 4) or not all(isinstance(t, Tensor) and t.dim() == 4 for t in layer):
            raise ValueError(
                "past_key_values: expected two or four Tensors [B, A, S, D] for every layer, "
                f"got {[list(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in layer]}"
            )
    return KeyValueCache(layers)


def _is_cache(past_key_values: Any) -> bool:
    return all(callable(getattr(past_key_values, name, None)) for name in ("update", "get_seq_length"))


def extend_cache(call: Call, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Packing]:
    """Appends this call's k and v [T, A, D]; returns all keys' [Tk, A, D], cached ones first, and their layout."""
    padded = (call.packing.unpack(t).transpose(1, 2) for t in (k, v))  # [B, A, S, D]
    cached = getattr(call.cache, "self_attention_cache", call.cache).update(*padded, layer)
    keys = call.keys
    if keys is None or keys.padded_shape is None:  # the first call
        return k, v, call.packing
    length = keys.padded_shape[1]  # a cache of fixed size gives more
    k, v = (keys.pack(t[:, :, :length].transpose(1, 2)) for t in cached)
    return k, v, keys


def memory_of(cache: Any, layer: int, project: Callable[[], KeyValue]) -> KeyValue:
    """Keys and values [B, A, Sm, D] of the memory: what an earlier call projected, else projected now and kept."""
    if isinstance(cache, KeyValueCache):
        if layer not in cache.memory:
            cache.memory[layer] = project()
        return cache.memory[layer]
    if not hasattr(cache, "cross_attention_cache"):
        return project()
    if not cache.is_updated.get(layer):
        cache.cross_attention_cache.update(*project(), layer)
        cache.is_updated[layer] = True
    kept = cache.cross_attention_cache.layers[layer]
    return kept.keys, kept.values
