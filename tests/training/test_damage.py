"""Checkpoints whose bytes change on the disk: noticed, named, and the one before is taken."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_fast.data.digests import data_digest
from bert_fast.errors import CheckpointError
from bert_fast.training.checkpoints import CheckpointFolder
from tests.training.test_trainer import Recorder
from tests.training.test_trainer_resume import assert_same, final_state
from tests.training.toy import ToySource, ToyTask
from tests.training.toy_process import toy_trainer

pytest.importorskip("accelerate")

FILES = ["model.safetensors", "optimizer.pt", "random.pt", "config.json", "state.json"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps with checkpoints of steps 9 and 12."""
    torch.set_num_threads(1)
    run = tmp_path_factory.mktemp("finished")
    toy_trainer(run, task=ToyTask()).train()
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "run")


def checkpoint(run: Path, step: int) -> Path:
    return CheckpointFolder(run / "checkpoints", 2).directory(step)


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def notes(run: Path, **changes: Any) -> list[str]:
    """What a run that goes on says of its beginning."""
    recorder = Recorder()
    toy_trainer(run, [recorder], **{"task": ToyTask(), **changes}).train()
    return recorder.of("note")


def as_before_digests(directory: Path) -> None:
    """The state.json of earlier versions."""
    file = directory / "state.json"
    state = json.loads(file.read_text())
    del state["digests"], state["digest"]
    state["metrics"] = {"loss": 0.5}
    file.write_text(json.dumps(state, indent=1))


