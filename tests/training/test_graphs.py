"""Runs whose forward and backward are replayed graphs: they learn what others learn. See `tests/recorded_graph.py`."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import bert_fast
from bert_fast import BertTokenizer, graphs
from bert_fast.data import tokenize_files
from bert_fast.data.batches import Batches
from bert_fast.data.classification import ClassificationSource
from bert_fast.data.multiple_choice import MultipleChoiceSource
from bert_fast.data.pretraining import PretrainingSource
from bert_fast.data.question_answering import QuestionAnsweringSource
from bert_fast.data.token_classification import TokenClassificationSource
from bert_fast.errors import BackendError, TrainingError
from bert_fast.testing.tolerances import RELATIVE
from bert_fast.training import Trainer, TrainingConfig, loop
from bert_fast.training.distributed import Processes
from bert_fast.training.gradients import run_budgets
from bert_fast.training.observers import Observer, Step
from bert_fast.training.task import Task
from bert_fast.training.tasks.classification import ClassificationTask
from bert_fast.training.tasks.multiple_choice import MultipleChoiceTask
from bert_fast.training.tasks.pretraining import PretrainingTask
from bert_fast.training.tasks.question_answering import QuestionAnsweringTask
from bert_fast.training.tasks.token_classification import TokenClassificationTask
from bert_fast.training.training_state import load_weights
from tests import recorded_graph
from tests.recorded_graph import RecordedGraph
from tests.training.test_trainer_resume import SignalAt
from tests.training.toy import ToySource, ToyTask, toy_config, toy_model
from tests.training.toy_process import toy_trainer

pytest.importorskip("accelerate")

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


def pretraining(folder: Path, next_sentence: bool) -> tuple[Task, str]:
    path = folder / "corpus.txt"
    lines = [" ".join(words) for words in texts(80, 12)]
    path.write_text("\n\n".join("\n".join(lines[start : start + 5]) for start in range(0, 80, 5)))
    store = tokenize_files([path], folder / "store", TOKENIZER)
    source = PretrainingSource(store, TOKENIZER, max_length=40, next_sentence=next_sentence)
    return PretrainingTask(source, source), "PreTraining" if next_sentence else "MaskedLM"


def classification(labels: list[Any], regression: bool = False) -> tuple[Task, str]:
    rows = [{"text": " ".join(words), "label": label} for words, label in zip(texts(len(labels)), labels, strict=True)]
    source = ClassificationSource.read(rows, TOKENIZER, regression=regression)
    return ClassificationTask(source, source.take(np.arange(9))), "SequenceClassification"


def entities() -> tuple[Task, str]:
    rows = [{"tokens": words, "ner_tags": ["B-X" if word < "c" else "O" for word in words]} for words in texts(40)]
    source = TokenClassificationSource.read(rows, TOKENIZER)
    return TokenClassificationTask(source), "TokenClassification"


def questions() -> tuple[Task, str]:
    """Of windows; some hold no answer."""
    rows = []
    for number, words in enumerate(texts(24)):
        context = " ".join(words)
        answer = {"text": words[-1], "answer_start": len(context) - 1}
        rows.append({"id": str(number), "question": "a b ?", "context": context, "answers": [answer][: number % 3]})
    source = QuestionAnsweringSource.read(rows, TOKENIZER, max_length=20, stride=4)
    return QuestionAnsweringTask(source), "QuestionAnswering"


def choices() -> tuple[Task, str]:
    rows = [
        {"sent1": " ".join(words), "sent2": words[0], "label": len(words) % 3,
         "ending0": words[0], "ending1": "b", "ending2": "c d e"}
        for words in texts(40)
    ]  # fmt: skip
    source = MultipleChoiceSource.read(rows, TOKENIZER)
    return MultipleChoiceTask(source, source), "MultipleChoice"


TASKS = {
    "pretrain": lambda folder: pretraining(folder, next_sentence=True),
    "pretrain, words": lambda folder: pretraining(folder, next_sentence=False),
    "classify": lambda folder: classification(list("xyz") * 13),
    "classify, numbers": lambda folder: classification([k / 7 for k in range(40)], regression=True),
    "ner": lambda folder: entities(),
    "qa": lambda folder: questions(),
    "choice": lambda folder: choices(),
}


class Losses(Observer):
    def __init__(self) -> None:
        self.steps: list[Step] = []

    def step(self, step: Step) -> None:
        self.steps.append(step)


def model_of(task: Task, head: str, cls: Any = None, **changes: Any) -> Any:
    torch.manual_seed(3)
    cls = cls or getattr(bert_fast, f"BertFor{head}")
    config = getattr(cls, "config_class", None) or bert_fast.BertConfig
    return cls(config(**SIZES | task.model_config() | changes))


def toy(folder: Path, **changes: Any) -> Trainer:
    return Trainer(toy_model(), ToyTask(valid=ToySource(20, seed=1)), toy_config(folder, **changes), observers=[])


def trained(model: Any, task: Task, config: TrainingConfig) -> tuple[list[dict[str, float]], Tensor]:
    """(losses of all steps told, how far the weights went to the last step, evaluated or not)."""
    watcher = Losses()
    start = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    Trainer(model, task, config, observers=[watcher]).train()
    assert all(p.grad is None for p in model.parameters())
    load_weights(
        config.output_dir / f"checkpoints/step-{config.steps:08d}", model, Processes(replace(config, graphs=False))
    )
    way = torch.cat([p.detach().flatten() for p in model.parameters()]) - start
    return [step.losses | {"norm": step.grad_norm or 0.0} for step in watcher.steps], way


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
    task, head = TASKS[name](tmp_path)
    results = []
    for on in (False, True):
        config = TrainingConfig(
            tmp_path / str(on), steps=24 // accumulation, batch_size=5, learning_rate=1e-3, log_every=3, eval_every=4,
            gradient_accumulation=accumulation, graphs=on, weight_decay=0.1, eps=EPS,
        )  # fmt: skip
        results.append(trained(model_of(task, head), task, config))
    assert len(recorded.all) > 1, "one budget only"
    assert recorded.num_replays > 4
    assert_alike(results[1], results[0])


@pytest.mark.parametrize("dropped", ["largest", "all but the smallest"])
def test_batches_beyond_all_budgets(
    dropped: str, recorded: type[RecordedGraph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run as they are, add to the same gradients, and leave them where graphs find them."""
    monkeypatch.setattr(
        loop, "run_budgets", lambda *given: run_budgets(*given)[: -1 if dropped == "largest" else 1]
    )  # fmt: skip
    results = []
    for on in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = toy(tmp_path / str(on), steps=30, graphs=on, gradient_accumulation=3, batch_size=4, log_every=1)
            results.append(trained(trainer.model, trainer.task, trainer.config))
        assert on == any("fits into no budget" in str(one.message) for one in caught)
    assert recorded.num_replays > (10 if dropped == "largest" else 0)
    assert_alike(results[1], results[0])


