"""Small models of transformers, every parameter random, and batches for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_fast.ops.packing import Packing
from bert_fast.testing.parity import randomize
from tests.huggingface.families import configuration

SIZES = dict(
    vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
    max_position_embeddings=24, num_labels=3,
)  # fmt: skip


@pytest.fixture(scope="session")
def make() -> Callable[..., nn.Module]:
    """A function from the name of a transformers class, dropout probability and configuration to a model of it."""
    transformers = pytest.importorskip("transformers")

    def make(name: str = "BertModel", dropout_p: float = 0.0, **config: Any) -> nn.Module:
        probabilities = {"hidden_dropout_prob": dropout_p, "attention_probs_dropout_prob": dropout_p}
        cls = getattr(transformers, name)
        model = cls(configuration(cls, **{**SIZES, **probabilities, **config}))
        randomize(model)
        return model.eval()

    return make


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Three sequences, one full, one half padding, one padded on the left with a hole."""
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, 5:] = 0
    mask[2, 6] = 0
    return {
        "input_ids": torch.randint(1, 61, (3, 9)),
        "attention_mask": mask,
        "token_type_ids": torch.randint(0, 2, (3, 9)),
    }


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was called that makes padded batches or outputs."""
    transformers = pytest.importorskip("transformers")
    found: list[str] = []
    for owner, name in ((Packing, "unpack"), (transformers.PreTrainedTokenizerBase, "__call__")):
        original = getattr(owner, name)

        def method(self: Any, *args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            found.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, method)
    return found
