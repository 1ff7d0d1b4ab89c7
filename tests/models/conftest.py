"""Stand-in models: transformers' own BERT classes, small and with every parameter random."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 12,
}


@pytest.fixture(scope="session")
def make_hf() -> Callable[..., nn.Module]:
    """A function from the name of a transformers class (and configuration fields) to a small model of it."""
    transformers = pytest.importorskip("transformers")

    def make(name: str = "BertForPreTraining", **config: Any) -> nn.Module:
        model = getattr(transformers, name)(transformers.BertConfig(**{**SIZES, **config}))
        with torch.no_grad():
            for parameter in model.parameters():  # zeros and ones would hide a value left at its start
                parameter.normal_()
        return model

    return make
