"""The JSON files of a tokenizer: read with care, and what kind of value each of their keys has."""

import json
import math
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bert_fast.tokenization.special_tokens import NAMED_TOKENS


class Kind(NamedTuple):
    """What a value may be."""

    words: str
    holds: Callable[[Any], bool]

    def or_null(self) -> "Kind":
        """This or null."""
        return Kind(f"{self.words} or null", lambda value: value is None or self.holds(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _are_tokens(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value
    return isinstance(value, dict | list) and all(map(_is_token, values))


TEXT = Kind("a string", lambda value: isinstance(value, str))
TEXT_OR_NULL = TEXT.or_null()
SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
NUMBER = Kind("a number from 0 on", _is_number)
ID = Kind("an integer from 0 to 2147483647", _is_count)
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
LIST = Kind("a list", lambda value: isinstance(value, list))
TEXTS = Kind("a list of strings", lambda value: isinstance(value, list) and all(map(TEXT.holds, value)))
TOKEN = Kind("a string or an object with its content", _is_token)
TOKENS = Kind("tokens in a list or by name", _are_tokens)

TOKENIZER_KINDS = {
    **dict.fromkeys(("model", "normalizer", "pre_tokenizer", "post_processor", "padding"), OBJECT.or_null()),
    "added_tokens": LIST.or_null(),
}
MODEL_KINDS = {
    "unk_token": TEXT_OR_NULL,
    "continuing_subword_prefix": TEXT_OR_NULL,
    "max_input_chars_per_word": ID.or_null(),
}
NORMALIZER_KINDS = {
    **dict.fromkeys(("lowercase", "handle_chinese_chars", "clean_text"), SWITCH),
    "strip_accents": SWITCH.or_null(),
}
# Also of special_tokens_map.json. Other keys mean nothing here.
CONFIG_KINDS = {
    **dict.fromkeys(NAMED_TOKENS, TOKEN.or_null()),
    **dict.fromkeys(("extra_special_tokens", "additional_special_tokens"), TOKENS.or_null()),
    **dict.fromkeys(("do_lower_case", "tokenize_chinese_chars", "do_basic_tokenize", "clean_text"), SWITCH),
    **dict.fromkeys(("strip_accents", "clean_up_tokenization_spaces"), SWITCH.or_null()),
    **dict.fromkeys(("pad_token_type_id", "max_input_chars_per_word"), ID),
    **dict.fromkeys(("padding_side", "truncation_side", "continuing_subword_prefix"), TEXT),
    "never_split": TEXTS.or_null(),
    "model_input_names": TEXTS,
    **dict.fromkeys(("model_max_length", "max_len"), NUMBER.or_null()),
    "split_special_tokens": SWITCH.or_null(),
    "added_tokens_decoder": OBJECT.or_null(),
}


def check_kinds(path: Path, values: Mapping[str, Any], kinds: Mapping[str, Kind], place: str = "") -> None:
    """Looks at the values that are there.

    Raises:
        ValueError: one is of another kind; the message names the file, `place` and the key.
    """
    for name, kind in kinds.items():
        if name in values and not kind.holds(values[name]):
            raise ValueError(f"{path}: {place}{name:.40}: expected {kind.words}, got {reprlib.repr(values[name])}")


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file.

    Raises:
        ValueError: the file holds something else, is not UTF-8, is nested too deeply, has a key twice in one object, a
            number that is none (NaN) or too long, or half of a surrogate pair.
    """
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text, object_pairs_hook=_distinct, parse_constant=_refuse_constant)
        if "\\u" in text:  # nothing else makes half a pair
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{path} is not valid JSON: a string holds half of a surrogate pair") from None
    except RecursionError:
        raise ValueError(f"{path} is not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def type_of(part: Mapping[str, Any]) -> str:
    """What a part of a tokenizer.json says that it is, for messages."""
    kind = part.get("type")
    return kind if isinstance(kind, str) and kind.isidentifier() else reprlib.repr(kind)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {reprlib.repr(twice)} stands twice in one object")
    return values


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
