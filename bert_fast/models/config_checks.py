"""Checks of single configuration values: each takes a field's name and value and returns the value as it is stored."""

import math
import numbers
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish", "tanh")
POSITION_EMBEDDING_TYPES = ("absolute", "relative_key", "relative_key_query")
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")

Check = Callable[[str, Any], Any]


_LARGEST = 2**31 - 1  # of sizes: kernels count rows and columns in 32 bits
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxdict, _REPR.maxlist = 4, 10, 10
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 200


def shown(value: Any) -> str:
    """A value for a message: its beginning, if it is long."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python writes no int of more than 4,300 digits
        return f"a very large {type(value).__name__}"


def _error(name: str, expected: str, value: Any) -> str:
    return f"{name}: expected {expected}, got {shown(value)}"


def at_least(minimum: int) -> Callable[[str, Any], int]:
    """The check that a value is an int (not a bool) of at least `minimum` and less than 2**31."""

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(_error(name, f"an int >= {minimum}", value))
        if value < minimum:
            raise ValueError(_error(name, f"an int >= {minimum}", value))
        if int(value) > _LARGEST:
            raise ValueError(_error(name, f"an int <= {_LARGEST}", value))
        return int(value)

    return check


def _number(name: str, value: Any, expected: str, upper: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(_error(name, expected, value))
    try:
        number = float(value)
    except OverflowError:  # an int beyond the largest float
        number = math.inf
    if not 0.0 <= number <= upper or math.isinf(number):  # NaN fails every comparison
        raise ValueError(_error(name, expected, value))
    return number


def _probability(name: str, value: Any) -> float:
    return _number(name, value, "a probability in [0, 1]", 1.0)


def _non_negative(name: str, value: Any) -> float:
    return _number(name, value, "a finite number >= 0", math.inf)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(_error(name, "True or False", value))
    return value


def _or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _one_of(choices: tuple[str, ...]) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError(_error(name, "one of " + ", ".join(choices), value))
        if value not in choices:
            raise ValueError(_error(name, "one of " + ", ".join(choices), value))
        return value

    return check


def _activation(name: str, value: Any) -> Any:
    return value if callable(value) else _one_of(ACTIVATIONS)(name, value)


def _token_id(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(_error(name, "an int or None", value))
    return int(value)


def _dtype(name: str, value: Any) -> torch.dtype | None:
    if isinstance(value, str):
        value = None if value == "auto" else getattr(torch, value.removeprefix("torch."), value)
    if value is not None and not isinstance(value, torch.dtype):
        raise ValueError(_error(name, "a torch.dtype or its name", value))
    if value is not None and not is_parameter_dtype(value):
        raise ValueError(_error(name, "a floating-point torch.dtype of at least 16 bits", value))
    return value


def is_parameter_dtype(value: Any) -> bool:
    """Whether parameters can have this dtype: floating-point numbers that can be computed with."""
    return isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize > 1


def _names(name: str, value: Any) -> list[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise TypeError(_error(name, "a list of str", value))
    return list(value)


def _int_keys(name: str, value: Any, what: str) -> dict[int, Any]:
    # JSON has no integer keys, so files hold them as strings.
    if not isinstance(value, Mapping):
        raise TypeError(_error(name, what, value))
    if not all(isinstance(key, int | str) for key in value):
        raise TypeError(_error(name, what, value))
    try:
        items = {int(key): item for key, item in value.items()}
    except ValueError as error:
        raise ValueError(_error(name, what, value)) from error
    if len(items) < len(value):
        raise ValueError(_error(name, what + ", each once", value))
    return items


def _labels(name: str, value: Any) -> dict[int, str]:
    what = "a mapping from class number to name"
    labels = _int_keys(name, value, what)
    if not labels:
        raise ValueError(_error(name, "at least one class", value))
    if not all(isinstance(label, str | int | float) for label in labels.values()):
        raise TypeError(_error(name, what, value))
    return labels


def _label_ids(name: str, value: Any) -> dict[str, int]:
    what = "a mapping from class name to number"
    if not isinstance(value, Mapping):
        raise TypeError(_error(name, what, value))
    try:
        return {label: _whole(index) for label, index in value.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(_error(name, what, value)) from error


def _whole(value: Any) -> int:
    number = int(value)
    if number != value and not isinstance(value, str):
        raise ValueError
    return number


def _pruned_heads(name: str, value: Any) -> dict[int, list[int]]:
    what = "a mapping from layer number to a list of head numbers"
    heads = _int_keys(name, value, what)
    if not all(isinstance(item, list | tuple | set) and all(type(h) is int for h in item) for item in heads.values()):
        raise TypeError(_error(name, what, value))
    return {layer: sorted(set(item)) for layer, item in heads.items()}


FIELD_CHECKS: dict[str, Check] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size"), at_least(1)),
    **dict.fromkeys(("max_position_embeddings", "type_vocab_size"), at_least(1)),
    **dict.fromkeys(("num_hidden_layers", "chunk_size_feed_forward"), at_least(0)),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), _probability),
    **dict.fromkeys(("initializer_range", "layer_norm_eps"), _non_negative),
    **dict.fromkeys(("use_cache", "is_decoder", "add_cross_attention", "tie_word_embeddings"), _boolean),
    **dict.fromkeys(("return_dict", "output_attentions", "output_hidden_states"), _boolean),
    "classifier_dropout": _or_none(_probability),
    "hidden_act": _activation,
    "position_embedding_type": _one_of(POSITION_EMBEDDING_TYPES),
    "problem_type": _or_none(_one_of(PROBLEM_TYPES)),
    "pad_token_id": _or_none(_token_id),
    "architectures": _or_none(_names),
    "dtype": _dtype,
    "pruned_heads": _pruned_heads,
    "id2label": _labels,
    "label2id": _label_ids,
}
