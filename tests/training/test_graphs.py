"""Runs whose forward and backward are replayed graphs: they learn what others learn. See `tests/recorded_graph.py`."""

import shutil
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import bert_fast
from bert_fast import BertTokenizer, graphs
from bert_fast.data import tokenize_files
from bert_fast.data.batches import Batches
from bert_fast.data.pretraining import PretrainingSource
from bert_fast.errors import BackendError
from bert_fast.testing.tolerances import RELATIVE
from bert_fast.training import Trainer, TrainingArguments, replaying
from bert_fast.training import trainer as trainer_module
from bert_fast.training.replaying import run_budgets
from bert_fast.training.tasks import task_named
from tests import recorded_graph
from tests.recorded_graph import RecordedGraph
from tests.training.toy import ToySource, toy_arguments, toy_model, toy_trainer

LETTERS = list("abcdefgh")
TOKENIZER = BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "?", *LETTERS])
SIZES: dict[str, Any] = {
    "vocab_size": 6 + len(LETTERS), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 64, "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
EPS = 1e-2  # of AdamW: its division by small numbers would make much of rounding


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[RecordedGraph]]:
    torch.set_num_threads(1)
    recorded_graph.install(monkeypatch)
    yield RecordedGraph
    RecordedGraph.all.clear()


def texts(count: int, longest: int = 30) -> list[list[str]]:
    draw = np.random.default_rng(count)
    return [draw.choice(LETTERS, draw.integers(1, longest)).tolist() for _ in range(count)]


def pretraining(folder: Path, next_sentence: bool) -> tuple[Any, Any, dict[str, Any]]:
    path = folder / "corpus.txt"
    lines = [" ".join(words) for words in texts(80, 12)]
    path.write_text("\n\n".join("\n".join(lines[start : start + 5]) for start in range(0, 80, 5)))
    store = tokenize_files([path], folder / "store", TOKENIZER)
    source = PretrainingSource(store, TOKENIZER, max_length=40, next_sentence=next_sentence)
    return source, bert_fast.BertForPreTraining if next_sentence else bert_fast.BertForMaskedLM, {}


def of_task(name: str, rows: list[dict[str, Any]], **arguments: Any) -> tuple[Any, Any, dict[str, Any]]:
    """(examples, class of the model, fields of its configuration) of a task of `bert-fast finetune`."""
    kind = task_named(name)
    task = kind(kind.Arguments(train_file="unused", **arguments), TOKENIZER)
    return task.read(rows), kind.model_class, task.config()


def classification(labels: list[Any], **arguments: Any) -> tuple[Any, Any, dict[str, Any]]:
    rows = [{"text": " ".join(words), "label": label} for words, label in zip(texts(len(labels)), labels, strict=True)]
    return of_task("classify", rows, **arguments)


def entities() -> tuple[Any, Any, dict[str, Any]]:
    rows = [{"tokens": words, "ner_tags": ["B-X" if word < "c" else "O" for word in words]} for words in texts(40)]
    return of_task("ner", rows)


def questions() -> tuple[Any, Any, dict[str, Any]]:
    """Of windows; some hold no answer."""
    rows = []
    for number, words in enumerate(texts(24)):
        context = " ".join(words)
        answers = {"text": [words[-1]], "answer_start": [len(context) - 1]}
        rows.append({"id": str(number), "question": "a b ?", "context": context, "answers": answers})
    return of_task("qa", rows, max_seq_length=20, doc_stride=4)


def choices() -> tuple[Any, Any, dict[str, Any]]:
    rows = [
        {"sent1": " ".join(words), "sent2": words[0], "label": len(words) % 3,
         "ending0": words[0], "ending1": "b", "ending2": "c d e"}
        for words in texts(40)
    ]  # fmt: skip
    return of_task("choice", rows)


TASKS = {
    "pretrain": lambda folder: pretraining(folder, next_sentence=True),
    "pretrain, words": lambda folder: pretraining(folder, next_sentence=False),
    "classify": lambda folder: classification(list("xyz") * 13),
    "classify, numbers": lambda folder: classification([k / 7 for k in range(40)], do_regression=True),
    "ner": lambda folder: entities(),
    "qa": lambda folder: questions(),
    "choice": lambda folder: choices(),
}


def settings(folder: Path, on: bool, **changes: Any) -> TrainingArguments:
    common: dict[str, Any] = {"logging_steps": 1, "save_strategy": "no", "weight_decay": 0.1, "adam_epsilon": EPS}
    return toy_arguments(folder, graphs=on, **common | changes)


def model_of(cls: Any, values: dict[str, Any], **changes: Any) -> Any:
    torch.manual_seed(3)
    config = getattr(cls, "config_class", None) or bert_fast.BertConfig
    return cls(config(**SIZES | values | changes))


