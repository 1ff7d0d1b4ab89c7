"""Shapes of an encoder's parameters from its configuration alone, before any of them is made.

A configuration of a few bytes can ask for any number of layers and any amount of memory. What it asks for is compared
with what there is: the weights that are to be loaded, and the memory of the machine.
"""

import os
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from bert_fast.errors import CheckpointError
from bert_fast.models.checkpoint import Mismatch
from bert_fast.models.config import BertConfig
from bert_fast.models.keys import canonical_key, oriented

_LAYER_BYTES = 30_000  # of the Python objects of one layer
_ADDRESSES = 2**63
_SIZES = (
    "vocab_size",
    "max_position_embeddings",
    "type_vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
)

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def encoder_shapes(config: BertConfig) -> Shapes:
    """Canonical name and shape of every parameter of the embeddings and of the layers, one by one."""
    yield from _embedding_shapes(config)
    for layer in range(config.num_hidden_layers):
        num_heads = config.num_attention_heads - len(set(config.pruned_heads.get(layer, ())))
        for name, shape in _layer_shapes(config, num_heads):
            yield f"encoder.layer.{layer}.{name}", shape


def check_sizes(
    config: BertConfig,
    state_dict: Mapping[str, Tensor],
    *,
    model_name: str,
    source: str | os.PathLike[str],
    ignore_mismatched_sizes: bool = False,
) -> None:
    """Raises CheckpointError where an encoder of this configuration cannot be that of the weights.

    There may be no more layers than tensors, and what they hold of the encoder has the shapes that the configuration
    says. Heads are not looked at, nor what the weights lack: it may be new.
    """
    if config.num_hidden_layers > len(state_dict):
        raise CheckpointError(
            f"{source}: does not fit {model_name}: num_hidden_layers: expected no more layers than the file's "
            f"{len(state_dict)} tensors, got {config.num_hidden_layers}"
        )
    if ignore_mismatched_sizes:
        return
    stored = {canonical_key(key): oriented(key, value).shape for key, value in state_dict.items()}
    mismatched = [
        Mismatch(name, str(list(shape)), str(list(stored[name])))
        for name, shape in encoder_shapes(config)
        if name in stored and stored[name] != shape
    ]
    if mismatched:
        lines = "".join(f"\n  {mismatch}" for mismatch in mismatched)
        raise CheckpointError(f"{source}: does not fit {model_name}:{lines}")


def check_memory(config: BertConfig) -> None:
    """Raises ValueError where parameters of the encoder alone are more than the machine's memory, or any machine's.

    The former where they are made on the CPU: on the meta device nothing is allocated.
    """
    itemsize = torch.get_default_dtype().itemsize
    layer = _num_elements(_layer_shapes(config, 0)) * itemsize + _LAYER_BYTES  # without heads, as they may be pruned
    size = _num_elements(_embedding_shapes(config)) * itemsize + config.num_hidden_layers * layer
    limit = _physical_memory() if torch.get_default_device().type == "cpu" else _ADDRESSES
    if size > limit:
        sizes = ", ".join(f"{name}={getattr(config, name)}" for name in _SIZES)
        raise ValueError(f"config: expected a model of at most {limit >> 30} GiB, the memory, got {sizes}")


def _embedding_shapes(config: BertConfig) -> Shapes:
    hidden = config.hidden_size
    yield "embeddings.word_embeddings.weight", (config.vocab_size, hidden)
    yield "embeddings.position_embeddings.weight", (config.max_position_embeddings, hidden)
    yield "embeddings.token_type_embeddings.weight", (config.type_vocab_size, hidden)
    yield from _norm_shapes("embeddings.", hidden)


def _layer_shapes(config: BertConfig, num_heads: int) -> Shapes:
    """By their names within the layer, of which `num_heads` heads are left."""
    hidden, wide = config.hidden_size, config.intermediate_size
    head_dim = hidden // config.num_attention_heads
    yield from _attention_shapes("attention.", hidden, num_heads * head_dim)
    if config.position_embedding_type != "absolute":
        yield "attention.self.distance_embedding.weight", (2 * config.max_position_embeddings - 1, head_dim)
    if config.add_cross_attention:
        yield from _attention_shapes("crossattention.", hidden, hidden)
    yield from _linear_shapes("intermediate.dense.", wide, hidden)
    yield from _linear_shapes("output.dense.", hidden, wide)
    yield from _norm_shapes("output.", hidden)


def _attention_shapes(prefix: str, hidden: int, width: int) -> Shapes:
    for name in ("query", "key", "value"):
        yield from _linear_shapes(f"{prefix}self.{name}.", width, hidden)
    yield from _linear_shapes(f"{prefix}output.dense.", hidden, width)
    yield from _norm_shapes(f"{prefix}output.", hidden)


def _linear_shapes(prefix: str, out_features: int, in_features: int) -> Shapes:
    yield prefix + "weight", (out_features, in_features)
    yield prefix + "bias", (out_features,)


def _norm_shapes(prefix: str, size: int) -> Shapes:
    yield prefix + "LayerNorm.weight", (size,)
    yield prefix + "LayerNorm.bias", (size,)


def _num_elements(shapes: Shapes) -> int:
    return sum(shape[0] * shape[-1] if len(shape) > 1 else shape[0] for _, shape in shapes)


def _physical_memory() -> int:
    """Bytes of the machine; where it does not tell, those that addresses reach."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return _ADDRESSES
