"""The part of the tokenizer that is called: texts to ids, masks, offsets and word ids, whatever the model is."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bert_fast.tokenization.added_token import AddedToken
from bert_fast.tokenization.arguments import check_flags, members, shown, strings
from bert_fast.tokenization.batch import encode_batch, later_encodings
from bert_fast.tokenization.direct import direct_lists, direct_rows
from bert_fast.tokenization.encoding import BatchEncoding
from bert_fast.tokenization.inputs import Inputs, column_inputs, is_column, own_texts, parse_inputs
from bert_fast.tokenization.options import NO_LIMIT, Returned, Shape, check_int, check_side, tensor_kind
from bert_fast.tokenization.padding import pad_features
from bert_fast.tokenization.special_tokens import NAMED_TOKENS
from bert_fast.tokenization.unpadded import UnpaddedTokenizer
from bert_fast.tokenization.vocab import Vocabulary

_ZERO = 0  # `is` finds arguments that were left out; another int that is equal takes the longer way
_PLAIN_SHAPE = Shape(True, None, "do_not_pad", None, None, "right")


def _flag(name: str, value: Any) -> bool:
    check_flags(**{name: value})
    return bool(value)


# What attributes become of what is assigned to them: from their name and the value.
_ASSIGNED: dict[str, Callable[[str, Any], Any]] = {
    "padding_side": check_side,
    "truncation_side": check_side,
    "model_input_names": strings,
    "never_split": strings,
    "clean_up_tokenization_spaces": _flag,
    "pad_token_type_id": lambda name, value: check_int(name, value, -(2**31), 2**31 - 1) or 0,
}


def _own_names(argument: str, tokens: Mapping[Any, Any]) -> dict[str, Any]:
    """The special tokens of a mapping from names of the caller's choice, which become attributes.

    Raises:
        TypeError, ValueError: a name is none or is taken, or a token is none; messages begin with `argument`.
    """
    for name, token in tokens.items():
        if not isinstance(name, str):
            raise TypeError(f"{argument}: expected a str as name, got {shown(name)}")
        if name in NAMED_TOKENS:
            raise ValueError(f"{argument}: {name} is an argument of its own")
        AddedToken.from_any(token, True, f"{argument}[{name!r:.40}]")
    return dict(tokens)


class Tokenizer(UnpaddedTokenizer):
    """The base of all tokenizers: calls, with the names that calls had before, and `pad`.

    `extra` are further special tokens, lists or mappings from their names, by the arguments that hold them.

    Example:
        >>> tokenizer = bert_fast.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text"])
        >>> isinstance(tokenizer, tokenization.Tokenizer)
        True
        >>> tokenizer(["a text", "a"], padding=True)["input_ids"]
        [[2, 5, 6, 3], [2, 5, 3, 0]]
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        named: Mapping[str, Any],
        extra: Mapping[str, Sequence[Any] | Mapping[str, Any] | None],
        added: Mapping[int, AddedToken],
        engine_options: dict[str, Any],
        *,
        model_max_length: float | None,
        padding_side: str,
        truncation_side: str,
        model_input_names: Sequence[str],
        clean_up_tokenization_spaces: bool,
        pad_token_type_id: int,
        name_or_path: str,
    ) -> None:
        if not isinstance(name_or_path, str):
            raise TypeError(f"name_or_path: expected a str, got {type(name_or_path).__name__}")
        self.model_max_length = NO_LIMIT if model_max_length is None else model_max_length
        self.padding_side = padding_side
        self.truncation_side = truncation_side
        self.model_input_names = strings("model_input_names", model_input_names)
        self.clean_up_tokenization_spaces = clean_up_tokenization_spaces
        self.pad_token_type_id = pad_token_type_id
        self.name_or_path = name_or_path
        self.deprecation_warnings: dict[str, bool] = {}  # data collators of transformers look for it
        self._config: dict[str, Any] = {}  # keys of tokenizer_config.json that mean nothing here, kept for saving
        chosen: list[Any] = []
        own: dict[str, Any] = {}
        for name, tokens in extra.items():
            if isinstance(tokens, Mapping):
                own.update(_own_names(name, tokens))
            elif tokens is not None:
                tokens = members(name, tokens)
                for token in tokens:
                    AddedToken.from_any(token, True, name)  # which names what is none
                chosen = chosen or tokens
        super().__init__(vocabulary, {**named, **own}, chosen, added, engine_options)

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if cls.__call__ is not Tokenizer.__call__ and cls.encode is Tokenizer.encode:
            cls.encode = Tokenizer._encode_by_call  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: Any) -> None:
        check = _ASSIGNED.get(name)
        super().__setattr__(name, value if check is None else check(name, value))

    # Text to ids.

    def __call__(
        self,
        text: Any = None,
        text_pair: Any = None,
        add_special_tokens: bool = True,
        padding: Any = False,
        truncation: Any = None,
        max_length: int | None = None,
        stride: int = 0,
        is_split_into_words: bool = False,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: Any = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool | None = None,
        return_overflowing_tokens: bool = False,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        return_length: bool = False,
        verbose: bool = True,
        text_target: Any = None,
        text_pair_target: Any = None,
    ) -> BatchEncoding:
        """Tokenizes a text, a pair of texts, or a batch of either.

        Args:
            text: a str (or UTF-8 bytes), a list of them, or a list of pairs; with `is_split_into_words`, a list of
                words in place of each str. A column (NumPy array of strings, Arrow column) is read without a Python
                object for each text if lists or padded tensors of ids, type ids and masks are all that is asked for.
            text_pair: the second text, or a list of second texts.
            add_special_tokens: [CLS] A [SEP], or [CLS] A [SEP] B [SEP].
            padding: False, True or "longest" (to the longest row), or "max_length".
            truncation: False, True or "longest_first", "only_first", "only_second"; None means "longest_first" if
                `max_length` is given without padding, else False.
            max_length: default: model_max_length, where truncation or padding need a length.
            stride: how many tokens overflowing windows share with the window before.
            is_split_into_words: texts are lists of words.
            pad_to_multiple_of: rounds the padded length up.
            padding_side: default: that of the tokenizer.
            return_tensors: None for lists, "pt" for torch tensors, "np" for NumPy arrays (all int64).
            return_token_type_ids: default: as `model_input_names` says.
            return_attention_mask: likewise.
            return_overflowing_tokens: also return what truncation cuts off, as further rows, and
                `overflow_to_sample_mapping`.
            return_special_tokens_mask: also return `special_tokens_mask`, 1 for added special tokens and padding.
            return_offsets_mapping: also return `offset_mapping`, (start, stop) in the text of every token.
            return_length: also return `length`, of each row, padding included.
            verbose: warn about arguments that have no effect and rows that are too long for the model.
            text_target: what a model is to produce, tokenized in the same way: its `input_ids` are the entry `labels`
                beside those of `text`; without `text`, it is tokenized in its place.
            text_pair_target: the second text of `text_target`.

        Returns:
            A dictionary whose values have one row per sample; for a single text and lists, the row itself.

        Raises:
            TypeError, ValueError: bad arguments; the message names the argument, and the index in a batch.
        """
        if (
            (text_pair is None and add_special_tokens is True and padding is False and truncation is None)
            and (max_length is None and stride is _ZERO and is_split_into_words is False)
            and (pad_to_multiple_of is None and padding_side is None and return_tensors is None)
            and (return_token_type_ids is None and return_attention_mask is None)
            and (return_overflowing_tokens is False and return_special_tokens_mask is False)
            and (return_offsets_mapping is False and return_length is False and verbose is True)
            and text_target is None
            and type(text) is str
        ):
            return self._encode_text(text)
        try:
            shape = self._shape(
                add_special_tokens, padding, truncation, max_length, stride, pad_to_multiple_of, padding_side
            )
            if verbose and shape.padding == "longest" and max_length is not None and shape.truncation is None:
                warnings.warn(
                    "max_length has no effect with padding=True and no truncation; padding='max_length' pads to it",
                    UserWarning,
                    stacklevel=2,
                )
            returned = Returned(
                "token_type_ids" in self.model_input_names if return_token_type_ids is None else return_token_type_ids,
                "attention_mask" in self.model_input_names if return_attention_mask is None else return_attention_mask,
                return_special_tokens_mask,
                return_offsets_mapping,
                return_length,
                return_overflowing_tokens,
                tensor_kind(return_tensors),
            )
            if text_target is None or text is not None:
                encoding = self._encode_inputs(text, text_pair, is_split_into_words, shape, returned)
            if text_target is not None:
                try:
                    target = self._encode_inputs(text_target, text_pair_target, is_split_into_words, shape, returned)
                except (TypeError, ValueError) as error:  # which speaks of text or text_pair
                    raise type(error)(re.sub(r"^text(_pair)?\b", r"text\1_target", str(error))) from None
                if text is None:
                    encoding = target
                else:
                    encoding["labels"] = target["input_ids"]
            if verbose and max_length is None and self._longest is not None:
                self._warn_if_too_long(encoding["input_ids"])
            return encoding
        except Exception:
            check_flags(
                add_special_tokens=add_special_tokens,
                is_split_into_words=is_split_into_words,
                return_token_type_ids=return_token_type_ids,
                return_attention_mask=return_attention_mask,
                return_overflowing_tokens=return_overflowing_tokens,
                return_special_tokens_mask=return_special_tokens_mask,
                return_offsets_mapping=return_offsets_mapping,
                return_length=return_length,
                verbose=verbose,
            )
            raise

    def encode(self, text: Any, text_pair: Any = None, add_special_tokens: bool = True, **options: Any) -> Any:
        """The `input_ids` of a call."""
        if text_pair is None and not options and type(add_special_tokens) is bool:
            around = self._around if add_special_tokens else None
            if type(text) is str:
                ids = self._engine.encode_one(text, around)
                if self._longest is not None and len(ids) > self._longest:
                    self._warn_if_too_long(ids)
                return ids
            if type(text) is list:
                try:
                    rows = self._engine.encode_lists(text, around)
                except TypeError:  # not all are texts: a call finds out what they are
                    pass
                else:
                    if self._longest is not None:
                        self._warn_if_too_long(rows)
                    return rows
        return self._encode_by_call(text, text_pair, add_special_tokens, **options)

    def _encode_by_call(self, text: Any, text_pair: Any = None, add_special_tokens: bool = True, **options: Any) -> Any:
        """The `input_ids` of a call."""
        return self(text, text_pair, add_special_tokens, **options)["input_ids"]

    def encode_plus(self, text: Any, text_pair: Any = None, **options: Any) -> BatchEncoding:
        """The former name of a call on one text or pair."""
        return self(text, text_pair, **options)

    def batch_encode_plus(self, batch_text_or_text_pairs: Any, **options: Any) -> BatchEncoding:
        """The former name of a call on a list of texts or pairs."""
        return self(batch_text_or_text_pairs, **options)

    def tokenize(self, text: Any, pair: Any = None, add_special_tokens: bool = False, **options: Any) -> list[str]:
        """The token strings of a text."""
        try:
            encoding = self(text, pair, add_special_tokens, **options)
        except (TypeError, ValueError) as error:
            if not str(error).startswith("text_pair"):
                raise
            raise type(error)(str(error).removeprefix("text_")) from None  # here the argument is called so
        if not encoding.encodings:
            raise ValueError("text: expected a text, got an empty batch")
        return encoding.tokens()

    def pad(
        self,
        encoded_inputs: Any,
        padding: Any = True,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_attention_mask: bool | None = None,
        return_tensors: Any = None,
        verbose: bool = True,
    ) -> BatchEncoding:
        """Pads rows that are encoded already: for data collators.

        Args:
            encoded_inputs: a list of encodings, or one of lists; entries other than input_ids, token_type_ids,
                attention_mask and special_tokens_mask are collected as they are.
            padding: as in a call.
            max_length: as in a call.
            pad_to_multiple_of: as in a call.
            padding_side: as in a call.
            return_tensors: as in a call; if None, rows that are arrays or tensors stay of their kind.
            return_attention_mask: make one if there is none; default: as `model_input_names` says.
            verbose: accepted for compatibility.

        Raises:
            ValueError: there are no input_ids, or other entries have other numbers of rows or lengths.
        """
        check_flags(return_attention_mask=return_attention_mask)
        shape = self._shape(
            padding=padding,
            truncation=False,
            max_length=max_length,
            pad_to_multiple_of=pad_to_multiple_of,
            padding_side=padding_side,
        )
        mask_wanted = (
            "attention_mask" in self.model_input_names if return_attention_mask is None else return_attention_mask
        )
        fills = {
            "input_ids": self.pad_token_id,
            "token_type_ids": self.pad_token_type_id,
            "attention_mask": 0,
            "special_tokens_mask": 1,
        }
        padded = pad_features(
            encoded_inputs,
            fills,
            strategy=shape.padding,
            max_length=shape.max_length,
            pad_to_multiple_of=shape.pad_to_multiple_of,
            padding_side=shape.padding_side,
            return_attention_mask=mask_wanted,
            return_tensors=tensor_kind(return_tensors),
        )
        return BatchEncoding(padded)

    # The object itself.

    @property
    def is_fast(self) -> bool:
        """True, as offsets and word ids are there."""
        return True

    @property
    def max_len_single_sentence(self) -> int:
        """Greatest number of tokens of one text."""
        return self.model_max_length - self.num_special_tokens_to_add()

    @property
    def max_len_sentences_pair(self) -> int:
        """Greatest number of tokens of two texts together."""
        return self.model_max_length - self.num_special_tokens_to_add(pair=True)

    def _warn_if_too_long(self, input_ids: Any, stacklevel: int = 3) -> None:
        """Says, once for each tokenizer, that rows are longer than the model takes."""
        key = "sequence-length-is-longer-than-the-specified-maximum"
        if self.deprecation_warnings.get(key):
            return
        is_row = len(input_ids) > 0 and isinstance(input_ids[0], int)
        longest = len(input_ids) if is_row else max(map(len, input_ids), default=0)
        if longest > self.model_max_length:
            self.deprecation_warnings[key] = True
            warnings.warn(
                f"a row has {longest} tokens, more than model_max_length={self.model_max_length}; pass truncation=True",
                UserWarning,
                stacklevel=stacklevel,
            )

    def _encode_text(self, text: str) -> BatchEncoding:
        """A call on one text without options."""
        engine, specials = self._engine, self._specials()
        ids = engine.encode_one(text, specials.around)
        length = len(ids)
        entries: dict[str, Any] = {"input_ids": ids}
        if "token_type_ids" in self.model_input_names:
            entries["token_type_ids"] = [0] * length
        if "attention_mask" in self.model_input_names:
            entries["attention_mask"] = [1] * length
        if self._longest is not None:
            self._warn_if_too_long(ids, stacklevel=4)
        make = later_encodings(engine, lambda: parse_inputs(text), _PLAIN_SHAPE, specials, self._token_of)
        return BatchEncoding(entries, make)

    def _encode_inputs(
        self, text: Any, text_pair: Any, is_split_into_words: bool, shape: Shape, returned: Returned
    ) -> BatchEncoding:
        """A call on inputs of any kind."""
        encoding = None
        if text_pair is None and not is_split_into_words and (type(text) in (str, list) or is_column(text)):
            encoding = self._encode_texts(text, shape, returned)
        if encoding is None:
            inputs = parse_inputs(text, text_pair, is_split_into_words)
            encoding = encode_batch(self._engine, inputs, shape, returned, self._specials(), self._token_of)
        return encoding

    def _encode_texts(self, texts: Any, shape: Shape, returned: Returned) -> BatchEncoding | None:
        """A call on a str, or a list or column of single texts, if the engine makes what is asked for; else None."""
        engine, specials = self._engine, self._specials()
        kept = own_texts(texts)  # the caller's may change later
        if returned.tensors is None:
            entries = direct_lists(engine, kept, shape, returned, specials.around)
        else:
            entries = direct_rows(engine, kept, None, shape, returned, specials)
        if entries is None:
            return None
        num_rows = len(entries["input_ids"])

        def make_inputs() -> Inputs:  # a column goes to the engine again: Python may have no other way to its texts
            return column_inputs(kept, num_rows) if is_column(kept) else parse_inputs(kept)

        return BatchEncoding(entries, later_encodings(engine, make_inputs, shape, specials, self._token_of))
