"""One run at a time in a directory, and nobody locked out by a process that is gone."""

import errno
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_fast.errors import CheckpointError, TrainingError
from bert_fast.training.checkpoints import RunLock
from bert_fast.training.reporting import default_observers
from tests.training.test_trainer import Recorder
from tests.training.toy_process import start, toy_trainer, train_together

pytest.importorskip("accelerate")


def locked(directory: Path) -> str:
    """What a process that may not have the lock is told."""
    with pytest.raises(TrainingError) as caught:
        RunLock(directory).acquire()
    return str(caught.value)


def child(work: Callable[[], Any]) -> int:
    """A forked process that works, and then sleeps until it is killed."""
    pid = os.fork()
    if not pid:
        try:
            work()
            time.sleep(60)
        finally:
            os._exit(1)
    return pid


def ended(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_at_a_time(tmp_path: Path) -> None:
    first, second = RunLock(tmp_path / "new/run"), RunLock(tmp_path / "new/run")
    first.acquire()
    message = locked(tmp_path / "new/run")
    assert f"another run writes there (process {os.getpid()} on " in message and "new/run" in message
    second.release()  # it has nothing to give up
    locked(tmp_path / "new/run")
    first.release()
    assert not list((tmp_path / "new/run").iterdir())
    second.acquire()
    first.release()
    locked(tmp_path / "new/run")
    second.release()


def test_a_process_that_was_killed_leaves_no_lock(tmp_path: Path) -> None:
    pid = child(RunLock(tmp_path).acquire)
    wait_for(lambda: (tmp_path / "run.lock").exists() and bool((tmp_path / "run.lock").read_text()))
    assert f"process {pid} on " in locked(tmp_path)
    ended(pid)
    lock = RunLock(tmp_path)
    lock.acquire()
    assert f"process {os.getpid()} on " in locked(tmp_path)
    lock.release()


def test_nor_do_the_children_it_forked(tmp_path: Path) -> None:
    """Workers that make batches outlive a killed run by seconds."""

    def work() -> None:
        lock = RunLock(tmp_path)
        lock.acquire()
        (tmp_path / "worker").write_text(str(child(lock.release)))  # a child gives up nothing of its parent's

    pid = child(work)
    wait_for(lambda: (tmp_path / "worker").exists() and bool((tmp_path / "worker").read_text()))
    time.sleep(0.1)
    locked(tmp_path)
    ended(pid)
    RunLock(tmp_path).acquire()
    os.kill(int((tmp_path / "worker").read_text()), signal.SIGKILL)


def test_a_lock_file_that_was_removed_guards_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening the file and locking it, the run that had it ended."""
    real, calls = fcntl.flock, []

    def slow(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            (tmp_path / "run.lock").unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    lock = RunLock(tmp_path)
    lock.acquire()
    assert len(calls) == 2
    locked(tmp_path)
    lock.release()


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("precious")
    (tmp_path / "run.lock").symlink_to(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"cannot be made or written: .*symbolic link"):
        RunLock(tmp_path).acquire()
    assert (tmp_path / "other").read_text() == "precious"


def test_a_directory_that_is_gone_ends_no_run(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run")
    lock.acquire()
    shutil.rmtree(tmp_path / "run")
    lock.release()


def test_where_there_are_no_locks_nothing_is_guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    lock = RunLock(tmp_path)
    lock.acquire()
    RunLock(tmp_path).acquire()
    lock.release()


def test_a_second_run_is_told_who_is_there_and_changes_nothing(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    found = []

    class Tries(Recorder):
        def step(self, event: Any) -> None:
            before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
            with pytest.raises(TrainingError, match=f"process {os.getpid()} on"):
                toy_trainer(tmp_path, default_observers(tmp_path, quiet=True)).train()
            assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
            found.append(event.step)

    toy_trainer(tmp_path, [Tries()]).train()
    assert found[-1] == 12
    assert not (tmp_path / "run.lock").exists()
    shutil.rmtree(tmp_path / "model")
    toy_trainer(tmp_path).train()


def test_a_run_that_fails_gives_it_up(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a checkpoint to go on from"):
        toy_trainer(tmp_path).train("must")
    assert not list(tmp_path.iterdir())


def test_several_processes_of_one_run_take_it_once(tmp_path: Path) -> None:
    assert train_together(tmp_path, 2, observers=()) == [0, 0]
    assert not (tmp_path / "run.lock").exists()


def test_two_processes(tmp_path: Path) -> None:
    first = start(tmp_path, steps=3000, save_every=3000, eval_every=3000)
    wait_for(lambda: (tmp_path / "run.lock").exists() and bool((tmp_path / "run.lock").read_text()))
    assert f"process {first.pid} on" in locked(tmp_path)
    first.kill()
    first.join()
    torch.set_num_threads(1)
    assert toy_trainer(tmp_path).train().step == 12
