"""Question answering: scores to answers, metrics, files, and a run that learns."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast import BertConfig, BertForQuestionAnswering
from bert_fast.data.question_answering import QuestionAnsweringSource
from bert_fast.tokenization import BertTokenizer
from bert_fast.training.task import Predictions
from bert_fast.training.tasks.question_answering import QaSettings, QuestionAnsweringTask

CONTEXT = "John and Mary ran to Oslo in May"


@pytest.fixture
def tokenizer(tmp_path: Path) -> BertTokenizer:
    words = ["who", "where", "?", "john", "mary", "and", "ran", "to", "oslo", "in", "may"]
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    return BertTokenizer(file)


def row(identifier: str, question: str, *answers: str) -> dict[str, Any]:
    found = [{"text": answer, "answer_start": CONTEXT.index(answer)} for answer in answers]
    return {"id": identifier, "question": question, "context": CONTEXT, "answers": found}


ROWS = [row("a", "Who ran?", "John and Mary", "Mary"), row("b", "Where?", "Oslo"), row("c", "Who?")]


def right_scores(source: QuestionAnsweringSource) -> Predictions:
    """What a model would say that knows where every window's answer is."""
    batch = source.batch(0, np.arange(len(source)))
    begins = batch["cu_seqlens"][:-1].long()
    start, end = (torch.full(batch["input_ids"].shape, -9.0) for _ in range(2))
    start[begins + batch["start_positions"]] = 4
    end[begins + batch["end_positions"]] = 4
    predictions = Predictions(source.lengths(0))
    predictions.add(np.arange(len(source)), {"start": start.numpy(), "end": end.numpy()})
    return predictions


def test_a_share_to_judge_by_holds_whole_questions(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in ROWS))
    settings = QaSettings(str(file), valid_share=0.34, max_length=12, stride=2)
    train, valid = settings.sources(tokenizer, seed=1, tokens_dir=None, on_main=lambda action: action())
    assert (train.num_questions, valid.num_questions) == (2, 1)
    assert {*train.questions.ids, *valid.questions.ids} == {"a", "b", "c"}
    assert len(valid) > 1 and len(train) > 2  # windows


def test_right_scores_give_right_answers(tokenizer: BertTokenizer) -> None:
    source = QuestionAnsweringSource.read(ROWS, tokenizer, max_length=12, stride=2)
    assert len(source) > len(ROWS)
    task = QuestionAnsweringTask(source, source)
    assert task.may_abstain
    assert task.answers(source, right_scores(source)) == {"a": "John and Mary", "b": "Oslo", "c": ""}
    assert task.score(source, right_scores(source)) == {"exact_match": 1, "f1": 1}


def test_who_must_not_abstain_always_answers(tokenizer: BertTokenizer) -> None:
    source = QuestionAnsweringSource.read(ROWS, tokenizer)
    task = QuestionAnsweringTask(source, may_abstain=False)
    answers = task.answers(source, right_scores(source))
    assert answers["a"] == "John and Mary" and answers["c"] != ""
    score = task.score(source, right_scores(source))
    assert score == pytest.approx({"exact_match": 2 / 3, "f1": 2 / 3})
    assert not QuestionAnsweringTask(QuestionAnsweringSource.read(ROWS[:2], tokenizer)).may_abstain
    assert not QuestionAnsweringTask().may_abstain


def test_a_threshold_decides_when_there_is_no_answer(tokenizer: BertTokenizer) -> None:
    source = QuestionAnsweringSource.read(ROWS, tokenizer)
    # The score of no answer less that of the best one: -13 where one was found, 26 where none was.
    for threshold, count in ((-27, 3), (0, 1), (25, 1), (27, 0)):
        task = QuestionAnsweringTask(source, null_threshold=threshold)
        assert list(task.answers(source, right_scores(source)).values()).count("") == count, threshold


def test_metrics_take_the_best_of_several_right_answers(tokenizer: BertTokenizer) -> None:
    source = QuestionAnsweringSource.read(ROWS[:2], tokenizer)
    predictions = Predictions(source.lengths(0))
    lengths = source.lengths(0)
    start, end = np.full((2, int(lengths.sum())), -9.0, dtype=np.float32)
    start[[7, lengths[0] + 9]] = end[[7, lengths[0] + 10]] = 1
    assert source.decode(1).split()[9:11] == ["<oslo>", "in"]
    predictions.add(np.arange(2), {"start": start, "end": end})
    task = QuestionAnsweringTask(source, source)
    assert task.answers(source, predictions) == {"a": "Mary", "b": "Oslo in"}
    assert task.score(source, predictions) == pytest.approx({"exact_match": 1 / 2, "f1": (1 + 2 / 3) / 2})


def test_answers_are_short(tokenizer: BertTokenizer) -> None:
    source = QuestionAnsweringSource.read(ROWS[:1], tokenizer)
    task = QuestionAnsweringTask(source, max_answer_length=2)
    [answer] = task.answers(source, right_scores(source)).values()
    assert len(answer.split()) <= 2


