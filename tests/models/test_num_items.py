"""`num_items_in_batch`: losses of a step's batches add up to the mean over all its labels, as transformers' do."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

import bert_fast
from bert_fast.testing.parity import randomize

transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own deprecations

SIZES = dict(
    vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
)  # fmt: skip
WORDS = ("BertForMaskedLM", "BertLMHeadModel", "BertForTokenClassification")
LOSSES = {
    "BertForMaskedLM": "ForMaskedLM",
    "BertLMHeadModel": "ForCausalLM",
    "BertForTokenClassification": "ForTokenClassification",
    "BertForSequenceClassification": "ForSequenceClassification",
}
LABELLED = (9, 1, 2, 7, 0, 9, 3, 3)  # words of every example


def models(name: str, **changes: Any) -> tuple[Any, Any]:
    """(transformers' model, ours with its weights), in fp64."""
    settings = {**SIZES, "is_decoder": name == "BertLMHeadModel", **changes}
    theirs = getattr(transformers, name)(transformers.BertConfig(**settings)).double()
    randomize(theirs)
    ours = getattr(bert_fast, name)(bert_fast.BertConfig(**settings)).double()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def examples(name: str) -> list[dict[str, Tensor]]:
    """Eight of nine words, each with another number of labels."""
    found = []
    for number, labelled in enumerate(LABELLED):
        words = torch.randint(5, 40, (9,))
        labels = torch.tensor(number % 2)
        if name in WORDS:
            labels = words % 3 if name == "BertForTokenClassification" else words.clone()
            labels[labelled:] = -100
        found.append({"input_ids": words, "labels": labels})
    return found


def joined(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("count", [11, torch.tensor(11), torch.tensor([11.0])])
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_that_of_transformers_loss_functions(name: str, count: Any) -> None:
    from transformers.loss.loss_utils import LOSS_MAPPING

    _, model = models(name)
    batch = joined(examples(name)[:4])
    output = model.eval()(**batch, num_items_in_batch=count)
    how: dict[str, Any] = {"logits": output.logits, "labels": batch["labels"], "num_items_in_batch": count}
    if name == "BertForSequenceClassification":
        how["pooled_logits"] = how.pop("logits")
    expected = LOSS_MAPPING[LOSSES[name]](vocab_size=40, config=transformers.BertConfig(**SIZES), **how)
    torch.testing.assert_close(output.loss.float(), expected.float().reshape(()))


def test_answers_count_once() -> None:
    from transformers.loss.loss_utils import ForQuestionAnsweringLoss

    _, model = models("BertForQuestionAnswering", num_labels=2)
    places = {"start_positions": torch.tensor([1, 9, 3]), "end_positions": torch.tensor([2, 9, 8])}
    output = model(torch.randint(5, 40, (3, 9)), **places, num_items_in_batch=5)
    expected = ForQuestionAnsweringLoss(output.start_logits, output.end_logits, **places, num_items_in_batch=5)
    torch.testing.assert_close(output.loss, expected)


class InOrder(transformers.Trainer):
    """Takes the examples as they come."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


def one_step(model: nn.Module, rows: list[dict[str, Tensor]], folder: Path, batches: int) -> dict[str, Tensor]:
    """The loss that Trainer reports, and all gradients, of a step that is cut into so many batches."""
    found: dict[str, Tensor] = {}

    class Keep(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            found.update(gradients(model))

    arguments = transformers.TrainingArguments(
        str(folder), max_steps=1, per_device_train_batch_size=len(rows) // batches,
        gradient_accumulation_steps=batches, learning_rate=0.0, max_grad_norm=0.0, use_cpu=True, report_to=[],
        save_strategy="no", logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    trainer = InOrder(model, arguments, train_dataset=rows, callbacks=[Keep()])
    trainer.train()
    return {"loss": torch.tensor(next(log["loss"] for log in trainer.state.log_history if "loss" in log)), **found}


@pytest.mark.parametrize("name", ["BertLMHeadModel", "BertForMaskedLM", "BertForSequenceClassification"])
def test_accumulation_under_trainer_is_the_whole_batch(name: str, tmp_path: Path) -> None:
    """Our model in two batches, transformers' in one; where theirs honours the number, theirs in two batches as well.

    Their other heads ignore it, and Trainer does not divide by the number of batches: fused models do as they do.
    """
    pytest.importorskip("accelerate")
    theirs, ours = models(name)
    rows = examples(name)
    fused = bert_fast.fuse(copy.deepcopy(theirs))
    whole = one_step(copy.deepcopy(theirs), rows, tmp_path, 1)
    cut, own, their_fused = (one_step(model, rows, tmp_path, 2) for model in (theirs, ours, fused))
    assert ours.accepts_loss_kwargs
    for key, value in whole.items():
        torch.testing.assert_close(own[key].float(), value.float(), msg=key)
        torch.testing.assert_close(their_fused[key].float(), cut[key].float(), msg=key)
    theirs_honours = name == "BertLMHeadModel"
    assert torch.isclose(cut["loss"], whole["loss"]) == theirs_honours


@pytest.mark.parametrize("problem_type", ["regression", "multi_label_classification"])
@pytest.mark.parametrize("is_masked", [False, True])
def test_numbers_and_several_classes(problem_type: str, is_masked: bool) -> None:
    _, model = models("BertForSequenceClassification", problem_type=problem_type)
    batch = {"input_ids": torch.randint(5, 40, (5, 9)), "labels": torch.rand(5, 3).round().double()}
    mask = torch.tensor([True, False, True, True, False]) if is_masked else None
    kept = 3 if is_masked else 5
    whole = model(**batch, loss_mask=mask).loss
    parts = [
        model(
            **{key: value[part] for key, value in batch.items()}, num_items_in_batch=kept * 3,
            loss_mask=None if mask is None else mask[part],
        ).loss
        for part in (slice(0, 2), slice(2, 5))
    ]  # fmt: skip
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("problem_type", ["single_label_classification", "regression", "multi_label_classification"])
def test_rows_that_a_mask_leaves_out_are_as_if_they_were_not_there(problem_type: str) -> None:
    _, model = models("BertForSequenceClassification", problem_type=problem_type)
    mask = torch.tensor([True, False, True, True, False])
    labels = torch.rand(5, 3).round() if problem_type != "single_label_classification" else torch.randint(3, (5,))
    batch = {"input_ids": torch.randint(5, 40, (5, 9)), "labels": labels}
    masked = model(**batch, loss_mask=mask).loss
    torch.testing.assert_close(masked, model(**{name: value[mask] for name, value in batch.items()}).loss)
    assert not torch.isclose(masked, model(**batch).loss)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertLMHeadModel"])
def test_every_way_to_the_loss_of_words(name: str) -> None:
    """With logits and without, padded and packed; labels at positions."""
    theirs, model = models(name)
    batch = joined(examples(name)[:4])
    packed: dict[str, Any] = {key: value.flatten() for key, value in batch.items()}
    packed |= {"cu_seqlens": torch.arange(5, dtype=torch.int32) * 9, "max_seqlen": 9}
    expected = model.train()(**batch, num_items_in_batch=7).loss
    others = [model(**one, output_logits=True, num_items_in_batch=7).loss for one in (batch, packed)]
    others.append(model(**packed, num_items_in_batch=torch.tensor(7)).loss)
    if name == "BertLMHeadModel":
        fused = bert_fast.fuse(theirs).train()
        others += [fused(**one, num_items_in_batch=7).loss for one in (batch, packed)]
        others.append(fused(**batch, output_logits=False, num_items_in_batch=7).loss)
    else:
        places = (packed["labels"] != -100).nonzero().squeeze(1)
        at = {"input_ids": batch["input_ids"], "labels": packed["labels"][places], "masked_lm_positions": places}
        others.append(model(**at, num_items_in_batch=7).loss)
    for other in others:
        torch.testing.assert_close(other.float(), expected.float())


def test_without_labels_and_without_sense() -> None:
    _, model = models("BertForTokenClassification")
    words = torch.randint(5, 40, (2, 9))
    none = torch.full_like(words, -100)
    for count in (0, torch.tensor(0), 3):
        assert model(words, labels=none, num_items_in_batch=count).loss == 0
    wrong: tuple[tuple[Any, type[Exception]], ...] = (
        ("3", TypeError),
        (True, TypeError),
        (-1, ValueError),
        (torch.ones(2), ValueError),
    )
    for count, error in wrong:
        with pytest.raises(error, match="num_items_in_batch: expected"):
            model(words, labels=words % 3, num_items_in_batch=count)
    assert not bert_fast.BertModel(model.config).accepts_loss_kwargs
    assert not bert_fast.BertForPreTraining(model.config).accepts_loss_kwargs  # which has labels of two kinds
