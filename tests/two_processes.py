"""Two processes that work together over gloo, for tests that compare them with one."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.process_server import start_server

WORLD_SIZE = 2


def run_two_processes(work: Callable[[int], Any], folder: Path) -> list[Any]:
    """What work(rank) returned in each of two processes that know each other, rank 0 first.

    work: a function of a module, found there by its name; what it returns are tensors and plain values. folder: where
    the processes meet and leave their results. An error in one of them is raised here. Skips the test without gloo.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this PyTorch has no gloo")
    start_server()
    torch.multiprocessing.start_processes(_process, (work, folder), WORLD_SIZE, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD_SIZE)]


def share(batch: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """A process's half of a batch."""
    return {name: value.chunk(WORLD_SIZE)[rank] for name, value in batch.items()}


def _process(rank: int, work: Callable[[int], Any], folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD_SIZE
    )
    torch.save(work(rank), folder / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # Not by way of Python's shutdown: a process was seen to abort there or shortly before ("terminate called without an
    # active exception"), with all its work done; probably a thread of PyTorch's that asks for the interpreter then.
    os._exit(0)
