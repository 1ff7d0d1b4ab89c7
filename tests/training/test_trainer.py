"""What the Trainer does beside transformers': batches, the loss of a step, optimizers, evaluation, what is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bert_fast import BertForSequenceClassification, PackedCollator, fuse
from bert_fast.data.batches import Batches
from bert_fast.errors import TrainingError
from bert_fast.optim import AdamW, Lamb
from bert_fast.testing.tolerances import RELATIVE
from bert_fast.training import Trainer, TrainingArguments
from tests.training.toy import SIZES, ToySource, accuracy, toy_arguments, toy_model, toy_trainer


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def are_close(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(found - expected).max() <= RELATIVE["two_processes"] * max(1.0, np.abs(expected).max()))


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    before = toy_model().state_dict()
    for name, value in ours.items():
        bound = RELATIVE["two_processes"] * max(1.0, value.abs().max().item())
        assert (value - theirs[name]).abs().max() <= bound, name
    assert sum(not torch.equal(before[name], value) for name, value in ours.items()) > 20, "nothing was trained"


def features(source: ToySource) -> list[dict[str, Any]]:
    """The examples of a source one by one, as a tokenizer returns them."""
    return [
        {"input_ids": sequence, "labels": int(label)}
        for sequence, label in zip(source.sequences, source.labels, strict=True)
    ]


def test_a_model_learns(tmp_path: Path) -> None:
    trainer = toy_trainer(
        tmp_path, train=ToySource(400), valid=ToySource(100, seed=1), max_steps=200, learning_rate=5e-3, save_steps=200
    )  # fmt: skip
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert before["eval_accuracy"] < 0.9 < after["eval_accuracy"]
    assert after["eval_loss"] < before["eval_loss"] / 2


def test_steps_are_those_of_transformers_trainer(tmp_path: Path) -> None:
    """The same examples in the same order, padded there, with PyTorch's optimizer and clipping."""
    source = ToySource()
    model = toy_model(dropout=0.0)
    ours = toy_trainer(tmp_path / "ours", model, source, max_steps=-1, num_train_epochs=1)
    plan = Batches(source, batch_size=8, seed=42).plan(0)
    rows = [features(source)[index] for index in plan.order]

    def padded(batch: list[dict[str, Any]]) -> dict[str, Any]:
        longest = max(len(row["input_ids"]) for row in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for place, row in zip(ids, batch, strict=True):
            place[: len(row["input_ids"])] = torch.from_numpy(row["input_ids"])
        labels = torch.tensor([row["labels"] for row in batch])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}

    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    peer = transformers.BertForSequenceClassification(config)
    peer.load_state_dict(model.state_dict(), strict=False)
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments) if field.init}
    same = {name: value for name, value in vars(ours.args).items() if name in fields and not name.startswith("_")}
    settings = transformers.TrainingArguments(
        **same | {"output_dir": str(tmp_path / "theirs"), "train_sampling_strategy": "sequential"}
    )
    theirs = transformers.Trainer(peer, settings, padded, train_dataset=rows)  # type: ignore[arg-type]
    ours.train()
    theirs.train()
    assert ours.state.global_step == theirs.state.global_step == 7
    assert_close(weights(ours), dict(peer.state_dict()))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_hold_a_budget_of_tokens(tmp_path: Path, workers: int) -> None:
    trainer = toy_trainer(tmp_path, per_device_train_batch_tokens=40, dataloader_num_workers=workers)
    loader = trainer.get_train_dataloader()
    plan = Batches(ToySource(), max_tokens=40, seed=42)
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        batches = list(loader)
        assert len(batches) == len(loader) == len(plan.plan(0))
        for batch in batches:
            place = batch.pop("place")
            assert torch.equal(batch.input_ids, plan.batch(place.epoch, place.number).input_ids)
            assert len(batch.input_ids) <= 40


def test_examples_of_later_epochs_are_not_left_out(tmp_path: Path) -> None:
    """An epoch of the data may have other batches than the first: they are counted through."""

    class Growing(ToySource):
        def lengths(self, epoch: int) -> np.ndarray:
            return super().lengths(epoch)[: 40 + epoch]

    batches = Batches(Growing(), batch_size=4, seed=1)
    found = [batches.locate(index) for index in range(32)]
    assert found[:10] == [(0, number) for number in range(10)]
    assert found[10:21] == [(1, number) for number in range(11)]
    assert found[21:32] == [(2, number) for number in range(11)]
    with pytest.raises(ValueError, match="source: expected examples in every epoch, epoch 0 has none"):
        Batches(ToySource(0), batch_size=4).locate(0)


