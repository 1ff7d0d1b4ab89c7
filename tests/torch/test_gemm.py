"""Matrix products by whichever library: operands of any layout, a view of them included."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bert_fast.torch._gemm import matmul, matmul_add


def _layouts(t: Tensor) -> Iterator[Tensor]:
    """t as it stands, with gaps between rows and between elements, and, of matrices, transposed ones."""
    yield t
    yield F.pad(t, (0, 3))[..., : t.shape[-1]]
    yield torch.stack([t, t + 1], -1).flatten(-2)[..., ::2]
    if t.dim() == 2:
        yield t.t().contiguous().t()
        yield F.pad(t.t(), (0, 5))[:, : t.shape[0]].t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(5, 7, 9), (2, 2, 2), (1, 8, 8), (7, 1, 5), (33, 32, 64)])
def test_any_layout(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, inner, columns = sizes
    a, b, bias, addend = (
        torch.randn(*s, dtype=dtype) for s in ((rows, inner), (inner, columns), (columns,), sizes[::2])
    )
    product = a.double() @ b.double()
    for one in _layouts(a):
        for other in _layouts(b):
            assert (matmul(one, other) - product).abs().max() < 1e-4
            for third in _layouts(bias):
                assert (matmul(one, other, third) - (product + bias)).abs().max() < 1e-4
            for third in _layouts(addend.clone()):
                assert (matmul_add(one, other, third.clone()) - (product + addend)).abs().max() < 1e-4
