"""Toy runs in processes of their own: to be killed, or to train together."""

import os
import socket
from pathlib import Path
from typing import Any

import torch

from bert_fast.training.trainer import Trainer
from tests.patience import PATIENCE_S
from tests.process_server import CONTEXT, start_server
from tests.training.toy import ToySource, ToyTask, toy_config, toy_model


def toy_trainer(output_dir: Path, observers=(), dropout: float = 0.1, task=None, **changes) -> Trainer:
    task = task or ToyTask(valid=ToySource(20, seed=1))
    return Trainer(toy_model(dropout), task, toy_config(output_dir, **changes), observers=observers)


class _Mortal(ToyTask):
    """Ends its process in the middle of a step."""

    def __init__(self, dies_at: int) -> None:
        super().__init__(valid=ToySource(20, seed=1))
        self.steps_left = dies_at

    def loss_parts(self, model, batch):
        self.steps_left -= 1
        if not self.steps_left:
            os._exit(9)
        return super().loss_parts(model, batch)


def _train(output_dir: Path, environment: dict[str, str], arguments: dict[str, Any]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    dies_at = arguments.pop("dies_at", None)
    arguments.setdefault("observers", None)  # those of the library
    if arguments.pop("differs", False) and environment["RANK"] == "1":
        arguments["learning_rate"] = 2e-3
    if dies_at is not None and environment["RANK"] == "1":
        arguments["task"] = _Mortal(dies_at)
    trainer = toy_trainer(output_dir, **arguments)
    trainer.train()
    if trainer.processes.count > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    os._exit(0)  # past Python's shutdown, in which gloo's threads may be in the way


def start(output_dir: Path, environment: dict[str, str] | None = None, **arguments) -> Any:
    """A process that trains, already running."""
    start_server()
    process = CONTEXT.Process(target=_train, args=(output_dir, environment or {}, arguments))
    process.start()
    return process


def train_together(output_dir: Path, count: int, **arguments) -> list[int]:
    """Exit statuses of `count` processes that train one model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(count),  # as torchrun says, or accelerate takes all cores
    }  # fmt: skip
    ranks = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    processes = [start(output_dir, environment, **arguments) for environment in ranks]
    for process in processes:
        process.join(PATIENCE_S)
    return [process.exitcode for process in processes]
