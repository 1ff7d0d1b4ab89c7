"""The torch back-end of the embedding as it runs on devices: ids out of range, sorted sums; here on CPU tensors."""

import pytest
import torch

from bert_fast.reference import embedding as reference
from bert_fast.reference.embedding import Embedding
from bert_fast.testing.compare import assert_close_to_truth
from bert_fast.torch import embedding as family

NAMES = ("dwords", "dposition_table", "dtype_table", "dweight", "dbias")
FIELDS = ("word_table", "position_table", "type_table", "weight", "bias")
SEED, COORDS = torch.tensor([5]), torch.stack([torch.arange(9), torch.arange(9)], dim=1).int()
EPS = 1e-12


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "_is_on_cpu", lambda t: False)


def _call(dtype: torch.dtype = torch.float32) -> Embedding:
    tables = [torch.randn(rows, 24, dtype=torch.float64).to(dtype) for rows in (11, 7, 2)]
    words, positions, types = (torch.randint(0, size, (9,)) for size in (11, 7, 2))
    weight, bias = torch.randn(2, 24, dtype=torch.float64).to(dtype).unbind()
    return Embedding(words, types.int(), positions, *tables, 3, weight, bias, EPS, 0.3, SEED, COORDS, 0, dtype)


def _wide(a: Embedding) -> Embedding:
    wide = [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in a]
    return Embedding(*wide)._replace(out_dtype=torch.float64)


def _in_order(made: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [made[name] for name in FIELDS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_and_gradients(dtype):
    a = _call(dtype)
    dy = torch.randn(9, 24).to(dtype)
    results = []
    for module, arguments in ((family, a), (reference, a), (reference, _wide(a))):
        y, mean, rstd = module.embedding_fwd(arguments)
        results.append((y, *_in_order(module.embedding_bwd(arguments, dy.to(y.dtype), mean, rstd))))
    for name, actual, plain, truth in zip(("y", *NAMES), *results, strict=True):
        assert_close_to_truth("embedding", name, actual, plain, truth)


@pytest.mark.parametrize("outside", [-1, 11, 2**40])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_ids_out_of_range_give_nan_and_count_nowhere(which, outside):
    a = _call()
    ids = a[which].long().clone()
    ids[[2, 8]] = outside
    broken = a._replace(**{a._fields[which]: ids})
    y, mean, rstd = family.embedding_fwd(broken)
    assert y.isnan().all(1).nonzero().flatten().tolist() == [2, 8]
    dy = torch.randn(9, 24)
    gradients = family.embedding_bwd(broken, dy, mean, rstd)
    dy[[2, 8]] = 0.0
    _, mean, rstd = reference.embedding_fwd(a)
    truth = reference.embedding_bwd(_wide(a), dy.double(), mean.double(), rstd.double())
    plain = reference.embedding_bwd(a, dy, mean, rstd)
    for name, *gradient in zip(NAMES, *map(_in_order, (gradients, plain, truth)), strict=True):
        assert_close_to_truth("embedding", name, *gradient)
