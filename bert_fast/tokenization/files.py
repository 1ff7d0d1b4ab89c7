"""Reading and writing the files of a tokenizer as transformers and tokenizers know them.

Where files disagree: arguments of the caller, then tokenizer_config.json (with the older special_tokens_map.json and
added_tokens.json), then tokenizer.json, then defaults. The vocabulary is that of tokenizer.json if there is one.
"""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bert_fast.errors import CheckpointError
from bert_fast.files import write_atomically
from bert_fast.hub import fetch_together, is_hub_name, local_place, take_hub_options
from bert_fast.tokenization.added_token import AddedToken
from bert_fast.tokenization.json_files import (
    CONFIG_KINDS,
    ID,
    OBJECT,
    TEXT_OR_NULL,
    TOKEN,
    check_kinds,
    read_json_object,
)
from bert_fast.tokenization.special_tokens import NAMED_TOKENS

Read = tuple[dict[str, Any], dict[int, AddedToken]]
Reader = Callable[[Path], Read]

VOCAB_FILE = "vocab.txt"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
MODEL_FILE = "config.json"
# Of models that have a Unigram vocabulary; only where no file names the tokenizer's class.
_CLASS_OF_MODEL = {
    **dict.fromkeys(("gte", "jina_embeddings_v3", "metaclip_2", "trocr", "xlm-roberta", "xmod"), "XLMRobertaTokenizer"),
    "camembert": "CamembertTokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
}
_BESIDE = (CONFIG_FILE, SPECIAL_TOKENS_FILE, ADDED_TOKENS_FILE, MODEL_FILE)
_MOST_DIGITS = 10  # of an id


def as_path(name: str, value: Any) -> Path:
    """The path that `value` is.

    Raises:
        TypeError: it is none.
        ValueError: no file can have it.
    """
    try:
        path = Path(value)
    except TypeError:
        raise TypeError(f"{name}: expected a path, got {type(value).__name__}") from None
    try:
        is_possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_possible = False
    if not is_possible:
        raise ValueError(f"{name}: no file can be called {value!r}")
    return path


def tokenizer_place(argument: str, path: Any, options: dict[str, Any]) -> Path:
    """Where the files of a tokenizer lie: a path or its subfolder, or of a name on the hub the folder in its cache.

    Removes the hub's arguments from `options`. Nothing but the files of a tokenizer is fetched, once.

    Raises:
        TypeError, ValueError: no path.
        FileNotFoundError: a name whose tokenizer is not to be had; one line says why.
    """
    given = as_path(argument, path)
    hub_options = take_hub_options(options)
    name = os.fspath(path)
    if not isinstance(name, str) or not is_hub_name(name):
        return Path(local_place(str(given), hub_options))
    try:
        return fetch_together(name, (TOKENIZER_FILE, VOCAB_FILE), _BESIDE, hub_options)
    except CheckpointError as error:
        raise FileNotFoundError(str(error)) from error


def read_tokenizer(path: str | os.PathLike[str], read_json: Reader, read_vocabulary: Reader) -> Read:
    """Reads a directory, a tokenizer.json (by `read_json`) or another file with a vocabulary (by `read_vocabulary`).

    Returns:
        Arguments for the constructor, those that the readers give and keys of configuration files that it does not
        know; the added tokens by id. The truncation and padding that a tokenizer.json carries are not applied to calls
        (as in transformers); only the padding side is taken over.

    Raises:
        FileNotFoundError: nothing there, or neither vocab.txt nor tokenizer.json in the directory.
        ValueError: a file is not what its name says, or holds a tokenizer of another class.
    """
    path = as_path("pretrained_model_name_or_path", path)
    if path.is_file():
        if path.suffix == ".json":
            return read_json(path)
        return read_vocabulary(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such file or directory")
    options: dict[str, Any]
    added: dict[int, AddedToken]
    if (path / TOKENIZER_FILE).is_file():
        options, added = read_json(path / TOKENIZER_FILE)
    elif (path / VOCAB_FILE).is_file():
        options, added = read_vocabulary(path / VOCAB_FILE)
    else:
        raise FileNotFoundError(f"{path} holds neither {TOKENIZER_FILE} nor {VOCAB_FILE}")
    config = read_json_object(path / CONFIG_FILE)
    check_kinds(path / CONFIG_FILE, config, CONFIG_KINDS)
    if config.get("split_special_tokens"):
        raise ValueError(f"{path / CONFIG_FILE}: split_special_tokens: only false is supported")
    if "model_max_length" not in config and "max_len" in config:  # its name before transformers 3
        config["model_max_length"] = config.pop("max_len")
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    added_decoder = config.pop("added_tokens_decoder", None)
    if added_decoder is None:
        older = read_json_object(path / SPECIAL_TOKENS_FILE)
        check_kinds(path / SPECIAL_TOKENS_FILE, older, CONFIG_KINDS)
        # There a token is special whatever stands beside its name.
        config.update({key: value | {"special": True} if _is_token(value) else value for key, value in older.items()})
    decoded: dict[int, AddedToken] = {}
    for token_id, value in (added_decoder or {}).items():
        name = f"{path / CONFIG_FILE}: added_tokens_decoder[{token_id!r:.20}]"
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= _MOST_DIGITS):
            raise ValueError(f"{name}: expected ids as keys")
        decoded[int(token_id)] = AddedToken.from_any(value, False, name)
    added.update(decoded)
    named = {_content(config[name]) for name in NAMED_TOKENS if config.get(name) is not None}
    named |= {_content(token) for token in extra} if isinstance(extra, list) else set()
    older_added = read_json_object(path / ADDED_TOKENS_FILE)
    check_kinds(path / ADDED_TOKENS_FILE, older_added, dict.fromkeys(older_added, ID))
    for token, token_id in older_added.items():
        added.setdefault(token_id, AddedToken.from_any(token, token in named, ADDED_TOKENS_FILE))
    # What an added token says about itself counts, and not what stands beside its name.
    known = {token.content for token in (added if added_decoder is None else decoded).values()}
    for name in NAMED_TOKENS:
        if _content(config.get(name)) in known:
            config[name] = _content(config[name])
    _gather_own_names(config)
    source: dict[str, Any] = {name: options[name] for name in ("vocab", "tokenizer_file") if name in options}
    return {**options, **config, **source}, added


