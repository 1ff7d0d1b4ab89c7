"""Whole steps as CUDA graphs: what fills their buffers, which budget a batch takes, and on a GPU the replays."""

import warnings
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import bert_fast
from bert_fast import BertConfig, BertForMaskedLM, graphs, optim
from bert_fast.errors import BackendError
from bert_fast.graphs import steps
from bert_fast.testing.tolerances import RELATIVE

CONFIG = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
BUDGET = graphs.Budget(max_tokens=16, max_sequences=3, max_seqlen=5, max_labels=4)


def packed(*lengths: int, per: str = "sequence") -> dict[str, Any]:
    """A packed batch with labels of sequences, of tokens, or of masked_lm_positions."""
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    ids = torch.randint(1, 50, (total,), generator=generator)
    batch = {"input_ids": ids, "cu_seqlens": cu_seqlens, "max_seqlen": max(lengths)}
    if per == "position":
        positions = torch.arange(0, total, 3)
        return batch | {"masked_lm_positions": positions, "labels": ids[positions]}
    count = len(lengths) if per == "sequence" else total
    return batch | {"labels": torch.randint(0, 2, (count,), generator=generator)}


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """Relative to the largest element expected."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny))


def test_what_a_batch_leaves_is_filled_with_sequences_nobody_asks_about() -> None:
    batch = packed(4, 2, per="token")
    filled = graphs.TokenBuffers(BUDGET, batch, "cpu").fill(batch)
    assert filled["input_ids"].tolist() == [*batch["input_ids"].tolist(), *[0] * 10]
    assert filled["labels"].tolist() == [*batch["labels"].tolist(), *[-100] * 10]
    assert filled["cu_seqlens"].tolist() == [0, 4, 6, 11, 16, 16, 16, 16]
    assert filled["max_seqlen"] == 5


def test_batches_follow_one_another_in_the_same_memory() -> None:
    buffers = graphs.TokenBuffers(BUDGET, packed(5, 5, 5), "cpu")
    addresses = [t.data_ptr() for t in buffers.batch.values() if isinstance(t, Tensor)]
    for lengths in ((5, 5, 5), (1, 2), (5, 5, 5)):
        batch = packed(*lengths)
        filled = buffers.fill(batch)
        assert [t.data_ptr() for t in filled.values() if isinstance(t, Tensor)] == addresses
        assert filled["cu_seqlens"][: len(lengths) + 1].tolist() == batch["cu_seqlens"].tolist()
        assert filled["cu_seqlens"].diff().min() >= 0 and filled["cu_seqlens"].diff().max() <= 5
        assert filled["cu_seqlens"][-1] == 16
        assert filled["labels"][len(lengths) :].eq(-100).all()


def test_every_batch_within_the_budget_fits() -> None:
    budget = graphs.Budget(max_tokens=7, max_sequences=7, max_seqlen=3)
    buffers = graphs.TokenBuffers(budget, packed(2, 1), "cpu")
    for lengths in ((1,) * 7, (3, 3, 1), (1,), (2, 2, 2)):
        cu_seqlens = buffers.fill(packed(*lengths))["cu_seqlens"]
        assert cu_seqlens[-1] == 7 and cu_seqlens.diff().max() <= 3


def labelled(kind: str, *lengths: int) -> tuple[type[Any], dict[str, Any], dict[str, Any]]:
    """A class, what its configuration says beside the rest, and a packed batch with labels of a kind."""
    generator = torch.Generator().manual_seed(len(lengths))
    count, total = len(lengths), sum(lengths)

    def whole(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    batch = {name: value for name, value in packed(*lengths).items() if name != "labels"}
    positions = torch.arange(0, total, 3)
    at_places = {"masked_lm_positions": positions, "labels": whole(50, len(positions))}
    of_head: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "classes": ("SequenceClassification", {"num_labels": 3}, {"labels": whole(3, count)}),
        "a number": ("SequenceClassification", {"num_labels": 1}, {"labels": torch.randn(count, generator=generator)}),
        "numbers": (
            "SequenceClassification", {"num_labels": 3, "problem_type": "regression"},
            {"labels": torch.randn(count, 3, generator=generator)},
        ),
        "several classes": ("SequenceClassification", {"num_labels": 3}, {"labels": whole(2, count, 3).float()}),
        "one column of whole numbers": ("SequenceClassification", {"num_labels": 1}, {"labels": whole(9, count)}),
        "spans": (
            "QuestionAnswering", {}, {"start_positions": torch.zeros(count, dtype=torch.int64),
                                      "end_positions": torch.tensor(lengths) - 1},
        ),
        "outside": (
            "QuestionAnswering", {}, {"start_positions": torch.tensor([0, *[99] * (count - 1)]),
                                      "end_positions": torch.full((count,), -3)},
        ),
        "next sentence": ("NextSentencePrediction", {}, {"labels": whole(2, count)}),
        "choices": ("MultipleChoice", {}, {"labels": whole(2, count // 2), "num_choices": 2}),
        "tokens": ("TokenClassification", {"num_labels": 3}, {"labels": whole(3, total)}),
        "words": ("MaskedLM", {}, {"labels": whole(50, total)}),
        "words at places": ("MaskedLM", {}, at_places),
        "pre-training": ("PreTraining", {}, at_places | {"next_sentence_label": whole(2, count)}),
        "next word": ("LMHead", {"is_decoder": True}, {"labels": whole(50, total)}),
    }  # fmt: skip
    name, options, labels = of_head[kind]
    return getattr(bert_fast, "BertLMHeadModel" if name == "LMHead" else f"BertFor{name}"), options, batch | labels


KINDS = (
    "classes", "a number", "numbers", "several classes", "one column of whole numbers", "spans", "outside",
    "next sentence", "choices", "tokens", "words", "words at places", "pre-training", "next word",
)  # fmt: skip


@pytest.mark.parametrize("lengths", [(4, 5), (1, 1), (5, 5), (4, 5, 1, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_filling_changes_neither_loss_nor_gradients(kind: str, lengths: tuple[int, ...]) -> None:
    """The first batch was another one: buffers hold what it left."""
    torch.manual_seed(0)
    cls, options, batch = labelled(kind, *lengths)
    plain = {name: value for name, value in CONFIG.to_dict().items() if name not in ("id2label", "label2id")}
    model = cls(BertConfig(**(plain | options))).double().train()
    if batch.get("labels", batch["input_ids"]).is_floating_point():
        batch["labels"] = batch["labels"].double()
    longest = {name: t.double() if torch.is_tensor(t) and t.is_floating_point() else t
               for name, t in labelled(kind, 5, 5, 5, 1)[2].items()}  # fmt: skip
    budget = graphs.Budget(max_tokens=16, max_sequences=4, max_seqlen=5, max_labels=6)
    buffers = graphs.TokenBuffers(budget, longest, "cpu")
    buffers.fill(longest)
    results = []
    for inputs in (batch, buffers.fill(batch)):
        loss = model(**inputs).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        model.zero_grad()
    expected, actual = (torch.cat([t.flatten() for t in result]) for result in results)
    assert expected.abs().max() > 0 or lengths == (1, 1), "nothing was compared"
    assert largest_difference(actual, expected) <= RELATIVE["filled_batch_fp64"]


def test_labels_of_sequences_come_with_a_mask() -> None:
    batch = packed(2, 3) | {"labels": torch.tensor([0.5, -1.0])}
    buffers = graphs.TokenBuffers(BUDGET, batch, "cpu")
    for _ in range(2):
        filled = buffers.fill(batch)
        assert filled["loss_mask"].tolist() == [True] * 2 + [False] * 5
        assert filled["labels"].tolist() == [0.5, -1.0] + [0.0] * 5
    own = batch | {"loss_mask": torch.tensor([True, False])}
    assert graphs.TokenBuffers(BUDGET, own, "cpu").fill(own)["loss_mask"].tolist() == [True] + [False] * 6
    of_tokens = packed(2, 3) | {"labels": torch.zeros(5)}
    with pytest.raises(
        ValueError, match=r"batch\['labels'\]: expected integers where labels belong to tokens, got float32"
    ):
        graphs.TokenBuffers(BUDGET, of_tokens, "cpu")
    assert "loss_mask" not in graphs.TokenBuffers(BUDGET, of_tokens, "cpu", fill={"labels": 0.0}).fill(of_tokens)


def test_choices_are_filled_question_by_question() -> None:
    batch = labelled("choices", 2, 3, 1, 4)[2]
    budget = graphs.Budget(max_tokens=16, max_sequences=5, max_seqlen=5)
    filled = graphs.TokenBuffers(budget, batch, "cpu").fill(batch)
    assert filled["num_choices"] == 2 and len(filled["cu_seqlens"]) == 11  # 9 slots, and one for whole questions
    assert filled["labels"].tolist() == [*batch["labels"].tolist(), *[-100] * 3]
    with pytest.raises(ValueError, match=r"batch\['num_choices'\]: expected 2 \(the first batch's\), got 4"):
        graphs.TokenBuffers(budget, batch, "cpu").fill(batch | {"num_choices": 4})


def test_unused_places_hold_what_was_asked_for() -> None:
    batch = packed(2, 3) | {"start_positions": torch.tensor([1, 2])}
    filled = graphs.TokenBuffers(BUDGET, batch, "cpu", fill={"start_positions": 99, "input_ids": 3}).fill(batch)
    assert filled["start_positions"].tolist() == [1, 2, 99, 99, 99, 99, 99]
    assert filled["input_ids"][5:].tolist() == [3] * 11


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            packed(5, 5, 5, 5),
            r"max_tokens: expected at most 16 tokens, got 20; max_sequences: expected at most 3 sequen",
        ),
        (packed(6), "max_seqlen: expected at most 5 tokens a sequence, got 6"),
        (packed(5, 5, 5, per="position"), "max_labels: expected at most 4 labels, got 5"),
        ({k: v for k, v in packed(2, 1).items() if k != "labels"}, r"expected the entries \['input_ids', 'labels'\]"),
        ({"input_ids": torch.zeros(1)}, r"expected input_ids or inputs_embeds, cu_seqlens and max_seqlen, got"),
        (packed(2, 1) | {"labels": torch.zeros(5, dtype=torch.int64)}, r"batch\['labels'\]: expected shape \[2\], got"),
    ],
)
def test_messages_of_batches(batch: dict[str, Any], message: str) -> None:
    buffers = graphs.TokenBuffers(BUDGET, packed(3, 4), "cpu")
    with pytest.raises(ValueError, match=message):
        buffers.fill(batch)


OFFSETS = torch.tensor([0, 2, 5], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        pytest.param({"cu_seqlens": OFFSETS * 3}, ValueError, "expected offsets that rise from 0 to .*5", id="end"),
        pytest.param({"cu_seqlens": OFFSETS - 1}, ValueError, "expected offsets that rise from 0 to .*5", id="start"),
        pytest.param({"cu_seqlens": OFFSETS.flip(0)}, ValueError, "expected offsets that rise from 0", id="falling"),
        pytest.param({"cu_seqlens": OFFSETS.long()}, TypeError, "cu_seqlens'.: expected dtype int32", id="dtype"),
        pytest.param({"cu_seqlens": OFFSETS[0]}, ValueError, r"cu_seqlens'.: expected shape \[B \+ 1\]", id="number"),
        pytest.param({"cu_seqlens": OFFSETS[:0]}, ValueError, "cu_seqlens'.: expected at least one entry", id="none"),
        pytest.param({"max_seqlen": 2}, ValueError, "max_seqlen'.: expected at least the longest sequence", id="short"),
        pytest.param({"max_seqlen": 2.5}, TypeError, "max_seqlen'.: expected an int", id="half"),
        pytest.param({"masked_lm_positions": torch.tensor([0, 5])}, ValueError, r"in \[0, 5\), got 5", id="position"),
        pytest.param({"labels": torch.zeros(2)}, TypeError, "labels'.: expected dtype int64", id="later entry"),
    ],
)
def test_nothing_of_a_wrong_batch_is_copied(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    """A graph replays without a look at its inputs."""
    buffers = graphs.TokenBuffers(BUDGET, packed(1, 3, per="position"), "cpu")
    before = {
        name: value.clone()
        for name, value in buffers.fill(packed(3, 1, per="position")).items()
        if name != "max_seqlen"
    }
    with pytest.raises(error, match=message):
        buffers.fill({**packed(2, 3, per="position"), **changes})
    assert all(torch.equal(buffers.batch[name], value) for name, value in before.items())


def test_messages_of_types() -> None:
    buffers = graphs.TokenBuffers(BUDGET, packed(3, 4), "cpu")
    with pytest.raises(TypeError, match=r"batch\['labels'\]: expected dtype int64 \(the first batch's\), got float32"):
        buffers.fill(packed(3, 4) | {"labels": torch.zeros(2)})
    with pytest.raises(TypeError, match="batch: expected a mapping, got list"):
        buffers.fill([1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"batch\['labels'\]: expected an entry for each of 2 tokens or 2 sequences"):
        graphs.TokenBuffers(BUDGET, packed(1, 1), "cpu")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_tokens": 0}, ValueError, "max_tokens: expected at least 1, got 0"),
        ({"max_seqlen": 5.0}, TypeError, "max_seqlen: expected an int, got float"),
        ({"max_labels": -1}, ValueError, "max_labels: expected at least 1, got -1"),
    ],
)
def test_messages_of_budgets(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        graphs.Budget(**{"max_tokens": 8, "max_sequences": 2, "max_seqlen": 4, **arguments})


def test_graphs_are_refused_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match="CUDA graphs need a CUDA device, and torch sees none"):
        graphs.CapturedStep(print, [BUDGET])
    with pytest.raises(BackendError, match=r"device: expected a CUDA device \(graphs are CUDA's\), got cpu"):
        graphs.CapturedStep(print, [BUDGET], device="cpu")
    with pytest.raises(ValueError, match=r"budgets: expected at least one Budget, got \[\]"):
        graphs.CapturedStep(print, [])
    with pytest.raises(ValueError, match="num_warmup: expected at least 1"):
        graphs.CapturedStep(print, [BUDGET], num_warmup=0)


class FakeGraph:
    """Replays by calling again what was captured; capturing runs nothing."""

    steps: ClassVar[list[Any]] = []

    def replay(self) -> None:
        self.steps.append("replay")

    def pool(self) -> str:
        return "pool"


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """CapturedStep on the CPU, with CUDA's part noted instead of done."""
    FakeGraph.steps = []

    @contextmanager
    def capturing(graph: FakeGraph, pool: Any, stream: Any, capture_error_mode: str) -> Any:
        FakeGraph.steps.append(("capture", pool))
        yield

    @contextmanager
    def on_device(device: Any) -> Any:
        yield

    buffers = graphs.TokenBuffers
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(steps, "TokenBuffers", lambda budget, batch, device, fill: buffers(budget, batch, "cpu", fill))
    monkeypatch.setattr(graphs.CapturedStep, "_warm_up", lambda self, inputs: self.step(inputs))
    monkeypatch.setattr(graphs.CapturedStep, "_side_stream", lambda self: None)
    return FakeGraph.steps