def test_batches_of_a_budget_of_tokens(recorded: type[RecordedGraph], tmp_path: Path) -> None:
    results = []
    for on in (False, True):
        trainer = toy(tmp_path / str(on), batch_size=None, batch_tokens=48, graphs=on, steps=20, seed=5)
        results.append(trained(trainer.model, trainer.task, trainer.config))
    assert len(recorded.all) == 1
    assert_alike(results[1], results[0])


@pytest.mark.parametrize("order", [(True, False), (False, True), (True, True)], ids=["off", "on", "on again"])
def test_a_run_goes_on_with_or_without(order: tuple[bool, bool], recorded: type[RecordedGraph], tmp_path: Path) -> None:
    """After a signal, from its checkpoint."""
    whole = toy(tmp_path / "whole", steps=24, log_every=1)
    expected = trained(whole.model, whole.task, whole.config)
    first, then = (toy(tmp_path / "run", steps=24, log_every=1, graphs=on) for on in order)
    first.observers.append(SignalAt(11))
    assert first.train().outcome == "interrupted: SIGTERM"
    before = recorded.num_replays
    assert (before > 0) == order[0]
    watcher = Losses()
    then.observers.append(watcher)
    then.train(resume="must")
    assert [step.step for step in watcher.steps] == list(range(12, 25))
    assert (recorded.num_replays > before) == order[1]
    told = [step.losses | {"norm": step.grad_norm or 0.0} for step in watcher.steps]
    last = "checkpoints/step-00000024/model.safetensors"
    ends = [load_file(tmp_path / run / last) for run in ("run", "whole")]
    for parameter, end in ends[1].items():
        assert (ends[0][parameter] - end).abs().max() <= RELATIVE["replayed_steps"] * expected[1].abs().max()
    for now, before_it in zip(told, expected[0][11:], strict=True):
        assert now == pytest.approx(before_it, rel=RELATIVE["replayed_steps"])