def trained(model: Any, source: Any, arguments: TrainingArguments) -> tuple[list[tuple[float, float]], Tensor]:
    """((loss, norm of the gradients) of all steps, how far the weights went)."""
    start = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    trainer = Trainer(model, arguments, train_dataset=source, eval_dataset=source)
    trainer.train()
    assert all(p.grad is None for p in model.parameters())
    way = torch.cat([p.detach().flatten() for p in model.parameters()]) - start
    return [(one["loss"], one["grad_norm"]) for one in trainer.state.log_history if "loss" in one], way


def assert_alike(one: Any, other: Any, tolerance: float = RELATIVE["replayed_steps"]) -> None:
    """As far as sums in another order allow, which filled batches have."""
    (losses, way), (expected, expected_way) = one, other
    assert len(losses) == len(expected) > 0
    for now, then in zip(losses, expected, strict=True):
        assert now == pytest.approx(then, rel=tolerance)
    assert expected_way.abs().max() > 0
    assert (way - expected_way).abs().max() <= tolerance * expected_way.abs().max()


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", TASKS)
def test_a_run_learns_the_same(name: str, accumulation: int, recorded: type[RecordedGraph], tmp_path: Path) -> None:
    """With dropout, evaluations between the steps, and epochs that end in a smaller batch."""
    source, cls, values = TASKS[name](tmp_path)
    results = []
    for on in (False, True):
        arguments = settings(
            tmp_path / str(on), on, max_steps=30 // accumulation, per_device_train_batch_size=5,
            gradient_accumulation_steps=accumulation, eval_strategy="steps", eval_steps=4,
        )  # fmt: skip
        results.append(trained(model_of(cls, values), source, arguments))
    assert len(recorded.all) > 1, "one budget only"
    assert recorded.num_replays > 4
    assert_alike(results[1], results[0])