def test_a_budget_warms_up_then_captures_once_then_replays(without_cuda: list[Any]) -> None:
    small = graphs.Budget(max_tokens=6, max_sequences=2, max_seqlen=5)

    def step(batch: dict[str, Any]) -> int:
        without_cuda.append(len(batch["input_ids"]))
        return len(batch["input_ids"])

    captured = graphs.CapturedStep(step, [BUDGET, small], num_warmup=2)
    outputs = [captured(packed(*lengths)) for lengths in ((2, 3), (2, 2), (5,), (4, 2), (5, 5), (5, 4), (5, 3), (3, 1))]
    assert outputs == [6, 6, 6, 6, 16, 16, 16, 6]
    assert without_cuda == [6, 6, ("capture", None), 6, "replay", "replay", 16, 16, ("capture", "pool"), 16, "replay",
                            "replay"]  # fmt: skip


def test_a_step_that_raises_counts_as_none(without_cuda: list[Any]) -> None:
    """Neither as a warm-up nor as captured: the next call does it again."""
    fails = iter([True, False, True, False])

    def step(batch: dict[str, Any]) -> str:
        without_cuda.append("step")
        if next(fails, False):
            raise RuntimeError("out of memory")
        return "done"

    captured = graphs.CapturedStep(step, [BUDGET], num_warmup=1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            captured(packed(2, 3))
        assert captured(packed(2, 3)) == "done"
    assert without_cuda == ["step", "step", ("capture", None), "step", ("capture", None), "step", "replay"]


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_errors_of_a_capture_name_it(error: type[Exception], without_cuda: list[Any]) -> None:
    """But for memory, of which others know what to say."""

    def step(batch: dict[str, Any]) -> None:
        if without_cuda:
            raise error("no such thing")

    captured = graphs.CapturedStep(step, [BUDGET], num_warmup=1)
    captured(packed(2, 3))
    expected, message = (BackendError, r"could not be captured for Budget\(max_tokens=16.*: no such thing")
    if error is torch.OutOfMemoryError:
        expected, message = error, "^no such thing"
    with pytest.raises(expected, match=message):
        captured(packed(2, 3))


def test_a_batch_that_fits_no_budget_runs_uncaptured_with_one_warning(
    without_cuda: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = graphs.Budget(max_tokens=6, max_sequences=2, max_seqlen=5)
    message = (
        "it fits into no budget and runs uncaptured: .*max_tokens: expected at most 6 tokens, got 18.*"
        "expected at most 16 tokens, got 18"
    )
    step = graphs.CapturedStep(lambda batch: batch["cu_seqlens"].tolist(), [small, BUDGET])
    monkeypatch.setattr(step, "device", torch.device("cpu"))
    with pytest.warns(UserWarning, match=message):
        assert step(packed(5, 5, 5, 3)) == [0, 5, 10, 15, 18]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step(packed(5, 5, 5, 4)) == [0, 5, 10, 15, 19]
    assert without_cuda == []
    with pytest.raises(ValueError, match="expected input_ids or inputs_embeds"):
        step({"cu_seqlens": torch.zeros(1)})


def test_the_budget_with_the_least_work_is_taken(without_cuda: list[Any]) -> None:
    budgets = [
        graphs.Budget(max_tokens=16, max_sequences=2, max_seqlen=16),
        graphs.Budget(max_tokens=16, max_sequences=9, max_seqlen=4),
        graphs.Budget(max_tokens=16, max_sequences=4, max_seqlen=4),
        graphs.Budget(max_tokens=8, max_sequences=8, max_seqlen=8),
    ]
    step = graphs.CapturedStep(lambda batch: (batch["max_seqlen"], len(batch["cu_seqlens"]) - 1), budgets)
    found = [step(packed(*lengths)) for lengths in ((4, 4), (4, 4, 1), (2, *(1,) * 8), (9,))]
    assert found == [(8, 9), (4, 8), (4, 13), (16, 3)]


def test_one_stream_warms_up_and_captures(without_cuda: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[Any] = []

    class Stream:
        def __init__(self, device: Any) -> None:
            streams.append(self)

        def wait_stream(self, other: Any) -> None:
            pass

    used: list[Any] = []

    @contextmanager
    def capturing(graph: Any, **options: Any) -> Any:
        used.append(options)
        yield

    @contextmanager
    def on_stream(stream: Any) -> Any:
        used.append(stream)
        yield

    monkeypatch.undo()
    for name, value in {
        "is_available": lambda: True, "CUDAGraph": FakeGraph, "graph": capturing, "Stream": Stream, "stream": on_stream,
        "device": lambda device: nullcontext(), "current_stream": Stream,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    buffers = graphs.TokenBuffers
    monkeypatch.setattr(steps, "TokenBuffers", lambda budget, batch, device, fill: buffers(budget, batch, "cpu", fill))
    step = graphs.CapturedStep(lambda batch: None, [BUDGET], num_warmup=2)
    for _ in range(4):
        step(packed(2, 3))
    side, again, options = used
    assert side is again is options["stream"]
    assert options["capture_error_mode"] == "thread_local" and options["pool"] is None


@pytest.mark.gpu
def test_replays_train_as_steps_do() -> None:
    losses = []
    for is_captured in (False, True):
        torch.manual_seed(0)
        model = BertForMaskedLM(CONFIG).cuda()
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)

        def train(batch: dict[str, Any], model: Any = model, optimizer: Any = optimizer) -> Tensor:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        step = graphs.CapturedStep(train, [BUDGET]) if is_captured else train
        batches = [packed(*lengths, per="position") for lengths in ((4, 5, 1), (2, 2), (5,), (5, 3), (1, 4, 4), (3, 5))]
        moved = [{k: v.cuda() if isinstance(v, Tensor) else v for k, v in batch.items()} for batch in batches]
        losses.append([float(step(batch)) for batch in moved])
    assert len(set(losses[0])) == len(losses[0])
    assert largest_difference(torch.tensor(losses[1]), torch.tensor(losses[0])) <= RELATIVE["replayed_steps"]


@pytest.mark.gpu
def test_every_replay_drops_others() -> None:
    torch.manual_seed(0)
    config = BertConfig(**{**CONFIG.to_dict(), "hidden_dropout_prob": 0.5})
    model = BertForMaskedLM(config).cuda().train()
    step = graphs.CapturedStep(lambda batch: model(**batch).loss.detach(), [BUDGET], num_warmup=1)
    losses = [float(step(packed(4, 5, 1, per="position"))) for _ in range(6)]
    assert len(set(losses)) == len(losses)
