"""Windows over the texts that answer questions."""

import json
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast.data import PackedCollator
from bert_fast.data.batches import Source
from bert_fast.data.question_answering import QuestionAnsweringSource
from bert_fast.tokenization import BertTokenizer

WORDS = ["who", "ran", "?", "he", "to", "john", "mary", "oslo", "in", "may", "aker", "##selv", "##a"]
CONTEXT = "John, Mary ran to Oslo in May"


@pytest.fixture
def tokenizer(tmp_path: Path) -> BertTokenizer:
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ",", *WORDS]), encoding="utf-8")
    return BertTokenizer(file)


def row(identifier: str, context: str, answer: str | None, question: str = "Who ran?") -> dict[str, Any]:
    answers = [] if answer is None else [{"text": answer, "answer_start": context.index(answer)}]
    return {"id": identifier, "question": question, "context": context, "answers": answers}


def test_windows_and_answers(tokenizer: BertTokenizer) -> None:
    rows = [row("a", CONTEXT, "Oslo"), row("b", CONTEXT, None), row("c", "Akerselva", "kerselv"), row("d", "", None)]
    source = QuestionAnsweringSource.read(rows, tokenizer, max_length=11, stride=2)
    assert isinstance(source, Source)
    assert [source.decode(index) for index in range(len(source))] == [
        "[CLS] who ran ? [SEP] john , mary ran to [SEP]",
        "[CLS] who ran ? [SEP] ran to <oslo> in may [SEP]",
        "[CLS] who ran ? [SEP] john , mary ran to [SEP]",
        "[CLS] who ran ? [SEP] ran to oslo in may [SEP]",
        "[CLS] who ran ? [SEP] <aker ##selv> ##a [SEP]",
        "[CLS] who ran ? [SEP] [SEP]",
    ]
    assert source.windows.question.tolist() == [0, 0, 1, 1, 2, 3]
    assert source.windows.first.tolist() == [0, 3, 0, 3, 0, 0]
    batch = source.batch(0, np.arange(6))
    assert batch["start_positions"].tolist() == [0, 7, 0, 0, 5, 0]
    assert batch["end_positions"].tolist() == [0, 7, 0, 0, 6, 0]
    assert batch["token_type_ids"][:11].tolist() == [0] * 5 + [1] * 6
    assert source.lengths(0).tolist() == [11, 11, 11, 11, 9, 6]
    assert source.has_unanswerable and source.is_labelled and source.num_questions == 4


def test_a_batch_is_its_windows_in_any_order(tokenizer: BertTokenizer) -> None:
    rows = [row("a", CONTEXT, "Oslo"), row("b", "he ran", "ran")]
    source = QuestionAnsweringSource.read(rows, tokenizer, max_length=11, stride=2)
    indices = np.array([2, 0, 1, 2])
    batch, joined = source.batch(0, indices), PackedCollator()([source[index] for index in indices])
    assert set(batch) == set(joined) | {"position_ids"}
    for name in ("input_ids", "token_type_ids", "cu_seqlens", "start_positions", "end_positions"):
        assert torch.equal(batch[name], joined[name]) and batch[name].dtype == joined[name].dtype, name
    copy = pickle.loads(pickle.dumps(source)).batch(0, indices)
    assert all(torch.equal(batch[name], copy[name]) for name in ("input_ids", "start_positions"))


def test_an_answer_cut_by_a_window_is_not_in_it(tokenizer: BertTokenizer) -> None:
    source = QuestionAnsweringSource.read([row("a", CONTEXT, "ran to Oslo")], tokenizer, max_length=10, stride=2)
    assert [source.decode(index)[22:-6] for index in range(len(source))] == [
        "john , mary ran", "mary <ran to oslo>", "to oslo in may",
    ]  # fmt: skip


def test_an_answer_of_which_no_token_is_left_teaches_nothing(tokenizer: BertTokenizer) -> None:
    source = QuestionAnsweringSource.read([row("a", "john \u200b ran", "\u200b")], tokenizer)
    batch = source.batch(0, np.array([0]))
    assert batch["start_positions"].tolist() == batch["end_positions"].tolist() == [len(batch["input_ids"])]


def test_questions_without_answers(tokenizer: BertTokenizer) -> None:
    source = QuestionAnsweringSource.read([{"question": "Who ran?", "context": CONTEXT}], tokenizer)
    assert "start_positions" not in source.batch(0, np.array([0])) and "start_positions" not in source[0]
    assert not source.is_labelled and not source.has_unanswerable
    assert source.decode(0) == "[CLS] who ran ? [SEP] john , mary ran to oslo in may [SEP]"


def test_long_questions_leave_room(tokenizer: BertTokenizer) -> None:
    rows = [row("a", CONTEXT, "May", "who " * 200), row("b", CONTEXT, "May")]
    source = QuestionAnsweringSource.read(rows, tokenizer, max_length=400)
    assert source.lengths(0).tolist() == [64 + 3 + 8, 3 + 3 + 8]
    source = QuestionAnsweringSource.read(rows, tokenizer, max_length=13, stride=100)
    assert source.lengths(0).max() == 13
    # Room for 5 tokens and 7; more than that cannot be shared: half of it is, 2 and 3.
    assert source.windows.first.tolist() == [0, 3, 0, 4]
    assert source.windows.length.tolist() == [5, 5, 7, 4]


