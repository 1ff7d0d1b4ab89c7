"""Runs that are cut off: whatever happened, the next one ends with the same bits."""

import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bert_fast.errors import CheckpointError
from bert_fast.training import checkpoints
from bert_fast.training.checkpoints import CheckpointFolder, load_data, replace_directory
from tests.training.toy import ToySource, ToyTask
from tests.training.toy_process import start, toy_trainer

pytest.importorskip("accelerate")

STEPS = 30


def final_state(run: Path, steps: int = STEPS) -> dict:
    """Everything that the last step left."""
    last = run / f"checkpoints/step-{steps:08d}"
    return {
        "weights": load_file(last / "model.safetensors"),
        "best": load_file(run / "model/model.safetensors"),
        "optimizer": load_data(last / "optimizer.pt"),
        "random": load_data(last / "random.pt"),
    }


def assert_same(a, b) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b


class SignalAt:
    """An observer that sends this process a signal after some steps."""

    def __init__(self, *steps: int, number: int = signal.SIGTERM) -> None:
        self.steps, self.number = steps, number

    def __getattr__(self, name: str):
        return lambda *arguments: None

    def step(self, event) -> None:
        if event.step in self.steps:
            os.kill(os.getpid(), self.number)


def steps_of(run: Path) -> list[int]:
    return CheckpointFolder(run / "checkpoints", 1).steps()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("uninterrupted")
    torch.set_num_threads(1)
    toy_trainer(path, steps=STEPS).train()
    return final_state(path)


