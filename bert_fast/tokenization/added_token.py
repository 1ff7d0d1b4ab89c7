"""Tokens that are recognised in the text before it is split: special tokens and those a user adds."""

import contextlib
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class AddedToken:
    """One added token; the fields mean what they mean in Hugging Face `tokenizers`.

    Args:
        content: the text to look for, and the name of the token.
        single_word: only where no word character stands on either side.
        lstrip: takes the whitespace before it along.
        rstrip: takes the whitespace after it along.
        normalized: matches the normalized content in the normalized text (not the text as given); None: if not special.
        special: left out by `decode(..., skip_special_tokens=True)`.

    Example:
        >>> words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text"]
        >>> tokenizer = bert_fast.BertTokenizer(words)
        >>> tokenizer.add_tokens([tokenization.AddedToken("covid", single_word=True)])
        1
    """

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = None  # type: ignore[assignment]  # set below
    special: bool = False

    def __post_init__(self) -> None:
        if self.normalized is None:
            object.__setattr__(self, "normalized", self.special is not True)
            object.__setattr__(self, "_is_open", True)
        for name, value in vars(self).items():
            kind = str if name == "content" else bool
            if not isinstance(value, kind):
                raise TypeError(f"{name}: expected a {kind.__name__}, got {type(value).__name__}")

    def __str__(self) -> str:
        return self.content

    @classmethod
    def from_any(cls, value: Any, special: bool, name: str) -> "AddedToken":
        """From a string, a dict as files hold it, or anything with these attributes (`tokenizers.AddedToken`).

        Raises:
            TypeError: `value`, called `name` in the message, is none of these, or a switch is no bool.
            ValueError: the content has lone surrogates, which UTF-8 cannot hold.
        """
        fields: dict[str, Any]
        if isinstance(value, str):
            fields = {"content": value}
        elif isinstance(value, dict) and isinstance(value.get("content"), str):
            fields = {key: value[key] for key in cls.__dataclass_fields__ if key in value}
        elif isinstance(getattr(value, "content", None), str):
            fields = {key: getattr(value, key) for key in cls.__dataclass_fields__ if hasattr(value, key)}
            if special and not fields.get("special"):
                fields["special"] = True
                if _follows_special(value):
                    del fields["normalized"]
        else:
            raise TypeError(f"{name}: expected a str or an AddedToken, got {type(value).__name__}")
        for key, switch in fields.items():
            if key != "content" and not isinstance(switch, bool):
                raise TypeError(f"{name}: {key}: expected a bool, got {type(switch).__name__}")
        try:
            fields["content"].encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name}: expected a str without lone surrogates, got {fields['content']!r:.80}") from None
        return cls(**{"special": special, **fields})

    def as_dict(self) -> dict[str, Any]:
        """The fields, as configuration files hold them."""
        return asdict(self)

    def for_engine(self, token_id: int) -> tuple[str, int, bool, bool, bool, bool]:
        """The tuple that the engines' constructors take."""
        return self.content, token_id, self.single_word, self.lstrip, self.rstrip, self.normalized


def _follows_special(value: Any) -> bool:
    """Whether `normalized` of an object was left to be what `special` is not.

    Objects of `tokenizers` show it only when `special` changes.
    """
    if isinstance(value, AddedToken):
        return hasattr(value, "_is_open")
    before = getattr(value, "normalized", None)
    try:
        value.special = True
        return bool(value.normalized != before)
    except AttributeError:
        return False
    finally:
        with contextlib.suppress(AttributeError):
            value.special = False