def test_accumulated_batches_are_one_large_batch(tmp_path: Path) -> None:
    """Also where batches have different numbers of labels, and where an epoch ends within a step."""
    large = toy_trainer(tmp_path / "1", toy_model(0.0), per_device_train_batch_size=16)
    small = toy_trainer(
        tmp_path / "2", toy_model(0.0), per_device_train_batch_size=4, gradient_accumulation_steps=4
    )  # fmt: skip
    large.train()
    small.train()
    assert large.state.max_steps == small.state.max_steps == 12
    assert_close(weights(large), weights(small))


def test_labels_of_minus_100_count_for_nothing(tmp_path: Path) -> None:
    """Of two batches with 8 and 2 labels the step's loss is the mean over all ten."""
    source = ToySource(16)
    source.labels = source.labels.copy()
    source.labels[2:8] = -100
    trainer = toy_trainer(
        tmp_path, toy_model(0.0), source, max_steps=1, gradient_accumulation_steps=2, logging_steps=1
    )  # fmt: skip
    trainer.train()
    whole = source.batch(0, np.arange(16))
    with torch.no_grad():
        expected = toy_model(0.0).train()(**whole).loss.item()
    found = trainer.state.log_history[0]["loss"]
    assert abs(found - expected) <= RELATIVE["two_processes"] * expected


@pytest.mark.parametrize("kind", ["ours", "fused", "transformers"])
def test_features_of_a_data_set(tmp_path: Path, kind: str) -> None:
    """What a tokenizer returns is packed; our models, fused ones and transformers' own take it."""
    model: Any = toy_model(0.0)
    if kind != "ours":
        state = model.state_dict()
        config = transformers.BertConfig(
            **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager"
        )
        model = transformers.BertForSequenceClassification(config)
        model.load_state_dict(state, strict=False)
    if kind == "fused":
        fuse(model)
    rows: Any = features(ToySource())
    collator: Any = PackedCollator()
    if kind == "transformers":
        collator = _padded
    trainer = Trainer(
        model, toy_arguments(tmp_path / kind), collator, train_dataset=rows, eval_dataset=rows, compute_metrics=accuracy
    )
    trainer.train()
    wanted = toy_trainer(tmp_path / "wanted", toy_model(0.0))
    wanted.train()
    assert_close(weights(wanted), weights(trainer))
    metrics = trainer.evaluate()
    expected = wanted.evaluate(ToySource())
    assert metrics["eval_accuracy"] == expected["eval_accuracy"]


def _padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ids = [torch.from_numpy(row["input_ids"]) for row in rows]
    joined = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": joined, "attention_mask": (joined > 0).long(), "labels": labels}


def test_a_data_set_of_the_library_for_them(tmp_path: Path) -> None:
    """Columns that no model takes are dropped; `length` is read."""
    datasets = pytest.importorskip("datasets")
    source = ToySource()
    columns = {
        "input_ids": [sequence.tolist() for sequence in source.sequences], "labels": source.labels.tolist(),
        "text": ["x"] * 50, "length": source.lengths(0).tolist(),
    }  # fmt: skip
    trainer = toy_trainer(tmp_path / "1", train=datasets.Dataset.from_dict(columns))
    trainer.train()
    wanted = toy_trainer(tmp_path / "2")
    wanted.train()
    assert all(torch.equal(value, weights(wanted)[name]) for name, value in weights(trainer).items())


def test_optimizers(tmp_path: Path) -> None:
    kinds = {"adamw": AdamW, "lamb": Lamb, "torch": torch.optim.SGD}
    for name, kind in kinds.items():
        trainer = toy_trainer(tmp_path / name, lamb=name == "lamb", optim="sgd" if name == "torch" else "adamw_torch")
        optimizer = trainer.create_optimizer()
        assert type(optimizer) is kind
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
        trainer.train()
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        assert len(norms) == 3 and all(0 < norm < 10 for norm in norms)


def test_bf16_keeps_fp32_weights(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, bf16=True)
    trainer.train()
    assert {value.dtype for value in weights(trainer).values() if value.is_floating_point()} == {torch.float32}
    logits = trainer.predict(ToySource(5)).predictions
    assert logits.dtype == np.float32 and not np.array_equal(logits, toy_predictions(trainer))


def toy_predictions(trainer: Trainer) -> np.ndarray:
    batch = ToySource(5).batch(0, np.arange(5))
    with torch.no_grad():
        found: np.ndarray = BertForSequenceClassification.forward(trainer.model.eval(), **batch).logits.numpy()
    return found


