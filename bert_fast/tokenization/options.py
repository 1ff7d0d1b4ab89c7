"""The arguments of a call that decide how long rows are and what comes back, checked and resolved."""

import operator
from typing import Any, NamedTuple

from bert_fast.tokenization.arguments import shown
from bert_fast.tokenization.layout import Truncation

LARGE_LENGTH = int(1e20)  # a model_max_length above this means "no limit" (transformers stores 1e30)
NO_LIMIT = int(1e30)

MOST_TOKENS = 2**62  # a max_length above it cuts nothing either, and fits into no int64
_MOST_WIDTH = 2**31 - 1  # of padded rows

_PADDING = ("longest", "max_length", "do_not_pad")
_TRUNCATION = ("longest_first", "only_first", "only_second", "do_not_truncate")


class Shape(NamedTuple):
    """How long rows may be and how they are filled up."""

    add_special_tokens: bool
    truncation: Truncation | None
    padding: str  # "longest", "max_length" or "do_not_pad"
    max_length: int | None
    pad_to_multiple_of: int | None
    padding_side: str


class Returned(NamedTuple):
    """Which entries the dictionary gets, and in what form."""

    token_type_ids: bool
    attention_mask: bool
    special_tokens_mask: bool = False
    offsets_mapping: bool = False
    length: bool = False
    overflowing_tokens: bool = False
    tensors: str | None = None  # "pt", "np" or None for lists

    @property
    def has_extras(self) -> bool:
        """Whether there is more to return than ids, type ids and attention mask."""
        return self.special_tokens_mask or self.offsets_mapping or self.length or self.overflowing_tokens


def resolve_shape(
    *,
    padding: Any,
    truncation: Any,
    max_length: Any,
    stride: Any,
    pad_to_multiple_of: Any,
    padding_side: str,
    truncation_side: str,
    model_max_length: int,
    add_special_tokens: bool,
    has_pad_token: bool,
) -> Shape:
    """Resolves what a caller left open, as transformers does.

    A `max_length` alone means truncation; without one, truncation and padding="max_length" take `model_max_length`, and
    do nothing if that is no limit either.

    Raises:
        ValueError: a value out of range or an unknown strategy; padding without a padding token; truncation to a length
            that is not a multiple of `pad_to_multiple_of`.
    """
    add_special_tokens = True if add_special_tokens else False  # noqa: SIM210 (a call of bool takes thrice as long)
    max_length = check_int("max_length", max_length, 0)
    stride = check_int("stride", stride, 0) or 0
    pad_to_multiple_of = check_int("pad_to_multiple_of", pad_to_multiple_of, 1, _MOST_WIDTH)
    check_side("padding_side", padding_side)
    fill = _strategy("padding", padding, _PADDING, "longest", "do_not_pad")
    if truncation is None and max_length is not None and fill == "do_not_pad":
        truncation = True
    cut = _strategy("truncation", truncation, _TRUNCATION, "longest_first", "do_not_truncate")
    needs_length = fill == "max_length" or cut != "do_not_truncate"
    if max_length is None and needs_length and model_max_length <= LARGE_LENGTH:
        max_length = model_max_length
    if fill == "max_length" and max_length is not None and max_length > _MOST_WIDTH:
        raise ValueError(f"max_length: expected at most {_MOST_WIDTH} to pad to, got {shown(max_length)}")
    if fill != "do_not_pad" and not has_pad_token:
        raise ValueError("padding: the tokenizer has no pad_token; set one, for example with add_special_tokens")
    if cut == "do_not_truncate" or max_length is None:
        return Shape(add_special_tokens, None, fill, max_length, pad_to_multiple_of, padding_side)
    if fill != "do_not_pad" and pad_to_multiple_of and max_length % pad_to_multiple_of:
        raise ValueError(
            f"pad_to_multiple_of: with truncation, max_length ({shown(max_length)}) must be a multiple of it, "
            f"got {pad_to_multiple_of}"
        )
    cutting = Truncation(cut, min(max_length, MOST_TOKENS), min(stride, MOST_TOKENS), truncation_side)
    return Shape(add_special_tokens, cutting, fill, max_length, pad_to_multiple_of, padding_side)


def padded_width(longest: int, strategy: str, max_length: int | None, pad_to_multiple_of: int | None) -> int:
    """The length to pad to; 0 for none.

    Args:
        longest: length of the longest row.
        strategy: "longest", "max_length" or "do_not_pad".
        max_length: None with "max_length" pads nothing, as a model without a limit has none.
        pad_to_multiple_of: rounds the length up.
    """
    if strategy == "do_not_pad" or (strategy == "max_length" and max_length is None):
        return 0
    width = longest if strategy == "longest" or max_length is None else max_length
    if pad_to_multiple_of:
        width = -(-width // pad_to_multiple_of) * pad_to_multiple_of
    return width


def tensor_kind(return_tensors: Any, name: str = "return_tensors") -> str | None:
    """The kind that `return_tensors` names: "pt", "np" or None; messages call it `name`.

    Raises:
        ValueError: it names another.
    """
    kind = getattr(return_tensors, "value", return_tensors)
    if kind is not None and not (isinstance(kind, str) and kind in ("pt", "np")):
        raise ValueError(f"{name}: expected 'pt', 'np' or None, got {shown(return_tensors)}")
    return kind


def check_side(name: str, side: Any) -> Any:
    """`side`, which is "right" or "left"; raises ValueError unless it is."""
    if not isinstance(side, str) or side not in ("right", "left"):
        raise ValueError(f"{name}: expected 'right' or 'left', got {shown(side)}")
    return side


def check_int(name: str, value: Any, least: int, most: int | None = None) -> int | None:
    """`value` as an int, or None.

    Raises:
        ValueError: it is neither, or less than `least` or more than `most`.
    """
    try:
        number = None if value is None else operator.index(value)
    except TypeError:
        number = least - 1
    if number is not None and (number < least or isinstance(value, bool)):
        raise ValueError(f"{name}: expected an int of at least {least}, got {shown(value)}")
    if number is not None and most is not None and number > most:
        raise ValueError(f"{name}: expected an int of at most {most}, got {shown(value)}")
    return number


def _strategy(name: str, value: Any, known: tuple[str, ...], if_true: str, if_false: str) -> str:
    """The strategy that a bool, a string or an enumeration of transformers names."""
    value = getattr(value, "value", value)
    if value is None or value is False:
        return if_false
    if value is True:
        return if_true
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}: expected True, False or one of {', '.join(known)}, got {shown(value)}")
    return str(value)
