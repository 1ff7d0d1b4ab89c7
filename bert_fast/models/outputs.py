"""What the models return: a dataclass, a dictionary and a tuple in one, with Hugging Face's class and field names.

`out.logits`, `out["logits"]`, `out[0]`, `out[:2]`, `out.to_tuple()` and `**out` all work. A field that is None is
absent from keys, indices, slices, `len` and iteration, so `out[0]` is the loss where labels were given and the logits
where not. As with any dictionary (and with Hugging Face's classes), iterating gives the keys; unpack `out.to_tuple()`
or `out[:2]` to get values.

Every class is a node of `torch.utils._pytree`, so DDP, activation checkpointing and `torch.compile` see the tensors.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

__all__ = [
    "BaseModelOutputWithPastAndCrossAttentions",
    "BaseModelOutputWithPoolingAndCrossAttentions",
    "BertForPreTrainingOutput",
    "CausalLMOutputWithCrossAttentions",
    "MaskedLMOutput",
    "ModelOutput",
    "MultipleChoiceModelOutput",
    "NextSentencePredictorOutput",
    "QuestionAnsweringModelOutput",
    "SequenceClassifierOutput",
    "TextEmbeddingOutput",
    "TokenClassifierOutput",
]


class ModelOutput(OrderedDict[str, Any]):
    """Base of all outputs; subclasses are dataclasses whose fields all default to None.

    A subclass can also be built from one mapping or one iterable of (name, value) pairs: generic code that rebuilds
    containers of a dictionary type (`accelerate`, `torch.nn.parallel.gather`) does that.

    Raises:
        KeyError: a key that is not a field is set, or an absent one is read.
        TypeError: an attempt to delete a field (set it to None instead).
    """

    def __init_subclass__(cls) -> None:
        """Makes the subclass a pytree node, so that transformations reach its tensors."""
        pytree.register_pytree_node(
            cls,
            lambda output: (list(output.values()), list(output.keys())),
            lambda values, keys: _rebuild(cls, values, keys),
            serialized_type_name=f"{cls.__module__}.{cls.__name__}",
        )

    def __post_init__(self) -> None:
        """Spreads a mapping or an iterable of pairs, given as the only argument, over the fields."""
        if len(self) != 1:
            return
        name, value = next(iter(self.items()))
        if name != fields(self)[0].name or isinstance(value, torch.Tensor):  # type: ignore[arg-type]
            return
        pairs = _as_pairs(value)
        if pairs is not None:
            setattr(self, name, None)
            for key, item in pairs:
                self[key] = item

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; a field is set as key too, None removes the key, and keys stay in field order."""
        super().__setattr__(name, value)
        names = list(self.__dataclass_fields__)  # type: ignore[attr-defined]
        if name not in names:
            return
        if value is None:
            if name in self:
                super().__delitem__(name)
            return
        is_new = name not in self
        super().__setitem__(name, value)
        if is_new:
            for later in names[names.index(name) + 1 :]:
                if later in self:
                    self.move_to_end(later)

    def __setitem__(self, key: str, value: Any) -> None:
        """Sets a field by its name, as attribute and as key."""
        if key not in self.__dataclass_fields__:  # type: ignore[attr-defined]
            raise KeyError(f"{type(self).__name__} has no field {key!r}")
        setattr(self, key, value)

    def __getitem__(self, key: Any) -> Any:
        """A field by name, or by position among the fields that are not None (integer or slice)."""
        if isinstance(key, str):
            return super().__getitem__(key)
        return self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        """The values of all fields that are not None, in field order."""
        return tuple(self.values())

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__}: fields cannot be deleted or merged; assign to them (None removes one)")

    __delitem__ = pop = popitem = setdefault = update = clear = _refuse


def _rebuild(cls: type[ModelOutput], values: Iterable[Any], keys: Iterable[str]) -> ModelOutput:
    # Not cls(**dict): a single leaf that a transformation turned into a mapping must stay a leaf.
    output = cls()
    for key, value in zip(keys, values, strict=True):
        setattr(output, key, value)
    return output


def _as_pairs(value: Any) -> list[tuple[str, Any]] | None:
    # The (name, value) pairs in `value`, or None where it is an ordinary value of the first field.
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        return None
    items = list(value)
    if all(isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str) for item in items):
        return [(key, item) for key, item in items]
    return None


@dataclass(eq=False)
class BaseModelOutputWithPoolingAndCrossAttentions(ModelOutput):
    """What `BertModel` returns.

    last_hidden_state (Tensor [B, S, H], or [T, H] for packed input): output of the last layer.
    pooler_output (Tensor [B, H]): the pooled sequence; None without a pooling layer.
    hidden_states (tuple of L + 1 tensors like last_hidden_state): embeddings, then each layer's output.
    attentions, cross_attentions (tuple of L tensors [B, A, S, S_k]): attention probabilities, after dropout.
    past_key_values: the cache of keys and values, for decoders.
    """

    last_hidden_state: torch.Tensor | None = None
    pooler_output: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    past_key_values: Any = None
    attentions: tuple[torch.Tensor, ...] | None = None
    cross_attentions: tuple[torch.Tensor, ...] | None = None


@dataclass(eq=False)
class BaseModelOutputWithPastAndCrossAttentions(ModelOutput):
    """What the encoder returns: `BaseModelOutputWithPoolingAndCrossAttentions` without the pooled sequence."""

    last_hidden_state: torch.Tensor | None = None
    past_key_values: Any = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    cross_attentions: tuple[torch.Tensor, ...] | None = None


@dataclass(eq=False)
class MaskedLMOutput(ModelOutput):
    """loss (Tensor []), logits (Tensor [B, S, V], or one row per gathered position), hidden states, attentions."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


@dataclass(eq=False)
class BertForPreTrainingOutput(ModelOutput):
    """What `BertForPreTraining` returns.

    loss (Tensor []): masked-LM loss plus next-sentence loss.
    prediction_logits (Tensor [B, S, V], or one row per gathered position); seq_relationship_logits (Tensor [B, 2]).
    """

    loss: torch.Tensor | None = None
    prediction_logits: torch.Tensor | None = None
    seq_relationship_logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


@dataclass(eq=False)
class CausalLMOutputWithCrossAttentions(ModelOutput):
    """loss (Tensor []), logits (Tensor [B, S, V]), the cache, hidden states, attentions, cross-attentions."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    past_key_values: Any = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    cross_attentions: tuple[torch.Tensor, ...] | None = None


@dataclass(eq=False)
class NextSentencePredictorOutput(ModelOutput):
    """loss (Tensor []), logits (Tensor [B, 2]; class 0: B follows A), hidden states, attentions."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


@dataclass(eq=False)
class SequenceClassifierOutput(ModelOutput):
    """loss (Tensor []), logits (Tensor [B, num_labels]), hidden states, attentions."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


@dataclass(eq=False)
class MultipleChoiceModelOutput(ModelOutput):
    """loss (Tensor []), logits (Tensor [B, number of choices]), hidden states, attentions."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


@dataclass(eq=False)
class TokenClassifierOutput(ModelOutput):
    """loss (Tensor []), logits (Tensor [B, S, num_labels]), hidden states, attentions."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


@dataclass(eq=False)
class QuestionAnsweringModelOutput(ModelOutput):
    """loss (Tensor []), start_logits and end_logits (Tensor [B, S]), hidden states, attentions."""

    loss: torch.Tensor | None = None
    start_logits: torch.Tensor | None = None
    end_logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


@dataclass(eq=False)
class TextEmbeddingOutput(ModelOutput):
    """embeddings (Tensor [B, H], fp32), hidden states, attentions."""

    embeddings: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
