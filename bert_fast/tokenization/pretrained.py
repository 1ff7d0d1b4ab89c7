"""The part of the tokenizer that reads and writes directories; the files themselves are in files.py."""

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_fast.tokenization.added_token import AddedToken
from bert_fast.tokenization.arguments import check_flags, shown
from bert_fast.tokenization.decode import TokenDecoder
from bert_fast.tokenization.files import read_tokenizer, tokenizer_place, write_tokenizer
from bert_fast.tokenization.options import LARGE_LENGTH
from bert_fast.tokenization.special_tokens import NAMED_TOKENS

if TYPE_CHECKING:
    from typing_extensions import Self

# Arguments of transformers' from_pretrained that mean nothing here.
_IGNORED = {"trust_remote_code", "use_auth_token", "use_fast"}
# Keys that transformers leaves in tokenizer_config.json and that would mislead a reader of the saved one.
_NOT_SAVED = {
    *("backend", "is_local", "local_files_only", "max_length", "pad_to_multiple_of", "special_tokens_map_file"),
    *("stride", "tokenizer_file", "truncation_strategy"),
}


class StoredTokenizer(TokenDecoder):
    """The part of the tokenizer that lives in files.

    `_config` holds keys of a tokenizer_config.json that mean nothing here: they are written back.
    """

    _config: dict[str, Any]
    padding_side: str
    truncation_side: str
    model_input_names: list[str]
    pad_token_type_id: int

    @property
    def model_max_length(self) -> int:
        """The longest row that the model takes; a huge number if there is no limit."""
        return self._model_max_length

    @model_max_length.setter
    def model_max_length(self, value: float) -> None:
        try:
            length = int(value)
            float(length)  # a number of more digits could not be read back from a file
        except Exception:  # no number, or none that is finite
            raise TypeError(f"model_max_length: expected an int, got {shown(value)}") from None
        if length < 0:
            raise ValueError(f"model_max_length: expected at least 0, got {length}")
        self._model_max_length = length
        self._longest = length if length <= LARGE_LENGTH else None  # the limit, if it is one: quick to look at

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **options: Any) -> "Self":
        """Reads a directory (tokenizer.json, tokenizer_config.json, ...) or a tokenizer.json; a BERT, also a vocab.txt.

        Args:
            pretrained_model_name_or_path: a path, or a name on the hub (with huggingface_hub installed).
            options: arguments of the constructor, which win over the files; `subfolder`, and of the hub `revision`,
                `token`, `cache_dir`, `local_files_only` and `force_download`.

        Raises:
            FileNotFoundError: no such path, no tokenizer in it, or a name whose tokenizer is neither in the hub's cache
                nor to be had; one line says which.
            ValueError: see `bert_fast.tokenization.files.read_tokenizer`.
            TypeError: an option that the constructor does not know.
        """
        place = tokenizer_place("pretrained_model_name_or_path", pretrained_model_name_or_path, options)
        return cls._of_place(place, str(pretrained_model_name_or_path), options)

    @classmethod
    def _of_place(cls, place: Path, name: str, options: Mapping[str, Any]) -> "Self":
        """`from_pretrained`, after it is known where the files lie; `name` is what the caller gave."""
        arguments, added = read_tokenizer(place, cls._read_json, cls._read_vocabulary)
        known = inspect.signature(cls.__init__).parameters.keys() - {"self", "vocab_file"}
        config = {key: arguments.pop(key) for key in list(arguments) if key not in known}
        given = {key: value for key, value in options.items() if key not in _IGNORED}
        arguments.update(added_tokens=added, name_or_path=name, **cls._of_class(place))
        try:
            tokenizer = cls(**{**arguments, **given})
        except (TypeError, ValueError) as error:
            if name in str(error) or str(place) in str(error):
                raise
            raise (TypeError if isinstance(error, TypeError) else ValueError)(f"{name}: {error}") from error
        tokenizer._config = {key: value for key, value in config.items() if key not in _NOT_SAVED}
        return tokenizer

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], filename_prefix: str | None = None, **ignored: Any
    ) -> tuple[str, ...]:
        """Writes tokenizer.json, special_tokens_map.json, tokenizer_config.json, a BERT also vocab.txt; returns paths.

        transformers and tokenizers open the directory with the same behaviour, except that they know no `never_split`.
        Each file is written under a temporary name and renamed.

        Args:
            save_directory: made if it is not there.
            filename_prefix: put before the names, with a "-".
            ignored: options of transformers that have no meaning here (legacy_format, ...).

        Raises:
            NotADirectoryError: `save_directory` is a file.
            ValueError: push_to_hub=True.
        """
        check_flags(push_to_hub=ignored.get("push_to_hub"))
        if ignored.get("push_to_hub"):
            raise ValueError("push_to_hub: nothing is uploaded from here; save, then upload the directory")
        prefix = prefix_of(filename_prefix)
        names: dict[str, Any] = self.special_tokens_map
        own = {name: names.pop(name) for name in list(names) if name not in NAMED_TOKENS}
        named = dict(names)
        if self._extra:
            names["additional_special_tokens"] = self.extra_special_tokens
        config = {
            **self._config,
            **dict.fromkeys(NAMED_TOKENS[2:]),
            **named,
            "added_tokens_decoder": {str(key): token.as_dict() for key, token in self.added_tokens_decoder.items()},
            "model_max_length": self.model_max_length,
            "padding_side": self.padding_side,
            "truncation_side": self.truncation_side,
            "model_input_names": self.model_input_names,
            "clean_up_tokenization_spaces": self.clean_up_tokenization_spaces,
            "pad_token_type_id": self.pad_token_type_id,
            **self._own_config(),
            **({"extra_special_tokens": own} if own else {}),
        }
        if self._extra:
            config["additional_special_tokens"] = self.extra_special_tokens  # the name that transformers 4 knows too
        return write_tokenizer(save_directory, self._own_files(), self.as_json(), config, names, prefix)

    # What classes of tokenizers have.

    def as_json(self) -> dict[str, Any]:
        """What tokenizer.json holds of it."""
        raise NotImplementedError

    def identity(self) -> list[Any]:
        """All that decides which ids a text gets, in values that JSON can hold.

        Names of special tokens, truncation and padding are not part of it.
        """
        raise NotImplementedError

    def continuing_ids(self) -> list[int]:
        """The tokens that never begin a word: they go on with the one before them."""
        raise NotImplementedError

    def _added_identity(self) -> list[tuple[Any, ...]]:
        """What added tokens have to say about which ids a text gets."""
        return [(token.special, token.for_engine(token_id)) for token_id, token in self.added_tokens_decoder.items()]

    def _own_files(self) -> dict[str, str]:
        """Name -> content of files besides the JSON ones."""
        raise NotImplementedError

    def _own_config(self) -> dict[str, Any]:
        """Keys of tokenizer_config.json that only this class has."""
        raise NotImplementedError

    @classmethod
    def _of_class(cls, place: Path) -> dict[str, Any]:
        """Arguments for the constructor by the class that a directory names."""
        return {}

    @classmethod
    def _read_json(cls, path: Path) -> tuple[dict[str, Any], dict[int, AddedToken]]:
        """Arguments for the constructor, and added tokens by id, from a tokenizer.json."""
        raise NotImplementedError

    @classmethod
    def _read_vocabulary(cls, path: Path) -> tuple[dict[str, Any], dict[int, AddedToken]]:
        """The same from a vocab.txt.

        Raises:
            ValueError: the class has no such file.
        """
        raise NotImplementedError


def prefix_of(filename_prefix: Any) -> str:
    """What names of files start with."""
    if not isinstance(filename_prefix, str | None):
        raise TypeError(f"filename_prefix: expected a str or None, got {type(filename_prefix).__name__}")
    return f"{filename_prefix}-" if filename_prefix else ""
