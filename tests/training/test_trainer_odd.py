"""Runs as nobody plans them: hardly any data, odd directories, other people's models, several at once, Ctrl-C twice."""

import copy
import math
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import bert_fast
from bert_fast import BertConfig, BertForMaskedLM, BertForTokenClassification
from bert_fast.errors import CheckpointError
from bert_fast.training import Trainer, training_state
from bert_fast.training.reporting import default_observers
from tests.training.test_trainer import Recorder
from tests.training.toy import SIZES, ToySource, ToyTask, toy_config, toy_model

pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Few(ToySource):
    """The sequences that are given."""

    def __init__(self, *sequences: list[int]) -> None:
        self.sequences = [np.array(sequence, dtype=np.int64) for sequence in sequences]
        self.labels = np.arange(len(sequences)) % 2


def make(folder: Path, observers=(), model=None, task=None, **changes) -> Trainer:
    task = task or ToyTask(valid=ToySource(20, seed=1))
    return Trainer(toy_model() if model is None else model, task, toy_config(folder, **changes), observers=observers)


def weights(folder: Path, step: int = 12) -> dict[str, torch.Tensor]:
    return load_file(folder / f"checkpoints/step-{step:08d}/model.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def cut_off(run: Path, step: int) -> None:
    """As if the run was killed after this step."""
    for directory in (run / "checkpoints").iterdir():
        if directory.name > f"step-{step:08d}":
            shutil.rmtree(directory)
    shutil.rmtree(run / "model")


# Little data, much of everything else


@pytest.mark.parametrize(
    ("task", "changes", "steps"),
    [
        (ToyTask(Few([1, 2, 3]), Few([4, 5])), {}, 12),
        (ToyTask(Few([5]), Few([6])), {}, 12),
        (ToyTask(Few([5]), Few([6])), {"batch_size": None, "batch_tokens": 1, "eval_batch_tokens": 1}, 12),
        (ToyTask(Few([1, 2], [], [3]), Few([], [4])), {}, 12),
        (ToyTask(Few([1, 2], [3, 4])), {"num_workers": 3, "steps": 7}, 7),
        (None, {"batch_size": 1000}, 12),
        (None, {"gradient_accumulation": 100, "steps": None, "epochs": 2.5}, 2),
        (None, {"warmup": 100, "schedule": "cosine"}, 12),
        (None, {"warmup": 12, "schedule": "polynomial", "schedule_power": 0.5}, 12),
        (None, {"steps": None, "epochs": 0.3}, 2),
        (None, {"steps": None, "epochs": 0.001}, 1),
        (None, {"optimizer": "lamb", "precision": "bf16", "gradient_checkpointing": True}, 12),
        (ToyTask(), {"early_stopping": 1}, 12),
    ],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
def test_a_run_ends_as_planned(tmp_path: Path, task: ToyTask | None, changes: dict[str, Any], steps: int) -> None:
    recorder = Recorder()
    result = make(tmp_path, [recorder], task=copy.copy(task), **changes).train()
    assert (result.outcome, result.step) == ("finished", steps)
    assert recorder.of("step")[-1].step == steps
    assert all(math.isfinite(step.losses["loss"]) for step in recorder.of("step"))
    assert all(value.isfinite().all() for value in load_file(result.model_dir / "model.safetensors").values())


def test_accumulation_beyond_an_epoch_takes_the_epoch(tmp_path: Path) -> None:
    source = ToySource(5)
    make(tmp_path / "few", task=ToyTask(source), model=toy_model(0.0), batch_size=5).train()
    make(tmp_path / "many", task=ToyTask(source), model=toy_model(0.0), batch_size=5, gradient_accumulation=9).train()
    assert same(weights(tmp_path / "few"), weights(tmp_path / "many"))


def test_everything_after_every_step(tmp_path: Path) -> None:
    recorder = Recorder()
    make(tmp_path, [recorder], steps=5, eval_every=1, save_every=1, log_every=1).train()
    for name in ("step", "evaluation"):
        assert [event.step for event in recorder.of(name)] == [1, 2, 3, 4, 5]
    assert recorder.of("checkpoint") == [1, 2, 3, 4, 5]


def test_examples_that_are_not_there(tmp_path: Path) -> None:
    class Once(ToySource):
        def lengths(self, epoch: int) -> np.ndarray:
            return super().lengths(epoch)[: 0 if epoch else None]

    with pytest.raises(ValueError, match="task: expected examples to train on, got none"):
        make(tmp_path, task=ToyTask(Few())).train()
    with pytest.raises(ValueError, match="task: expected examples to judge by, got none"):
        make(tmp_path, task=ToyTask(valid=Few())).train()
    with pytest.raises(ValueError, match="epoch 1"):
        make(tmp_path, task=ToyTask(Once()), steps=20).train()


# Parts without labels


class Words(ToySource):
    """A label for every token, but for the sequences of `unlabelled`."""

    def __init__(self, unlabelled: range) -> None:
        super().__init__()
        self.unlabelled = unlabelled

    def batch(self, epoch: int, indices: np.ndarray):
        batch = super().batch(epoch, indices)
        labels = (batch["input_ids"] > 20).long()
        bounds = batch["cu_seqlens"].tolist()
        for place, index in enumerate(indices):
            if index in self.unlabelled:
                labels[bounds[place] : bounds[place + 1]] = -100
        return type(batch)({**batch, "labels": labels})


class MaskedWords(Words):
    """The first token of every sequence is to be guessed, but for those of `unlabelled`."""

    def batch(self, epoch: int, indices: np.ndarray):
        batch = ToySource.batch(self, epoch, indices)
        is_masked = torch.tensor([index not in self.unlabelled for index in indices])
        places = batch["cu_seqlens"][:-1].long()[is_masked]
        return type(batch)({**batch, "labels": batch["input_ids"][places], "masked_lm_positions": places})


class WordTask(ToyTask):
    metric = "loss"
    higher_is_better = False

    def label_counts(self, batch) -> dict[str, int]:
        return {"loss": int((batch["labels"] != -100).sum())}

    def predict(self, model, batch):
        return {"loss": model(**batch).loss}, {}

    def score(self, source, predictions) -> dict[str, float]:
        return {}


@pytest.mark.parametrize(
    ("source", "cls"), [(Words, BertForTokenClassification), (MaskedWords, BertForMaskedLM)]
)  # fmt: skip
@pytest.mark.parametrize("accumulation", [1, 3])
def test_batches_without_a_label_count_for_nothing(tmp_path: Path, source: Any, cls: Any, accumulation: int) -> None:
    recorder = Recorder()
    torch.manual_seed(0)
    model = cls(BertConfig(**SIZES))
    some, none = source(range(30)), source(range(50))
    changes = dict(batch_size=1, gradient_accumulation=accumulation, steps=20, log_every=1, eval_every=10)
    result = make(tmp_path / "some", [recorder], model, WordTask(some, some), **changes).train()
    losses = [step.losses["loss"] for step in recorder.of("step")]
    assert all(math.isfinite(loss) for loss in losses)
    assert {loss == 0 for loss in losses} == {True, False} or accumulation > 1
    assert result.metrics["loss"] > 0
    assert make(tmp_path / "none", (), model, WordTask(none, none), **changes).train().metrics["loss"] == 0


# Several at once


def test_two_trainers_beside_each_other(tmp_path: Path) -> None:
    alone = [make(tmp_path / name, precision=name).train().metrics for name in ("fp32", "bf16")]
    both = [make(tmp_path / f"{name} again", precision=name) for name in ("fp32", "bf16")]
    assert [trainer.train().metrics for trainer in both] == alone
    assert alone[0] != alone[1]


def test_runs_in_threads(tmp_path: Path) -> None:
    """Outside the main thread there are no signal handlers to set; the model is trained all the same."""
    expected = make(tmp_path / "main", model=toy_model(0.0)).train().metrics
    models = [toy_model(0.0), toy_model(0.0)]  # here: they draw from the generator that all threads share
    found: dict[int, Any] = {}
    handler = signal.getsignal(signal.SIGINT)

    def work(number: int) -> None:
        found[number] = make(tmp_path / str(number), model=models[number]).train().metrics

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: expected, 1: expected}
    assert signal.getsignal(signal.SIGINT) is handler


# Directories


def test_names_of_directories(tmp_path: Path) -> None:
    folder = tmp_path / "ä 模型 'x' $y\nz"
    result = make(folder, default_observers(folder, quiet=True)).train()
    assert {path.name for path in folder.iterdir()} >= {"metrics.jsonl", "report.html", "model", "checkpoints"}
    assert make(folder).train() == result


def test_a_relative_directory_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    class Task(ToyTask):
        def loss_parts(self, model, batch):
            os.chdir(tmp_path / "elsewhere")
            return super().loss_parts(model, batch)

    make(Path("run"), task=Task(valid=ToySource(20))).train()
    assert not list((tmp_path / "elsewhere").iterdir())
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"model", "checkpoints"}


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    class Task(ToyTask):
        def loss_parts(self, model, batch):
            raise AssertionError("known before the first step")

    for observers in ([], default_observers(tmp_path / "file/run", quiet=True)):
        with pytest.raises(CheckpointError, match=r"output_dir: .*file/run cannot be made"):
            make(tmp_path / "file/run", observers, task=Task()).train()


