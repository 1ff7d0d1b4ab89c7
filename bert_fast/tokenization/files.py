"""Reading and writing the files of a tokenizer as transformers and tokenizers know them.

Where files disagree: arguments of the caller, then tokenizer_config.json (with the older special_tokens_map.json and
added_tokens.json), then tokenizer.json, then defaults. The vocabulary is that of tokenizer.json if there is one.
"""

import functools
import json
import os
import reprlib
from pathlib import Path
from typing import Any

from bert_fast.files import write_atomically
from bert_fast.tokenization.added_token import AddedToken
from bert_fast.tokenization.json_files import (
    CONFIG_KINDS,
    ID,
    MODEL_KINDS,
    NORMALIZER_KINDS,
    OBJECT,
    TEXT_OR_NULL,
    TOKENIZER_KINDS,
    check_kinds,
    read_json_object,
)
from bert_fast.tokenization.special_tokens import NAMED_TOKENS
from bert_fast.tokenization.vocab import open_vocab, vocab_from_mapping, vocab_to_text

__all__ = ["as_path", "read_tokenizer", "tokenizer_json", "write_tokenizer"]

VOCAB_FILE = "vocab.txt"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
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


def read_tokenizer(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[int, AddedToken]]:
    """Reads a directory, a vocab.txt or a tokenizer.json.

    Returns:
        Arguments for the constructor, `vocab` among them, with keys of configuration files that it does not
        know; the added tokens by id. The truncation and padding that a tokenizer.json carries are not applied to calls
        (as in transformers); only the padding side is taken over.

    Raises:
        FileNotFoundError: nothing there, or neither vocab.txt nor tokenizer.json in the directory.
        ValueError: a file is not what its name says, or holds a tokenizer that is not BERT's.
    """
    path = as_path("pretrained_model_name_or_path", path)
    if path.is_file():
        if path.suffix == ".json":
            return _read_tokenizer_json(path)
        return {"vocab": open_vocab(path)}, {}
    if not path.is_dir():
        raise FileNotFoundError(
            f"there is no directory or file {path}; models are not fetched from the network by name"
        )
    options: dict[str, Any]
    added: dict[int, AddedToken]
    if (path / TOKENIZER_FILE).is_file():
        options, added = _read_tokenizer_json(path / TOKENIZER_FILE)
    elif (path / VOCAB_FILE).is_file():
        options, added = {"vocab": open_vocab(path / VOCAB_FILE)}, {}
    else:
        raise FileNotFoundError(f"{path} holds neither {TOKENIZER_FILE} nor {VOCAB_FILE}")
    config = read_json_object(path / CONFIG_FILE)
    check_kinds(path / CONFIG_FILE, config, CONFIG_KINDS)
    added_decoder = config.pop("added_tokens_decoder", None)
    if added_decoder is None:
        older = read_json_object(path / SPECIAL_TOKENS_FILE)
        check_kinds(path / SPECIAL_TOKENS_FILE, older, CONFIG_KINDS)
        config.update(older)
    for token_id, value in (added_decoder or {}).items():
        name = f"{path / CONFIG_FILE}: added_tokens_decoder[{token_id!r:.20}]"
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= _MOST_DIGITS):
            raise ValueError(f"{name}: expected ids as keys")
        added[int(token_id)] = AddedToken.from_any(value, False, name)
    named = {_content(config[name]) for name in NAMED_TOKENS if config.get(name) is not None}
    older_added = read_json_object(path / ADDED_TOKENS_FILE)
    check_kinds(path / ADDED_TOKENS_FILE, older_added, dict.fromkeys(older_added, ID))
    for token, token_id in older_added.items():
        added.setdefault(token_id, AddedToken.from_any(token, token in named, ADDED_TOKENS_FILE))
    return {**options, **config, "vocab": options["vocab"]}, added


def _read_tokenizer_json(path: Path) -> tuple[dict[str, Any], dict[int, AddedToken]]:
    state = read_json_object(path)
    check_kinds(path, state, TOKENIZER_KINDS)
    model = state.get("model") or {}
    # Older files leave the type out; only WordPiece has max_input_chars_per_word and a mapping as vocabulary.
    if model.get("type", "WordPiece") != "WordPiece" or not isinstance(model.get("vocab"), dict):
        raise ValueError(f"{path}: expected a WordPiece model, got {_type_of(model)}")
    check_kinds(path, model, MODEL_KINDS, "model: ")
    added = {}
    for index, entry in enumerate(state.get("added_tokens") or []):
        name = f"added_tokens[{index}]"
        check_kinds(path, {name: entry}, {name: OBJECT})
        check_kinds(path, {"id": None, **entry}, {"id": ID}, f"{name}: ")
        added[entry["id"]] = AddedToken.from_any(entry, False, f"{path}: {name}")
    try:
        options: dict[str, Any] = {"vocab": vocab_from_mapping(model["vocab"])}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    for key in ("unk_token", "max_input_chars_per_word", "continuing_subword_prefix"):
        if model.get(key) is not None:
            options[key] = model[key]
    options.update(_read_normalizer(path, state.get("normalizer")))
    pre_tokenizer = _type_of(state.get("pre_tokenizer") or {})
    if pre_tokenizer != "BertPreTokenizer":
        raise ValueError(f"{path}: expected the pre-tokenizer BertPreTokenizer, got {pre_tokenizer}")
    options.update(_read_post_processor(path, state.get("post_processor")))
    padding = state.get("padding") or {}
    check_kinds(path, padding, {"direction": TEXT_OR_NULL}, "padding: ")
    if padding.get("direction"):
        options["padding_side"] = padding["direction"].lower()
    return options, added