def test_early_stopping(recorded: type[RecordedGraph], tmp_path: Path) -> None:
    class Falling(ToyTask):
        values = iter([0.9, 0.5, 0.3])

        def score(self, source: Any, predictions: Any) -> dict[str, float]:
            return {"accuracy": next(self.values)}

    trainer = toy_trainer(
        tmp_path, task=Falling(valid=ToySource(20)), eval_every=8, early_stopping=2, steps=40, graphs=True
    )
    result = trainer.train()
    assert (result.outcome, result.step, result.best_step) == ("stopped early", 24, 8)
    assert recorded.num_replays > 0


class Penalized(ToyTask):
    """Has an operator of PyTorch's see a weight, of which autocast then keeps a copy."""

    def loss_parts(self, model: Any, batch: Any) -> dict[str, Tensor]:
        weight = model.classifier.weight
        penalty = torch.nn.functional.linear(torch.ones_like(weight), weight).square().mean()
        return {"loss": super().loss_parts(model, batch)["loss"] + penalty.float()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("is_outer", [False, True], ids=["own", "around the run"])
def test_a_replay_does_what_a_call_does(
    precision: str, is_outer: bool, recorded: type[RecordedGraph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autocast keeps copies of weights while it is on; a graph must not have been captured with old ones."""
    results = []
    for num_warmup in (10**6, 2):
        is_replayed = num_warmup == 2
        step = partial(graphs.CapturedStep, num_warmup=num_warmup)
        monkeypatch.setattr("bert_fast.training.gradients.CapturedStep", step)
        config = toy_config(
            tmp_path / str(num_warmup),
            steps=30,
            graphs=True,
            precision=precision,
            batch_size=16,
            eps=EPS,
            learning_rate=1e-2,
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=is_outer, cache_enabled=is_replayed):
            results.append(trained(toy_model(), Penalized(), config))
        assert (recorded.num_replays > 5) == is_replayed
    # With the cache two uses of a weight add up their gradients in bf16.
    assert_alike(results[1], results[0], RELATIVE["training_step_loss_bf16"])


@pytest.mark.parametrize("regression", [False, True])
def test_fused_models(regression: bool, recorded: type[RecordedGraph], tmp_path: Path) -> None:
    """They take no loss_mask: -100 leaves out classes, and nothing leaves out numbers."""
    transformers = pytest.importorskip("transformers", minversion="5")
    task, head = TASKS["classify, numbers" if regression else "classify"](tmp_path)
    results = []
    for on in (False, True):
        model = model_of(task, head, transformers.BertForSequenceClassification, classifier_dropout=0.0)
        bert_fast.fuse(model)  # its own dropout draws from a stream, of which a larger batch takes more
        config = TrainingConfig(
            tmp_path / str(on), steps=20, batch_size=5, learning_rate=1e-3, log_every=3, graphs=on, eps=EPS
        )
        if regression and on:
            with pytest.raises(
                ValueError, match=r"graphs: expected False for a .* problem_type 'regression'.* got True"
            ):
                Trainer(model, task, config)
            return
        results.append(trained(model, task, config))
    assert recorded.num_replays > 3
    assert_alike(results[1], results[0])


def test_what_cannot_be_captured_is_said(recorded: type[RecordedGraph], tmp_path: Path) -> None:
    class Looking(ToyTask):
        def loss_parts(self, model: Any, batch: Any) -> dict[str, Tensor]:
            parts = super().loss_parts(model, batch)
            assert parts["loss"].item() > 0
            return parts

    trainer = toy_trainer(tmp_path, task=Looking(), graphs=True)
    with pytest.raises(BackendError, match=r"step: it could not be captured for Budget.*max_tokens=.*not permitted"):
        trainer.train()
    assert not recorded.all and recorded.num_replays == 0
    assert toy_trainer(tmp_path, task=ToyTask(), steps=12).train().outcome == "finished"


def test_memory_that_a_capture_lacks_is_explained(recorded: type[RecordedGraph], tmp_path: Path) -> None:
    class Greedy(ToyTask):
        calls = 0

        def loss_parts(self, model: Any, batch: Any) -> dict[str, Tensor]:
            self.calls += 1
            return super().loss_parts(model, batch) if self.calls < 4 else {"loss": torch.empty(2**60)}

    with pytest.raises(TrainingError, match=r"step 4: out of memory with \d+ tokens"):
        toy_trainer(tmp_path, task=Greedy(), graphs=True, batch_size=50).train()


def test_no_gradient_begins_in_a_capture(recorded: type[RecordedGraph], tmp_path: Path) -> None:
    class Late(ToyTask):
        calls = 0

        def loss_parts(self, model: Any, batch: Any) -> dict[str, Tensor]:
            self.calls += 1
            model.classifier.bias.requires_grad_(self.calls > 3)
            return super().loss_parts(model, batch)

    with pytest.raises(BackendError, match="a parameter has its first gradient in a capture"):
        toy_trainer(tmp_path, task=Late(), graphs=True, batch_size=50).train()


def test_budgets_hold_the_batches_of_all_epochs(tmp_path: Path) -> None:
    for name, make in TASKS.items():
        folder = tmp_path / name
        folder.mkdir()
        task, _ = make(folder)
        assert task.train is not None
        batches = Batches(task.train, batch_size=3, seed=1)
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
    monkeypatch.setattr("bert_fast.training.gradients._BATCHES_LOOKED_AT", 10)
    looked_at: list[Any] = []
    batches = Batches(ToySource(50), batch_size=8)
    monkeypatch.setattr(batches, "sizes", lambda *given: looked_at.append(given) or Batches.sizes(batches, *given))
    run_budgets(batches, 10**9, 16)
    assert looked_at == [(0, 10), (1, 3)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp16"}, "graphs: expected False with precision='fp16', got True"),
        ({"sharding": "fsdp2"}, "graphs: expected False with sharding='fsdp2', got True"),
        ({"gradient_checkpointing": True}, "graphs: expected False with gradient_checkpointing=True, got True"),
        ({"graphs": 1}, "graphs: expected a bool, got int"),
    ],
)
def test_settings_that_graphs_do_not_go_with(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = toy_config(tmp_path)
    assert not config.graphs
    with pytest.raises((TypeError, ValueError), match=message):
        replace(config, **{"graphs": True, **changes})


def test_devices_without_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match=r"graphs: expected a CUDA device \(graphs are CUDA's\), got cpu"):
        toy_trainer(tmp_path / "run", graphs=True)
    assert not (tmp_path / "run").exists()
    recorded_graph.install(monkeypatch)
    monkeypatch.setattr("accelerate.Accelerator.num_processes", 2)
    with pytest.raises(ValueError, match="graphs: expected False for 2 processes, got True"):
        toy_trainer(tmp_path / "run", graphs=True)
    monkeypatch.undo()
    with pytest.raises(BackendError, match="device: expected a CUDA device"):
        graphs.CapturedStep(print, [graphs.Budget(1, 1, 1)], device="cpu")
