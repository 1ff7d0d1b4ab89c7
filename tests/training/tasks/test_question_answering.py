"""Question answering: scores to answers against all spans one by one, metrics by hand, and a model that learns."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast import BertConfig, BertForQuestionAnswering
from bert_fast.data.examples import Examples
from bert_fast.errors import SourceError
from bert_fast.tokenization import BertTokenizer, Tokenizer, XLMRobertaTokenizer
from bert_fast.training.tasks.question_answering import QuestionAnswering
from tests.tokenization.native_core import needs_native
from tests.tokenization.unigram_core import forms, make_state, metaspace, trained_pieces

CONTEXT = "John,  Mary RAN to Oslo in Mays"


@pytest.fixture
def tokenizer(tmp_path: Path) -> BertTokenizer:
    words = ["who", "?", "john", "mary", "ran", "to", "oslo", "in", "may", "##s", ","]
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    return BertTokenizer(file)


def task_of(tokenizer: Tokenizer, **options: Any) -> QuestionAnswering:
    return QuestionAnswering(
        QuestionAnswering.Arguments(**{"max_seq_length": 10, "doc_stride": 2} | options), tokenizer
    )


def row(identifier: str, context: str, *answers: str) -> dict[str, Any]:
    found = {"text": list(answers), "answer_start": [context.index(answer) for answer in answers]}
    return {"id": identifier, "question": "Who?", "context": context, "answers": found}


ROWS = [row("a", CONTEXT, "Mary RAN", "Oslo"), row("b", "", *()), row("c", "in Oslo in Oslo", "Oslo")]
# a: john , mary ran to | ran to oslo in may | in may ##s; b: nothing; c: in oslo in oslo
SEQUENCES = ["C w ? S john , mary ran to S", "C w ? S ran to oslo in may S", "C w ? S in may ##s S",
             "C w ? S S", "C w ? S in oslo in oslo S"]  # fmt: skip


def scores(examples: Examples, **given: dict[int, float]) -> np.ndarray:
    """Scores of -5, but where they are given by window and place."""
    assert examples.lengths(0).tolist() == [len(sequence.split()) for sequence in SEQUENCES]
    values = [np.full(length, -5.0, np.float32) for length in examples.lengths(0)]
    for window, places in given.items():
        for place, value in places.items():
            values[int(window[1:])][place] = value
    return np.concatenate(values)


def right_scores(examples: Examples) -> tuple[np.ndarray, np.ndarray]:
    """What a model would say that knows where every window's answer is."""
    start, end = np.full((2, len(examples.sequences.ids)), -9.0, np.float32)
    begins = examples.sequences.boundaries[:-1]
    start[begins + examples.labels["start_positions"]] = end[begins + examples.labels["end_positions"]] = 4
    return start, end


def test_answers_are_text_of_the_context(tokenizer: BertTokenizer) -> None:
    task = task_of(tokenizer, n_best_size=4, max_answer_length=3)
    examples = task.read(ROWS, is_labelled=False)
    assert examples.labels == {} and task.config() == {}
    start = scores(examples, w0={6: 3.0}, w1={4: 2.0, 6: 4.0}, w2={6: 1.0}, w4={5: 1.0, 7: 2.0})
    end = scores(examples, w0={7: 3.0}, w1={4: 1.0, 6: 1.0}, w2={6: 1.0}, w4={5: 1.0, 7: 1.0})
    a, b, c = task.rows(examples, (start, end))
    assert (a["id"], a["question"], a["answer"]) == ("a", "Who?", "Mary RAN")
    found = [(answer["text"], answer["start"], answer["score"]) for answer in a["candidates"]]
    assert found[:2] == [("Mary RAN", 7, 6.0), ("Oslo", 19, 5.0)] and len(found) == 4
    shares = [answer["probability"] for answer in a["candidates"]]
    assert sum(shares) == pytest.approx(1) and shares == sorted(shares, reverse=True) and a["probability"] == shares[0]
    assert b["answer"] == "" and b["candidates"][0]["start"] == -1  # nothing else can be said
    # The better of two places of the same text, and no text twice.
    assert c["candidates"][0] | {"probability": 0} == {"text": "Oslo", "start": 11, "score": 3.0, "probability": 0}
    assert len({answer["text"] for answer in c["candidates"]}) == len(c["candidates"]) >= 2
    assert json.loads(json.dumps([a, b, c])) == [a, b, c]


