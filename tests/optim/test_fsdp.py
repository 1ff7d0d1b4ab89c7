"""Two processes step as one process does, or say why not.

With FSDP2 norms and trust ratios are those of whole tensors. FSDP1 leaves a process pieces of which nothing is known.
"""

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


def work_on_pieces(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    for use_orig_params in (False, True):
        options = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
        whole, sharded = model(), FullyShardedDataParallel(model(), **options)
        with pytest.raises(
            ValueError, match=r"max_grad_norm: expected None for Fully.* module's clip_grad_norm_ .*FSDP2"
        ):
            AdamW(sharded.parameters(), max_grad_norm=0.1)
        for arguments in ({}, {"max_grad_norm": None}, {"use_nvlamb": True, "weight_decay": 0.0}):
            with pytest.raises(ValueError, match=r"params: Lamb needs norms of whole parameters.*fully_shard"):
                Lamb(sharded.parameters(), **arguments)
        Lamb(sharded.parameters(), weight_decay=0.0, max_grad_norm=None)
        optimizers = [AdamW(m.parameters(), lr=0.01) for m in (whole, sharded)]
        for i in range(3):
            torch.manual_seed(i)
            x = torch.randn(8, 13)
            for m in (whole, sharded):
                m(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
            sharded.clip_grad_norm_(0.1)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with FullyShardedDataParallel.summon_full_params(sharded):
            for p, q in zip(whole.parameters(), sharded.parameters(), strict=True):
                bound = RELATIVE["two_processes"] * float(p.detach().abs().max())
                torch.testing.assert_close(q.view(p.shape), p, rtol=0, atol=bound)
    late = model()
    optimizer = AdamW(late.parameters(), max_grad_norm=0.1)
    FullyShardedDataParallel(late, **options)(torch.randn(8, 13)).square().mean().backward()
    with pytest.raises(ValueError, match="max_grad_norm: expected None"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.slow
def test_two_processes_with_pieces(tmp_path: Path) -> None:
    run_two_processes(work_on_pieces, tmp_path)


def test_one_process_has_whole_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process on its own only flat parameters, which are made of several, have no trust ratio."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    p = nn.Parameter(torch.ones(3))
    p._fsdp_flattened = True
    AdamW([p], max_grad_norm=1.0)
    Lamb([p])
    p._is_flat_param = True
    AdamW([p], max_grad_norm=1.0)
    with pytest.raises(ValueError, match="params: Lamb needs norms of whole parameters"):
        Lamb([p])