# Ends that nobody planned


@pytest.mark.parametrize("saving", [False, True])
def test_ctrl_c_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saving: bool) -> None:
    """In a step, or while a checkpoint is written: nothing is half there, and the run goes on to the same end."""
    expected = make(tmp_path / "straight").train()
    save, calls = training_state.save_data, []

    def interrupt() -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    def interrupted_save(*arguments) -> None:
        calls.append(arguments)
        if saving and len(calls) == 3:  # the second checkpoint's first file
            interrupt()
        save(*arguments)

    class Ob(Recorder):
        def step(self, event) -> None:
            if not saving and event.step == 4:
                interrupt()

    monkeypatch.setattr(training_state, "save_data", interrupted_save)
    observer, handler, threads = Ob(), signal.getsignal(signal.SIGINT), threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "cut off", [observer]).train()
    monkeypatch.undo()
    assert observer.of("end") == ["failed: KeyboardInterrupt"]
    assert signal.getsignal(signal.SIGINT) is handler
    assert threading.active_count() == threads
    assert [path.name for path in (tmp_path / "cut off/checkpoints").iterdir()] == ["step-00000003"]
    again = make(tmp_path / "cut off").train()
    assert (again.step, again.metrics) == (expected.step, expected.metrics)
    assert same(weights(tmp_path / "cut off"), weights(tmp_path / "straight"))