def test_predictions_are_squad_files(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    source = QuestionAnsweringSource.read(ROWS, tokenizer)
    task = QuestionAnsweringTask(source, n_best=3)
    files = task.write_predictions(tmp_path / "predictions" / "valid", source, right_scores(source))
    assert [file.name for file in files] == ["valid.json", "valid.nbest.json"]
    assert json.loads(files[0].read_text()) == {"a": "John and Mary", "b": "Oslo", "c": ""}
    best = json.loads(files[1].read_text())
    assert best["a"][0]["text"] == "John and Mary" and best["a"][0]["start"] == 0 and best["a"][0]["score"] == 8
    assert best["c"][0]["text"] == "" and len(best["c"]) == 4
    assert sum(answer["probability"] for answer in best["a"]) == pytest.approx(1)


def test_questions_that_nobody_answered(tokenizer: BertTokenizer) -> None:
    source = QuestionAnsweringSource.read([{"question": "Who ran?", "context": CONTEXT}], tokenizer)
    task = QuestionAnsweringTask(may_abstain=True)
    model, batch = make_model(len(tokenizer)).eval(), source.batch(0, np.array([0]))
    parts, scores = task.predict(model, batch)
    assert parts == {} and task.label_counts(batch) == {}
    assert scores["start"].dtype == torch.float32 and scores["end"].shape == batch["input_ids"].shape
    predictions = Predictions(source.lengths(0))
    predictions.add(np.array([0]), {name: value.detach().numpy() for name, value in scores.items()})
    [found] = task.rows(source, predictions)
    assert found["id"] == "0" and found["question"] == "Who ran?" and found["answer"] in CONTEXT
    with pytest.raises(ValueError, match="expected questions with answers"):
        task.score(source, predictions)
    with pytest.raises(TypeError, match="expected a QuestionAnsweringSource, got list"):
        task.describe([], 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["max_answer_length", "n_best"])
def test_wrong_options(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        QuestionAnsweringTask(**{name: 0})


def make_model(vocab_size: int) -> BertForQuestionAnswering:
    torch.set_num_threads(1)
    sizes: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    sizes |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForQuestionAnswering(
        BertConfig(vocab_size=vocab_size, **sizes, **QuestionAnsweringTask().model_config())
    )


def test_the_loss_of_two_batches_is_that_of_one(tokenizer: BertTokenizer) -> None:
    lost = {"id": "d", "question": "Who?", "context": "\u200b", "answers": [{"text": "\u200b", "answer_start": 0}]}
    source = QuestionAnsweringSource.read([*ROWS, lost], tokenizer)
    task = QuestionAnsweringTask(source)
    model = make_model(len(tokenizer)).double().eval()
    batches = [source.batch(0, np.array(indices)) for indices in ([0, 1, 2, 3], [0, 3], [1, 2], [3])]
    counts = [task.label_counts(batch)["loss"] for batch in batches]
    assert counts == [3, 1, 2, 0]  # of the fourth no token is left
    sums = [task.loss_parts(model, batch)["loss"] * n for batch, n in zip(batches, counts, strict=True)]
    assert torch.allclose(sums[0], sums[1] + sums[2]) and sums[3] == 0


@pytest.mark.parametrize(("language", "vocabulary"), [("en", "bert-base-uncased"), ("zh", "bert-base-chinese")])
def test_right_scores_answer_real_questions(shared_data: Path, language: str, vocabulary: str) -> None:
    tokenizer = BertTokenizer.from_pretrained(shared_data / "vocab" / vocabulary)
    file = shared_data / "question_answering" / f"xquad.{language}.json"
    source = QuestionAnsweringSource.read(file, tokenizer, max_length=128, stride=64)
    task = QuestionAnsweringTask(None, source, max_answer_length=60)
    score = task.score(source, right_scores(source))
    assert 0.95 < score["exact_match"] <= score["f1"] <= 1  # answers within words cannot be said


def test_a_small_model_learns_answers_of_real_questions(shared_data: Path) -> None:
    torch.manual_seed(0)
    tokenizer = BertTokenizer.from_pretrained(shared_data / "vocab" / "bert-base-uncased")
    file = shared_data / "question_answering" / "xquad.en.json"
    source = QuestionAnsweringSource.read(file, tokenizer).take_questions(np.arange(0, 40, 2))
    task = QuestionAnsweringTask(source, source)
    model = make_model(len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    batch = source.batch(0, np.arange(len(source)))
    for _ in range(45):
        task.loss_parts(model, batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        parts, scores = task.predict(model.eval(), batch)
    predictions = Predictions(source.lengths(0))
    predictions.add(np.arange(len(source)), {name: value.numpy() for name, value in scores.items()})
    metrics = task.score(source, predictions)
    assert metrics["f1"] > 0.8 and float(parts["loss"]) < 1
