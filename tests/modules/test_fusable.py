"""Linear layers that are more than their weight and bias are called wherever a fused op would take these two."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import bert_fast
from bert_fast.modules.fusable import activated_linear, is_plain, product_and_bias

SIZES = dict(
    vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=16, initializer_range=0.3,
)  # fmt: skip
LINEARS = (
    "encoder.layer.0.attention.self.query", "encoder.layer.0.attention.self.value",
    "encoder.layer.0.attention.output.dense", "encoder.layer.0.intermediate.dense", "encoder.layer.0.output.dense",
    "pooler.dense",
)  # fmt: skip
IDS = torch.randint(1, 40, (2, 7), generator=torch.Generator().manual_seed(1))


class Adapted(nn.Module):
    """A linear layer and a correction of low rank, as adapters for fine-tuning are."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.low, self.high = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.high(self.low(x))

    def merged(self) -> nn.Linear:
        layer = nn.Linear(self.base.in_features, self.base.out_features)
        with torch.no_grad():
            layer.weight.copy_(self.base.weight + self.high.weight @ self.low.weight)
            layer.bias.copy_(self.base.bias)
        return layer


@pytest.mark.parametrize("name", LINEARS)
def test_an_adapter_anywhere_counts(name: str) -> None:
    model = bert_fast.BertModel(bert_fast.BertConfig(**SIZES)).eval()
    before = model(IDS)
    path, _, leaf = name.rpartition(".")
    adapted = Adapted(model.get_submodule(name))
    setattr(model.get_submodule(path), leaf, adapted)
    with_adapter = model(IDS)
    with_adapter.pooler_output.sum().backward()
    assert adapted.low.weight.grad is not None and adapted.low.weight.grad.any()
    setattr(model.get_submodule(path), leaf, adapted.merged())
    merged = model(IDS)
    assert not torch.allclose(before.pooler_output, merged.pooler_output)
    torch.testing.assert_close(with_adapter.last_hidden_state, merged.last_hidden_state)
    torch.testing.assert_close(with_adapter.pooler_output, merged.pooler_output)


@pytest.mark.parametrize("name", ["cls.predictions.transform.dense", "cls.predictions.decoder"])
def test_an_adapter_in_the_masked_lm_head_counts(name: str) -> None:
    model = bert_fast.BertForMaskedLM(
        bert_fast.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )
    path, _, leaf = name.rpartition(".")
    adapted = Adapted(model.get_submodule(name))
    setattr(model.get_submodule(path), leaf, adapted)
    losses = [model.train()(IDS, labels=IDS).loss]
    setattr(model.get_submodule(path), leaf, adapted.merged())
    losses += [model(IDS, labels=IDS).loss]
    torch.testing.assert_close(*losses)


def test_what_is_plain() -> None:
    layer = nn.Linear(4, 3)
    assert is_plain(layer)
    for register in (layer.register_forward_hook, layer.register_forward_pre_hook, layer.register_full_backward_hook):
        handle = register(lambda *arguments: None)
        assert not is_plain(layer)
        handle.remove()
    assert is_plain(layer) and not is_plain(Adapted(layer)) and not is_plain(nn.Identity())
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    assert not is_plain(layer)


def test_hooks_see_the_product_with_its_bias() -> None:
    layer, x, seen = nn.Linear(4, 3), torch.randn(5, 4), []
    product, bias = product_and_bias(x, layer)
    assert bias is layer.bias
    torch.testing.assert_close(product + bias, layer(x))
    layer.register_forward_hook(lambda module, inputs, result: seen.append(result))
    product, bias = product_and_bias(x, layer)
    assert bias is None and product is seen[0]
    activated_linear(x, layer, "gelu")
    activated_linear(x, layer, torch.relu)
    assert len(seen) == 3