def test_an_observer_that_fails(tmp_path: Path) -> None:
    class Fails(Recorder):
        def step(self, event) -> None:
            raise OSError("no space left")

        def end(self, outcome: str) -> None:
            raise ValueError("hides what happened")

    recorder = Recorder()
    with pytest.raises(OSError, match="no space left"):
        make(tmp_path, [recorder, Fails()]).train()
    assert recorder.of("end") == ["failed: no space left"]


def test_a_metric_that_is_no_number_is_not_the_best(tmp_path: Path) -> None:
    class Task(ToyTask):
        values = iter([math.nan, 0.3, math.nan])

        def score(self, source, predictions):
            return {"accuracy": next(self.values)}

    result = make(tmp_path, task=Task(valid=ToySource(20)), eval_every=4).train()
    assert (result.best_step, result.best_metric) == (8, 0.3)


def test_a_checkpoint_that_was_copied_in_part_is_written_anew(tmp_path: Path) -> None:
    expected = make(tmp_path / "straight", steps=4).train()
    run = tmp_path / "run"
    half = run / "checkpoints/step-00000004"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    assert make(run, steps=4).train().metrics == expected.metrics
    assert same(weights(run, 4), weights(tmp_path / "straight", 4))


# Other models


def fused(**sizes: Any) -> Any:
    transformers = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(7)
    config = transformers.BertConfig(**SIZES, **sizes)
    return bert_fast.fuse(transformers.BertForSequenceClassification(config))


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.mark.filterwarnings("ignore")  # transformers' own deprecations
def test_a_fused_model_of_transformers(tmp_path: Path) -> None:
    model = fused(**NO_DROPOUT)
    ours = toy_model(0.0)
    ours.load_state_dict(model.state_dict(), strict=False)
    theirs = make(tmp_path / "theirs", model=model).train()
    own = make(tmp_path / "own", model=ours).train()
    assert theirs.metrics == pytest.approx(own.metrics)
    assert type(fused()).from_pretrained(theirs.model_dir).num_labels == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["fused", "half", "compiled"])
def test_they_go_on_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    def other() -> Any:
        if kind == "fused":
            return fused()
        return toy_model().half() if kind == "half" else torch.compile(toy_model(), backend="eager")

    changes = dict(batch_size=50, steps=4, save_every=1, eval_every=4)  # batches of one size: compiled once
    make(tmp_path / "straight", model=other(), **changes).train()
    shutil.copytree(tmp_path / "straight", tmp_path / "cut off")
    cut_off(tmp_path / "cut off", 3)
    make(tmp_path / "cut off", model=other(), **changes).train()
    found = weights(tmp_path / "cut off", 4)
    assert same(found, weights(tmp_path / "straight", 4))
    assert found.keys() >= {"bert.embeddings.word_embeddings.weight", "classifier.bias"}
    assert {value.dtype for value in found.values()} == {torch.float16 if kind == "half" else torch.float32}


def test_a_frozen_encoder_stays_as_it_is(tmp_path: Path) -> None:
    model = toy_model()
    model.bert.requires_grad_(False)
    make(tmp_path, model=model).train()
    start = toy_model().state_dict()
    changed = {name for name, value in weights(tmp_path).items() if not torch.equal(value, start[name])}
    assert changed == {"classifier.weight", "classifier.bias"}


def test_what_is_no_model(tmp_path: Path) -> None:
    for wrong in ("bert-base-uncased", torch.nn.Linear(3, 3), None):
        with pytest.raises(TypeError, match="model: expected"):
            Trainer(wrong, ToyTask(), toy_config(tmp_path))


def test_kernels_that_are_kept_are_few(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.setenv(name, "7")
    Trainer(toy_model(), ToyTask(), toy_config(tmp_path))
    assert os.environ[name] == "7", "whoever sets it decides"
    monkeypatch.delenv(name)
    Trainer(toy_model(), ToyTask(), toy_config(tmp_path))
    assert os.environ[name] == "64"
