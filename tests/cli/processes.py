"""Commands in processes of their own: tests kill them, start two for one run, or close the pipe they write to."""

import os
import sys
from typing import Any

import torch

from bert_fast.cli import main
from bert_fast.training import Trainer


def without_reader(argv: list[str]) -> None:
    """The reader of standard output has left before the first line."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    sys.exit(main.main(argv))


def killed(argv: list[str], step: int) -> None:
    """SIGKILL in the middle of a step, from 1."""
    torch.set_num_threads(1)
    training_step, steps = Trainer.training_step, []

    def mortal(*arguments: Any, **options: Any) -> Any:
        steps.append(1)
        if len(steps) == step:
            os.kill(os.getpid(), 9)
        return training_step(*arguments, **options)

    Trainer.training_step = mortal  # type: ignore[method-assign]
    sys.exit(main.main(argv))


def of_several(argv: list[str], rank: int, port: int) -> None:
    """One of two processes, as torchrun starts them."""
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank),
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    sys.argv = ["bert-fast", *argv]
    main.command()