@pytest.mark.parametrize("tokens", [1, 17, 16384])
def test_evaluation_does_not_depend_on_batches(tmp_path: Path, tokens: int) -> None:
    trainer = toy_trainer(tmp_path, per_device_eval_batch_tokens=tokens)
    found = trainer.predict(ToySource(30, seed=1))
    assert are_close(found.predictions, toy_trainer(tmp_path).predict(ToySource(30, seed=1)).predictions)
    assert np.array_equal(found.label_ids, ToySource(30, seed=1).labels)
    loss = torch.nn.functional.cross_entropy(torch.from_numpy(found.predictions), torch.from_numpy(found.label_ids))
    assert abs(found.metrics["test_loss"] - loss.item()) <= RELATIVE["two_processes"]


def test_evaluation_of_tokens_and_of_several_outputs(tmp_path: Path) -> None:
    """What belongs to tokens comes back for all tokens in order; several outputs and labels as tuples."""
    from bert_fast import BertConfig, BertForQuestionAnswering

    class Spans(ToySource):
        def batch(self, epoch: int, indices: np.ndarray) -> Any:
            batch = super().batch(epoch, indices)
            labels = batch.pop("labels")
            return type(batch)(**batch, start_positions=labels, end_positions=labels)

    torch.manual_seed(0)
    model = BertForQuestionAnswering(BertConfig(**SIZES))
    found = Trainer(model, toy_arguments(tmp_path, per_device_eval_batch_tokens=20)).predict(Spans(9))
    start, end = found.predictions
    assert start.shape == end.shape == (sum(map(len, Spans(9).sequences)),)
    assert all(np.array_equal(labels, Spans(9).labels) for labels in found.label_ids)
    with torch.no_grad():
        whole = model(**Spans(9).batch(0, np.arange(9)))
    assert are_close(start, whole.start_logits.numpy())


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, logging_steps=2)
    with torch.no_grad():
        trainer.model.classifier.weight.fill_(torch.nan)
    with pytest.raises(TrainingError, match=r"loss: expected a number, got nan up to step 2; a smaller learning_rate"):
        trainer.train()


def test_early_stopping_and_the_best_model(tmp_path: Path) -> None:
    values = iter([0.3, 0.9, 0.5, 0.4, 0.2])
    trainer = toy_trainer(
        tmp_path, eval_strategy="steps", eval_steps=3, load_best_model_at_end=True, metric_for_best_model="accuracy"
    )
    trainer.compute_metrics = lambda said: {"accuracy": next(values)}
    trainer.add_callback(transformers.EarlyStoppingCallback(2))
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-6")
    best = BertForSequenceClassification.from_pretrained(tmp_path / "checkpoint-6").state_dict()
    assert all(torch.equal(value, best[name]) for name, value in weights(trainer).items())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "arguments of transformers": ({"args": None}, r"args: expected bert_fast.training.TrainingArguments, got NoneType"),
    "a loss of one's own": ({"compute_loss_func": len}, "compute_loss_func: expected None, as batches are weighted"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(tmp_path: Path, name: str) -> None:
    changes, message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=message):
        Trainer(**{"model": toy_model(), "args": toy_arguments(tmp_path)} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_device_train_batch_tokens": 0}, "per_device_train_batch_tokens: expected .* got 0"),
        ({"per_device_eval_batch_tokens": 1.5}, "per_device_eval_batch_tokens: expected .* got float"),
        ({"lamb": 1}, "lamb: expected a bool, got int"),
        ({"graphs": True}, "graphs: expected a CUDA device"),
        ({"graphs": True, "gradient_checkpointing": True}, "graphs: expected False with gradient_checkpointing, got"),
    ],
)
def test_wrong_settings(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        TrainingArguments(str(tmp_path), **changes)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (ToySource(0), "training: expected examples, got none"),
        (iter([1]), r"training: expected a Source, or a data set with a length and indices, got list_iterator"),
        (
            [{"input_ids": np.array([1, 2])}],
            "train_dataset: expected batches with labels, got input_ids, cu_seqlens, max_seqlen",
        ),
    ],
)
def test_wrong_data(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        toy_trainer(tmp_path, train=data).train()


def test_examples_longer_than_a_batch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_tokens: example .* of epoch 0 has .* tokens, more than 5"):
        toy_trainer(tmp_path, per_device_train_batch_tokens=5).train()
    assert toy_trainer(tmp_path, per_device_eval_batch_tokens=5).evaluate()["eval_accuracy"] > 0
