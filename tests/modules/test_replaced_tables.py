"""Whatever stands in the place of an embedding is called, and needs nothing of an `nn.Embedding` but that."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import bert_fast
from bert_fast.testing.parity import randomize

SIZES = dict(
    vocab_size=61, hidden_size=36, num_hidden_layers=2, num_attention_heads=3, intermediate_size=50,
    max_position_embeddings=24,
)  # fmt: skip
IDS = torch.randint(1, 61, (3, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 7 + [0] * 2])
TABLES = ("embeddings.word_embeddings", "embeddings.position_embeddings", "embeddings.token_type_embeddings")


class Own(nn.Module):
    """A table under another name, and no attribute of `nn.Embedding`."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.rows = nn.Parameter(2 * table.weight.detach())

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows[ids]


class Sub(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return 2 * super().forward(ids)


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def _sub(table: nn.Embedding) -> nn.Module:
    return Sub(*table.weight.shape, _weight=table.weight.detach().clone())


def _parametrized(table: nn.Embedding) -> nn.Module:
    parametrize.register_parametrization(table, "weight", Twice())
    return table


def _hooked(table: nn.Embedding) -> nn.Module:
    table.register_forward_hook(lambda module, arguments, output: 2 * output)
    return table


def _quantised(table: nn.Embedding) -> nn.Module:
    """Eight bits a number, whose `weight` is a method."""
    with torch.no_grad():
        table.weight.mul_(2)
    table.qconfig = torch.ao.quantization.float_qparams_weight_only_qconfig  # type: ignore[assignment]
    return torch.ao.nn.quantized.Embedding.from_float(table)


def _of_another_dtype(table: nn.Embedding) -> nn.Module:
    with torch.no_grad():
        table.weight.mul_(2)
    return table.half()


REPLACEMENTS: dict[str, Callable[[nn.Embedding], nn.Module]] = {
    "another module": Own, "subclass": _sub, "parametrized": _parametrized, "hook": _hooked, "8 bits": _quantised,
    "half": _of_another_dtype,
}  # fmt: skip


def _run(model: bert_fast.BertModel) -> list[Tensor]:
    model.zero_grad()
    output = model(IDS, MASK, token_type_ids=IDS % 2, dropout_seed=torch.tensor([3]))
    output.last_hidden_state.sin().sum().backward()
    weight = model.get_submodule("encoder.layer.0.attention.self.query").weight
    return [output.last_hidden_state, output.pooler_output, weight.grad.clone()]


def _make(**config: object) -> bert_fast.BertModel:
    model = bert_fast.BertModel(bert_fast.BertConfig(**SIZES, **config)).train()
    randomize(model)
    return model


@pytest.mark.parametrize("table", [name.removeprefix("embeddings.") for name in TABLES])
@pytest.mark.parametrize("how", REPLACEMENTS)
def test_a_replaced_table_is_called(how: str, table: str) -> None:
    """Each replacement doubles the rows."""
    model = _make()
    doubled = copy.deepcopy(model)
    with torch.no_grad():
        doubled.get_submodule(f"embeddings.{table}").weight.mul_(2)
    setattr(model.embeddings, table, REPLACEMENTS[how](getattr(model.embeddings, table)))
    is_rounded = how in ("8 bits", "half")
    for got, want in zip(_run(model), _run(doubled), strict=True):
        if is_rounded:
            assert (got - want).abs().max() < 0.1 * want.abs().max()
        else:
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("how", ["another module", "subclass", "parametrized", "hook"])
def test_a_replaced_table_of_distances_is_called(how: str) -> None:
    model = _make(position_embedding_type="relative_key_query")
    doubled, place = copy.deepcopy(model), "encoder.layer.1.attention.self.distance_embedding"
    with torch.no_grad():
        doubled.get_submodule(place).weight.mul_(2)
    model.set_submodule(place, REPLACEMENTS[how](model.get_submodule(place)))
    for got, want in zip(_run(model), _run(doubled), strict=True):
        torch.testing.assert_close(got, want)
    assert all(p.grad is not None for p in model.get_submodule(place).parameters())


def test_plain_tables_name_the_ids() -> None:
    """Beside a table that is called, which names its own."""
    model = _make()
    model.embeddings.position_embeddings = Own(model.embeddings.position_embeddings)
    with pytest.raises(ValueError, match=r"input_ids: .*\[0, 61\)"):
        model(IDS + 60)
    model.embeddings.word_embeddings = Own(model.embeddings.word_embeddings)
    with pytest.raises(IndexError):
        model(IDS + 60)
