import dataclasses
import math
import sys
from pathlib import Path

import pytest

from bert_fast.training.observers import Plan
from bert_fast.training.reporting import TensorBoardLog

from .conftest import make_evaluation, make_step


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="reads the log")
    accumulator = reader.EventAccumulator(str(directory))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def record(directory: Path, plan: Plan, steps: list[int], evaluated: list[int]) -> None:
    log = TensorBoardLog(directory)
    log.start(plan)
    for step in steps:
        log.step(make_step(step))
        if step in evaluated:
            log.evaluation(make_evaluation(step))
    log.end("finished")


def test_scalars_over_steps(tmp_path: Path, plan: Plan) -> None:
    pytest.importorskip("tensorboard", reason="writes the log")
    record(tmp_path, plan, [10, 20], [20])
    found = scalars(tmp_path)
    assert [step for step, _ in found["train/masked_lm"]] == [10, 20]
    assert found["valid/accuracy"] == [(20, 0.75)]
    assert found["speed/tokens_per_s"][0] == (10, 160_000)
    assert {"train/loss", "train/learning_rate", "train/grad_norm", "speed/mfu", "speed/memory_bytes"} <= found.keys()


def test_a_run_that_goes_on_hides_what_it_does_again(tmp_path: Path, plan: Plan) -> None:
    pytest.importorskip("tensorboard", reason="writes the log")
    record(tmp_path, plan, [10, 20, 30], [])
    record(tmp_path, dataclasses.replace(plan, first_step=20), [30, 40], [])
    assert [step for step, _ in scalars(tmp_path)["train/loss"]] == [10, 20, 30, 40]


def test_what_is_not_known_is_left_out(tmp_path: Path, plan: Plan) -> None:
    pytest.importorskip("tensorboard", reason="writes the log")
    log = TensorBoardLog(tmp_path)
    log.start(dataclasses.replace(plan, device="CPU"))
    log.step(make_step(1, grad_norm=None, seconds=0.0, losses={"loss": math.nan}))
    log.end("failed: not finite")
    found = scalars(tmp_path)
    assert not {"speed/mfu", "speed/tokens_per_s", "train/grad_norm"} & found.keys()
    assert math.isnan(found["train/loss"][0][1])


def test_without_tensorboard_it_says_how_to_get_it(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install bert_fast\[train\]"):
        TensorBoardLog(tmp_path).start(plan)
