"""The torch back-end of the embedding as it runs on devices: ids out of range, sorted sums; here on CPU tensors."""

import pytest
import torch

from bert_fast.aten import embedding as family
from bert_fast.reference import embedding as reference
from bert_fast.testing.compare import assert_close_to_truth

NAMES = ("dwords", "dposition_table", "dtype_table", "dweight", "dbias")
SEED, COORDS = torch.tensor([5]), torch.stack([torch.arange(9), torch.arange(9)], dim=1).int()
MASK = 0.3, SEED, COORDS, 0
EPS = 1e-12


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "_is_on_cpu", lambda t: False)


def _inputs(dtype=torch.float32):
    tables = [torch.randn(rows, 24, dtype=torch.float64).to(dtype) for rows in (11, 7, 2)]
    words, positions, types = (torch.randint(0, size, (9,)) for size in (11, 7, 2))
    weight, bias = torch.randn(2, 24, dtype=torch.float64).to(dtype).unbind()
    return (words, types.int(), positions, *tables, 3, weight), bias


def _wide(given):
    return tuple(t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_and_gradients(dtype):
    given, bias = _inputs(dtype)
    dy = torch.randn(9, 24).to(dtype)
    results = []
    for module, arguments in ((family, given), (reference, given), (reference, _wide(given))):
        y, mean, rstd = module.embedding_fwd(*arguments, bias.to(arguments[-1].dtype), EPS, *MASK)
        gradients = module.embedding_bwd(dy.to(y.dtype), *arguments, mean, rstd, *MASK)
        results.append((y, *gradients))
    for name, actual, plain, truth in zip(("y", *NAMES), *results, strict=True):
        assert_close_to_truth("embedding", name, actual, plain, truth)


@pytest.mark.parametrize("outside", [-1, 11, 2**40])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_ids_out_of_range_give_nan_and_count_nowhere(which, outside):
    given, bias = _inputs()
    ids = given[which].long().clone()
    ids[[2, 8]] = outside
    broken = (*given[:which], ids, *given[which + 1 :])
    y, mean, rstd = family.embedding_fwd(*broken, bias, EPS, *MASK)
    assert y.isnan().all(1).nonzero().flatten().tolist() == [2, 8]
    dy = torch.randn(9, 24)
    gradients = family.embedding_bwd(dy, *broken, mean, rstd, *MASK)
    dy[[2, 8]] = 0.0
    _, mean, rstd = reference.embedding_fwd(*given, bias, EPS, *MASK)
    truth = reference.embedding_bwd(dy.double(), *_wide(given), mean.double(), rstd.double(), *MASK)
    plain = reference.embedding_bwd(dy, *given, mean, rstd, *MASK)
    for name, *gradient in zip(NAMES, gradients, plain, truth, strict=True):
        assert_close_to_truth("embedding", name, *gradient)