@pytest.mark.parametrize(("options", "name"), [({"max_length": 7}, "max_length"), ({"stride": -1}, "stride")])
def test_wrong_options(tokenizer: BertTokenizer, options: dict[str, int], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected at least"):
        QuestionAnsweringSource.read([row("a", CONTEXT, "May")], tokenizer, **options)


def test_some_of_the_questions(tokenizer: BertTokenizer) -> None:
    rows = [row("a", CONTEXT, "Oslo"), row("b", "he ran", "ran"), row("c", CONTEXT, None)]
    source = QuestionAnsweringSource.read(rows, tokenizer, max_length=11, stride=2)
    some = source.take_questions(np.array([1, 0]))
    assert some.questions.ids == ["b", "a"] and not some.has_unanswerable
    assert [some.decode(index) for index in range(3)] == [source.decode(index) for index in (2, 0, 1)]


def test_tokens_are_kept_from_one_run_to_the_next(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    rows, kept = [row("a", CONTEXT, "Oslo")], tmp_path / "kept"
    first = QuestionAnsweringSource.read(rows, tokenizer, cache_dir=kept)
    [file] = kept.iterdir()
    before = file.stat().st_mtime_ns
    again = QuestionAnsweringSource.read(rows, tokenizer, cache_dir=kept, max_length=11, stride=2)
    assert file.stat().st_mtime_ns == before and first.decode(0) != again.decode(0)
    QuestionAnsweringSource.read([row("a", CONTEXT + ".", "Oslo")], tokenizer, cache_dir=kept)
    assert len(list(kept.iterdir())) == 2


def by_definition(
    tokenizer: Any, source: QuestionAnsweringSource, index: int, **options: int
) -> Iterator[tuple[list[int], list[int], int, int]]:
    """Ids, token types, start and end of every window of a question, from the tokenizer's offsets."""
    questions = source.questions
    assert questions.spans is not None
    begin, stop = questions.spans[index].tolist()
    encoded = tokenizer(
        questions.texts[index], questions.contexts[questions.context_of[index]], truncation="only_second",
        return_overflowing_tokens=True, return_offsets_mapping=True, **options,
    )  # fmt: skip
    for ids, types, offsets in zip(
        encoded["input_ids"], encoded["token_type_ids"], encoded["offset_mapping"], strict=True
    ):
        tokens = [token for token in range(len(ids) - 1) if types[token] == 1]
        inside = [token for token in tokens if offsets[token][1] > begin and offsets[token][0] < stop]
        is_whole = offsets[tokens[0]][0] <= begin and offsets[tokens[-1]][1] >= stop
        yield ids, types, *((inside[0], inside[-1]) if is_whole and inside else (0, 0))


@pytest.mark.parametrize(
    ("language", "vocabulary", "max_length", "stride"),
    [("en", "bert-base-uncased", 384, 128), ("en", "bert-base-cased", 96, 20), ("zh", "bert-base-chinese", 128, 64)],
)
def test_real_windows_are_those_of_the_definition(
    shared_data: Path, language: str, vocabulary: str, max_length: int, stride: int
) -> None:
    tokenizer = BertTokenizer.from_pretrained(shared_data / "vocab" / vocabulary)
    file = shared_data / "question_answering" / f"xquad.{language}.json"
    source = QuestionAnsweringSource.read(file, tokenizer, max_length=max_length, stride=stride)
    assert not source.has_unanswerable
    for index in range(0, source.num_questions, 9):
        windows = np.flatnonzero(source.windows.question == index)
        expected = list(by_definition(tokenizer, source, index, max_length=max_length, stride=stride))
        assert len(expected) == len(windows)
        for window, (ids, types, start, end) in zip(windows.tolist(), expected, strict=True):
            example = source[window]
            assert example["input_ids"].tolist() == ids and example["token_type_ids"].tolist() == types
            assert (example["start_positions"], example["end_positions"]) == (start, end), (index, window)


@pytest.mark.parametrize(
    ("name", "max_length", "stride"),
    [("384_stride128", 384, 128), ("512_stride128", 512, 128), ("128_stride64", 128, 64)],
)
def test_lengths_are_those_counted_by_another_tokenizer(
    shared_data: Path, name: str, max_length: int, stride: int
) -> None:
    stored = json.loads((shared_data / "length_distributions" / f"squad_windows_{name}.json").read_text())
    tokenizer = BertTokenizer.from_pretrained(shared_data / "vocab" / "bert-base-uncased")
    file = shared_data / "question_answering" / "xquad.en.json"
    lengths = QuestionAnsweringSource.read(file, tokenizer, max_length=max_length, stride=stride).lengths(0)
    assert Counter(lengths.tolist()) == {int(length): count for length, count in stored["histogram"].items()}


@pytest.mark.parametrize(("language", "vocabulary"), [("en", "bert-base-uncased"), ("zh", "bert-base-chinese")])
def test_real_answers_are_found_again_by_their_tokens(shared_data: Path, language: str, vocabulary: str) -> None:
    tokenizer = BertTokenizer.from_pretrained(shared_data / "vocab" / vocabulary)
    file = shared_data / "question_answering" / f"xquad.{language}.json"
    source = QuestionAnsweringSource.read(file, tokenizer)
    questions, windows = source.questions, source.windows
    batch = source.batch(0, np.arange(len(source)))
    answered, whole = set(), 0
    for window in np.flatnonzero(batch["start_positions"].numpy()).tolist():
        question = int(windows.question[window])
        context, shift = int(questions.context_of[question]), int(windows.first[window] - windows.offset[window])
        spans = source.context_spans[source.context_tokens[context] :]
        start = spans[int(batch["start_positions"][window]) + shift, 0]
        stop = spans[int(batch["end_positions"][window]) + shift, 1]
        assert questions.answers is not None
        found, [answer] = questions.contexts[context][start:stop], questions.answers[question]
        assert answer.strip() in found
        whole += found == answer
        answered.add(question)
    assert len(answered) == source.num_questions
    assert whole >= 0.97 * len(answered)  # an answer may begin or end within a word
