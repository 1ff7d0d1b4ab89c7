"""Embedding: gradcheck with dropout, against torch's modules, the padding row, vectors in place of ids."""

import pytest
import torch
from torch import Tensor, nn

from bert_fast.reference.dropout import dropout_scale, keep_mask
from bert_fast.reference.embedding import embedding_bwd, embedding_fwd
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


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("as_vectors", [False, True])
@pytest.mark.parametrize("has_positions", [False, True])
def test_gradcheck(dropout_p: float, as_vectors: bool, has_positions: bool) -> None:
    words, positions, types, weight, bias = _tables()
    mask = dropout_p, SEED, COORDS, SITE
    # gradcheck moves every row of the word table, so none may be the padding row here
    fixed = TYPES, POSITIONS

    def forward(words, positions, types, weight, bias):
        first = words if as_vectors else IDS
        tables = words, positions, types, None, weight
        y, mean, rstd = embedding_fwd(first, *fixed, *tables, bias, EPS, *mask)
        return (y,), (first.detach(), tables, mean.detach(), rstd.detach())

    def backward(saved, dy):
        first, tables, mean, rstd = saved
        return embedding_bwd(dy, first, *fixed, *tables, mean, rstd, *mask)

    if as_vectors:
        words = torch.randn(len(IDS), 5, dtype=torch.float64, requires_grad=True)
    inputs = words, positions if has_positions else None, types, weight, bias
    assert torch.autograd.gradcheck(explicit_function(forward, backward), inputs)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_equals_torch_modules(dropout_p: float) -> None:
    words, positions, types, weight, bias = (t.detach() for t in _tables())
    tables = nn.Embedding(4, 5, padding_idx=PADDING_IDX), nn.Embedding(5, 5), nn.Embedding(2, 5)
    norm = nn.LayerNorm(5, eps=EPS)
    for module, values in zip((*tables, norm), (words, positions, types, weight), strict=True):
        module.weight = nn.Parameter(values.clone())
    norm.bias = nn.Parameter(bias.clone())
    keep = keep_mask(SEED, SITE, COORDS, 5, dropout_p)
    expected = norm(tables[0](IDS) + tables[1](POSITIONS) + tables[2](TYPES)) * keep * dropout_scale(dropout_p)
    given = IDS, TYPES, POSITIONS, words, positions, types, PADDING_IDX, weight
    mask = dropout_p, SEED, COORDS, SITE
    y, mean, rstd = embedding_fwd(*given, bias, EPS, *mask)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    expected.backward(dy)
    got = embedding_bwd(dy, *given, mean, rstd, *mask)
    wanted = [t.weight.grad for t in tables] + [norm.weight.grad, norm.bias.grad]
    for gradient, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(gradient, want)
    assert not got.dwords[PADDING_IDX].any() and got.dwords[3].any()


def test_no_padding_row() -> None:
    words, positions, types, weight, bias = (t.detach() for t in _tables())
    given = IDS, TYPES, POSITIONS, words, positions, types, None, weight
    y, mean, rstd = embedding_fwd(*given, bias, EPS, 0.0, None, None, SITE)
    assert embedding_bwd(torch.randn_like(y), *given, mean, rstd, 0.0, None, None, SITE).dwords[PADDING_IDX].any()


def test_no_token_types_are_zeros() -> None:
    words, positions, types, weight, bias = (t.detach() for t in _tables())
    zeros = torch.zeros_like(TYPES)
    mask = 0.3, SEED, COORDS, SITE
    results = []
    for token_types in (None, zeros):
        given = IDS, token_types, POSITIONS, words, positions, types, PADDING_IDX, weight
        y, mean, rstd = embedding_fwd(*given, bias, EPS, *mask)
        torch.manual_seed(3)
        results.append((y, *embedding_bwd(torch.randn_like(y), *given, mean, rstd, *mask)))
    for without, with_zeros in zip(*results, strict=True):
        assert torch.equal(without, with_zeros)


def test_only_wanted_gradients_are_made() -> None:
    words, positions, types, weight, bias = (t.detach() for t in _tables())
    given = IDS, TYPES, POSITIONS, words, positions, types, PADDING_IDX, weight
    y, mean, rstd = embedding_fwd(*given, bias, EPS, 0.0, None, None, SITE)
    got = embedding_bwd(y, *given, mean, rstd, 0.0, None, None, SITE, False, False, False)
    assert got.dwords is None and got.dposition_table is None and got.dtype_table is None
    assert got.dweight.any()


def test_output_dtype() -> None:
    words, positions, types, weight, bias = (t.detach().float() for t in _tables())
    given = IDS, TYPES, POSITIONS, words, positions, types, PADDING_IDX, weight, bias, EPS, 0.0, None, None, SITE
    y, mean, _ = embedding_fwd(*given, torch.bfloat16)
    assert y.dtype == torch.bfloat16 and mean.dtype == torch.float32
    assert torch.equal(y, embedding_fwd(*given)[0].bfloat16())
