"""`BertTokenizer`, the drop-in for the BERT tokenizers of transformers."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_fast.files import write_atomically
from bert_fast.tokenization.added_token import AddedToken
from bert_fast.tokenization.arguments import check_flags, strings
from bert_fast.tokenization.calls import Tokenizer
from bert_fast.tokenization.files import VOCAB_FILE, as_path
from bert_fast.tokenization.layout import BERT_PAIRS, PairForm
from bert_fast.tokenization.options import check_int
from bert_fast.tokenization.pretrained import prefix_of
from bert_fast.tokenization.vocab import load_vocab, open_vocab, vocab_to_text
from bert_fast.tokenization.wordpiece_file import read_tokenizer_json, tokenizer_json


class BertTokenizer(Tokenizer):
    """Text to WordPiece ids and back: ids, masks, offsets and word ids as transformers' fast BERT tokenizer makes them.

    Args:
        vocab: path of a vocab.txt, list of tokens, or mapping token -> id.
        do_lower_case: lower-case the text (uncased models).
        strip_accents: remove accents; None means "if do_lower_case".
        tokenize_chinese_chars: make every CJK ideograph a word.
        never_split: words that, standing between whitespace, are looked up whole and as they are.
        unk_token, sep_token, pad_token, cls_token, mask_token: special tokens, all in the vocabulary; mask_token and
            pad_token may be None.
        model_max_length: what `truncation=True` and `padding="max_length"` use without `max_length`; None: no limit.
        padding_side, truncation_side: "right" or "left".
        vocab_file: the same as `vocab`.
        do_basic_tokenize: only True is supported.
        extra_special_tokens, additional_special_tokens: further special tokens, in a list or by the names that they get
            as attributes; new ones are added.
        model_input_names: which of token_type_ids and attention_mask a call returns unasked.
        clean_up_tokenization_spaces: default of `decode`.
        pad_token_type_id: type id of padding.
        clean_text: drop control characters and turn whitespace into spaces.
        max_input_chars_per_word: longer words become unk_token.
        continuing_subword_prefix: marks entries of the vocabulary that continue a word.
        added_tokens: added tokens by id, as files hold them.
        pairs: what rows of two texts look like, as files hold it: MPNet has two separators and no types.
        name_or_path: where it came from.

    Raises:
        ValueError: duplicate tokens, missing special tokens, an unreadable file; the message says which and where.

    Instances may be shared between threads and forked processes, pickled and copied. Only `add_tokens`,
    `add_special_tokens` and assignments change one.

    Example:
        >>> words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text", "##s"]
        >>> tokenizer = bert_fast.BertTokenizer(words)
        >>> tokenizer(["Texts", "a text"])["input_ids"]
        [[2, 6, 7, 3], [2, 5, 6, 3]]
        >>> tokenizer.decode([6, 7])
        'texts'
    """

    do_lower_case: bool
    strip_accents: bool | None
    tokenize_chinese_chars: bool
    never_split: list[str]

    def __init__(
        self,
        vocab: str | os.PathLike[str] | Mapping[str, int] | Sequence[str] | None = None,
        do_lower_case: bool = True,
        strip_accents: bool | None = None,
        tokenize_chinese_chars: bool = True,
        never_split: Sequence[str] | None = None,
        unk_token: Any = "[UNK]",
        sep_token: Any = "[SEP]",
        pad_token: Any = "[PAD]",
        cls_token: Any = "[CLS]",
        mask_token: Any = "[MASK]",
        model_max_length: int | None = None,
        padding_side: str = "right",
        truncation_side: str = "right",
        *,
        vocab_file: str | os.PathLike[str] | None = None,
        do_basic_tokenize: bool = True,
        bos_token: Any = None,
        eos_token: Any = None,
        extra_special_tokens: Sequence[Any] | Mapping[str, Any] | None = None,
        additional_special_tokens: Sequence[Any] | Mapping[str, Any] | None = None,
        model_input_names: Sequence[str] = ("input_ids", "token_type_ids", "attention_mask"),
        clean_up_tokenization_spaces: bool = False,
        pad_token_type_id: int = 0,
        clean_text: bool = True,
        max_input_chars_per_word: int = 100,
        continuing_subword_prefix: str = "##",
        added_tokens: Mapping[int, AddedToken] | None = None,
        pairs: PairForm = BERT_PAIRS,
        name_or_path: str = "",
    ) -> None:
        check_flags(do_basic_tokenize=do_basic_tokenize)
        if not do_basic_tokenize:
            raise ValueError(
                "do_basic_tokenize: only True is supported (text that is split already: is_split_into_words)"
            )
        if type(max_input_chars_per_word) is int:  # of others the engine says what is wrong with them
            check_int("max_input_chars_per_word", max_input_chars_per_word, 0, 2**31 - 1)
        if not isinstance(pairs, PairForm):
            raise TypeError(f"pairs: expected a PairForm, got {type(pairs).__name__}")
        self._pairs = pairs
        self.do_lower_case = do_lower_case
        self.strip_accents = strip_accents
        self.tokenize_chinese_chars = tokenize_chinese_chars
        self.never_split = strings("never_split", never_split)
        named = {"unk_token": unk_token, "sep_token": sep_token, "pad_token": pad_token, "cls_token": cls_token}
        super().__init__(
            load_vocab(vocab, vocab_file),
            {**named, "mask_token": mask_token, "bos_token": bos_token, "eos_token": eos_token},
            {"extra_special_tokens": extra_special_tokens, "additional_special_tokens": additional_special_tokens},
            {} if added_tokens is None else added_tokens,
            {
                "lowercase": do_lower_case,
                "strip_accents": strip_accents,
                "handle_chinese_chars": tokenize_chinese_chars,
                "clean_text": clean_text,
                "max_word_chars": max_input_chars_per_word,
                "continuing_prefix": continuing_subword_prefix,
                "never_split": self.never_split,
            },
            model_max_length=model_max_length,
            padding_side=padding_side,
            truncation_side=truncation_side,
            model_input_names=model_input_names,
            clean_up_tokenization_spaces=clean_up_tokenization_spaces,
            pad_token_type_id=pad_token_type_id,
            name_or_path=name_or_path,
        )

    # Files.

    def save_vocabulary(self, save_directory: str | os.PathLike[str], filename_prefix: str | None = None) -> tuple[str]:
        """Writes vocab.txt into an existing directory; returns its path."""
        directory = as_path("save_directory", save_directory)
        if not directory.is_dir():
            raise NotADirectoryError(f"save_directory: there is no directory {save_directory}")
        path = directory / as_path("filename_prefix", f"{prefix_of(filename_prefix)}{VOCAB_FILE}")
        write_atomically(path, lambda temporary: temporary.write_bytes(vocab_to_text(self._vocabulary.tokens).encode()))
        return (str(path),)

    def as_json(self) -> dict[str, Any]:
        """What tokenizer.json holds of it: all that decides which ids a text has, but for `never_split`."""
        special = {name: (token, self._ids[token]) for name, token in self.special_tokens_map.items()}
        return tokenizer_json(self._vocabulary.tokens, self._added, self._engine_options, special, self._pairs)

    def identity(self) -> list[Any]:
        """See `StoredTokenizer.identity`: vocabulary, options and added tokens."""
        options = dict(self._engine_options)
        if options["strip_accents"] is None:
            options["strip_accents"] = options["lowercase"]
        options["never_split"] = sorted(set(options["never_split"]))
        tokens = sorted(self._ids.items(), key=lambda item: item[1])
        return [self.vocab_size, tokens, self.unk_token, sorted(options.items()), self._added_identity()]

    def continuing_ids(self) -> list[int]:
        """See `StoredTokenizer.continuing_ids`: those with the prefix, "##"."""
        prefix = self._engine_options["continuing_prefix"]
        return [
            token_id
            for token_id, token in enumerate(self._vocabulary.tokens)
            if token.startswith(prefix) and token != prefix and token_id not in self._added
        ]

    def _own_files(self) -> dict[str, str]:
        return {VOCAB_FILE: vocab_to_text(self._vocabulary.tokens)}

    def _own_config(self) -> dict[str, Any]:
        return {
            # transformers' class of this name makes BERT's pairs whatever the file says.
            "tokenizer_class": "BertTokenizer" if self._pairs == BERT_PAIRS else "PreTrainedTokenizerFast",
            "do_lower_case": self.do_lower_case,
            "strip_accents": self.strip_accents,
            "tokenize_chinese_chars": self.tokenize_chinese_chars,
            "never_split": self.never_split or None,
        }

    @classmethod
    def _read_json(cls, path: Path) -> tuple[dict[str, Any], dict[int, AddedToken]]:
        return read_tokenizer_json(path)

    @classmethod
    def _read_vocabulary(cls, path: Path) -> tuple[dict[str, Any], dict[int, AddedToken]]:
        return {"vocab": open_vocab(path)}, {}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(name_or_path={self.name_or_path!r}, vocab_size={self.vocab_size}, "
            f"do_lower_case={self.do_lower_case}, model_max_length={self.model_max_length}, "
            f"padding_side={self.padding_side!r}, truncation_side={self.truncation_side!r}, "
            f"special_tokens={self.special_tokens_map})"
        )