@pytest.mark.parametrize("file", FILES)
def test_one_bit_is_noticed_wherever_it_is(run: Path, file: str) -> None:
    folder, damaged = CheckpointFolder(run / "checkpoints", 2), checkpoint(run, 12) / file
    assert folder.newest_intact() == (12, {})
    num_bits, draw = 8 * damaged.stat().st_size, random.Random(0)
    harmless = 0
    for bit in [0, num_bits - 1, *(draw.randrange(num_bits) for _ in range(50))]:
        flip(damaged, bit)
        newest, damage = folder.newest_intact()
        if newest == 12:  # one of the spaces between values became another one
            harmless += 1
            assert file == "state.json"
            assert damaged.read_bytes()[bit // 8 : bit // 8 + 1].isspace()
        else:
            assert (newest, list(damage)) == (9, [12])
            assert str(damaged) in damage[12]
        flip(damaged, bit)
    assert folder.newest_intact() == (12, {})
    assert harmless < 10


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("how", ["flipped", "cut off", "gone"])
def test_a_run_goes_on_from_the_checkpoint_before(finished: Path, run: Path, file: str, how: str) -> None:
    damaged = checkpoint(run, 12) / file
    if how == "flipped":
        flip(damaged, 8 * (damaged.stat().st_size // 2))
    elif how == "cut off":
        damaged.write_bytes(damaged.read_bytes()[:-10])
    else:
        damaged.unlink()
    if (file, how) == ("state.json", "gone"):  # that was never complete
        assert notes(run) == [f"going on after step 9, from {checkpoint(run, 9)}"]
    else:
        first, second = notes(run)
        aside = run / "checkpoints/damaged-step-00000012"
        assert first.startswith(f"{damaged}: ") and first.endswith(f"; it is now {aside}")
        if how == "flipped" and file != "state.json":
            assert "expected digest " in first and "..., got " in first
        assert second == f"going on after step 9, from {checkpoint(run, 9)}"
        assert aside.is_dir()
    assert_same(final_state(run, 12), final_state(finished, 12))
    assert notes(run) == [f"going on after step 12, from {checkpoint(run, 12)}"], "the step was written anew"


def test_without_an_intact_checkpoint_nothing_is_changed(run: Path) -> None:
    found = sorted((run / "checkpoints").glob("*/optimizer.pt"))
    for file in found:
        flip(file, 1000)
    before = sorted(run.rglob("*"))
    with pytest.raises(CheckpointError, match=r"no checkpoint is intact: .*step-00000012/optimizer\.pt.*step-00000009"):
        toy_trainer(run, task=ToyTask()).train()
    assert sorted(run.rglob("*")) == before


def test_damage_of_another_run_is_not_touched(run: Path) -> None:
    flip(checkpoint(run, 12) / "random.pt", 99)
    with pytest.raises(CheckpointError, match="made by another run"):
        toy_trainer(run, task=ToyTask(), learning_rate=2e-3).train()
    assert checkpoint(run, 12).is_dir()


class Worse(ToyTask):
    """The evaluation after step 4 is the best one."""

    def score(self, source: Any, predictions: Any) -> dict[str, float]:
        self.value = getattr(self, "value", 1.0) - 0.1
        return {"accuracy": self.value}


def worse() -> ToyTask:
    return Worse(valid=ToySource(20, seed=1))


def test_the_best_weights_are_damaged(tmp_path: Path) -> None:
    assert toy_trainer(tmp_path / "run", task=worse()).train().best_step == 4
    run = shutil.copytree(tmp_path / "run", tmp_path / "of the optimizer")
    flip(checkpoint(run, 4) / "optimizer.pt", 5000)  # which nobody needs
    assert len(notes(run, task=worse())) == 1
    assert_same(final_state(run, 12), final_state(tmp_path / "run", 12))
    run = shutil.copytree(tmp_path / "run", tmp_path / "at the end")
    flip(checkpoint(run, 4) / "model.safetensors", 5000)
    first, second = notes(run, task=worse())
    assert "step-00000004/model.safetensors: is damaged" in first and "These were the best weights" in first
    assert second.startswith("going on after step 12")
    assert_same(final_state(run, 12)["best"], final_state(run, 12)["weights"])

    run = tmp_path / "run"  # known at the end only
    shutil.rmtree(checkpoint(run, 12))
    trainer = toy_trainer(run, [_DamagesAt(10, checkpoint(run, 4) / "model.safetensors")], task=worse(), log_every=1)
    with pytest.raises(
        CheckpointError, match=r"is damaged: .* best weights, and model/ was not written: the same comma"
    ):
        trainer.train()
    assert toy_trainer(run, task=worse()).train().best_step is None


class _DamagesAt(Recorder):
    def __init__(self, step: int, file: Path) -> None:
        super().__init__()
        self._step, self._file = step, file

    def step(self, event: Any) -> None:
        if event.step == self._step:
            flip(self._file, 5000)


def test_checkpoints_of_earlier_versions(finished: Path, run: Path) -> None:
    shutil.rmtree(checkpoint(run, 12))
    as_before_digests(checkpoint(run, 9))
    assert notes(run) == [f"going on after step 9, from {checkpoint(run, 9)}"]
    assert_same(final_state(run, 12), final_state(finished, 12))


NESTED = "[" * 100_000 + "]" * 100_000
WRONG: list[Any] = [None, True, -1, 10**30, 1.5, float("nan"), "x", [], {}, {"a": {"b": 1}}, [[1]]]


def wrong_states(state: dict[str, Any]) -> list[tuple[str, Any]]:
    """(what, state) for every field of an earlier version's state.json, of every wrong type, and missing."""
    found: list[tuple[str, Any]] = []
    for place in (("step",), ("outcome",), ("progress",), ("metrics",), ("agreement",), ("metrics", "loss"),
                  *(("progress", name) for name in state["progress"])):  # fmt: skip
        *above, name = place
        for value in [*WRONG, "missing"]:
            changed = json.loads(json.dumps(state))
            inner = changed[above[0]] if above else changed
            if value == "missing":
                del inner[name]
            else:
                inner[name] = value
            found.append((f"{'.'.join(place)} = {value!r}", changed))
    return found


def test_every_field_of_an_earlier_state_broken_in_every_way(run: Path) -> None:
    """What is wrong is named; what is not refused is right, such as another number of evaluations since the best."""
    as_before_digests(checkpoint(run, 9))
    file = checkpoint(run, 9) / "state.json"
    shutil.rmtree(checkpoint(run, 12))
    accepted = set()
    for what, state in wrong_states(json.loads(file.read_text())):
        file.write_text(json.dumps(state))
        problem = CheckpointFolder(run / "checkpoints", 2).damage(9)
        if problem is None:
            accepted.add(what)
        else:
            assert str(file) in problem, what
    assert accepted == {
        "outcome = None", "outcome = 'missing'", "progress.best_step = None", "progress.best_value = None",
        "progress.best_value = -1", "progress.best_value = 1.5", "progress.best_value = nan",
        "progress.best_value = 1000000000000000000000000000000", "metrics.loss = 1.5", "metrics.loss = -1",
        "metrics.loss = nan", "metrics.loss = 1000000000000000000000000000000", "metrics.loss = 'missing'",
        "metrics = {}", "agreement = {}", "agreement = {'a': {'b': 1}}",
    }  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff\xfe\x00", id="not UTF-8"),
        pytest.param(b"[]", id="no object"),
        pytest.param(b"null", id="null"),
        pytest.param(NESTED.encode(), id="nested"),
        pytest.param(b'{"step": ' + b"9" * 10_000 + b"}", id="a number without end"),
        pytest.param(b'{"agreement": ' + NESTED[:900].replace("]", "").encode(), id="cut off"),
    ],
)
def test_a_state_file_that_is_none(run: Path, content: bytes) -> None:
    shutil.rmtree(checkpoint(run, 9))
    (checkpoint(run, 12) / "state.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step-00000012/state\.json: cannot be read or is damaged"):
        toy_trainer(run, task=ToyTask()).train()


@pytest.mark.parametrize("digests", [[], {"../../x": "0"}, {"/dev/zero": "0"}, {"model.safetensors": 1}, {"none": "0"}])
def test_digests_of_other_files(run: Path, digests: Any) -> None:
    """Sealed by somebody who knows how."""
    file = checkpoint(run, 12) / "state.json"
    state = json.loads(file.read_text())
    del state["digest"]
    state["digests"] = digests
    file.write_text(json.dumps({**state, "digest": data_digest(state)}))
    newest, damage = CheckpointFolder(run / "checkpoints", 2).newest_intact()
    assert newest == 9 and "step-00000012/" in damage[12]


@pytest.mark.parametrize("file", ["optimizer.pt", "random.pt"])
@pytest.mark.parametrize(
    "content", [None, 5, [], {"optimizer": 5, "scaler": None}, {"optimizer": {"state": 1}}, [{"python": 3}], [{}]]
)
def test_other_content_in_earlier_checkpoints(run: Path, file: str, content: Any) -> None:
    shutil.rmtree(checkpoint(run, 12))
    as_before_digests(checkpoint(run, 9))
    torch.save(content, checkpoint(run, 9) / file)
    with pytest.raises(CheckpointError, match="step-00000009: does not fit this run"):
        toy_trainer(run, task=ToyTask()).train()
