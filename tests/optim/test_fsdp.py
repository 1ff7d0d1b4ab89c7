"""Two processes with FSDP2 step as one process does: norms and trust ratios are those of whole tensors."""

from pathlib import Path

import pytest
import torch
from torch import nn

from bert_fast.optim import AdamW, Lamb
from bert_fast.testing.tolerances import RELATIVE
from tests.two_processes import WORLD_SIZE, run_two_processes


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(13, 30), nn.GELU(), nn.Linear(30, 7))


def work(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for cls, options in ((AdamW, {}), (AdamW, {"max_grad_norm": 0.1}), (Lamb, {"max_grad_norm": 0.1})):
        whole, sharded = model(), model()
        for layer in (sharded[0], sharded[2], sharded):
            fully_shard(layer, mesh=mesh)
        optimizers = [cls(m.parameters(), lr=0.01, **options) for m in (whole, sharded)]
        for i in range(5):
            torch.manual_seed(i)
            x = torch.randn(8, 13)
            for m, optimizer in zip((whole, sharded), optimizers, strict=True):
                optimizer.zero_grad()
                m(x).square().mean().backward()
                optimizer.step()
        for p, q in zip(whole.parameters(), sharded.parameters(), strict=True):
            scale = float(p.detach().abs().max())
            bound = RELATIVE["two_processes"] * scale
            torch.testing.assert_close(q.full_tensor(), p.detach(), rtol=0, atol=bound)


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    run_two_processes(work, tmp_path)
