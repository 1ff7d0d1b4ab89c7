"""Names of parameters in BERT files: one canonical name for every spelling in which they were published.

bert.encoder.layer.0.output.LayerNorm.gamma     file of 2018
encoder.layer.0.output.LayerNorm.weight         file of a bare BertModel (sentence-transformers, MiniLM)
module.bert.encoder.layer.0.output.LayerNorm.weight   saved from inside DistributedDataParallel
-> encoder.layer.0.output.LayerNorm.weight      canonical
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["KeyMatch", "canonical_key", "match_keys"]

_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")  # DDP, torch.compile, FSDP
_OLD_LAYER_NORM = {"gamma": "weight", "beta": "bias"}
_OLD_LAYER_NORM_KEY = re.compile(r"^(?P<module>.*LayerNorm)\.(?P<name>gamma|beta)$")
_BASE = re.compile(r"^bert\.(?=(embeddings|encoder|pooler)\.)")
# Constant index buffers that old versions stored; they hold 0, 1, 2, ... and zeros.
_CONSTANTS = ("embeddings.position_ids", "embeddings.token_type_ids")
# Canonical name -> the name that holds the same values in files that store a tied pair once, under either name. A
# decoder weight is not filled from the embeddings: a model that asks for it separately does not tie the two.
_SAME_VALUES = {
    "cls.predictions.bias": "cls.predictions.decoder.bias",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "embeddings.word_embeddings.weight": "cls.predictions.decoder.weight",
}


def canonical_key(key: str) -> str:
    """The canonical name of one key; names that are not BERT's come back unchanged."""
    while key.startswith(_WRAPPERS):
        key = key.split(".", 1)[1]
    key = _BASE.sub("", key)
    old = _OLD_LAYER_NORM_KEY.match(key)
    return f"{old['module']}.{_OLD_LAYER_NORM[old['name']]}" if old else key


@dataclass(frozen=True)
class KeyMatch:
    """How the keys of a file fit those of a model.

    source: model key -> file key. missing: model keys without one. unexpected: file keys that no model key uses.
    """

    source: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def match_keys(file_keys: Iterable[str], model_keys: Iterable[str]) -> KeyMatch:
    """Finds for every model key the file key that holds its values, whatever prefix either carries.

    Raises:
        ValueError: two keys of the file have one canonical name, so it is not clear which is meant.
    """
    by_name: dict[str, str] = {}
    for key in file_keys:
        name = canonical_key(key)
        if name in by_name:
            raise ValueError(f"keys {by_name[name]!r} and {key!r} name the same parameter")
        by_name[name] = key
    source, missing, model_names = {}, [], set()
    for key in model_keys:
        name = canonical_key(key)
        model_names.add(name)
        found = by_name.get(name) or by_name.get(_SAME_VALUES.get(name, ""))
        if found is not None:
            source[key] = found
        elif name not in _CONSTANTS:
            missing.append(key)
    used = set(source.values())
    # A file may hold both names of one bias; the second is no surprise where the model knows only the first.
    harmless = {*_CONSTANTS, *(name for name, other in _SAME_VALUES.items() if other in model_names)}
    unexpected = tuple(key for name, key in by_name.items() if key not in used and name not in harmless)
    return KeyMatch(source, tuple(missing), unexpected)
