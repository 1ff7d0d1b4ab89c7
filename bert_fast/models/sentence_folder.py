"""The files by which sentence-transformers knows how a folder's encoder makes embeddings.

modules.json                     the modules, in their order: encoder, pooling, perhaps normalization
1_Pooling/config.json            how tokens become a vector
sentence_bert_config.json        greatest number of tokens; else model_max_length in tokenizer_config.json
config_sentence_transformers.json  how embeddings are compared
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bert_fast.checks import check_choice, check_count, check_flag
from bert_fast.errors import CheckpointError
from bert_fast.files import path_name, write_atomically
from bert_fast.hub import FileAbsent, fetch_together, take_hub_options
from bert_fast.models.json_file import read_json
from bert_fast.models.pooling import POOLINGS, Pooling

MODULES = "modules.json"
_BESIDE = ("1_Pooling/config.json", "sentence_bert_config.json", "tokenizer_config.json")
_MOST_TOKENS = 2**20
_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_weightedmean_tokens": "weighted",
    "pooling_mode_lasttoken": "last",
}
_NAMES: dict[str, Pooling] = {
    "cls": "cls", "mean": "mean", "max": "max", "weightedmean": "weighted", "lasttoken": "last"
}  # fmt: skip
_KINDS = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class TextEmbedding:
    """How an encoder's tokens become one vector.

    Attributes:
        pooling: see `pooling.pooled`.
        normalize: whether vectors have length 1.
        max_length: tokens of a text, special ones counted; None: as many as the model takes.

    Raises: TypeError, ValueError naming the argument.
    """

    pooling: Pooling = "mean"
    normalize: bool = False
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_choice("pooling", self.pooling, POOLINGS)
        check_flag("normalize", self.normalize)
        if self.max_length is not None:
            object.__setattr__(self, "max_length", check_count("max_length", self.max_length, 2))

    @classmethod
    def of(cls, values: Any) -> "TextEmbedding":
        """Of plain values by these names, as `as_dict` gives them.

        Raises:
            TypeError, ValueError: others.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"text_embedding: expected a mapping, got {type(values).__name__}")
        if unknown := sorted(set(values) - {"pooling", "normalize", "max_length"}):
            raise ValueError(f"text_embedding: expected pooling, normalize and max_length, got {unknown[0]!r}")
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def read_sentence_folder(directory: str | os.PathLike[str]) -> TextEmbedding | None:
    """What the files of a folder say; None where it has no modules.json.

    Raises:
        CheckpointError: a file is damaged, or embeddings are made in a way that is not one of ours (further layers,
            several poolings at once); the message names file and value.
    """
    directory = Path(path_name("directory", directory))
    file = directory / MODULES
    if not file.is_file():
        return None
    modules = read_json(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{file}: expected a list of modules, got {type(modules).__name__}")
    kinds = [str(module.get("type")).rsplit(".", 1)[-1] for module in modules]
    if tuple(kinds) not in (_KINDS, _KINDS[:2]) or modules[0].get("path") not in ("", "0_Transformer"):
        raise CheckpointError(f"{file}: expected Transformer, Pooling and perhaps Normalize, got {', '.join(kinds)}")
    if modules[0]["path"]:
        raise CheckpointError(f"{file}: expected the encoder beside it, got one in {modules[0]['path']!r}")
    place = directory / str(modules[1].get("path"))
    if not place.resolve().is_relative_to(directory.resolve()):
        raise CheckpointError(f"{file}: expected a folder within {directory}, got {place}")
    return TextEmbedding(_pooling(place / "config.json"), len(kinds) == 3, _max_length(directory))


def fetch_sentence_folder(name: str | os.PathLike[str], options: Mapping[str, Any]) -> Path:
    """The folder of a name on the hub in its cache, with the files that `read_sentence_folder` reads, if it has them.

    options: those of `hub.HUB_OPTIONS` are used.

    Raises: CheckpointError: see `hub.fetch_first`.
    """
    try:
        return fetch_together(os.fspath(name), [MODULES], _BESIDE, take_hub_options(dict(options)))
    except FileAbsent:
        return Path(os.fspath(name))


def write_sentence_folder(directory: str | os.PathLike[str], width: int, how: TextEmbedding) -> None:
    """Writes the files beside a checkpoint; each appears whole, modules.json last. width: of the vectors."""
    directory = Path(path_name("directory", directory))
    pooling: dict[str, Any] = {"word_embedding_dimension": width}
    pooling |= {mode: name == how.pooling for mode, name in _MODES.items()}
    pooling |= {"pooling_mode_mean_sqrt_len_tokens": False, "include_prompt": True}
    kinds = _KINDS if how.normalize else _KINDS[:2]
    modules = [
        {
            "idx": number, "name": str(number), "path": f"{number}_{kind}" if number else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, kind in enumerate(kinds)
    ]  # fmt: skip
    (directory / "1_Pooling").mkdir(parents=True, exist_ok=True)
    if how.normalize:
        (directory / "2_Normalize").mkdir(exist_ok=True)
    _write(directory / "1_Pooling" / "config.json", pooling)
    _write(directory / "sentence_bert_config.json", {"max_seq_length": how.max_length, "do_lower_case": False})
    _write(
        directory / "config_sentence_transformers.json",
        {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )
    _write(directory / MODULES, modules)


def _write(path: Path, values: Any) -> None:
    text = json.dumps(values, indent=2) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _pooling(file: Path) -> Pooling:
    values = read_json(file)
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: expected an object, got {type(values).__name__}")
    if not values.get("include_prompt", True):
        raise CheckpointError(f"{file}: include_prompt: expected true, got false")
    modes = values.get("pooling_mode")
    if modes is not None:  # as sentence-transformers writes it since 5.?: one name, or several in a list
        found = [modes] if isinstance(modes, str) else list(modes)
    else:
        found = [key for key, value in values.items() if key.startswith("pooling_mode_") and value is True]
    known = _NAMES | _MODES
    if len(found) != 1 or found[0] not in known:
        expected = ", ".join(_NAMES)
        raise CheckpointError(f"{file}: expected one pooling of {expected}, got {', '.join(map(str, found)) or 'none'}")
    return known[found[0]]


def _max_length(directory: Path) -> int | None:
    file = directory / "sentence_bert_config.json"
    values = read_json(file) if file.is_file() else {}
    length = values.get("max_seq_length") if isinstance(values, dict) else values
    if length is None:
        return _of_tokenizer(directory)
    if isinstance(length, bool) or not isinstance(length, int) or not 2 <= length <= _MOST_TOKENS:
        raise CheckpointError(f"{file}: max_seq_length: expected a number of tokens from 2 on, got {length!r}")
    return length


def _of_tokenizer(directory: Path) -> int | None:
    """The tokenizer's greatest number of tokens, where sentence-transformers writes it since 6; None if it has none."""
    file = directory / "tokenizer_config.json"
    values = read_json(file) if file.is_file() else {}
    length = values.get("model_max_length") if isinstance(values, dict) else None
    # "None" of a tokenizer is a number of 31 digits.
    return length if type(length) is int and 2 <= length <= _MOST_TOKENS else None
