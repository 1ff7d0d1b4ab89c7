"""Checkpoints of a run: complete or not there, the newest few and the best one.

    checkpoints/step-00000100/
        model.safetensors, config.json   as `save_pretrained` writes them: from_pretrained opens the directory
        optimizer.pt                     state of the optimizer and the loss scaler; loaded as data only
        random.pt                        states of the random number generators, process by process
        state.json                       step, place in the data, what the run must agree on to go on; digests
                                         of all other files and of itself

Everything is written to a directory of another name, flushed to the disk, and renamed; so is what is taken away. A
process that dies at any moment leaves every checkpoint that has its name complete. Bits that change afterwards are
noticed by the digests. Checkpoints of versions that wrote none are taken as they are.
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from bert_fast.data.digests import HashingFile, file_digest
from bert_fast.errors import CheckpointError
from bert_fast.files import sync_directory, sync_tree
from bert_fast.training.state_file import RunState, read_state, write_state

__all__ = ["STATE", "WEIGHTS", "CheckpointFolder", "check_files", "load_data", "replace_directory", "save_data"]

_NAME = re.compile(r"step-(\d{8,})")
_WRITING, _REMOVING, _DAMAGED = ".writing-", ".removing-", "damaged-"
STATE, OPTIMIZER, RANDOM = "state.json", "optimizer.pt", "random.pt"
WEIGHTS = "*.safetensors"  # all that counts of the best checkpoint, and of one that a model is made of


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

    def state(self, step: int) -> RunState:
        """The content of its state.json."""
        file = self.directory(step) / STATE
        state = read_state(file)
        if state.step != step:
            raise CheckpointError(f"{file}: is damaged: step: expected {step}, got {state.step}")
        return state

    def newest_intact(self) -> tuple[int | None, dict[int, str]]:
        """(the newest step whose files are as they were written, {later step: what is wrong with it}).

        None: there is no checkpoint at all. All files of the checkpoints that are looked at are read.
        """
        damage: dict[int, str] = {}
        for step in reversed(self.steps()):
            problem = self.damage(step)
            if problem is None:
                return step, damage
            damage[step] = problem
        if damage:
            raise CheckpointError(f"no checkpoint is intact: {'; '.join(damage.values())}")
        return None, damage

    def damage(self, step: int, pattern: str = "*") -> str | None:
        """What is wrong with the files of a checkpoint, or with some (see `check_files`); None: nothing."""
        if not self.directory(step).exists():
            return f"{self.directory(step)}: is not there"
        try:
            self.state(step)
            check_files(self.directory(step), pattern)
        except CheckpointError as error:
            return str(error)
        return None

    def set_aside(self, step: int, problem: str) -> str:
        """Gives a damaged checkpoint another name, so that the run makes it anew; returns what is to be said of it."""
        target = self.path / f"{_DAMAGED}{self.directory(step).name}"
        if not self.directory(step).exists():
            return problem
        shutil.rmtree(target, ignore_errors=True)
        os.replace(self.directory(step), target)
        return f"{problem}; it is now {target}"

    def write(self, step: int, fill: Callable[[Path], Mapping[str, str]], state: Mapping[str, Any]) -> Path:
        """Makes the checkpoint of a step: `fill` writes its files into a directory, state.json comes last.

        What `fill` returns are digests of files that it hashed while it wrote them; the others are read for theirs.
        Nothing happens where there is one already.
        """
        target = self.directory(step)
        if (target / STATE).is_file():
            return target
        with replace_directory(target) as directory:
            known = fill(directory)
            names = sorted(str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file())
            digests = {name: known.get(name) or file_digest(directory / name) for name in names}
            write_state(directory / STATE, state, digests)
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


def check_files(directory: Path, pattern: str = "*") -> bool:
    """Compares the files of a checkpoint with the digests in its state.json, where that has any.

    Args:
        directory: of the checkpoint.
        pattern: of the names of files, such as "*.safetensors".

    Returns: whether it has any.

    Raises:
        CheckpointError: a file is missing or its bytes have changed; the message names it.
    """
    digests = read_state(directory / STATE).digests
    for name, expected in digests.items():
        if not fnmatchcase(name, pattern):
            continue
        try:
            got = file_digest(directory / name)
        except OSError as error:
            raise CheckpointError(f"{directory / name}: cannot be read: {error.strerror}") from None
        if got != expected:
            raise CheckpointError(
                f"{directory / name}: is damaged: expected digest {expected[:16]}..., got {got[:16]}..."
            )
    return bool(digests)


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
        sync_tree(temporary)
        if target.exists():
            old = target.parent / f"{_REMOVING}{target.name}"
            shutil.rmtree(old, ignore_errors=True)
            os.replace(target, old)
            os.replace(temporary, target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(temporary, target)
        sync_directory(target.parent)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        shutil.rmtree(temporary, ignore_errors=True)
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if full else str(error)
        raise CheckpointError(f"{target}: cannot be written: {reason}; what was there before is unchanged") from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def save_data(file: Path, data: Any) -> str:
    """Tensors and plain values in nested containers, to be read by `load_data`; returns the file's digest."""
    with open(file, "wb") as opened:
        stream = HashingFile(opened)
        torch.save(data, stream)  # type: ignore[arg-type]  # write and flush is all that it asks for
    return stream.hexdigest()


def load_data(file: Path) -> Any:
    """What `save_data` wrote, on the CPU; nothing in the file is executed.

    Raises:
        CheckpointError: it is not there or damaged.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has no error of its own for damaged files
        raise CheckpointError(f"{file}: cannot be read or is damaged: {error}") from None
