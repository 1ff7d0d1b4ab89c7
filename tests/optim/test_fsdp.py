"""Two processes with FSDP2 step as one process does: norms and trust ratios are those of whole tensors."""

import os
import socket

import pytest
import torch
import torch.multiprocessing
from torch import distributed, nn

from bert_fast.optim import AdamW, Lamb
from bert_fast.testing.tolerances import RELATIVE


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(13, 30), nn.GELU(), nn.Linear(30, 7))


def worker(rank: int, port: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
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
    distributed.barrier()
    distributed.destroy_process_group()
    os._exit(0)  # not by way of Python's shutdown: see tests/parity/test_scale_out.py


@pytest.mark.slow
def test_two_processes() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(worker, args=(port,), nprocs=2)
