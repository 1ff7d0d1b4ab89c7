"""The vocabulary side of the tokenizer: special and added tokens, ids and tokens, sequences with special tokens."""

import copy
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from bert_fast.tokenization.added_token import AddedToken
from bert_fast.tokenization.arguments import check_flags, members, plain, shown
from bert_fast.tokenization.engine import Engine, make_engine
from bert_fast.tokenization.layout import BERT_PAIRS, PairForm
from bert_fast.tokenization.vocab import Vocabulary

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REQUIRED = ("unk_token", "sep_token", "cls_token")
_CONSTRUCTOR_NAMES = {  # of options that the engine calls otherwise
    "lowercase": "do_lower_case",
    "handle_chinese_chars": "tokenize_chinese_chars",
    "max_word_chars": "max_input_chars_per_word",
    "continuing_prefix": "continuing_subword_prefix",
}


def _named_token(name: str) -> Any:
    """The attribute `name`: one of the special tokens with a name."""

    def read(self: "TokenTable") -> str | None:
        return self._named[name]

    def write(self: "TokenTable", value: Any) -> None:
        self._set_named(name, None if value is None else AddedToken.from_any(value, True, name).content)

    return property(read, write)


def _named_token_id(name: str) -> Any:
    """The attribute `<name>_id`."""

    def read(self: "TokenTable") -> int | None:
        return self._id_of_named(name)

    def write(self: "TokenTable", value: Any) -> None:
        self._set_named(name, None if value is None else self._token_of(value, f"{name}_id"))

    return property(read, write)