def _read_normalizer(path: Path, normalizer: dict[str, Any] | None) -> dict[str, Any]:
    kind = _type_of(normalizer or {})
    if normalizer is None or kind != "BertNormalizer":
        raise ValueError(f"{path}: expected the normalizer BertNormalizer, got {kind}")
    check_kinds(path, normalizer, NORMALIZER_KINDS, "normalizer: ")
    names = {
        "do_lower_case": "lowercase",
        "strip_accents": "strip_accents",
        "tokenize_chinese_chars": "handle_chinese_chars",
        "clean_text": "clean_text",
    }
    return {option: normalizer[key] for option, key in names.items() if key in normalizer}


def _read_post_processor(path: Path, processor: dict[str, Any] | None) -> dict[str, Any]:
    """The names of [CLS] and [SEP], from either form in which the library writes BERT's template."""
    if processor is None:
        return {}
    try:
        if processor.get("type") == "BertProcessing":
            names = {"cls_token": processor["cls"][0], "sep_token": processor["sep"][0]}
        else:
            ((first, cls),), ((second, _),), ((third, sep),) = (piece.items() for piece in processor["single"])
            if [first, second, third] != ["SpecialToken", "Sequence", "SpecialToken"]:
                raise KeyError(first)
            names = {"cls_token": cls["id"], "sep_token": sep["id"]}
        if all(isinstance(name, str) for name in names.values()):
            return names
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        pass
    kind = _type_of(processor)
    raise ValueError(f"{path}: expected a post-processor that makes [CLS] A [SEP], got {kind}")


def _type_of(part: dict[str, Any]) -> str:
    """What a part of a tokenizer.json says that it is, for messages."""
    kind = part.get("type")
    return kind if isinstance(kind, str) and kind.isidentifier() else reprlib.repr(kind)


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def tokenizer_json(
    vocab: list[str], added: dict[int, AddedToken], engine_options: dict[str, Any], special: dict[str, tuple[str, int]]
) -> dict[str, Any]:
    """The state that `tokenizers.Tokenizer.from_file` reads, without truncation and padding.

    Args:
        vocab: tokens by id.
        added: added tokens by id.
        engine_options: arguments of the engine's constructor.
        special: "cls_token" and "sep_token" -> (content, id); "unk_token" likewise.
    """
    (cls, cls_id), (sep, sep_id) = special["cls_token"], special["sep_token"]

    def token(content: str, type_id: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": content, "type_id": type_id}}

    def text(name: str, type_id: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": type_id}}

    single = [token(cls, 0), text("A", 0), token(sep, 0)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token_id, **entry.as_dict()} for token_id, entry in sorted(added.items())],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": engine_options["clean_text"],
            "handle_chinese_chars": engine_options["handle_chinese_chars"],
            "strip_accents": engine_options["strip_accents"],
            "lowercase": engine_options["lowercase"],
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, text("B", 1), token(sep, 1)],
            "special_tokens": {
                content: {"id": content, "ids": [token_id], "tokens": [content]}
                for content, token_id in ((cls, cls_id), (sep, sep_id))
            },
        },
        "decoder": {"type": "WordPiece", "prefix": engine_options["continuing_prefix"], "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": special["unk_token"][0],
            "continuing_subword_prefix": engine_options["continuing_prefix"],
            "max_input_chars_per_word": engine_options["max_word_chars"],
            "vocab": {entry: token_id for token_id, entry in enumerate(vocab)},
        },
    }


def write_tokenizer(
    directory: str | os.PathLike[str],
    vocab: list[str],
    state: dict[str, Any],
    config: dict[str, Any],
    special_tokens: dict[str, Any],
    prefix: str = "",
) -> tuple[str, ...]:
    """Writes vocab.txt, tokenizer.json, special_tokens_map.json and tokenizer_config.json, each atomically.

    Raises:
        NotADirectoryError: `directory` is a file.
    """
    directory = as_path("save_directory", directory)
    as_path("filename_prefix", prefix)
    if directory.is_file():
        raise NotADirectoryError(f"save_directory: {directory} is a file")
    directory.mkdir(parents=True, exist_ok=True)
    contents = {
        VOCAB_FILE: vocab_to_text(vocab),
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
