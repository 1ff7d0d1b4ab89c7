"""Runs that are cut off: whatever happened, the next one ends with the same bits."""

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bert_fast.errors import CheckpointError
from bert_fast.training import last_checkpoint
from tests.training.toy import toy_model, toy_trainer
from tests.training.toy_process import start

STEPS = 30
EVERY_STEP: dict[str, Any] = {"max_steps": STEPS, "save_steps": 1}


def final_state(run: Path, steps: int = STEPS) -> dict[str, Any]:
    """Everything that the last step left."""
    last = run / f"checkpoint-{steps}"
    kept = {name: torch.load(last / name, weights_only=False) for name in ("optimizer.pt", "scheduler.pt")}
    kept["rng"] = torch.load(last / "rng_state.pth", weights_only=False)["cpu"]
    return kept | {"weights": load_file(last / "model.safetensors")}


def assert_same(a: Any, b: Any) -> None:
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


def newest(run: Path) -> int:
    path = last_checkpoint(run)
    return 0 if path is None else int(path.rpartition("-")[2])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("uninterrupted")
    torch.set_num_threads(1)
    toy_trainer(path, max_steps=STEPS).train()
    return final_state(path)


def test_runs_repeat(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    """Whatever workers make the batches and whatever is logged; another seed is another run."""
    torch.set_num_threads(1)
    toy_trainer(tmp_path / "1", max_steps=STEPS, dataloader_num_workers=2, logging_steps=1).train()
    assert_same(final_state(tmp_path / "1"), uninterrupted)
    toy_trainer(tmp_path / "2", max_steps=STEPS, seed=1).train()
    assert not torch.equal(
        final_state(tmp_path / "2")["weights"]["classifier.weight"], uninterrupted["weights"]["classifier.weight"]
    )


def kill_ten_times(run: Path, draw: random.Random) -> int:
    """Kills a run by SIGKILL up to ten times at random moments; returns how often it was still running."""
    for kills in range(10):
        goal = min(newest(run) + 2, STEPS)
        process = start(run, **EVERY_STEP)
        while newest(run) < goal and process.is_alive():
            time.sleep(0.002)
        time.sleep(draw.random() * 0.05)
        if newest(run) == STEPS:
            process.join()
            return kills
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    return 10


def test_killed_ten_times(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    """From outside, checkpoints being written among them."""
    draw = random.Random(1)
    # Where this process has to wait for a processor, the run may be over before: once more then.
    run = next((run for run in (tmp_path / str(n) for n in range(5)) if kill_ten_times(run, draw) >= 8), None)
    assert run is not None, "the run was over before it was killed often enough"
    process = start(run, **EVERY_STEP)
    process.join()
    assert process.exitcode == 0
    assert_same(final_state(run), uninterrupted)


def _whole(path: Path) -> None:
    """Nothing is wrong with it."""


def _without_state(path: Path) -> None:
    (path / "trainer_state.json").unlink()


def _half_a_state(path: Path) -> None:
    text = (path / "trainer_state.json").read_text()
    (path / "trainer_state.json").write_text(text[: len(text) // 2])


def _weights_alone(path: Path) -> None:
    for file in path.iterdir():
        if file.name != "model.safetensors":
            file.unlink()


@pytest.mark.parametrize("damage", [_whole, _without_state, _half_a_state, _weights_alone])
def test_a_checkpoint_that_was_not_written_to_its_end_is_none(
    uninterrupted: dict[str, Any], tmp_path: Path, damage: Any
) -> None:
    torch.set_num_threads(1)
    toy_trainer(tmp_path, max_steps=STEPS).train()
    for step in range(21, STEPS + 1, 3):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    damage(tmp_path / "checkpoint-18")
    assert newest(tmp_path) == (18 if damage is _whole else 15)
    toy_trainer(tmp_path, max_steps=STEPS).train(resume_from_checkpoint=True)
    assert_same(final_state(tmp_path), uninterrupted)


def test_what_is_written_over_is_no_checkpoint_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older checkpoint of the same step must not lend its state to new weights."""
    trainer = toy_trainer(tmp_path)
    trainer.train()

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    again = toy_trainer(tmp_path)
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left on device"):
        again.train()
    monkeypatch.undo()
    assert not (tmp_path / "checkpoint-3" / "trainer_state.json").exists()
    assert newest(tmp_path) == 12


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    toy_trainer(tmp_path).train()
    before = final_state(tmp_path, 12)
    again = toy_trainer(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 12
    assert_same(dict(again.model.state_dict().items()), before["weights"])


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "none") is None
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    with pytest.raises(CheckpointError, match="expected a checkpoint to go on from, got none"):
        toy_trainer(tmp_path).train(resume_from_checkpoint=True)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    """transformers would go on without it, to other weights."""
    toy_trainer(tmp_path, max_steps=3).train()
    folder = tmp_path / "checkpoint-3"
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        with pytest.raises(CheckpointError, match=f"checkpoint-3: expected a whole .*{name[:9]}"):
            toy_trainer(tmp_path, max_steps=6).train(resume_from_checkpoint=True)
        (folder / name).write_bytes(content)


def test_weights_of_another_model(tmp_path: Path) -> None:
    toy_trainer(tmp_path).train()
    with pytest.raises(CheckpointError, match=r"checkpoint-12.*expected all weights of the model"):
        toy_trainer(tmp_path, toy_model(num_hidden_layers=3)).train(resume_from_checkpoint=True)
