"""Checkpoints of a run: complete or not there, the newest few and the best one; and the lock on its directory.

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
import fcntl
import json
import os
import re
import shutil
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from bert_fast.data.digests import DIGESTS, HashingFile, check_seal, file_digest, seal
from bert_fast.errors import CheckpointError, TrainingError
from bert_fast.files import sync_directory, sync_tree
from bert_fast.training.loader import Position

__all__ = [
    "OPTIMIZER",
    "RANDOM",
    "STATE",
    "WEIGHTS",
    "CheckpointFolder",
    "Progress",
    "RunLock",
    "RunState",
    "check_files",
    "load_data",
    "read_state",
    "replace_directory",
    "save_data",
    "write_state",
]

_NAME = re.compile(r"step-(\d{8,})")
_WRITING, _REMOVING, _DAMAGED = ".writing-", ".removing-", "damaged-"
STATE, OPTIMIZER, RANDOM = "state.json", "optimizer.pt", "random.pt"
WEIGHTS = "*.safetensors"  # all that counts of the best checkpoint, and of one that a model is made of
_OUTCOMES = (None, "finished", "stopped early")
_LOCK = "run.lock"


@dataclass
class Progress:
    """How far a run is.

    step: steps done. epoch, epoch_step: the next step's place in the data. best_step, best_value: of the evaluation
    with the best metric so far. since_best: evaluations after that.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    best_step: int | None = None
    best_value: float | None = None
    since_best: int = 0

    @property
    def position(self) -> Position:
        """The next step's place in the data."""
        return Position(self.epoch, self.epoch_step)

    def forget_best(self) -> None:
        """As if there had been no evaluation yet: the weights of the best one are lost."""
        self.best_step, self.best_value, self.since_best = None, None, 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Progress":
        """What `as_dict` gave.

        Raises:
            ValueError: something else; the message names the field.
        """
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in values]
        if missing:
            raise ValueError(f"{missing[0]}: is missing")
        for name in names:
            value = values[name]
            if name == "best_value":
                is_right = value is None or _is_number(value)
            else:  # no step is past the last one that was done, and there is at least one in an epoch
                is_right = _is_count(value, values["step"]) or (name == "best_step" and value is None)
            if not is_right:
                raise ValueError(f"{name}: got {value!r}")
        return cls(**{name: values[name] for name in names})


@dataclass(frozen=True)
class RunState:
    """What state.json says.

    Attributes:
        step: steps done.
        outcome: how the run ended; None: it had not.
        progress: see `Progress`.
        metrics: of the last evaluation.
        agreement: see `training_state.agreement`.
        digests: of the other files by name; {} in checkpoints of versions that kept none.
    """

    step: int
    outcome: str | None
    progress: Progress
    metrics: dict[str, float]
    agreement: dict[str, Any]
    digests: dict[str, str]


def write_state(file: Path, state: Mapping[str, Any], digests: Mapping[str, str]) -> None:
    """Writes the fields of a `RunState`, with a digest of them all."""
    file.write_text(json.dumps(seal({**state, DIGESTS: digests}), indent=1) + "\n", encoding="utf-8")


def read_state(file: Path) -> RunState:
    """What `write_state` wrote.

    Raises:
        CheckpointError: the file is missing or damaged; the message names it, and the field that is wrong.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        check_seal(content)
        return _checked_state(content)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read or is damaged: {error}") from None


def _checked_state(content: Mapping[str, Any]) -> RunState:
    progress: Any
    metrics: Any
    agreement: Any
    progress, metrics, agreement = (content.get(name) for name in ("progress", "metrics", "agreement"))
    step, outcome, digests = content.get("step"), content.get("outcome"), content.get(DIGESTS, {})
    for name, value in (("progress", progress), ("metrics", metrics), ("agreement", agreement), (DIGESTS, digests)):
        if not isinstance(value, dict):
            raise ValueError(f"{name}: expected an object, got {type(value).__name__}")
    if outcome not in _OUTCOMES:
        raise ValueError(f"outcome: expected one of {_OUTCOMES}, got {outcome!r}")
    for name, value in metrics.items():
        if not _is_number(value):
            raise ValueError(f"metrics: {name}: expected a number, got {type(value).__name__}")
    for name, value in digests.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not isinstance(value, str):
            raise ValueError(f"{DIGESTS}: expected files of the checkpoint and their digests, got {name!r}: {value!r}")
    how_far = Progress.from_dict(progress)
    if how_far.step != step or isinstance(step, bool):
        raise ValueError(f"step: expected {how_far.step}, as progress has it, got {step!r}")
    return RunState(step, outcome, how_far, metrics, agreement, digests)


def _is_count(value: Any, most: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and isinstance(most, int) and 0 <= value <= most


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
        """Removes all but the newest `keep` (or 1) and the best, and what killed processes left half-written."""
        steps = self.steps()
        for step in steps[: -max(self.keep, 1)]:
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


class RunLock:
    """A directory that this run alone writes into, until `release`, or until the process ends in whatever way.

    The lock is the kernel's (flock), on run.lock, which says which process has it and is gone afterwards. It is
    advisory: who only reads does not ask for it. Where a file system has no locks nothing is guarded; network file
    systems may honour them on one machine only.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor: int | None = None
        _LOCKS.add(self)

    def acquire(self) -> None:
        """Takes the lock; makes the directory if it is missing.

        Raises:
            CheckpointError: the directory cannot be made or written.
            TrainingError: another run has the lock; the message names its process.
        """
        path = self._directory / _LOCK
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            while self._descriptor is None:
                self._descriptor = self._take(path)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except OSError as error:
            raise CheckpointError(f"output_dir: {self._directory} cannot be made or written: {error}") from error

    def _take(self, path: Path) -> int | None:
        """The open file with the lock; None: whoever had the lock removed the file meanwhile."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise TrainingError(
                f"output_dir: {self._directory}: another run writes there ({holder}); wait until it has ended, or "
                "choose another directory"
            ) from None
        except OSError:  # no locks on this file system
            return descriptor
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)
        return None

    def release(self) -> None:
        """Gives up the lock, if this process has it."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # before others can take it: theirs is a new file
                (self._directory / _LOCK).unlink()
            self.forget()

    def forget(self) -> None:
        """In a process that was forked off: what it inherited must not hold the lock when its parent is gone."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _forget_locks() -> None:
    for lock in _LOCKS:
        lock.forget()


_LOCKS: weakref.WeakSet[RunLock] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_locks)
