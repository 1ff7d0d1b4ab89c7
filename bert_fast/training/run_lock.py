"""`RunLock`: one run at a time in a directory."""

import contextlib
import fcntl
import os
import socket
import weakref
from pathlib import Path

from bert_fast.errors import CheckpointError, TrainingError

__all__ = ["RunLock"]

_NAME = "run.lock"


class RunLock:
    """A directory that this run alone writes into, until `release`, or until the process ends in whatever way.

    The lock is the kernel's (flock), on run.lock, which says which process has it and is gone afterwards. It is
    advisory: who only reads does not ask for it. Where a file system has no locks nothing is guarded; network file
    systems may honour them on one machine only.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor: int | None = None
        _ALL.add(self)

    def acquire(self) -> None:
        """Takes the lock; makes the directory if it is missing.

        Raises:
            CheckpointError: the directory cannot be made or written.
            TrainingError: another run has the lock; the message names its process.
        """
        path = self._directory / _NAME
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
                (self._directory / _NAME).unlink()
            self.forget()

    def forget(self) -> None:
        """In a process that was forked off: what it inherited must not hold the lock when its parent is gone."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _forget_all() -> None:
    for lock in _ALL:
        lock.forget()


_ALL: weakref.WeakSet[RunLock] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_all)