def one_by_one(task: QuestionAnswering, examples: Examples, start: np.ndarray, end: np.ndarray) -> list[list[Any]]:
    """Texts and scores of the best spans of every question: all spans are made, sorted and counted."""
    options, bounds, said = task.arguments, examples.sequences.boundaries, []
    for number, asked in enumerate(examples.rows):
        spans: dict[tuple[int, int], float] = {}
        for window in np.flatnonzero(examples.row_of == number):
            places = range(bounds[window], bounds[window + 1])
            inside = [place for place in places if examples.details["characters"][place, 0] >= 0]
            for first in inside:
                for last in range(first, min(first + options.max_answer_length, inside[-1] + 1)):
                    characters = examples.details["characters"][[first, last], [0, 1]]
                    span, score = tuple(characters.tolist()), float(start[first] + end[last])
                    spans[span] = max(score, spans.get(span, score))
        best = sorted(spans.items(), key=lambda item: (-item[1], item[0]))[: options.n_best_size]
        texts: dict[str, float] = {}
        for (begin, stop), score in best:
            texts.setdefault(asked["context"][begin:stop], score)
        said.append(list(texts.items()))
    return said


@pytest.mark.parametrize("levels", [3, 1000], ids=["ties", "no ties"])
@pytest.mark.parametrize(("count", "max_length"), [(1, 1), (5, 2), (20, 7), (1000, 30)])
def test_answers_are_the_best_of_all_spans(tokenizer: BertTokenizer, levels: int, count: int, max_length: int) -> None:
    task, random = task_of(tokenizer, n_best_size=count, max_answer_length=max_length), np.random.default_rng(levels)
    examples = task.read([ROWS[0], ROWS[2]])
    shuffled = examples.take(random.permutation(len(examples)))  # windows may come in any order
    start, end = random.integers(0, levels, (2, len(shuffled.sequences.ids))).astype(np.float32)
    found = [[(one["text"], one["score"]) for one in said["candidates"]] for said in task.rows(shuffled, (start, end))]
    assert found == one_by_one(task, shuffled, start, end)


def test_questions_special_tokens_and_crossed_spans_are_no_answers(tokenizer: BertTokenizer) -> None:
    task = task_of(tokenizer)
    examples = task.read(ROWS, is_labelled=False)
    start = scores(examples, w0={1: 9.0, 8: 2.0, 9: 9.0}, w1={9: 9.0})
    end = scores(examples, w0={0: 9.0, 2: 9.0, 3: 9.0, 4: 9.0, 9: 9.0})
    a, *_ = task.rows(examples, (start, end))
    assert a["answer"] == "John" and a["candidates"][0]["score"] == 4.0


def test_no_answer_has_to_look_so_in_every_window(tokenizer: BertTokenizer) -> None:
    task = task_of(tokenizer, version_2_with_negative=True, n_best_size=2)
    examples = task.read(ROWS)
    start = scores(examples, w0={0: 9.0, 4: 1.0}, w1={0: 3.0}, w2={0: 5.0}, w4={0: 1.0})
    end = scores(examples, w0={0: 9.0, 4: 1.0}, w1={0: 1.5}, w2={0: 5.0}, w4={0: 1.0})
    a, b, c = task.rows(examples, (start, end))
    found = [(answer["text"], answer["start"], answer["score"]) for answer in a["candidates"]]
    assert found[:2] == [("", -1, 4.5), ("John", 0, 2.0)] and len(found) == 3
    assert a["answer"] == b["answer"] == c["answer"] == ""
    # No answer is better by 2.5 in a, by 12 in c: it has to be by more than the threshold.
    for threshold, expected in ((2.4, ["", ""]), (2.5, ["John", ""]), (12.0, ["John", "in"])):
        task.arguments.null_score_diff_threshold = threshold
        said = [one["answer"] for one in task.rows(examples, (start, end))]
        assert [said[0], said[2]] == expected, threshold


@needs_native
def test_answers_begin_with_a_word(shared_data: Path) -> None:
    """Where Metaspace stands alone, a token's characters are those of the space in front of it, too."""
    form = forms()["xlm-r"] | {"pre_tokenizer": metaspace()}
    tokenizer = XLMRobertaTokenizer(make_state(trained_pieces(shared_data), form))
    task = task_of(tokenizer, max_seq_length=48, n_best_size=1)
    examples = task.read([row("a", "He and Mary ran to Oslo")], is_labelled=False)
    place = tokenizer.convert_ids_to_tokens(examples.sequences.ids.tolist()).index("▁to")
    assert examples.details["characters"][place, 0] == 15, "the space counts"
    start = np.zeros(len(examples.sequences.ids), dtype=np.float32)
    start[place] = 9
    [said] = task.rows(examples, (start, start))
    assert said["answer"] == "to" and said["candidates"][0]["start"] == 16


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scores_that_are_no_numbers_are_the_worst(tokenizer: BertTokenizer, value: float) -> None:
    task = task_of(tokenizer, version_2_with_negative=True)
    examples = task.read(ROWS)
    a, *_ = task.rows(examples, (scores(examples, w0={4: 1.0}), scores(examples, w0={4: 1.0, 5: value})))
    assert a["answer"] == "John"
    everything = np.full(len(examples.sequences.ids), value)
    for said in task.rows(examples, (everything, everything)):
        assert all(np.isfinite([answer["score"], answer["probability"]]).all() for answer in said["candidates"])
    with pytest.raises(ValueError, match="predictions: expected scores of 42 tokens, got 3, 42"):
        next(task.rows(examples, (everything[:3], everything)))