def test_batches_beyond_all_budgets(
    recorded: type[RecordedGraph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run as they are, add to the same gradients, and leave them where graphs find them."""
    results = []
    for on, kept, least in ((False, slice(None), 0), (True, slice(-1), 10), (True, slice(1), 1)):
        monkeypatch.setattr(trainer_module, "run_budgets", lambda *given, kept=kept: run_budgets(*given)[kept])
        arguments = settings(
            tmp_path / f"{on} {kept}", on, max_steps=24, gradient_accumulation_steps=3, per_device_train_batch_size=4,
            seed=3,
        )  # fmt: skip
        before = recorded.num_replays
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results.append(trained(toy_model(), ToySource(), arguments))
        assert on == any("fits into no budget" in str(one.message) for one in caught)
        assert recorded.num_replays - before >= least
        assert_alike(results[-1], results[0])


def test_batches_of_a_budget_of_tokens(recorded: type[RecordedGraph], tmp_path: Path) -> None:
    results = [
        trained(
            toy_model(), ToySource(), settings(tmp_path, on, per_device_train_batch_tokens=48, max_steps=20, seed=5)
        )
        for on in (False, True)
    ]
    assert len(recorded.all) == 1
    assert_alike(results[1], results[0])


SAVING: dict[str, Any] = {"max_steps": 24, "save_strategy": "steps", "save_steps": 11}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Path, Any]]:
    """Whole runs without graphs and with them: the folder of their checkpoints, what they learnt."""
    torch.set_num_threads(1)
    found = {}
    for on in (False, True):
        folder = tmp_path_factory.mktemp("run")
        with pytest.MonkeyPatch.context() as patch:
            recorded_graph.install(patch)
            found[on] = folder, trained(toy_model(), ToySource(), settings(folder, on, **SAVING))
            assert (RecordedGraph.num_replays > 0) == on
    return found


@pytest.mark.parametrize("order", [(True, False), (False, True), (True, True)], ids=["off", "on", "on again"])
def test_a_run_goes_on_with_or_without(
    order: tuple[bool, bool], runs: dict[bool, tuple[Path, Any]], recorded: type[RecordedGraph], tmp_path: Path
) -> None:
    """From the checkpoint of a run that was cut off."""
    shutil.copytree(runs[order[0]][0] / "checkpoint-11", tmp_path / "checkpoint-11")
    start = toy_model().state_dict()
    then = Trainer(toy_model(), settings(tmp_path, order[1], **SAVING), train_dataset=ToySource())
    then.train(resume_from_checkpoint=True)
    assert (recorded.num_replays > 0) == order[1]
    told = [(one["loss"], one["grad_norm"]) for one in then.state.log_history if "loss" in one]
    way = torch.cat([(value - start[name]).flatten() for name, value in then.model.named_parameters()]).detach()
    assert_alike((told, way), runs[False][1])


class Penalized(torch.nn.Module):
    """Has an operator of PyTorch's see a weight, of which autocast then keeps a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = toy_model(dropout=0.0)
        self.config = self.inner.config

    def forward(self, labels: Any = None, **batch: Any) -> Any:
        outputs = self.inner(labels=labels, **batch)
        weight = self.inner.classifier.weight
        penalty = torch.nn.functional.linear(torch.ones_like(weight), weight).square().mean()
        return {"loss": outputs["loss"] + penalty.float(), "logits": outputs["logits"]}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("is_outer", [False, True], ids=["own", "around the run"])
def test_a_replay_does_what_a_call_does(
    bf16: bool, is_outer: bool, recorded: type[RecordedGraph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autocast keeps copies of weights while it is on; a graph must not have been captured with old ones."""
    results = []
    for num_warmup in (10**6, 2):
        is_replayed = num_warmup == 2
        monkeypatch.setattr(replaying, "CapturedStep", partial(graphs.CapturedStep, num_warmup=num_warmup))
        arguments = settings(
            tmp_path, True, max_steps=16, bf16=bf16, per_device_train_batch_size=16, learning_rate=1e-2
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=is_outer, cache_enabled=is_replayed):
            results.append(trained(Penalized(), ToySource(), arguments))
        assert (recorded.num_replays > 5) == is_replayed
    # With the cache two uses of a weight add up their gradients in bf16.
    assert_alike(results[1], results[0], RELATIVE["training_step_loss_bf16"])


@pytest.mark.parametrize("regression", [False, True])
def test_fused_models(regression: bool, recorded: type[RecordedGraph], tmp_path: Path) -> None:
    """They take no loss_mask: -100 leaves out classes, and nothing leaves out numbers."""
    source, _, values = TASKS["classify, numbers" if regression else "classify"](tmp_path)
    results = []
    for on in (False, True):
        model = model_of(transformers.BertForSequenceClassification, values, classifier_dropout=0.0)
        bert_fast.fuse(model)  # its own dropout draws from a stream, of which a larger batch takes more
        arguments = settings(tmp_path, on, max_steps=20, per_device_train_batch_size=5)
        if regression and on:
            with pytest.raises(
                ValueError, match=r"graphs: expected False for a .* problem_type 'regression'.* got True"
            ):
                Trainer(model, arguments)
            return
        results.append(trained(model, source, arguments))
    assert recorded.num_replays > 3
    assert_alike(results[1], results[0])


def test_what_cannot_be_captured_is_said(recorded: type[RecordedGraph], tmp_path: Path) -> None:
    class Looking(Penalized):
        def forward(self, **batch: Any) -> Any:
            outputs = super().forward(**batch)
            assert outputs["loss"].item() > 0
            return outputs

    trainer = Trainer(Looking(), settings(tmp_path, True), train_dataset=ToySource())
    with pytest.raises(BackendError, match=r"step: it could not be captured for Budget.*max_tokens=.*not permitted"):
        trainer.train()
    assert not recorded.all and recorded.num_replays == 0


def test_no_gradient_begins_in_a_capture(recorded: type[RecordedGraph], tmp_path: Path) -> None:
    class Late(Penalized):
        calls = 0

        def forward(self, **batch: Any) -> Any:
            self.calls += 1
            self.inner.classifier.bias.requires_grad_(self.calls > 3)
            return super().forward(**batch)

    with pytest.raises(BackendError, match="a parameter has its first gradient in a capture"):
        Trainer(Late(), settings(tmp_path, True, per_device_train_batch_size=50), train_dataset=ToySource()).train()


def test_budgets_hold_the_batches_of_all_epochs(tmp_path: Path) -> None:
    for name, make in TASKS.items():
        folder = tmp_path / name
        folder.mkdir()
        batches = Batches(make(folder)[0], batch_size=3, seed=1)
        budgets = run_budgets(batches, 3, 64)
        for epoch in range(3):
            for number, size in enumerate(batches.sizes(epoch)):
                batch = batches.batch(epoch, number)
                labels = [len(batch["masked_lm_positions"])] if "masked_lm_positions" in batch else []
                assert size[:2] == (len(batch["input_ids"]), batch.num_sequences)
                assert len(size) == 2 + len(labels) and all(most >= n for most, n in zip(size[2:], labels, strict=True))
                assert not all(budget.reasons_against(batch) for budget in budgets)
    assert batches.sizes(0, 2) == batches.sizes(0)[:2]


def test_only_some_batches_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "_BATCHES_LOOKED_AT", 10)
    looked_at: list[Any] = []
    batches = Batches(ToySource(50), batch_size=8)
    monkeypatch.setattr(batches, "sizes", lambda *given: looked_at.append(given) or Batches.sizes(batches, *given))
    run_budgets(batches, 10**9, 16)
    assert looked_at == [(0, 10), (1, 3)]


def test_devices_without_graphs(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"graphs: expected a CUDA device \(graphs are CUDA's\), got cpu"):
        toy_trainer(tmp_path / "run", graphs=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(BackendError, match="device: expected a CUDA device"):
        graphs.CapturedStep(print, [graphs.Budget(1, 1, 1)], device="cpu")
