"""Runs that go wrong are said to, and runs that do not are not."""

import math
from pathlib import Path

import numpy as np
import pytest

from bert_fast.training.health import STALLED_EVALUATIONS, Health
from bert_fast.training.observers import Evaluation, Observer, Step
from tests.training.toy import ToySource, ToyTask, toy_config
from tests.training.toy_process import toy_trainer

pytest.importorskip("accelerate")


def report(step: int, loss: float, norm: float | None = 1.0, rate: float = 1e-3) -> Step:
    return Step(
        step=step, epoch=0.0, num_steps=1, losses={"loss": loss}, learning_rate=rate, grad_norm=norm, tokens=1,
        squares=1, sequences=1, capacity_tokens=1, seconds=1.0, wait_seconds=0.0, memory_bytes=1,
    )  # fmt: skip


def evaluated(step: int, loss: float) -> Evaluation:
    return Evaluation(step, 0.0, {"loss": loss})


def watch(tmp_path: Path, losses, norms=None, **changes) -> list[tuple[int, str]]:
    health = Health(toy_config(tmp_path, **changes), ToyTask())
    norms = [1.0] * len(losses) if norms is None else norms
    told = []
    for number, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        told += [(number, text) for text in health.after_step(report(number, loss, norm))]
    return told


def noisy(means: np.ndarray, deviation: float) -> list[float]:
    return (means + np.random.default_rng(0).normal(0, deviation, len(means))).tolist()


def test_a_loss_that_rises_is_said_once(tmp_path: Path) -> None:
    falling, rising = np.linspace(6, 3, 60), np.linspace(3, 6, 60)
    told = watch(tmp_path, noisy(np.concatenate([falling, rising]), 0.05), learning_rate=2e-3)
    assert len(told) == 1
    step, text = told[0]
    assert 62 <= step <= 80
    assert text.startswith("training diverges: its loss was ") and "try 0.0002 (it is 0.002 at its highest)" in text


def test_it_is_said_again_after_it_was_well(tmp_path: Path) -> None:
    wave = np.concatenate([np.linspace(6, 3, 40), np.linspace(3, 6, 40), np.linspace(6, 2, 40), np.linspace(2, 6, 40)])
    assert len(watch(tmp_path, noisy(wave, 0.02))) == 2


@pytest.mark.parametrize("deviation", [0.0, 0.05, 0.3, 1.0])
def test_noise_is_not_divergence(tmp_path: Path, deviation: float) -> None:
    for means in (np.full(400, 2.0), 0.3 + 3 * np.exp(-np.arange(400) / 50), np.linspace(7, 5, 400)):
        assert watch(tmp_path, np.abs(noisy(means, deviation)).tolist()) == []


def test_gradients_that_grow_are_said(tmp_path: Path) -> None:
    norms = np.concatenate([np.full(30, 0.5), np.geomspace(0.5, 20, 30)])
    told = watch(tmp_path, noisy(np.full(60, 5.0), 0.01), norms.tolist())
    assert [text.split(" from")[0] for _, text in told] == ["the gradient norm grew"]
    assert "(clipped to max_grad_norm=1)" in told[0][1]
    falling = watch(tmp_path, np.linspace(5, 1, 60).tolist(), norms.tolist())
    assert falling == [], "norms may grow while the loss falls"


def test_what_is_not_a_number_is_left_to_others(tmp_path: Path) -> None:
    assert watch(tmp_path, [1.0, math.nan, 1.0, math.inf] * 10, [math.nan, 1.0, math.inf, None] * 10) == []


def stalls(health: Health, losses, training) -> list[str]:
    told = []
    for number, (loss, seen) in enumerate(zip(losses, training, strict=True), start=1):
        for part in range(5):
            assert health.after_step(report(10 * number + part, seen)) == []
        told += health.after_evaluation(evaluated(10 * number, loss))
    return told


