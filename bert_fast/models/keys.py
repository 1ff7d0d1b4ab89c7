"""Names of parameters in BERT files: one canonical name for every spelling in which they were published.

bert.encoder.layer.0.output.LayerNorm.gamma     file of 2018
bert/encoder/layer_0/output/LayerNorm/gamma     variable of Google's TensorFlow code
encoder.layer.0.output.LayerNorm.weight         file of a bare BertModel (sentence-transformers, MiniLM)
module.bert.encoder.layer.0.output.LayerNorm.weight   saved from inside DistributedDataParallel
-> encoder.layer.0.output.LayerNorm.weight      canonical

TensorFlow stores the weight of a linear layer as `kernel`, [in, out]; `oriented` turns it round.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")  # DDP, torch.compile, FSDP
_OLD_LAYER_NORM = {"gamma": "weight", "beta": "bias"}
_OLD_LAYER_NORM_KEY = re.compile(r"^(?P<module>.*LayerNorm)\.(?P<name>gamma|beta)$")
_BASE = re.compile(r"^bert\.(?=(embeddings|encoder|pooler)\.)")
# In TensorFlow's names: their own words for ours, and what optimizers keep beside the variables.
_TENSORFLOW_LEAVES = _OLD_LAYER_NORM | {"kernel": "weight", "output_weights": "weight", "output_bias": "bias"}
_TENSORFLOW_LAYER = re.compile(r"^layer_(\d+)$")
_TENSORFLOW_HEADS = {"": "classifier", "cls.squad": "qa_outputs"}
_TENSORFLOW_CLASSIFIER = ("output_weights", "output_bias")  # those of a classifier are in no scope
_TENSORFLOW_STATE = re.compile(r"(^|/)(global_step|adam_[mv]|beta[12]_power|(Adam|LAMB)\w*)(:0)?$")
# Constant index buffers that old versions stored; they hold 0, 1, 2, ... and zeros.
_CONSTANTS = ("embeddings.position_ids", "embeddings.token_type_ids")
# Canonical name -> the name that holds the same values in files that store a tied pair once, under either name. A
# decoder weight is not filled from the embeddings: a model that asks for it separately does not tie the two.
_SAME_VALUES = {
    "cls.predictions.bias": "cls.predictions.decoder.bias",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "embeddings.word_embeddings.weight": "cls.predictions.decoder.weight",
}


@functools.lru_cache(4096)  # loading asks for those of the file and of the model, which are mostly the same
def canonical_key(key: str) -> str:
    """The canonical name of one key; names that are not BERT's come back unchanged."""
    if "/" in key or key.removesuffix(":0") in _TENSORFLOW_CLASSIFIER:
        key = _from_tensorflow(key)
    while key.startswith(_WRAPPERS):
        key = key.split(".", 1)[1]
    key = _BASE.sub("", key)
    old = _OLD_LAYER_NORM_KEY.match(key)
    return f"{old['module']}.{_OLD_LAYER_NORM[old['name']]}" if old else key


def _from_tensorflow(key: str) -> str:
    """`cls/squad/output_weights` to `qa_outputs.weight`, and so on, with the prefix `bert.` where it has one."""
    *modules, leaf = key.removesuffix(":0").split("/")
    if leaf.endswith("_embeddings"):  # a table is the variable itself
        modules, leaf = [*modules, leaf], "weight"
    path = ".".join(_TENSORFLOW_LAYER.sub(r"layer.\1", module) for module in modules)
    return f"{_TENSORFLOW_HEADS.get(path, path)}.{_TENSORFLOW_LEAVES.get(leaf, leaf)}"


def oriented(key: str, value: Tensor) -> Tensor:
    """The value of a file's key as PyTorch wants it: a TensorFlow kernel [in, out] as [out, in], a view."""
    is_kernel = "/" in key and key.removesuffix(":0").endswith("/kernel")
    return value.t() if is_kernel and value.dim() == 2 else value


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
        if _TENSORFLOW_STATE.search(key):
            continue
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
