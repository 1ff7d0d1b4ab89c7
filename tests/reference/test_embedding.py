"""Embedding: gradcheck with dropout, against torch's modules, the padding row, vectors in place of ids."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bert_fast.reference.dropout import dropout_scale, keep_mask
from bert_fast.reference.embedding import Embedding, embedding_bwd, embedding_fwd
from bert_fast.testing.explicit import explicit_function

SEED = torch.tensor([77], dtype=torch.int64)
EPS, SITE, PADDING_IDX = 1e-12, 0, 2
IDS = torch.tensor([3, 2, 3, 0, 1, 2, 3])  # repeated words, the padding word, every word
TYPES = torch.tensor([0, 0, 1, 1, 0, 1, 0])
POSITIONS = torch.tensor([0, 1, 2, 0, 0, 1, 4])
COORDS = torch.tensor([[0, 0], [0, 1], [0, 2], [1, 0], [2, 0], [2, 1], [2, 4]], dtype=torch.int32)


def _tables(hidden: int = 5) -> tuple[Tensor, ...]:
    """Word, position and type table, LayerNorm weight and bias."""
    shapes = (4, hidden), (5, hidden), (2, hidden), (hidden,), (hidden,)
    return tuple(torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes)


def _call(words: Tensor, tables: tuple[Tensor | None, ...], dropout_p: float = 0.0, **others: Any) -> Embedding:
    """tables: as `_tables` makes them; others: fields that differ."""
    word_table, position_table, type_table, weight, bias = tables
    a = Embedding(
        words, TYPES, POSITIONS, word_table, position_table, type_table, PADDING_IDX, weight, bias, EPS, dropout_p,
        SEED if dropout_p else None, COORDS if dropout_p else None, SITE, type_table.dtype,
    )  # fmt: skip
    return a._replace(**others)


def _in_order(made: dict[str, Tensor], words: str = "word_table") -> list[Tensor]:
    return [made[name] for name in (words, "position_table", "type_table", "weight", "bias")]


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("as_vectors", [False, True])
@pytest.mark.parametrize("has_positions", [False, True])
def test_gradcheck(dropout_p: float, as_vectors: bool, has_positions: bool) -> None:
    # gradcheck moves every row of the word table, so none may be the padding row here
    def call(words: Tensor, *tables: Tensor) -> Embedding:
        return _call(words if as_vectors else IDS, (words, *tables), dropout_p, padding_idx=None)

    def forward(*inputs):
        y, mean, rstd = embedding_fwd(call(*inputs))
        return (y,), (inputs, mean.detach(), rstd.detach())

    def backward(saved, dy):
        inputs, mean, rstd = saved
        made = embedding_bwd(call(*inputs), dy, mean, rstd)
        words = made["words" if as_vectors else "word_table"]
        return words, *(made.get(name) for name in ("position_table", "type_table", "weight", "bias"))

    words, positions, *rest = _tables()
    if as_vectors:
        words = torch.randn(len(IDS), 5, dtype=torch.float64, requires_grad=True)
    inputs = words, positions if has_positions else None, *rest
    assert torch.autograd.gradcheck(explicit_function(forward, backward), inputs)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_equals_torch_modules(dropout_p: float) -> None:
    words, positions, types, weight, bias = given = tuple(t.detach() for t in _tables())
    tables = nn.Embedding(4, 5, padding_idx=PADDING_IDX), nn.Embedding(5, 5), nn.Embedding(2, 5)
    norm = nn.LayerNorm(5, eps=EPS)
    for module, values in zip((*tables, norm), (words, positions, types, weight), strict=True):
        module.weight = nn.Parameter(values.clone())
    norm.bias = nn.Parameter(bias.clone())
    keep = keep_mask(SEED, SITE, COORDS, 5, dropout_p)
    expected = norm(tables[0](IDS) + tables[1](POSITIONS) + tables[2](TYPES)) * keep * dropout_scale(dropout_p)
    a = _call(IDS, given, dropout_p)
    y, mean, rstd = embedding_fwd(a)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    expected.backward(dy)
    got = embedding_bwd(a, dy, mean, rstd)
    wanted = [t.weight.grad for t in tables] + [norm.weight.grad, norm.bias.grad]
    for gradient, want in zip(_in_order(got), wanted, strict=True):
        torch.testing.assert_close(gradient, want)
    assert not got["word_table"][PADDING_IDX].any() and got["word_table"][3].any()


def test_no_padding_row() -> None:
    a = _call(IDS, tuple(t.detach() for t in _tables()), padding_idx=None)
    y, mean, rstd = embedding_fwd(a)
    assert embedding_bwd(a, torch.randn_like(y), mean, rstd)["word_table"][PADDING_IDX].any()


def test_no_token_types_are_zeros() -> None:
    tables = tuple(t.detach() for t in _tables())
    results = []
    for token_types in (None, torch.zeros_like(TYPES)):
        a = _call(IDS, tables, 0.3, token_type_ids=token_types)
        y, mean, rstd = embedding_fwd(a)
        torch.manual_seed(3)
        results.append((y, *_in_order(embedding_bwd(a, torch.randn_like(y), mean, rstd))))
    for without, with_zeros in zip(*results, strict=True):
        assert torch.equal(without, with_zeros)


def test_only_wanted_gradients_are_made() -> None:
    a = _call(IDS, tuple(t.detach() for t in _tables()))
    y, mean, rstd = embedding_fwd(a)
    made = embedding_bwd(a, y, mean, rstd, frozenset())
    assert made.keys() == {"weight", "bias"} and made["weight"].any()


def test_output_dtype() -> None:
    a = _call(IDS, tuple(t.detach().float() for t in _tables()))
    y, mean, _ = embedding_fwd(a._replace(out_dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16 and mean.dtype == torch.float32
    assert torch.equal(y, embedding_fwd(a)[0].bfloat16())
