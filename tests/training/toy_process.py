"""Toy runs in processes of their own: to be killed, or to train together."""

import os
import socket
from pathlib import Path
from typing import Any

import torch

from tests.patience import PATIENCE_S
from tests.process_server import CONTEXT, start_server
from tests.training.toy import ToySource, toy_model, toy_trainer


class _Mortal(ToySource):
    """Ends its process in the middle of a step."""

    def __init__(self, dies_at: int) -> None:
        super().__init__()
        self.steps_left = dies_at

    def batch(self, epoch: int, indices: Any) -> Any:
        self.steps_left -= 1
        if not self.steps_left:
            os._exit(9)
        return super().batch(epoch, indices)


def _train(output_dir: Path, environment: dict[str, str], arguments: dict[str, Any]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    dies_at = arguments.pop("dies_at", None)
    if dies_at is not None and environment["RANK"] == "1":
        arguments["train"] = _Mortal(dies_at)
    trainer = toy_trainer(output_dir, toy_model(arguments.pop("dropout", 0.1)), **arguments)
    trainer.train(resume_from_checkpoint=any(output_dir.glob("checkpoint-*/trainer_state.json")))
    trainer.save_model(str(output_dir / "model"))
    if trainer.accelerator.num_processes > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    os._exit(0)  # past Python's shutdown, in which gloo's threads may be in the way


def start(output_dir: Path, environment: dict[str, str] | None = None, **arguments: Any) -> Any:
    """A process that trains, already running."""
    start_server()
    process = CONTEXT.Process(target=_train, args=(output_dir, environment or {}, arguments))
    process.start()
    return process


def train_together(output_dir: Path, count: int, **arguments: Any) -> list[int]:
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
