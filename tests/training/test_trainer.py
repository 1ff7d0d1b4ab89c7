"""What a run does, leaves, and says when it cannot go on."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bert_fast import BertForSequenceClassification
from bert_fast.errors import TrainingError
from bert_fast.training import Trainer, TrainingConfig, loop
from bert_fast.training.distributed import lost_process
from bert_fast.training.failures import explained
from tests.training.toy import ToySource, ToyTask, toy_config, toy_model
from tests.training.toy_process import toy_trainer

pytest.importorskip("accelerate")


class Recorder:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, tuple]] = []

    def __getattr__(self, name: str):
        return lambda *arguments: self.events.append((name, arguments))

    def of(self, name: str) -> list:
        return [arguments[0] for kind, arguments in self.events if kind == name]


def test_a_model_learns(tmp_path) -> None:
    recorder = Recorder()
    task = ToyTask(ToySource(400), ToySource(100, seed=1))
    before = Trainer(toy_model(), task, toy_config(tmp_path)).evaluate()
    result = Trainer(
        toy_model(), task, toy_config(tmp_path, steps=200, learning_rate=5e-3, eval_every=40), observers=[recorder]
    ).train()
    assert result.outcome == "finished"
    assert result.step == 200
    assert before["accuracy"] < 0.9 < result.best_metric
    losses = [step.losses["loss"] for step in recorder.of("step")]
    assert losses[-1] < losses[0] / 2


def test_events_in_order_and_complete(tmp_path) -> None:
    recorder = Recorder()
    trainer = toy_trainer(tmp_path, [recorder], steps=10, log_every=3, eval_every=5, save_every=4)
    trainer.train()
    names = [name for name, _ in recorder.events]
    assert (names[0], names[-1]) == ("start", "end")
    assert recorder.of("end") == ["finished"]
    assert [event.step for event in recorder.of("evaluation")] == [5, 10]
    # Steps are told when they are due, before evaluations and before checkpoints.
    assert [event.step for event in recorder.of("step")] == [3, 4, 5, 6, 8, 9, 10]
    assert sum(event.num_steps for event in recorder.of("step")) == 10
    assert set(recorder.of("checkpoint")) >= {4, 8, 10}
    plan = recorder.of("start")[0]
    assert (plan.steps, plan.steps_per_epoch, plan.num_examples, plan.num_valid_examples) == (10, 7, 50, 20)
    assert plan.num_parameters == sum(p.numel() for p in trainer.model.parameters())
    assert trainer.task.train is not None
    lengths = trainer.task.train.lengths(0)
    first_epoch = [event for event in recorder.of("step") if event.step <= 6]
    assert 0 < sum(event.tokens for event in first_epoch) < lengths.sum()
    assert all(event.tokens <= event.capacity_tokens and event.seconds > 0 for event in recorder.of("step"))
    assert [event.learning_rate for event in recorder.of("step")][-1] == pytest.approx(1e-3 / 8)


@pytest.mark.parametrize("keep_checkpoints", [0, 1])
def test_the_last_step_is_told_whatever_else_is_due(tmp_path, keep_checkpoints) -> None:
    recorder = Recorder()
    settings = {"steps": 7, "log_every": 5, "save_every": 100, "keep_checkpoints": keep_checkpoints}
    toy_trainer(tmp_path, [recorder], task=ToyTask(ToySource(50)), **settings).train()
    assert [(event.step, event.num_steps) for event in recorder.of("step")] == [(5, 5), (7, 2)]


def test_an_epoch_takes_every_example_once(tmp_path) -> None:
    seen: list[int] = []

    class Source(ToySource):
        def batch(self, epoch, indices):
            assert epoch == 0
            seen.extend(indices.tolist())
            return super().batch(epoch, indices)

    toy_trainer(tmp_path, task=ToyTask(Source()), steps=None, epochs=1).train()
    assert sorted(set(seen)) == list(range(50))


def test_model_directory_holds_the_best_weights(tmp_path) -> None:
    class Task(ToyTask):
        values = iter([0.3, 0.9, 0.5])

        def score(self, source, predictions):
            return {"accuracy": next(self.values)}

    trainer = toy_trainer(tmp_path, task=Task(valid=ToySource(20)), eval_every=4)
    result = trainer.train()
    assert (result.best_step, result.best_metric, result.metrics["accuracy"]) == (8, 0.9, 0.9)
    best = load_file(tmp_path / "checkpoints/step-00000008/model.safetensors")
    saved = BertForSequenceClassification.from_pretrained(result.model_dir).state_dict()
    last = load_file(tmp_path / "checkpoints/step-00000012/model.safetensors")
    assert all(torch.equal(best[name], saved[name]) for name in best)
    assert any(not torch.equal(best[name], last[name]) for name in best)
    assert all(torch.equal(best[name], value) for name, value in trainer.model.state_dict().items())


def test_a_metric_that_is_no_number_is_never_the_best(tmp_path) -> None:
    class Task(ToyTask):
        values = iter([math.nan, 0.3, math.nan, 0.2])

        def score(self, source, predictions):
            return {"accuracy": next(self.values)}

    result = toy_trainer(tmp_path, task=Task(valid=ToySource(20)), eval_every=3).train()
    assert (result.best_step, result.best_metric) == (6, 0.3)


def test_only_the_newest_checkpoints_and_the_best_stay(tmp_path) -> None:
    class Task(ToyTask):
        values = iter([0.9, 0.3, 0.5])

        def score(self, source, predictions):
            return {"accuracy": next(self.values)}

    toy_trainer(tmp_path, task=Task(valid=ToySource(20)), eval_every=4, save_every=1).train()
    found = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert found == ["step-00000004", "step-00000011", "step-00000012"]


def test_early_stopping(tmp_path) -> None:
    class Task(ToyTask):
        values = iter([0.9, 0.3, 0.5, 0.95])

        def score(self, source, predictions):
            return {"accuracy": next(self.values)}

    recorder = Recorder()
    trainer = toy_trainer(tmp_path, [recorder], task=Task(valid=ToySource(20)), eval_every=2, early_stopping=2)
    result = trainer.train()
    assert (result.outcome, result.step, result.best_step) == ("stopped early", 6, 2)
    assert recorder.of("end") == ["stopped early"]
    again = toy_trainer(tmp_path, task=Task(valid=ToySource(20)), eval_every=2, early_stopping=2).train()
    assert (again.outcome, again.step) == ("stopped early", 6), "it must not go on"


def test_accumulated_batches_are_one_large_batch(tmp_path) -> None:
    weights = []
    for changes in (dict(batch_size=16), dict(batch_size=4, gradient_accumulation=4)):
        trainer = toy_trainer(tmp_path / str(len(weights)), dropout=0.0, **changes)
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    start = torch.cat([p.detach().flatten() for p in toy_model().parameters()])
    assert (weights[0] - weights[1]).abs().max() < (weights[0] - start).abs().max() / 1000


def test_workers_make_the_same_batches(tmp_path) -> None:
    results = [
        load_file(toy_trainer(tmp_path / str(number), num_workers=number).train().model_dir / "model.safetensors")
        for number in (0, 2)
    ]
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_bf16_trains_and_keeps_fp32_weights(tmp_path) -> None:
    result = toy_trainer(tmp_path, precision="bf16").train()
    saved = load_file(result.model_dir / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert math.isfinite(result.metrics["loss"])


def test_gradient_checkpointing_changes_no_bit(tmp_path) -> None:
    results = [
        load_file(toy_trainer(tmp_path / str(on), gradient_checkpointing=on).train().model_dir / "model.safetensors")
        for on in (False, True)
    ]
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_batch(tmp_path) -> None:
    source = ToySource()
    source.labels[13] = -50  # the sum of its batch's labels is negative

    class Task(ToyTask):
        def loss_parts(self, model, batch):
            poisoned = batch["labels"].min() < 0
            clean = dict(batch, labels=batch["labels"].clamp(min=0))
            return {"loss": super().loss_parts(model, clean)["loss"] * (torch.nan if poisoned else 1.0)}

    recorder = Recorder()
    trainer = toy_trainer(tmp_path, [recorder], task=Task(source), save_every=1, keep_checkpoints=20)
    with pytest.raises(TrainingError, match=r"step (\d+): loss or gradient is not a finite number; its batches are in"):
        trainer.train()
    (folder,) = (tmp_path / "failed_batch").iterdir()
    record = json.loads((folder / "batches.json").read_text())
    assert 13 in record["batches"][0]["examples"]
    batch = torch.load(folder / "batch-0.pt", weights_only=True)
    assert batch["labels"].min() == -50
    step = record["step"]
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) if step > 1 else []
    assert kept == [f"step-{number:08d}" for number in range(1, step)], "no checkpoint after the bad step"
    assert recorder.of("end")[0].startswith("failed: step")
    for name in kept:
        assert all(
            torch.isfinite(t).all() for t in load_file(tmp_path / "checkpoints" / name / "model.safetensors").values()
        )


def test_memory_that_is_not_there_is_explained(tmp_path) -> None:
    class Task(ToyTask):
        def loss_parts(self, model, batch):
            return {"loss": torch.empty(2**60)}

    with pytest.raises(TrainingError, match=r"step 1: out of memory with \d+ tokens in 8 sequences .* batch_tokens"):
        toy_trainer(tmp_path, task=Task()).train()


def test_memory_that_an_evaluation_lacks_is_explained(tmp_path) -> None:
    class Task(ToyTask):
        def predict(self, model, batch):
            raise MemoryError

    with pytest.raises(TrainingError, match=r"evaluation: out of memory with 77 tokens in a batch\. Lower eval_batch"):
        toy_trainer(tmp_path, task=Task(valid=ToySource(5)), eval_batch_tokens=77).evaluate()


def test_processes_that_are_gone_are_explained() -> None:
    lost = RuntimeError("[transport/tcp/pair.cc:549] Connection closed by peer [127.0.0.1]:30153")
    assert "another process of this run is gone" in str(lost_process(lost))
    assert lost_process(RuntimeError("a bug")) is None
    with pytest.raises(TrainingError, match="step 3: another process of this run is gone"), explained("step 3", str):
        raise lost


def test_other_errors_stay_themselves(tmp_path) -> None:
    class Task(ToyTask):
        def loss_parts(self, model, batch):
            raise RuntimeError("a bug")

    class Source(ToySource):
        def batch(self, epoch, indices):
            raise OSError("the disk is gone")

    with pytest.raises(RuntimeError, match="a bug"):
        toy_trainer(tmp_path / "a", task=Task()).train()
    with pytest.raises(OSError, match="the disk is gone"):
        toy_trainer(tmp_path / "b", task=ToyTask(Source())).train()


def test_nothing_to_train_on(tmp_path) -> None:
    with pytest.raises(ValueError, match="task: expected examples to train on, got none"):
        toy_trainer(tmp_path, task=ToyTask(ToySource(0))).train()


def test_making_a_trainer_and_evaluating_write_nothing(tmp_path) -> None:
    trainer = Trainer(toy_model(), ToyTask(valid=ToySource(5)), toy_config(tmp_path / "run"))
    metrics = trainer.evaluate()
    assert set(metrics) == {"loss", "accuracy"}
    assert not (tmp_path / "run").exists()


def test_evaluation_does_not_depend_on_batches(tmp_path) -> None:
    source = ToySource(60)
    logits, losses = [], []
    for tokens in (13, 100, 10_000):
        trainer = toy_trainer(tmp_path, task=ToyTask(source), eval_batch_tokens=tokens)
        logits.append(trainer.predict(source).rows("logits"))
        losses.append(trainer.evaluate(source)["loss"])
    for other, loss in zip(logits[1:], losses[1:], strict=True):
        assert np.abs(logits[0] - other).max() < np.abs(logits[0]).max() / 1e4
        assert loss == pytest.approx(losses[0])


def test_wrong_arguments(tmp_path) -> None:
    config = toy_config(tmp_path)
    with pytest.raises(TypeError, match="task: expected a Task, got str"):
        Trainer(toy_model(), "classify", config)
    with pytest.raises(TypeError, match=r"model: expected one of bert_fast\.models, or a fused one, got str"):
        Trainer("bert", ToyTask(), config)
    with pytest.raises(TypeError, match="config: expected a TrainingConfig, got dict"):
        Trainer(toy_model(), ToyTask(), {})
    with pytest.raises(ValueError, match="precision: expected 'fp32' or 'bf16' on a CPU, got 'fp16'"):
        toy_trainer(tmp_path, precision="fp16")
    with pytest.raises(ValueError, match="sharding: expected 'none' for a single process"):
        toy_trainer(tmp_path, sharding="fsdp2")
    with pytest.raises(ValueError, match="resume: expected one of auto, must, never, got True"):
        toy_trainer(tmp_path).train(resume=True)
    task = ToyTask(valid=ToySource(5))
    task.metric = "f1"
    with pytest.raises(ValueError, match="metric: expected one of"):
        toy_trainer(tmp_path / "f1", task=task).train()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": None}, "epochs, steps: expected one of them"),
        ({"epochs": 3}, "epochs, steps: expected one of them"),
        ({"steps": 0}, "steps: expected at least 1, got 0"),
        ({"batch_size": None}, "batch_size, batch_tokens: expected at least one"),
        ({"learning_rate": 0}, "learning_rate: expected a number above 0, got 0"),
        ({"learning_rate": math.nan}, "learning_rate: expected a number above 0, got nan"),
        ({"warmup": -1}, "warmup: expected a number from 0, got -1"),
        ({"optimizer": "sgd"}, "optimizer: expected one of adamw, lamb, got 'sgd'"),
        ({"precision": "fp8"}, "precision: expected one of fp32, bf16, fp16"),
        ({"keep_checkpoints": -1}, "keep_checkpoints: expected at least 0"),
    ],
)
def test_wrong_configuration(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy_config(tmp_path, **changes)
    with pytest.raises(TypeError, match="seed: expected an int, got float"):
        TrainingConfig(tmp_path, steps=1, seed=1.5)  # type: ignore[arg-type]


def test_kernels_are_compiled_for_the_batches_to_come(tmp_path, monkeypatch) -> None:
    """On a GPU, before the first step: for texts and batches as large as there are, in the run's precision."""
    calls = []
    monkeypatch.setattr(loop, "warm_up", lambda *arguments, **options: calls.append((arguments, options)) or 7.0)
    source = ToySource(50)
    recorder = Recorder()
    task = ToyTask(source, ToySource(20, seed=1))
    trainer = Trainer(toy_model(), task, toy_config(tmp_path, batch_size=8, precision="bf16"), observers=[recorder])
    trainer.train()
    assert not calls, "nothing to compile on a CPU"
    run = loop.Run(trainer.setup)
    run._compile_kernels()
    (_, training), (_, evaluation) = calls
    assert [arguments for arguments, _ in calls] == [(trainer.model,)] * 2
    assert training["optimizer"] is trainer.optimizer.optimizer
    assert training["autocast_dtype"] == evaluation["autocast_dtype"] == torch.bfloat16
    assert training["max_seqlen"] == max(source.lengths(0))
    plan = run.batches.plan(0)
    assert training["max_tokens"] == max(source.lengths(0)[plan.indices(i)].sum() for i in range(len(plan)))
    assert evaluation["max_tokens"] == task.valid.lengths(0).sum()
    assert (training["inference"], evaluation["training"]) == (False, False)
    assert "compiled kernels for 14 s" in recorder.of("note")[-1]
