"""The Triton kernel of dropout on a GPU: the bits that the CPU has, forward and backward."""

import pytest
import torch

from bert_fast import ops

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(1, 768), (32, 768), (4099, 1024), (515, 1001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mask_and_values_are_the_cpus(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, dy = (torch.randn(shape).to(dtype) for _ in range(2))
    index = torch.arange(shape[0], dtype=torch.int32)
    coords, seed = torch.stack((index, index % 7), 1), torch.tensor([2**62 + 11])
    results = []
    for device, backend in (("cuda", "triton"), ("cuda", "triton"), ("cpu", "reference")):
        leaf = x.detach().to(device).requires_grad_()
        y = ops.dropout(leaf, 0.1, seed=seed.to(device), coords=coords.to(device), site=14, backend=backend)
        results.append([y.detach().cpu(), torch.autograd.grad(y, leaf, dy.to(device))[0].cpu()])
    assert all(map(torch.equal, results[0], results[1])), "two runs differ"
    assert all(map(torch.equal, results[0], results[2]))