@pytest.mark.parametrize(
    ("answer", "right", "exact", "score"),
    [
        ("308", ["308"], 1, 1),
        ("the 308 points", ["308"], 0, 2 / 3),  # one of two words, and the only one
        ("Denver Broncos", ["Carolina Panthers"], 0, 0),
        ("Pro Bowl pro", ["the Pro Bowl"], 0, 4 / 5),  # "pro" is counted once: 2 of 3, and 2 of 2
        ("in new york city", ["York", "New York City!"], 0, 6 / 7),  # the better of two
        ("the  a-b $1,234.50 É", ["ab 123450 é"], 1, 1),  # no case, articles, punctuation of ASCII
        ("", ["308"], 0, 0),
        ("", [], 1, 1),  # there is no answer
        ("308", [], 0, 0),
        ("卡万·肖特", ["卡万·肖特"], 1, 1),
        ("肖特", ["卡万·肖特"], 0, 0),  # a single word each
    ],
)
def test_metrics_by_hand(
    tokenizer: BertTokenizer, monkeypatch: pytest.MonkeyPatch, answer: str, right: list[str], exact: float, score: float
) -> None:
    task = task_of(tokenizer, version_2_with_negative=True)
    examples = task.read([row("q", " ".join(right), *right), row("r", "John ran", "John")])
    answers = [{"id": "q", "answer": answer}, {"id": "r", "answer": "John"}]
    monkeypatch.setattr(task, "rows", lambda *_: iter(answers))
    expected = {"exact_match": (exact + 1) / 2, "f1": (score + 1) / 2}
    assert task.metrics(examples, None) == pytest.approx(expected)


def test_right_scores_give_right_answers(tokenizer: BertTokenizer) -> None:
    task = task_of(tokenizer, version_2_with_negative=True)
    examples = task.read(ROWS)
    assert [said["answer"] for said in task.rows(examples, right_scores(examples))] == ["Mary RAN", "", "Oslo"]
    assert task.metrics(examples, right_scores(examples)) == {"exact_match": 1, "f1": 1}


def test_wrong_options(tokenizer: BertTokenizer) -> None:
    for name, value in {"max_seq_length": 7, "doc_stride": -1, "n_best_size": 0, "max_answer_length": 0}.items():
        with pytest.raises(ValueError, match=f"{name}: expected at least"):
            task_of(tokenizer, **{name: value})
    with pytest.raises(SourceError, match="question 'b': answers: expected one, got none; version_2_with_negat"):
        task_of(tokenizer).read(ROWS)
    with pytest.raises(TypeError, match="tokenizer: expected a BertTokenizer"):
        task_of(None)  # type: ignore[arg-type]


def test_arguments_are_flags() -> None:
    transformers = pytest.importorskip("transformers")
    [parsed] = transformers.HfArgumentParser(QuestionAnswering.Arguments).parse_args_into_dataclasses(
        ["--train_file", "train.json", "--doc_stride", "64", "--version_2_with_negative"]
    )
    assert parsed == QuestionAnswering.Arguments("train.json", doc_stride=64, version_2_with_negative=True)


@pytest.mark.parametrize(("language", "vocabulary"), [("en", "bert-base-uncased"), ("zh", "bert-base-chinese")])
def test_right_scores_answer_real_questions(shared_data: Path, language: str, vocabulary: str) -> None:
    tokenizer = BertTokenizer.from_pretrained(shared_data / "vocab" / vocabulary)
    task = task_of(tokenizer, max_seq_length=128, doc_stride=64, max_answer_length=60)
    examples = task.read(shared_data / "question_answering" / f"xquad.{language}.json")
    found = task.metrics(examples, right_scores(examples))
    assert 0.95 < found["exact_match"] <= found["f1"] <= 1  # answers within words cannot be said


def test_a_small_model_learns_answers_of_real_questions(shared_data: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = BertTokenizer.from_pretrained(shared_data / "vocab" / "bert-base-uncased")
    task = task_of(tokenizer, max_seq_length=384, doc_stride=128)
    examples = task.read(shared_data / "question_answering" / "xquad.en.json")
    examples = examples.take(np.flatnonzero(np.isin(examples.row_of, np.arange(0, 40, 2))))
    sizes: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    sizes |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForQuestionAnswering(BertConfig(vocab_size=len(tokenizer), **sizes, **task.config()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    batch = examples.batch(0, np.arange(len(examples)))
    for _ in range(45):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        output = model.eval()(**batch)
    found = task.metrics(examples, (output.start_logits.numpy(), output.end_logits.numpy()))
    assert found["f1"] > 0.8 and float(output.loss) < 1