def test_runs_repeat(uninterrupted, tmp_path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(99)  # the run does not depend on what was drawn before it
    toy_trainer(tmp_path, steps=STEPS).train()
    assert_same(final_state(tmp_path), uninterrupted)
    other = toy_trainer(tmp_path / "other", steps=STEPS, seed=1)
    other.train()
    assert not torch.equal(
        final_state(tmp_path / "other")["weights"]["classifier.weight"], uninterrupted["weights"]["classifier.weight"]
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_with_a_checkpoint(uninterrupted, tmp_path, number) -> None:
    torch.set_num_threads(1)
    before = signal.getsignal(number)
    outcomes = []
    for stop in (5, 14, 15, 100):  # in an epoch, at its end, right after it
        result = toy_trainer(
            tmp_path, [SignalAt(stop, number=number)], steps=STEPS, log_every=1, save_every=100
        ).train()
        outcomes.append((result.outcome, result.step))
    name = f"interrupted: {signal.Signals(number).name}"
    assert outcomes == [(name, 5), (name, 14), (name, 15), ("finished", STEPS)]
    assert signal.getsignal(number) is before
    assert_same(final_state(tmp_path), uninterrupted)


def test_workers_and_new_logging_change_nothing(uninterrupted, tmp_path) -> None:
    torch.set_num_threads(1)
    toy_trainer(tmp_path, [SignalAt(9)], steps=STEPS, log_every=1, num_workers=2).train()
    toy_trainer(tmp_path, steps=STEPS, log_every=7, save_every=5, keep_checkpoints=1).train()
    assert_same(final_state(tmp_path), uninterrupted)


def test_a_run_without_checkpoints(uninterrupted, tmp_path) -> None:
    """The best one alone, and what a signal leaves until there is a better one; none where nothing judges."""
    torch.set_num_threads(1)
    settings = {"steps": STEPS, "log_every": 1, "save_every": 5, "keep_checkpoints": 0}
    result = toy_trainer(tmp_path, [SignalAt(4)], **settings).train()
    assert (result.outcome, steps_of(tmp_path)) == ("interrupted: SIGTERM", [4])
    result = toy_trainer(tmp_path, **settings).train()
    assert (result.outcome, result.step) == ("finished", STEPS)
    assert steps_of(tmp_path) == [result.best_step]
    assert_same(load_file(tmp_path / "model/model.safetensors"), uninterrupted["best"])

    alone = tmp_path / "alone"
    toy_trainer(alone, task=ToyTask(), **settings).train()
    assert not (alone / "checkpoints").exists()
    toy_trainer(tmp_path / "saved", task=ToyTask(), steps=STEPS).train()
    last = final_state(tmp_path / "saved")["weights"]
    assert_same(load_file(alone / "model/model.safetensors"), last)


def kill_ten_times(run, draw) -> int:
    """Kills runs into one directory, each a few steps after the one before; returns how often there was one to kill."""
    folder = CheckpointFolder(run / "checkpoints", 2)
    for kills in range(10):
        before = max(folder.steps(), default=0)
        process = start(run, steps=STEPS, save_every=1)
        goal = min(before + draw.randint(1, 2), STEPS - 1)
        while max(folder.steps(), default=0) < goal and process.is_alive():
            time.sleep(0.002)
        time.sleep(draw.random() * 0.05)
        if max(folder.steps(), default=0) == STEPS:
            process.join()
            return kills
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    return 10


def test_killed_ten_times(uninterrupted, tmp_path) -> None:
    """kill -9 from outside at moments that nobody chose, checkpoints being written among them."""
    draw = random.Random(1)
    # Where this process has to wait for a processor, the run may be over before: once more then.
    run = next((run for run in (tmp_path / str(n) for n in range(5)) if kill_ten_times(run, draw) >= 8), None)
    assert run is not None, "the run was over before it was killed often enough"
    process = start(run, steps=STEPS, save_every=1)
    process.join()
    assert process.exitcode == 0
    assert_same(final_state(run), uninterrupted)
    assert not [entry for entry in (run / "checkpoints").iterdir() if entry.name.startswith(".")]


def test_a_finished_run_is_not_run_again(tmp_path) -> None:
    first = toy_trainer(tmp_path).train()
    shutil.rmtree(tmp_path / "model")  # as if it was killed before this was written

    class Task(ToyTask):
        def loss_parts(self, model, batch):
            raise AssertionError("nothing is left to do")

    again = toy_trainer(tmp_path, task=Task(valid=ToySource(20, seed=1))).train()
    assert again == first
    assert (tmp_path / "model/model.safetensors").is_file()


def test_what_to_do_with_a_run_that_is_there(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="expected a checkpoint to go on from, found none"):
        toy_trainer(tmp_path).train(resume="must")
    toy_trainer(tmp_path).train(resume="never")
    with pytest.raises(CheckpointError, match="holds checkpoints of a run already"):
        toy_trainer(tmp_path).train(resume="never")


def test_another_run_does_not_go_on(tmp_path) -> None:
    toy_trainer(tmp_path, [SignalAt(4)]).train()
    with pytest.raises(
        CheckpointError, match=r"made by another run: training\.learning_rate is 0\.002 here and 0\.001"
    ):
        toy_trainer(tmp_path, learning_rate=2e-3).train()
    with pytest.raises(CheckpointError, match=r"data\.examples is 60 here and 50 there"):
        toy_trainer(tmp_path, task=ToyTask(ToySource(60), ToySource(20, seed=1))).train()
    other = toy_trainer(tmp_path)
    other.model.config.hidden_act = "relu"
    with pytest.raises(CheckpointError, match=r"model\.hidden_act is 'relu' here and 'gelu' there"):
        other.train()


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "random.pt", "state.json"])
def test_damaged_checkpoints_are_named(tmp_path, file) -> None:
    toy_trainer(tmp_path, [SignalAt(4)]).train()
    found = sorted((tmp_path / "checkpoints").glob(f"*/{file}"))
    contents = [damaged.read_bytes() for damaged in found]
    assert len(found) == 2
    for broken in ([content[: len(content) // 2] for content in contents], [b""] * 2):
        for damaged, content in zip(found, broken, strict=True):
            damaged.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"step-00000004/{file}.*step-00000003/{file}"):
            toy_trainer(tmp_path).train()


def test_a_full_disk_leaves_the_checkpoint_before(uninterrupted, tmp_path, monkeypatch) -> None:
    torch.set_num_threads(1)
    save, calls = checkpoints.save_data, []

    def full(file, data):
        calls.append(file)
        if len(calls) == 5:
            file.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(file, data)

    monkeypatch.setattr("bert_fast.training.training_state.save_data", full)
    with pytest.raises(CheckpointError, match="step-00000009: cannot be written: the disk is full"):
        toy_trainer(tmp_path, steps=STEPS, save_every=3, eval_every=100).train()
    monkeypatch.undo()
    assert CheckpointFolder(tmp_path / "checkpoints", 2).steps() == [3, 6]
    toy_trainer(tmp_path, steps=STEPS, save_every=3, eval_every=100).train()
    assert CheckpointFolder(tmp_path / "checkpoints", 2).steps()[-1] == STEPS


def test_a_checkpoint_that_was_cut_off_by_hand_is_written_anew(tmp_path) -> None:
    folder = CheckpointFolder(tmp_path, 2)
    folder.directory(4).mkdir()
    (folder.directory(4) / "stale").write_text("")
    assert folder.steps() == []

    def fill(directory: Path, text: str) -> dict[str, str]:
        (directory / "weights").write_text(text)
        return {}

    folder.write(4, partial(fill, text="new"), {"step": 4})
    assert folder.steps() == [4]
    assert sorted(path.name for path in folder.directory(4).iterdir()) == ["state.json", "weights"]
    folder.write(4, partial(fill, text="newer"), {"step": 4})
    assert (folder.directory(4) / "weights").read_text() == "new", "a complete one stays"


def test_replaced_directories_are_whole(tmp_path) -> None:
    target = tmp_path / "target"
    with replace_directory(target) as directory:
        (directory / "a").write_text("1")

    def fail() -> None:
        with replace_directory(target) as directory:
            (directory / "b").write_text("2")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "a"]
    with replace_directory(target) as directory:
        (directory / "c").write_text("3")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["c", "target"]
