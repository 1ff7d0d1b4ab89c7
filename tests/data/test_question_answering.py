"""Questions of files and rows, and windows over the texts that answer them."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_fast.data.examples import Examples
from bert_fast.data.question_answering import read_questions, split_into_windows
from bert_fast.errors import SourceError
from bert_fast.tokenization import BertTokenizer, Tokenizer, XLMRobertaTokenizer
from tests.data.corpora import rows_of
from tests.tokenization.native_core import needs_native
from tests.tokenization.unigram_core import forms, make_state, trained_pieces

CONTEXT = "Oslo 🏙 is a city. Its river is the Akerselva."
ROWS = [
    {"id": "a", "question": "What is it?", "context": CONTEXT,
     "answers": {"text": ["a city", "city"], "answer_start": [10, 12]}},
    {"id": "b", "question": "What is it?", "context": CONTEXT, "answers": {"text": [], "answer_start": []}},
    {"id": "c", "question": "What is it?", "context": CONTEXT,
     "answers": {"text": ["Akerselva"], "answer_start": [35]}},
]  # fmt: skip


def qas(*records: dict[str, Any], context: Any = CONTEXT) -> dict[str, Any]:
    return {"version": "v2.0", "data": [{"title": "Oslo", "paragraphs": [{"context": context, "qas": list(records)}]}]}


def record(identifier: Any = "1", *answers: tuple[Any, Any], **more: Any) -> dict[str, Any]:
    found = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": identifier, "question": "What is it?", "answers": found} | more


def write(folder: Path, content: Any, name: str = "file.json") -> Path:
    file = folder / name
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file


def test_all_forms_are_the_same_questions(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    nested = qas(
        record("a", ("a city", 10), ("city", 12)),
        record("b", is_impossible=True, plausible_answers=[{"text": "Oslo", "answer_start": 0}]),
        record("c", ("Akerselva", 35), is_impossible=False),
    )
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "file.parquet")
    forms = [write(tmp_path, nested), write(tmp_path, "\ufeff" + json.dumps(nested, indent=1), "marked.json"),
             write(tmp_path, lines, "file.jsonl"), write(tmp_path, lines, "lines.json"), tmp_path / "file.parquet",
             datasets.Dataset.from_list(ROWS), ROWS]  # fmt: skip
    for form in forms:
        assert read_questions(form) == ROWS, form


def test_questions_that_nobody_answered(tmp_path: Path) -> None:
    rows = [{"question": "Who?", "context": "Me."}, {"question": "Where?", "context": "Here."}]
    assert read_questions(rows, is_labelled=False) == [{"id": str(number)} | row for number, row in enumerate(rows)]
    assert read_questions(write(tmp_path, rows[0]), is_labelled=False) == [{"id": "0"} | rows[0]]
    assert "answers" not in read_questions(ROWS, is_labelled=False)[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"data": [\n{]', r"expected JSON: .*: line 2 column 2"),
        ("[" * 100_000, "expected JSON"),
        ({"data": []}, "expected at least one question, got none"),
        ({"dta": []}, "expected data, paragraphs, context and qas as SQuAD has them: KeyError.'data'"),
        ({"data": [{"paragraphs": [3]}]}, "as SQuAD has them: TypeError"),
        (qas(record(), context=None), "question '1': context: expected a string, got None"),
        (qas({"id": "1"}), "question '1': question: expected a string, got None"),
        (qas(record("1", ("Oslo", "0"))), "question '1': answers: expected text and answer_start of each, got"),
        (qas(record("1", ("", 0))), "question '1': answers: expected '' at character 0 of the context"),
        (qas(record("b", ("river", 0))), "question 'b': answers: expected 'river' at character 0 .*, got 'Oslo '"),
        (qas(record("b", ("x", 99))), "question 'b': answers: expected 'x' at character 99 of the context, got ''"),
        (qas(record("b", ("Oslo", -4))), "question 'b': answers: expected 'Oslo' at character -4"),
        (qas(record(), record()), "question '1': expected an id of its own for every question"),
        (qas({"id": "2", "question": "Who?"}), "question '2': answers: expected text and answer_start of each"),
        (qas(record(), context="\ud800"), "question '1': context: expected a string"),
    ],
    ids=["empty", "broken", "deep", "no question", "other key", "no object", "no context", "no text", "start as text",
         "empty answer", "elsewhere", "behind the end", "negative", "same id", "no answers", "no Unicode"],
)  # fmt: skip
def test_wrong_files_are_one_line(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        read_questions(write(tmp_path, content))
    assert str(caught.value).startswith(str(tmp_path / "file.json")) and "\n" not in str(caught.value)


def test_wrong_rows_are_one_line(tmp_path: Path) -> None:
    file = write(tmp_path, json.dumps(ROWS[0]) + "\n{broken\n", "file.jsonl")
    with pytest.raises(SourceError, match=r"file.jsonl: line 2: "):
        read_questions(file)
    with pytest.raises(SourceError, match="expected a column 'context', got 'question'"):
        read_questions([{"question": "Who?"}])
    with pytest.raises(SourceError, match="question 'a': answers: expected text and answer_start of each"):
        read_questions([ROWS[0] | {"answers": {"text": ["a"], "answer_start": []}}])
    with pytest.raises(SourceError, match="question 'b': answers: expected one, got none; version_2_with_neg"):
        read_questions(ROWS, may_lack_answers=False)


@pytest.fixture
def tokenizer(tmp_path: Path) -> BertTokenizer:
    words = ["who", "ran", "?", "he", "to", "john", "mary", "oslo", "in", "may", "aker", "##selv", "##a", ","]
    return BertTokenizer(
        write(tmp_path, "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]), "vocab.txt")
    )


def asked(identifier: str, context: str, answer: str | None, text: str = "Who ran?") -> dict[str, Any]:
    found = {"text": [answer], "answer_start": [context.index(answer)]} if answer else {"text": [], "answer_start": []}
    return {"id": identifier, "question": text, "context": context, "answers": found}


def shown(examples: Examples, tokenizer: Tokenizer) -> list[str]:
    """Windows as text, the answer in angle brackets."""
    found, labels = [], examples.labels
    for index, row in enumerate(rows_of(examples.sequences)):
        tokens = tokenizer.convert_ids_to_tokens(row)
        start, end = labels["start_positions"][index], labels["end_positions"][index]
        if start:
            tokens[start], tokens[end] = f"<{tokens[start]}", f"{tokens[end]}>" if end > start else f"<{tokens[end]}>"
        found.append(" ".join(tokens))
    return found


RACE = "John, Mary ran to Oslo in May"


def test_windows_and_answers(tokenizer: BertTokenizer) -> None:
    questions = [asked("a", RACE, "Oslo"), asked("b", RACE, None), asked("c", "Akerselva", "kerselv"),
                 asked("d", "", None)]  # fmt: skip
    examples = split_into_windows(questions, tokenizer, max_length=11, stride=2)
    assert shown(examples, tokenizer) == [
        "[CLS] who ran ? [SEP] john , mary ran to [SEP]",
        "[CLS] who ran ? [SEP] ran to <oslo> in may [SEP]",
        "[CLS] who ran ? [SEP] john , mary ran to [SEP]",
        "[CLS] who ran ? [SEP] ran to oslo in may [SEP]",
        "[CLS] who ran ? [SEP] <aker ##selv> ##a [SEP]",
        "[CLS] who ran ? [SEP] [SEP]",
    ]
    assert examples.row_of.tolist() == [0, 0, 1, 1, 2, 3] and examples.rows is questions
    batch = examples.batch(0, np.array([1, 4]))
    assert batch["start_positions"].tolist() == [7, 5] and batch["end_positions"].tolist() == [7, 6]
    assert batch["token_type_ids"].tolist() == [0] * 5 + [1] * 6 + [0] * 5 + [1] * 4
    start, stop = examples.take(np.array([4])).details["characters"].T
    assert start.tolist() == [-1] * 5 + [0, 4, 8] + [-1] and stop.tolist() == [-1] * 5 + [4, 8, 9] + [-1]


def test_an_answer_cut_by_a_window_is_not_in_it(tokenizer: BertTokenizer) -> None:
    examples = split_into_windows([asked("a", RACE, "ran to Oslo")], tokenizer, max_length=10, stride=2)
    assert [text[22:-6] for text in shown(examples, tokenizer)] == [
        "john , mary ran", "mary <ran to oslo>", "to oslo in may",
    ]  # fmt: skip


def test_an_answer_of_which_no_token_is_left_teaches_nothing(tokenizer: BertTokenizer) -> None:
    examples = split_into_windows([asked("a", "john \u200b ran", "\u200b")], tokenizer, max_length=384, stride=128)
    assert examples.labels["start_positions"] == examples.labels["end_positions"] == examples.lengths(0)


def test_long_questions_leave_room(tokenizer: BertTokenizer) -> None:
    questions = [asked("a", RACE, "May", "who " * 200), asked("b", RACE, "May")]
    assert split_into_windows(questions, tokenizer, 400, 128).lengths(0).tolist() == [64 + 3 + 8, 3 + 3 + 8]
    examples = split_into_windows(questions, tokenizer, max_length=13, stride=100)
    # Room for 5 tokens and 7; more than that cannot be shared: half of it is, 2 and 3.
    assert [text.split("[SEP]")[1] for text in shown(examples, tokenizer)] == [
        " john , mary ran to ", " ran to oslo in <may> ", " john , mary ran to oslo in ", " to oslo in <may> ",
    ]  # fmt: skip


def by_definition(tokenizer: Any, question: dict[str, Any], **options: int) -> Iterator[tuple[Any, ...]]:
    """Ids, token types, start and end of every window of a question, from the tokenizer's offsets."""
    begin, stop = (
        question["answers"]["answer_start"][0],
        question["answers"]["answer_start"][0] + len(question["answers"]["text"][0]),
    )
    encoded = tokenizer(
        question["question"], question["context"], truncation="only_second", return_overflowing_tokens=True,
        return_offsets_mapping=True, **options,
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
    questions = read_questions(shared_data / "question_answering" / f"xquad.{language}.json")
    assert len(questions) == 1190
    examples = split_into_windows(questions, tokenizer, max_length, stride)
    found_ids, found_types = rows_of(examples.sequences), rows_of(examples.sequences, "token_type_ids")
    for index in range(0, len(questions), 9):
        windows = np.flatnonzero(examples.row_of == index)
        expected = list(by_definition(tokenizer, questions[index], max_length=max_length, stride=stride))
        assert len(expected) == len(windows)
        for window, (ids, types, *answer) in zip(windows.tolist(), expected, strict=True):
            assert (found_ids[window], found_types[window]) == (ids, types)
            assert [examples.labels[name][window] for name in ("start_positions", "end_positions")] == answer


@pytest.mark.parametrize(
    ("name", "max_length", "stride"),
    [("384_stride128", 384, 128), ("512_stride128", 512, 128), ("128_stride64", 128, 64)],
)
def test_lengths_are_those_counted_by_another_tokenizer(
    shared_data: Path, name: str, max_length: int, stride: int
) -> None:
    stored = json.loads((shared_data / "length_distributions" / f"squad_windows_{name}.json").read_text())
    tokenizer = BertTokenizer.from_pretrained(shared_data / "vocab" / "bert-base-uncased")
    questions = read_questions(shared_data / "question_answering" / "xquad.en.json")
    lengths = split_into_windows(questions, tokenizer, max_length, stride).lengths(0)
    assert Counter(lengths.tolist()) == {int(length): count for length, count in stored["histogram"].items()}


@needs_native
def test_windows_of_a_unigram_tokenizer(shared_data: Path) -> None:
    """Two separators, no types, and words by the mark of a space: the characters of a token may begin with it."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    state = make_state(trained_pieces(shared_data), forms()["xlm-r"])
    tokenizer = XLMRobertaTokenizer(state)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(state)), sep_token="</s>", cls_token="<s>"
    )
    questions = read_questions(shared_data / "question_answering" / "xquad.en.json")[:60]
    examples = split_into_windows(questions, tokenizer, max_length=96, stride=16)
    wanted = theirs(
        [one["question"] for one in questions], [one["context"] for one in questions], truncation="only_second",
        max_length=96, stride=16, return_overflowing_tokens=True,
    )["input_ids"]  # fmt: skip
    assert rows_of(examples.sequences) == wanted
    labels, found = examples.labels, set()
    for window in np.flatnonzero(labels["start_positions"]).tolist():
        question = questions[examples.row_of[window]]
        characters = examples.take(np.array([window])).details["characters"]
        start, stop = characters[labels["start_positions"][window], 0], characters[labels["end_positions"][window], 1]
        assert question["answers"]["text"][0] in question["context"][start:stop]
        found.add(question["id"])
    assert len(found) == len(questions)
