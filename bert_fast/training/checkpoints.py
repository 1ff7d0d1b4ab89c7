"""Checkpoints of a run: complete or not there, the newest few and the best one.

    checkpoints/step-00000100/
        model.safetensors, config.json   as `save_pretrained` writes them: from_pretrained opens the directory
        optimizer.pt                     state of the optimizer and the loss scaler; loaded as data only
        state.json                       step, place in the data, what the run must agree on to go on
        random.pt                        states of the random number generators, process by process

Everything is written to a directory of another name, flushed to the disk, and renamed; so is what is taken away. A
process that dies at any moment leaves every checkpoint that has its name complete.
"""

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from bert_fast.errors import CheckpointError

__all__ = ["CheckpointFolder", "load_data", "replace_directory", "save_data"]

_NAME = re.compile(r"step-(\d{8,})")
_WRITING, _REMOVING = ".writing-", ".removing-"
STATE, OPTIMIZER, RANDOM = "state.json", "optimizer.pt", "random.pt"


class CheckpointFolder:
    """The checkpoints of one run; one process writes.

    Raises, from its methods: CheckpointError naming the file and what is wrong.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps that have a complete checkpoint, ascending."""
        if not self.path.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.path.iterdir() if (entry / STATE).is_file())
        return sorted(int(match[1]) for match in found if match)

    def directory(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.path / f"step-{step:08d}"

    def state(self, step: int) -> dict[str, Any]:
        """The content of its state.json."""
        file = self.directory(step) / STATE
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
            if state["step"] != step:
                raise ValueError(f"expected step {step}, got {state['step']}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file}: cannot be read or is damaged: {error!r}") from None
        return state

    def write(self, step: int, fill: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
        """Makes the checkpoint of a step: `fill` writes its files into a directory, state.json comes last.

        Nothing happens where there is one already.
        """
        target = self.directory(step)
        if (target / STATE).is_file():
            return target
        with replace_directory(target) as directory:
            fill(directory)
            (directory / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        return target

    def prune(self, best: int | None) -> None:
        """Removes all but the newest `keep` and the best, and what killed processes left half-written."""
        steps = self.steps()
        for step in steps[: -self.keep]:
            if step != best:
                doomed = self.path / f"{_REMOVING}{step}"
                os.replace(self.directory(step), doomed)
        for entry in self.path.iterdir():
            if entry.name.startswith((_WRITING, _REMOVING)):
                shutil.rmtree(entry, ignore_errors=True)


@contextlib.contextmanager
def replace_directory(target: Path) -> Iterator[Path]:
    """A new directory to write into, which takes the place and name of `target` when the block ends without error.

    What is written is on the disk before the name changes.

    Raises:
        CheckpointError: the disk is full, or nothing can be written there; `target` is as it was.
    """
    temporary = target.parent / f"{_WRITING}{target.name}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        _flush(temporary)
        if target.exists():
            old = target.parent / f"{_REMOVING}{target.name}"
            shutil.rmtree(old, ignore_errors=True)
            os.replace(target, old)
            os.replace(temporary, target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(temporary, target)
        _flush_entry(target.parent)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        shutil.rmtree(temporary, ignore_errors=True)
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if full else str(error)
        raise CheckpointError(f"{target}: cannot be written: {reason}; what was there before is unchanged") from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def save_data(file: Path, data: Any) -> None:
    """Tensors and plain values in nested containers, to be read by `load_data`."""
    with open(file, "wb") as stream:
        torch.save(data, stream)


def load_data(file: Path) -> Any:
    """What `save_data` wrote, on the CPU; nothing in the file is executed.

    Raises:
        CheckpointError: it is not there or damaged.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has no error of its own for damaged files
        raise CheckpointError(f"{file}: cannot be read or is damaged: {error}") from None


def _flush(directory: Path) -> None:
    for entry in directory.rglob("*"):
        _flush_entry(entry)
    _flush_entry(directory)


def _flush_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
