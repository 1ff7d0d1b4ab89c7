"""What a Trainer could do wrong without a word: other runs' checkpoints, weights that are none, labels that count."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bert_fast import BertConfig, BertForPreTraining, BertLMHeadModel, PackedCollator
from bert_fast.errors import CheckpointError, TrainingError
from bert_fast.testing.tolerances import RELATIVE
from bert_fast.tokenization.pack import PackedBatch
from bert_fast.training import Trainer, last_checkpoint
from tests.training.test_trainer_resume import assert_same
from tests.training.toy import SIZES, ToySource, toy_arguments, toy_model, toy_trainer


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"train": ToySource(seed=5)}, "train_dataset"),
        ({"learning_rate": 2e-3}, "learning_rate: 0.001 there and 0.002 here"),
        ({"per_device_train_batch_size": 4}, "batches: {'batch_size': 8} there and {'batch_size': 4} here"),
        ({"per_device_train_batch_tokens": 64}, "batches: {'batch_size': 8} there and {'max_tokens': 64} here"),
        ({"gradient_accumulation_steps": 2}, "batches of a step: 1 there and 2 here"),
        ({"seed": 1}, "data_seed: 42 there and 1 here"),
    ],
)
def test_another_run_does_not_go_on(tmp_path: Path, changes: dict[str, Any], name: str) -> None:
    toy_trainer(tmp_path).train()
    with pytest.raises(CheckpointError, match=f"checkpoint-12: is of another run: {name}"):
        toy_trainer(tmp_path, **changes).train(resume_from_checkpoint=True)


def test_other_labels_do_not_go_on(tmp_path: Path) -> None:
    toy_trainer(tmp_path).train()
    model = toy_model(id2label={0: "no", 1: "yes"})
    with pytest.raises(CheckpointError, match=r"labels: \['LABEL_0', 'LABEL_1'\] there and \['no', 'yes'\] here"):
        toy_trainer(tmp_path, model).train(resume_from_checkpoint=True)


def test_a_run_may_become_longer(tmp_path: Path) -> None:
    toy_trainer(tmp_path).train()
    trainer = toy_trainer(tmp_path, max_steps=15)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 15


def test_weights_alone_are_no_checkpoint(tmp_path: Path) -> None:
    toy_trainer(tmp_path, save_only_model=True).train()
    with pytest.raises(CheckpointError, match=r"expected a whole checkpoint, got none of scheduler\.pt"):
        toy_trainer(tmp_path, save_only_model=True).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("changes", [{"logging_steps": 500}, {"logging_steps": 4, "save_steps": 1}])
def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path, changes: dict[str, Any]) -> None:
    trainer = toy_trainer(tmp_path, max_steps=4, warmup_steps=0, learning_rate=1e30, **changes)
    with pytest.raises(TrainingError, match=r"expected a number, got (nan|inf)"):
        trainer.train()
    kept = last_checkpoint(tmp_path)
    assert kept is None or all(p.isfinite().all() for p in type(trainer.model).from_pretrained(kept).parameters())


def _masking(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A collator for padded batches that draws random numbers."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row["input_ids"]) for row in rows], batch_first=True)
    mask = (ids > 0).long()
    drawn = torch.rand(ids.shape) < 0.3
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": ids.masked_fill(drawn & (ids > 0), 3), "attention_mask": mask, "labels": labels}


def _drawing(folder: Path, **changes: Any) -> Trainer:
    source = ToySource()
    rows: Any = [
        {"input_ids": ids, "labels": int(label)} for ids, label in zip(source.sequences, source.labels, strict=True)
    ]
    return Trainer(toy_model(), toy_arguments(folder, **changes), PackedCollator(_masking), train_dataset=rows)


def test_a_collator_that_draws_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """Whatever workers there are; another seed draws other numbers."""
    whole = _drawing(tmp_path / "1")
    whole.train()
    (tmp_path / "1" / "checkpoint-12" / "trainer_state.json").unlink()
    again = _drawing(tmp_path / "1", dataloader_num_workers=2)
    again.train(resume_from_checkpoint=True)
    assert_same(dict(again.model.state_dict()), dict(whole.model.state_dict()))
    loaders = [_drawing(tmp_path / "2", seed=seed, data_seed=7).get_train_dataloader() for seed in (1, 2)]
    first, second = (next(iter(loader)).input_ids for loader in loaders)
    assert torch.equal(first, second)
    other = next(iter(_drawing(tmp_path / "2", data_seed=8).get_train_dataloader())).input_ids
    assert not torch.equal(first, other)


class Words(ToySource):
    """Every token is a label."""

    def batch(self, epoch: int, indices: np.ndarray) -> PackedBatch:
        batch = super().batch(epoch, indices)
        batch["labels"] = batch["input_ids"].clone()
        return batch


class Pairs(ToySource):
    """Two words to predict in each, and of some whether a second text follows."""

    def batch(self, epoch: int, indices: np.ndarray) -> PackedBatch:
        batch = super().batch(epoch, indices)
        starts = batch["cu_seqlens"][:-1].long()
        batch["masked_lm_positions"] = torch.stack([starts, starts + 1], 1).flatten()
        batch["next_sentence_label"] = torch.where(torch.from_numpy(indices % 3 == 0), -100, batch["labels"])
        batch["labels"] = batch["input_ids"][batch["masked_lm_positions"]]
        return batch


@pytest.mark.parametrize("kind", [(BertLMHeadModel, Words, {"is_decoder": True}), (BertForPreTraining, Pairs, {})])
def test_a_loss_does_not_depend_on_batches(tmp_path: Path, kind: Any) -> None:
    """Of words that are predicted from those before, a text's first is none; -100 is none in any label."""
    cls, source, options = kind
    torch.manual_seed(1)
    model = cls(BertConfig(**SIZES, **options, initializer_range=0.5))
    found = []
    for tokens in (13, 1000):
        trainer = Trainer(
            model, toy_arguments(tmp_path, per_device_eval_batch_tokens=tokens, prediction_loss_only=True)
        )
        metrics = trainer.evaluate(source(12))
        found.append(
            {name: value for name, value in metrics.items() if "per_second" not in name and "time" not in name}
        )
    assert found[0].keys() == found[1].keys() and "eval_loss" in found[0]
    for name, value in found[0].items():
        assert abs(value - found[1][name]) <= RELATIVE["two_processes"] * max(1.0, abs(value)), name