def test_a_loss_that_stalls_is_said_with_what_to_try(tmp_path: Path) -> None:
    health = Health(toy_config(tmp_path, learning_rate=3e-4), ToyTask())
    told = stalls(health, [6.5, 6.0] + [5.999] * 9, [6.2] * 11)
    assert len(told) == 1, "once"
    assert f"has not fallen for {STALLED_EVALUATIONS} evaluations: it is 5.999, and was 6 at step 20" in told[0]
    assert "Nor does that of training. Try a learning_rate of 0.0001 or 0.0009" in told[0]


def test_learning_by_heart_is_told_apart(tmp_path: Path) -> None:
    told = stalls(Health(toy_config(tmp_path), ToyTask()), [2.0] * 7, np.linspace(2, 1, 7))
    assert len(told) == 1 and "learns its examples by heart" in told[0]


def test_a_fall_and_an_end_are_no_stall(tmp_path: Path) -> None:
    assert stalls(Health(toy_config(tmp_path), ToyTask()), 5 * 0.99 ** np.arange(20), [3.0] * 20) == []
    health = Health(toy_config(tmp_path, learning_rate=1e-3), ToyTask())
    health.after_step(report(1, 2.0, rate=1e-5))
    assert [health.after_evaluation(evaluated(step, 2.0)) for step in range(10)] == [[]] * 10
    assert health.after_evaluation(Evaluation(1, 0.0, {"accuracy": 1.0})) == []


class Notes(Observer):
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.evaluated: list[tuple[int, int]] = []

    def note(self, text: str) -> None:
        self.texts.append(text)

    def evaluating(self, done: int, batches: int) -> None:
        self.evaluated.append((done, batches))


def toy_notes(path: Path, learning_rate: float) -> list[str]:
    notes = Notes()
    settings = dict(steps=100, log_every=2, eval_every=100, keep_checkpoints=0, schedule="constant", warmup=20)
    trainer = toy_trainer(path, [notes], dropout=0.0, learning_rate=learning_rate, **settings)
    trainer.train()
    return notes.texts


def test_a_learning_rate_ten_times_too_high_is_said_by_a_run(tmp_path: Path) -> None:
    assert not any("ten times too high" in text for text in toy_notes(tmp_path / "well", 1e-2))
    assert any("ten times too high" in text for text in toy_notes(tmp_path / "too high", 1.0))


def test_how_far_an_evaluation_is(tmp_path: Path) -> None:
    notes = Notes()
    toy_trainer(tmp_path, [notes], steps=1, eval_batch_tokens=40).train()
    done, batches = zip(*notes.evaluated, strict=True)
    assert len(set(batches)) == 1 and done == tuple(range(1, batches[0] + 1)) and batches[0] > 2


def test_the_metric_that_chooses_the_best(tmp_path: Path) -> None:
    def chosen(name: str | None) -> tuple[float, list[dict[str, float]]]:
        found: list[Evaluation] = []

        class Seen(Observer):
            def evaluation(self, evaluation: Evaluation) -> None:
                found.append(evaluation)

        run = tmp_path / str(name)
        result = toy_trainer(
            run, [Seen()], best_by=name, steps=12, eval_every=2, keep_checkpoints=0, learning_rate=2e-2
        ).train()
        return result.best_metric, [one.metrics for one in found]

    best, metrics = chosen("loss")
    assert best == min(one["loss"] for one in metrics)
    best, metrics = chosen("accuracy")
    assert best == max(one["accuracy"] for one in metrics)
    assert chosen(None)[0] == best, "the task's own"


def test_a_metric_that_is_not_there_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="best_by: expected one of accuracy, loss, got 'f1'"):
        toy_trainer(tmp_path, best_by="f1").train()
    assert not (tmp_path / "checkpoints").exists()
    task = ToyTask(train=ToySource(20))
    with pytest.raises(ValueError, match=r"best_by: expected examples to judge by \(valid\), got none for 'loss'"):
        toy_trainer(tmp_path, task=task, best_by="loss").train()
    with pytest.raises(TypeError, match="best_by: expected text or None, got int"):
        toy_config(tmp_path, best_by=3)
