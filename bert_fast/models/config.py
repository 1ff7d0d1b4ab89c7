"""BertConfig: Hugging Face's attribute names, defaults and file format, with every value checked when it is set."""

import copy
import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from bert_fast.checks import check_flag
from bert_fast.errors import CheckpointError
from bert_fast.files import path_name, path_string, write_atomically
from bert_fast.hub import fetch_first, is_hub_name, local_place, take_hub_options
from bert_fast.models.config_checks import FIELD_CHECKS, at_least, shown
from bert_fast.models.foreign_arguments import refuse_foreign, without_foreign
from bert_fast.models.json_file import read_json

CONFIG_NAMES = ("config.json", "bert_config.json")  # in order of preference; the second is Google's original name

# Written to a file only where they differ from the default, as transformers does; all other fields always are.
_OPTIONAL_IN_FILES = (
    "architectures",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "pruned_heads",
    "return_dict",
)
# transformers writes null for "not said" where our field is never None.
_NONE_IS_DEFAULT = ("id2label", "label2id", "pruned_heads", "return_dict", "output_attentions", "output_hidden_states")
_MOST_UNNAMED = 2**20  # classes that get names; each takes some hundred bytes
_LABEL_KEYS = {"num_labels", "id2label", "label2id"}


def _to_json(values: Any) -> str:
    text = json.dumps(values, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"
    text.encode()  # half of a surrogate pair is no text
    return text


def _is_json(value: Any) -> bool:
    try:
        _to_json(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _default_labels(count: int) -> dict[int, str]:
    return {index: f"LABEL_{index}" for index in range(count)}


@dataclass(init=False, eq=False, repr=False)
class BertConfig:
    """The sizes and choices of one BERT.

    Accepts every keyword of Hugging Face's `BertConfig` (4.x and 5.x). A keyword that BERT does not know is kept as an
    attribute and written back, so no file loses a key by passing through. A field is checked when it is set, relations
    between fields by `validate()`, which the constructor and `save_pretrained` call.

    Raises:
        TypeError, ValueError: a value of the wrong type or out of range; the message names field, expected and actual.

    Example:
        >>> config = BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2)
        >>> config.hidden_size, config.intermediate_size
        (128, 3072)
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str | Callable[[torch.Tensor], torch.Tensor] = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    position_embedding_type: str = "absolute"
    use_cache: bool = True
    is_decoder: bool = False
    add_cross_attention: bool = False
    classifier_dropout: float | None = None  # None: hidden_dropout_prob
    tie_word_embeddings: bool = True
    chunk_size_feed_forward: int = 0  # 0: the whole sequence at once
    return_dict: bool = True
    output_attentions: bool = False
    output_hidden_states: bool = False
    problem_type: str | None = None
    architectures: list[str] | None = None
    dtype: torch.dtype | None = None  # of the stored weights; None: as the weights' file says
    pruned_heads: dict[int, list[int]] = field(default_factory=dict)  # layer -> heads removed from it
    id2label: dict[int, str] = field(default_factory=lambda: _default_labels(2))
    label2id: dict[str, int] = field(default_factory=lambda: {"LABEL_0": 0, "LABEL_1": 1})

    model_type = "bert"  # no annotation: a constant of the class, not a field

    def __init__(self, **values: Any) -> None:
        """Sets the given fields, the others to their defaults; `num_labels=n` stands for n labels named LABEL_i."""
        model_type = values.pop("model_type", None)
        if model_type is not None and not (isinstance(model_type, str) and model_type in ("", self.model_type)):
            raise ValueError(
                f"model_type: expected 'bert', got {shown(model_type)} (of other families, transformers' own "
                "model runs here by bert_fast.fuse(model))"
            )
        torch_dtype = values.pop("torch_dtype", None)  # the name of `dtype` before transformers 4.56
        if values.get("dtype") is None:
            values["dtype"] = torch_dtype
        values.pop("use_return_dict", None)  # derived from return_dict
        num_labels = values.pop("num_labels", None)
        if num_labels is not None:
            num_labels = at_least(1)("num_labels", num_labels)
        if isinstance(values.get("id2label"), Mapping) and not values["id2label"]:
            del values["id2label"]
        for entry in fields(self):
            if entry.name not in values or (values[entry.name] is None and entry.name in _NONE_IS_DEFAULT):
                default = entry.default if entry.default_factory is MISSING else entry.default_factory()
                setattr(self, entry.name, default)
            else:
                setattr(self, entry.name, values[entry.name])
        self._set_labels(num_labels, values.get("id2label"), values.get("label2id"))
        known = {entry.name for entry in fields(self)}
        for name in (name for name in values if name not in known):
            if hasattr(type(self), name):
                raise ValueError(f"{name}: expected a name that is no method of BertConfig")
            setattr(self, name, values[name])
        self.validate()

    def _set_labels(self, num_labels: int | None, id2label: Any, label2id: Any) -> None:
        # Of the three only one need be given; names win over a bare count, as in transformers.
        if id2label is None:
            if label2id is not None:
                self.id2label = {index: label for label, index in self.label2id.items()}
            elif num_labels is not None:
                self.num_labels = num_labels
            return
        if label2id is None:
            self.label2id = {label: index for index, label in self.id2label.items()}
        if num_labels is not None and num_labels != len(self.id2label):
            warnings.warn(f"num_labels={num_labels} is ignored: id2label has {len(self.id2label)} names", stacklevel=3)

    def __setattr__(self, name: str, value: Any) -> None:
        check = FIELD_CHECKS.get(name)
        super().__setattr__(name, value if check is None else check(name, value))

    @property
    def num_labels(self) -> int:
        """Number of classes of a classification head: the length of `id2label`; setting it names them LABEL_i."""
        return len(self.id2label)

    @num_labels.setter
    def num_labels(self, count: int) -> None:
        count = at_least(1)("num_labels", count)
        if count != len(self.id2label):
            if count > _MOST_UNNAMED:
                raise ValueError(
                    f"num_labels: expected at most {_MOST_UNNAMED} classes without names (id2label), got {count}"
                )
            self.id2label = _default_labels(count)
            self.label2id = {label: index for index, label in self.id2label.items()}

    @property
    def use_return_dict(self) -> bool:
        """The older name of `return_dict`."""
        return self.return_dict

    def validate(self) -> None:
        """Checks the relations between fields.

        Raises:
            ValueError: they contradict each other.
        """
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size: expected a multiple of num_attention_heads={self.num_attention_heads}, "
                f"got {self.hidden_size}"
            )
        if self.pad_token_id is not None and not -self.vocab_size <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"pad_token_id: expected an id below vocab_size={self.vocab_size}, got {self.pad_token_id}"
            )
        for layer, heads in self.pruned_heads.items():
            if not 0 <= layer < self.num_hidden_layers or not all(0 <= h < self.num_attention_heads for h in heads):
                raise ValueError(
                    f"pruned_heads: expected layers below {self.num_hidden_layers} and heads below "
                    f"{self.num_attention_heads}, got {layer}: {shown(heads)}"
                )
        if self.problem_type == "single_label_classification" and self.num_labels == 1:
            raise ValueError("problem_type: 'single_label_classification' needs num_labels >= 2, got 1")

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike[str], *, return_unused_kwargs: bool = False, **overrides: Any
    ) -> "BertConfig":
        """Reads a configuration file, or config.json (else bert_config.json) in a directory.

        Args:
            path: file or directory, or a name on the hub (see `hub.fetch_first`).
            return_unused_kwargs: return the configuration and a dictionary of the overrides that it has no field for.
            **overrides: fields that replace those of the file, and `hub.HUB_OPTIONS` (a subfolder also of a directory).
                Arguments of transformers: see `foreign_arguments`.

        Raises:
            CheckpointError: the file is missing or broken, or holds a wrong value; the message names it.
            TypeError, ValueError: a wrong name or value among the overrides.
        """
        check_flag("return_unused_kwargs", return_unused_kwargs)
        overrides = without_foreign(overrides)
        options = take_hub_options(overrides)
        name = path_string("path", path)
        path = fetch_first(name, CONFIG_NAMES, options) if is_hub_name(name) else Path(local_place(name, options))
        if os.path.isdir(path):  # unlike Path.is_dir, False for names that no file can have
            found = [path / name for name in CONFIG_NAMES if (path / name).is_file()]
            if not found:
                raise CheckpointError(f"{path}: the directory holds neither {CONFIG_NAMES[0]} nor {CONFIG_NAMES[1]}")
            path = found[0]
        config = cls.from_json_file(path)
        for dtype in ("dtype", "torch_dtype"):
            if isinstance(overrides.get(dtype), str) and overrides[dtype] == "auto":  # as the file says
                del overrides[dtype]
        if not return_unused_kwargs:
            return config.with_overrides(**overrides)
        unused = {name: value for name, value in overrides.items() if not config._knows(name)}
        used = {name: value for name, value in overrides.items() if name not in unused}
        return config.with_overrides(**used), unused  # type: ignore[return-value]

    def with_overrides(self, **overrides: Any) -> "BertConfig":
        """A copy with some fields replaced; a new `num_labels` or label mapping replaces all of the old labels.

        Raises:
            TypeError: a name that this configuration does not have. TypeError, ValueError: a wrong value.
        """
        values = self.to_dict()
        unknown = [name for name in overrides if not self._knows(name)]
        if unknown:
            raise TypeError(f"overrides: BertConfig has no field {', '.join(sorted(unknown))}")
        if (num_labels := overrides.get("num_labels")) is not None and (
            at_least(1)("num_labels", num_labels) == self.num_labels
        ):
            del overrides["num_labels"]
        if any(overrides.get(name) is not None for name in _LABEL_KEYS):
            values = {name: value for name, value in values.items() if name not in _LABEL_KEYS}
        if "torch_dtype" in overrides:
            del values["dtype"]
        return type(self)(**{**values, **overrides})

    def _knows(self, name: str) -> bool:
        return name in vars(self) or name in ("model_type", "num_labels", "torch_dtype")

    @classmethod
    def from_json_file(cls, path: str | os.PathLike[str]) -> "BertConfig":
        """Reads one JSON file.

        Raises:
            CheckpointError: it is missing, not JSON, not an object, or holds a wrong value; the message names it.
        """
        path = Path(path_string("path", path))
        values = read_json(path)
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: expected a JSON object, got {type(values).__name__}")
        try:
            return cls.from_dict(values)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], **overrides: Any) -> "BertConfig":
        """A configuration from a dictionary, which is not changed; `overrides` replace its values."""
        if not isinstance(values, Mapping):
            raise TypeError(f"values: expected a mapping from names to values, got {type(values).__name__}")
        if not all(isinstance(name, str) for name in values):
            raise TypeError("values: expected names as keys, got others")
        return cls(**{**copy.deepcopy(dict(values)), **overrides})

    @classmethod
    def from_hf(cls, config: Any) -> "BertConfig":
        """A configuration from one of transformers' `BertConfig` objects (4.x or 5.x); ours are returned as copies.

        Raises:
            TypeError: not a configuration object. ValueError: one of another architecture.
        """
        if isinstance(config, cls):
            return copy.deepcopy(config)
        if not callable(getattr(config, "to_dict", None)):
            raise TypeError(f"config: expected a transformers BertConfig, got {type(config).__name__}")
        # The short form leaves out what has the default of every architecture, such as settings of text generation.
        values = config.to_diff_dict() if hasattr(config, "to_diff_dict") else config.to_dict()
        values = {name: value for name, value in values.items() if not name.startswith("_")}  # "_": its session's state
        values["output_attentions"] = bool(getattr(config, "output_attentions", False))  # a property in transformers 5
        return cls.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """All fields and extra attributes as a new dictionary, `model_type` included; values are not yet JSON."""
        return {"model_type": self.model_type, **copy.deepcopy(vars(self))}

    def to_json_string(self) -> str:
        """What `save_pretrained` writes: sorted JSON, fields that every transformers config has only if not default.

        Raises:
            ValueError: a value that JSON cannot hold, such as a callable `hidden_act`.
        """
        if callable(self.hidden_act):
            raise ValueError(f"hidden_act: a callable cannot be written to JSON, got {self.hidden_act!r}")
        default = vars(BertConfig())
        values = {
            name: value
            for name, value in self.to_dict().items()
            if name not in _OPTIONAL_IN_FILES or value != default[name]
        }
        if self.dtype is not None:
            values["dtype"] = str(self.dtype).removeprefix("torch.")
        if {"id2label", "label2id"} & values.keys():  # names and their inverse belong together
            values |= {"id2label": self.id2label, "label2id": self.label2id}
        try:
            return _to_json(values)
        except (TypeError, ValueError, RecursionError) as error:
            name = next((name for name, value in values.items() if not _is_json(value)), "config")
            raise ValueError(f"{name}: a value cannot be written to JSON: {error}") from error

    def save_pretrained(self, directory: str | os.PathLike[str], *, push_to_hub: bool = False) -> Path:
        """Writes config.json into `directory` (made if missing), atomically; returns the file's path.

        push_to_hub: only False.

        Raises:
            ValueError: the fields contradict each other or cannot be written as JSON; an old file stays as it was.
        """
        refuse_foreign(push_to_hub=push_to_hub)
        directory = Path(path_name("directory", directory))
        self.validate()
        text = self.to_json_string()
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / CONFIG_NAMES[0]
        write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        return path

    def __eq__(self, other: object) -> bool:
        """Equal in every field and extra attribute."""
        return isinstance(other, BertConfig) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({shown})"