class TokenTable:
    """Base class of the tokenizer: which tokens there are, which of them are special, and the engine that knows them.

    `bos_token`, `eos_token`, `unk_token`, `sep_token`, `pad_token`, `cls_token`, `mask_token` and the same names with
    `_id` are attributes; the tokens can be set to any token of the vocabulary or to None. Those with other names need
    not be in the vocabulary.
    """

    _pairs: PairForm = BERT_PAIRS

    bos_token, bos_token_id = _named_token("bos_token"), _named_token_id("bos_token")
    eos_token, eos_token_id = _named_token("eos_token"), _named_token_id("eos_token")
    unk_token, unk_token_id = _named_token("unk_token"), _named_token_id("unk_token")
    sep_token, sep_token_id = _named_token("sep_token"), _named_token_id("sep_token")
    pad_token, pad_token_id = _named_token("pad_token"), _named_token_id("pad_token")
    cls_token, cls_token_id = _named_token("cls_token"), _named_token_id("cls_token")
    mask_token, mask_token_id = _named_token("mask_token"), _named_token_id("mask_token")

    def __init__(
        self,
        vocabulary: Vocabulary,
        named: Mapping[str, Any],
        extra: Sequence[Any],
        added: Mapping[int, AddedToken],
        engine_options: dict[str, Any],
    ) -> None:
        self._vocabulary = vocabulary
        self._engine_options = engine_options
        self._added: dict[int, AddedToken] = {}
        self._added_ids: dict[str, int] = {}
        self._all_ids: dict[str, int] | None = None
        self._num_ids = len(vocabulary)  # with the gaps that added tokens may leave
        self._named: dict[str, str | None] = dict.fromkeys(NAMED_TOKENS)
        self._extra: list[str] = []
        try:
            self._register_all(named, extra, added)
            self._engine = self._build_engine()
        except ValueError:
            vocabulary.check_distinct()  # what is wrong may follow from that
            raise
        self._update_special_ids()

    def _register_all(self, named: Mapping[str, Any], extra: Sequence[Any], added: Mapping[int, AddedToken]) -> None:
        if not isinstance(added, Mapping) or not all(
            isinstance(token_id, int) and isinstance(token, AddedToken) for token_id, token in added.items()
        ):
            raise TypeError(f"added_tokens: expected a mapping from ids to AddedTokens, got {shown(added)}")
        for token_id, token in sorted(added.items()):
            if not 0 <= token_id < 2**31:
                raise ValueError(f"added_tokens: expected ids in [0, 2**31), got {shown(token_id)}")
            self._register(token_id, token)
        wanted = {name: value for name, value in named.items() if value is not None}
        own = {name: wanted.pop(name) for name in named if name in wanted and name not in NAMED_TOKENS}
        special = {name: AddedToken.from_any(value, True, name) for name, value in wanted.items()}
        missing = [
            f"{name} {token.content!r:.80}" for name, token in special.items() if self._find(token.content) is None
        ]
        missing += [f"{name} (None)" for name in _REQUIRED if name not in special]
        if missing:
            raise ValueError(f"vocab: special tokens are missing from the vocabulary: {', '.join(missing)}")
        for name, token in special.items():
            self._named[name] = token.content
            token_id = self._id_for(token.content)
            if isinstance(wanted[name], str) and token_id in self._added:
                token = self._added[token_id]  # a file said more about it than its name
            self._register(token_id, AddedToken(**{**token.as_dict(), "special": True}))
        self._named.update({name: AddedToken.from_any(value, True, name).content for name, value in own.items()})
        name = "extra_special_tokens"  # objects say what `normalized` is, though they become special here
        extra = [value if isinstance(value, str | dict) else AddedToken.from_any(value, False, name) for value in extra]
        self._extra = [AddedToken.from_any(value, True, name).content for value in extra]
        for value in [*own.values(), *extra]:
            token = AddedToken.from_any(value, True, name)
            if not (isinstance(value, str) and token.content in self._added_ids):
                self._register(self._id_for(token.content), token)
        # Attributes of their own: with a __getattr__ Python would look up all others more slowly.
        for name in own:
            for attribute, found in ((name, self._named[name]), (f"{name}_id", self._id_of_named(name))):
                if not hasattr(type(self), attribute):
                    setattr(self, attribute, found)

    # The vocabulary.

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the vocabulary, without the tokens that were added to it; `len()` counts both."""
        return len(self._vocabulary)

    def __len__(self) -> int:
        return self.vocab_size + sum(token_id >= self.vocab_size for token_id in self._added)

    def __bool__(self) -> bool:
        return True

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return dict(self._ids)

    @property
    def vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return self.get_vocab()

    def get_added_vocab(self) -> dict[str, int]:
        """Token -> id of the added tokens, special ones among them, by id."""
        return {token.content: token_id for token_id, token in sorted(self._added.items())}

    @property
    def added_tokens_encoder(self) -> dict[str, int]:
        """Token -> id of the added tokens."""
        return self.get_added_vocab()

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Id -> `AddedToken`."""
        return dict(sorted(self._added.items()))

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> int | list[int]:
        """The id of a token, or the ids of several; unknown ones get that of `unk_token`."""
        ids, unk_id = self._ids, self._id_of_named("unk_token")
        if isinstance(tokens, str):
            return ids.get(tokens, unk_id)
        try:
            return [ids.get(token, unk_id) for token in tokens]
        except TypeError:  # nothing to go through, or members that no dictionary can hold
            raise TypeError(f"tokens: expected a str or a list of them, got {shown(tokens)}") from None

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """The token of an id (int), or the tokens of several.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        check_flags(skip_special_tokens=skip_special_tokens)
        ids = plain("ids", ids)
        if isinstance(ids, int):
            return self._token_of(ids)
        skipped = set(self.all_special_ids) if skip_special_tokens else ()
        return self._tokens_of("ids", members("ids", ids), skipped)

    def _tokens_of(self, name: str, ids: Iterable[Any], skipped: Container[int] = ()) -> list[str]:
        """The tokens of several ids, without the `skipped` ones; messages call the ids `name`."""
        try:
            return [self._token_of(token_id) for token_id in ids if token_id not in skipped]
        except (TypeError, ValueError):
            for index, token_id in enumerate(ids):
                self._token_of(token_id, f"{name}[{index}]")
            raise

    def _token_of(self, token_id: Any, name: str = "ids") -> str:
        try:
            if hasattr(token_id, "item"):
                token_id = token_id.item()
            added = self._added.get(token_id)
            if added is not None:
                # On the way back the library shows added tokens as they look in normalized text.
                return self._engine.normalize(added.content) if added.normalized else added.content
            if 0 <= token_id < self.vocab_size:
                return self._vocabulary.tokens[token_id]
        except (RuntimeError, TypeError, ValueError):  # no number; an array or a tensor of several
            raise TypeError(f"{name}: expected an int, got {shown(token_id)}") from None
        raise ValueError(f"{name}: {shown(token_id)} is not in the vocabulary (0 to {self._num_ids - 1})")

    # Special tokens.

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Name -> token of the named special tokens."""
        return {name: token for name, token in self._named.items() if token is not None}

    @property
    def extra_special_tokens(self) -> list[str]:
        """Special tokens without a name of their own."""
        return list(self._extra)

    @property
    def additional_special_tokens(self) -> list[str]:
        """The former name of `extra_special_tokens`."""
        return list(self._extra)

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        """Ids of `additional_special_tokens`."""
        return [self._ids[token] for token in self._extra]

    @property
    def all_special_tokens(self) -> list[str]:
        """All special tokens, each once."""
        return list(dict.fromkeys([*self.special_tokens_map.values(), *self._extra]))

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of `all_special_tokens`."""
        return [self._ids[token] for token in self.all_special_tokens]

    def add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        """Makes tokens recognised in the text; new ones get the ids after the last one.

        Args:
            new_tokens: one or several strings or `AddedToken`s.
            special_tokens: whether `decode(..., skip_special_tokens=True)` leaves them out.

        Returns:
            How many were not there already in just this form. Resize the model's embeddings to `len(tokenizer)`.
        """
        check_flags(special_tokens=special_tokens)
        special_tokens = bool(special_tokens)
        is_many = isinstance(new_tokens, (list, tuple))
        tokens = [
            AddedToken.from_any(value, special_tokens, f"new_tokens[{index}]" if is_many else "new_tokens")
            for index, value in enumerate(new_tokens if is_many else [new_tokens])
        ]
        added = 0
        for token in tokens:
            token_id = self._id_for(token.content)
            if token.content and self._added.get(token_id) != token:
                self._register(token_id, token)
                added += 1
        if added:
            self._engine = self._build_engine()
        return added

    def add_special_tokens(
        self, special_tokens_dict: Mapping[str, Any], replace_extra_special_tokens: bool = True
    ) -> int:
        """Gives names to special tokens, and adds those that are not in the vocabulary.

        Args:
            special_tokens_dict: name such as "mask_token" -> token, and "extra_special_tokens" (or
                "additional_special_tokens") -> list of tokens.
            replace_extra_special_tokens: whether the list takes the place of the one before.

        Returns:
            What `add_tokens` returns.

        Raises:
            ValueError: there is no special token of that name.
        """
        check_flags(replace_extra_special_tokens=replace_extra_special_tokens)
        if not isinstance(special_tokens_dict, Mapping):
            kind = type(special_tokens_dict).__name__
            raise TypeError(f"special_tokens_dict: expected a mapping from names to tokens, got {kind}")
        named, extra = {}, None

        def token_of(name: str, value: Any) -> AddedToken:
            token = AddedToken.from_any(value, True, name)
            if not token.content and self._find("") is None:
                raise ValueError(f"{name}: expected a token, got an empty str")
            return token

        for name, value in special_tokens_dict.items():
            if name in ("extra_special_tokens", "additional_special_tokens"):
                if not isinstance(value, (list, tuple)):
                    raise TypeError(f"{name}: expected a list of tokens, got {type(value).__name__}")
                extra = [token_of(name, token) for token in value]
            elif name in NAMED_TOKENS:
                named[name] = token_of(name, value)
            else:
                known = ", ".join([*NAMED_TOKENS, "extra_special_tokens"])
                raise ValueError(f"special_tokens_dict: there is no special token {shown(name)}; known are {known}")
        added = self.add_tokens([*named.values(), *(extra or [])], special_tokens=True)
        self._named.update({name: token.content for name, token in named.items()})
        self._update_special_ids()
        if extra is not None:
            kept = [] if replace_extra_special_tokens else self._extra
            self._extra = list(dict.fromkeys([*kept, *(token.content for token in extra)]))
        return added

    # Engines are immutable and cannot be pickled: copies share them, other processes build their own.

    def __getstate__(self) -> dict[str, Any]:
        return {**{name: value for name, value in self.__dict__.items() if name != "_engine"}, "_all_ids": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._engine = self._build_engine()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        duplicate.__dict__.update(copy.deepcopy(self.__getstate__(), memo), _engine=self._engine)
        return duplicate

    def __copy__(self) -> Any:
        return copy.deepcopy(self)

    @property
    def _ids(self) -> dict[str, int]:
        """Token -> id, added tokens included; not to be changed."""
        if self._all_ids is None:
            ids = self._vocabulary.ids
            self._all_ids = ids if self._added_ids.keys() <= ids.keys() else {**ids, **self._added_ids}
        return self._all_ids

    def _find(self, content: str) -> int | None:
        """The id of a token, or None."""
        token_id = self._added_ids.get(content)
        return self._vocabulary.find(content) if token_id is None else token_id

    def _id_for(self, content: str) -> int:
        """The id of a token, or the next free one."""
        token_id = self._find(content)
        return self._num_ids if token_id is None else token_id

    def _id_of_named(self, name: str) -> Any:
        token = self._named[name]
        return None if token is None else self._find(token)

    def _set_named(self, name: str, token: str | None) -> None:
        if token is not None and self._find(token) is None:
            raise ValueError(f"{name}: {token!r} is not in the vocabulary; add it with add_special_tokens")
        self._named[name] = token
        self._update_special_ids()

    def _update_special_ids(self) -> None:
        """Looks up what every call needs, as ids are found by searching."""
        ids = (self._id_of_named(name) for name in ("pad_token", "cls_token", "sep_token"))
        self._pad_id, cls_id, sep_id = (0 if token_id is None else token_id for token_id in ids)
        self._around = cls_id, sep_id

    def _register(self, token_id: int, token: AddedToken) -> None:
        present = self._added.get(token_id)
        owner = present.content if present is not None else None
        if owner is None and token_id < self.vocab_size and self._find(token.content) != token_id:
            owner = self._vocabulary.tokens[token_id]
        if owner not in (None, token.content):
            raise ValueError(f"added_tokens: {token.content!r:.80}: id {token_id} belongs to {owner!r:.80}")
        known_id = self._find(token.content)
        if known_id not in (None, token_id):
            raise ValueError(f"added_tokens: {token.content!r:.80}: has id {known_id}, not {token_id}")
        self._num_ids = max(self._num_ids, token_id + 1)
        self._added[token_id] = token
        self._added_ids[token.content] = token_id
        self._all_ids = None

    def _build_engine(self) -> Engine:
        # Of contents that are equal after normalization the first wins: special ones, then the lowest id.
        in_order = sorted(self._added.items(), key=lambda item: (not item[1].special, item[0]))
        try:
            return self._make_engine([token.for_engine(token_id) for token_id, token in in_order])
        except (TypeError, ValueError) as error:
            option, _, rest = str(error).partition(":")
            if option not in _CONSTRUCTOR_NAMES:
                raise
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{_CONSTRUCTOR_NAMES[option]}:{rest}") from None

    def _make_engine(self, added_tokens: list[tuple[Any, ...]]) -> Engine:
        """The engine of the vocabulary and the options."""
        return make_engine(
            self._vocabulary.source,
            unk_token=self._named["unk_token"],
            added_tokens=added_tokens,
            **self._engine_options,
        )