def test_models_that_return_tuples(tmp_path: Path) -> None:
    model = toy_model()
    expected = toy_trainer(tmp_path, model).evaluate()
    model.config.return_dict = False
    found = toy_trainer(tmp_path, model).evaluate()
    assert {name: found[name] for name in ("eval_loss", "eval_accuracy")} == {
        name: expected[name] for name in ("eval_loss", "eval_accuracy")
    }


def test_an_optimizer_that_has_modes_is_told(tmp_path: Path) -> None:
    modes: list[str] = []

    class Modal(torch.optim.SGD):
        def train(self) -> None:
            modes.append("train")

        def eval(self) -> None:
            modes.append("eval")

    model = toy_model()
    arguments = toy_arguments(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    optimizer = Modal(model.parameters(), lr=0.1)
    Trainer(
        model, arguments, train_dataset=ToySource(), eval_dataset=ToySource(5), optimizers=(optimizer, None)
    ).train()
    assert modes == ["train", "eval", "train", "eval"]


def test_examples_in_their_order(tmp_path: Path) -> None:
    loader = toy_trainer(tmp_path, train_sampling_strategy="sequential").get_train_dataloader()
    assert torch.equal(next(iter(loader)).input_ids, ToySource().batch(0, np.arange(8)).input_ids)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dataloader_drop_last", True), ("auto_find_batch_size", True), ("batch_eval_metrics", True),
        ("eval_do_concat_batches", False), ("bf16_full_eval", True), ("include_for_metrics", ["inputs"]),
        ("average_tokens_across_devices", False), ("neftune_noise_alpha", 5.0), ("label_smoothing_factor", 0.1),
        ("train_sampling_strategy", "group_by_length"),
    ],
)  # fmt: skip
def test_arguments_that_would_be_ignored_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected .*, got "):
        Trainer(toy_model(), toy_arguments(tmp_path, **{name: value}))


def test_lamb_with_another_optimizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lamb: expected False with optim="):
        toy_trainer(tmp_path, lamb=True, optim="sgd").train()


def test_padded_outputs_that_cannot_be_joined(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SIZES)
    model = transformers.BertForTokenClassification(config)

    def padded(rows: list[Any]) -> dict[str, Any]:
        ids = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row["input_ids"]) for row in rows], batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": (ids > 20).long()}

    rows: Any = [{"input_ids": ids} for ids in ToySource(20).sequences]
    trainer = Trainer(model, toy_arguments(tmp_path, per_device_eval_batch_tokens=20), padded)
    with pytest.raises(ValueError, match="data_collator: expected batches whose outputs can be joined"):
        trainer.predict(rows)
