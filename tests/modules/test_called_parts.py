"""Parts that somebody watches are called instead of being read, each once, and nothing else changes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bert_fast
from bert_fast.modules.call import first_rows
from bert_fast.modules.fusable import joined_products

CONFIG = dict(
    vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=16, initializer_range=0.3, is_decoder=True, add_cross_attention=True, use_cache=False,
)  # fmt: skip
IDS = torch.randint(1, 40, (2, 7), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
MEMORY = torch.randn(2, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def make() -> bert_fast.BertModel:
    torch.manual_seed(3)
    model = bert_fast.BertModel(bert_fast.BertConfig(**CONFIG)).double().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


def results(model: bert_fast.BertModel, rows: Any) -> list[Tensor]:
    model.zero_grad()
    encoded = model.encode(
        input_ids=IDS, attention_mask=MASK, encoder_hidden_states=MEMORY, dropout_seed=torch.tensor([5]), rows=rows
    )
    pooled = model.pool(encoded)
    (encoded.hidden.sin().sum() + pooled.sum()).backward()
    return [encoded.hidden, pooled, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("rows", [None, first_rows], ids=["all rows", "first rows"])
def test_every_part_with_parameters_can_be_watched(rows: Any) -> None:
    model = make()
    wanted = results(model, rows)
    watched = [(name, part) for name, part in model.named_modules() if part._parameters]
    assert len(watched) == 4 + 5 + 5 + 3 + 1  # embeddings, self-attention, cross-attention, MLP, pooler
    for name, part in watched:
        seen: list[Tensor] = []
        handle = part.register_forward_hook(lambda module, arguments, result, seen=seen: seen.append(result))
        for got, want in zip(results(model, rows), wanted, strict=True):
            torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")
        assert len(seen) == 1, name
        handle.remove()
    assert all(torch.equal(got, want) for got, want in zip(results(model, rows), wanted, strict=True))


def test_every_container_is_called_once() -> None:
    model, seen = make(), []
    for name, part in model.named_modules():
        if name and not part._parameters and not isinstance(part, nn.ModuleList):
            part.register_forward_hook(lambda module, arguments, result, name=name: seen.append(name))
    results(model, None)
    assert sorted(seen) == sorted(
        name for name, part in model.named_modules()
        if name and not part._parameters and not isinstance(part, nn.ModuleList)
    )  # fmt: skip


def test_tables_that_do_more_than_look_up() -> None:
    model = make()
    table = model.embeddings.word_embeddings
    table.max_norm = 0.5
    model(IDS, encoder_hidden_states=MEMORY)
    assert table.weight[IDS].norm(dim=-1).max() <= 0.5 + 1e-5
    table.max_norm, table.sparse = None, True
    model(IDS, encoder_hidden_states=MEMORY).last_hidden_state.sum().backward()
    assert table.weight.grad is not None and table.weight.grad.is_sparse


@pytest.mark.parametrize("biases", [(True, True), (False, False), (True, False)])
@pytest.mark.parametrize("records", [False, True])
def test_joined_products(biases: tuple[bool, bool], records: bool) -> None:
    layers = [nn.Linear(5, width, bias=bias) for width, bias in zip((3, 4), biases, strict=True)]
    x = torch.randn(6, 5)
    with torch.set_grad_enabled(records):
        wanted = torch.cat([F.linear(x, layer.weight, layer.bias) for layer in layers], dim=1)
        torch.testing.assert_close(joined_products(x, *layers), wanted)
        if records:
            joined_products(x, *layers).sum().backward()
            assert all(p.grad is not None for layer in layers for p in layer.parameters())