def class_of(directory: Path) -> str | None:
    """The class of transformers that its AutoTokenizer makes of a directory, as far as the files name one."""
    model = read_json_object(directory / MODEL_FILE)
    name = read_json_object(directory / CONFIG_FILE).get("tokenizer_class") or model.get("tokenizer_class")
    return name if isinstance(name, str) else _CLASS_OF_MODEL.get(str(model.get("model_type")))


def read_added_tokens(path: Path, state: dict[str, Any]) -> dict[int, AddedToken]:
    """The added tokens of a tokenizer.json, by id.

    Raises:
        ValueError: one is damaged; the message names its place.
    """
    added = {}
    for index, entry in enumerate(state.get("added_tokens") or []):
        name = f"added_tokens[{index}]"
        check_kinds(path, {name: entry}, {name: OBJECT})
        check_kinds(path, {"id": None, **entry}, {"id": ID}, f"{name}: ")
        added[entry["id"]] = AddedToken.from_any(entry, False, f"{path}: {name}")
    return added


def read_padding_side(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """The argument padding_side, where a tokenizer.json has one."""
    padding = state.get("padding") or {}
    check_kinds(path, padding, {"direction": TEXT_OR_NULL}, "padding: ")
    return {"padding_side": padding["direction"].lower()} if padding.get("direction") else {}


def _gather_own_names(config: dict[str, Any]) -> None:
    """Puts special tokens with names of their own together: "<name>_token" and the mapping extra_special_tokens."""
    own = {name: value for name, value in config.items() if name.endswith("_token") and TOKEN.holds(value)}
    own = {name: config.pop(name) for name in own if name not in NAMED_TOKENS}
    extra = config.get("extra_special_tokens") or []
    if isinstance(extra, dict):
        own.update(extra)
    elif own and extra:
        config["additional_special_tokens"] = extra
    if own:
        config["extra_special_tokens"] = own


def _is_token(value: Any) -> bool:
    return isinstance(value, dict) and "content" in value


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def write_tokenizer(
    directory: str | os.PathLike[str],
    own: dict[str, str],
    state: dict[str, Any],
    config: dict[str, Any],
    special_tokens: dict[str, Any],
    prefix: str = "",
) -> tuple[str, ...]:
    """Writes `own` files (by name), tokenizer.json, special_tokens_map.json and tokenizer_config.json, each atomically.

    Raises:
        NotADirectoryError: `directory` is a file.
    """
    directory = as_path("save_directory", directory)
    as_path("filename_prefix", prefix)
    if directory.is_file():
        raise NotADirectoryError(f"save_directory: {directory} is a file")
    directory.mkdir(parents=True, exist_ok=True)
    contents = {
        **own,
        TOKENIZER_FILE: json.dumps(state, ensure_ascii=False, indent=2),
        SPECIAL_TOKENS_FILE: json.dumps(special_tokens, ensure_ascii=False, indent=2),
        CONFIG_FILE: json.dumps(config, ensure_ascii=False, indent=2, sort_keys=True),
    }
    written = []
    for name, text in contents.items():
        path = directory / f"{prefix}{name}"
        content = (text if text.endswith("\n") else text + "\n").encode()
        write_atomically(path, functools.partial(Path.write_bytes, data=content))
        written.append(str(path))
    return tuple(written)
