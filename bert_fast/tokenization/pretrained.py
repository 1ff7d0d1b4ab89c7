"""The part of the tokenizer that reads and writes directories; the files themselves are in files.py."""

import inspect
import os
from typing import TYPE_CHECKING, Any

from bert_fast.files import write_atomically
from bert_fast.tokenization.arguments import check_flags, shown
from bert_fast.tokenization.decode import TokenDecoder
from bert_fast.tokenization.files import VOCAB_FILE, as_path, read_tokenizer, tokenizer_json, write_tokenizer
from bert_fast.tokenization.options import LARGE_LENGTH
from bert_fast.tokenization.special_tokens import NAMED_TOKENS
from bert_fast.tokenization.vocab import vocab_to_text

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["StoredTokenizer"]

# Arguments of transformers' from_pretrained that say where and how to fetch; nothing is fetched here.
_FETCHING = {
    *("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token"),
    *("trust_remote_code", "use_auth_token", "use_fast"),
}
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
    do_lower_case: bool
    strip_accents: bool | None
    tokenize_chinese_chars: bool
    never_split: list[str]
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
        """Reads a directory (tokenizer.json or vocab.txt, tokenizer_config.json, ...), a vocab.txt or a tokenizer.json.

        Args:
            pretrained_model_name_or_path: a path; nothing is fetched from the network.
            options: arguments of the constructor, which win over the files.

        Raises:
            FileNotFoundError, ValueError: see `bert_fast.tokenization.files.read_tokenizer`.
            TypeError: an option that the constructor does not know.
        """
        arguments, added = read_tokenizer(pretrained_model_name_or_path)
        known = inspect.signature(cls.__init__).parameters.keys() - {"self", "vocab_file"}
        config = {key: arguments.pop(key) for key in list(arguments) if key not in known}
        given = {key: value for key, value in options.items() if key not in _FETCHING}
        arguments.update(added_tokens=added, name_or_path=str(pretrained_model_name_or_path))
        try:
            tokenizer = cls(**{**arguments, **given})
        except (TypeError, ValueError) as error:
            path = str(pretrained_model_name_or_path)
            if path in str(error):
                raise
            raise (TypeError if isinstance(error, TypeError) else ValueError)(f"{path}: {error}") from error
        tokenizer._config = {key: value for key, value in config.items() if key not in _NOT_SAVED}
        return tokenizer

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], filename_prefix: str | None = None, **ignored: Any
    ) -> tuple[str, ...]:
        """Writes vocab.txt, tokenizer.json, special_tokens_map.json and tokenizer_config.json; returns their paths.

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
        prefix = _prefix(filename_prefix)
        vocab = self._vocabulary.tokens
        names: dict[str, Any] = dict(self.special_tokens_map)
        if self._extra:
            names["additional_special_tokens"] = self.extra_special_tokens
        config = {
            **self._config,
            **dict.fromkeys(NAMED_TOKENS[2:]),
            **self.special_tokens_map,
            "tokenizer_class": "BertTokenizer",
            "added_tokens_decoder": {str(key): token.as_dict() for key, token in self.added_tokens_decoder.items()},
            "do_lower_case": self.do_lower_case,
            "strip_accents": self.strip_accents,
            "tokenize_chinese_chars": self.tokenize_chinese_chars,
            "never_split": self.never_split or None,
            "model_max_length": self.model_max_length,
            "padding_side": self.padding_side,
            "truncation_side": self.truncation_side,
            "model_input_names": self.model_input_names,
            "clean_up_tokenization_spaces": self.clean_up_tokenization_spaces,
            "pad_token_type_id": self.pad_token_type_id,
        }
        if self._extra:
            config["additional_special_tokens"] = self.extra_special_tokens  # the name that transformers 4 knows too
        return write_tokenizer(save_directory, vocab, self.as_json(), config, names, prefix)

    def as_json(self) -> dict[str, Any]:
        """What tokenizer.json holds of it: all that decides which ids a text has, but for `never_split`."""
        special = {name: (token, self._ids[token]) for name, token in self.special_tokens_map.items()}
        return tokenizer_json(self._vocabulary.tokens, self._added, self._engine_options, special)

    def save_vocabulary(self, save_directory: str | os.PathLike[str], filename_prefix: str | None = None) -> tuple[str]:
        """Writes vocab.txt into an existing directory; returns its path."""
        directory = as_path("save_directory", save_directory)
        if not directory.is_dir():
            raise NotADirectoryError(f"save_directory: there is no directory {save_directory}")
        path = directory / as_path("filename_prefix", f"{_prefix(filename_prefix)}{VOCAB_FILE}")
        write_atomically(path, lambda temporary: temporary.write_bytes(vocab_to_text(self._vocabulary.tokens).encode()))
        return (str(path),)


def _prefix(filename_prefix: Any) -> str:
    """What names of files start with."""
    if not isinstance(filename_prefix, str | None):
        raise TypeError(f"filename_prefix: expected a str or None, got {type(filename_prefix).__name__}")
    return f"{filename_prefix}-" if filename_prefix else ""
