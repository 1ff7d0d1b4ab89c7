"""Questions in SQuAD's JSON and in rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from bert_fast.data.questions import Questions, read_questions
from bert_fast.errors import SourceError

CONTEXT = "Oslo 🏙 is a city. Its river is the Akerselva."


def qas(*records: dict[str, Any], context: Any = CONTEXT) -> dict[str, Any]:
    return {"version": "v2.0", "data": [{"title": "Oslo", "paragraphs": [{"context": context, "qas": list(records)}]}]}


def question(identifier: Any = "1", *answers: tuple[Any, Any], **more: Any) -> dict[str, Any]:
    found = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": identifier, "question": "What is it?", "answers": found} | more


def write(path: Path, content: Any, name: str = "file.json") -> Path:
    file = path / name
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file


WHOLE = qas(
    question("a", ("a city", 10), ("city", 12)),
    question("b", is_impossible=True, plausible_answers=[{"text": "Oslo", "answer_start": 0}]),
    question("c", ("Akerselva", 35), is_impossible=False),
)


def check(questions: Questions) -> None:
    assert questions.ids == ["a", "b", "c"] and questions.texts == ["What is it?"] * 3 and len(questions) == 3
    assert questions.contexts == [CONTEXT] and questions.context_of.tolist() == [0, 0, 0]
    assert questions.answers == [["a city", "city"], [], ["Akerselva"]]
    assert questions.spans is not None and questions.spans.tolist() == [[10, 16], [-1, -1], [35, 44]]


def test_squad_files(tmp_path: Path) -> None:
    check(read_questions(write(tmp_path, WHOLE)))
    check(read_questions(write(tmp_path, "\ufeff" + json.dumps(WHOLE, ensure_ascii=False, indent=1))))


FLAT = [
    {"id": "a", "question": "What is it?", "context": CONTEXT,
     "answers": {"text": ["a city", "city"], "answer_start": [10, 12]}},
    {"id": "b", "question": "What is it?", "context": CONTEXT, "answers": {"text": [], "answer_start": []}},
    {"id": "c", "question": "What is it?", "context": CONTEXT, "answers": [{"text": "Akerselva", "answer_start": 35}]},
]  # fmt: skip


def test_rows(tmp_path: Path) -> None:
    check(read_questions(FLAT))
    lines = "\n".join(map(json.dumps, FLAT))
    check(read_questions(write(tmp_path, lines, "file.jsonl")))
    check(read_questions(write(tmp_path, lines + "\n")))  # JSON lines by the name .json
    check(read_questions(write(tmp_path, FLAT)))


def test_rows_of_a_data_set(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    same = [row | {"answers": row["answers"]} for row in FLAT[:2]]
    same.append(FLAT[2] | {"answers": {"text": ["Akerselva"], "answer_start": [35]}})
    data = datasets.Dataset.from_list(same)
    check(read_questions(data))
    data.to_parquet(tmp_path / "file.parquet")
    check(read_questions(tmp_path / "file.parquet"))


def test_questions_that_nobody_answered() -> None:
    rows = [{"question": "Who?", "context": "Me."}, {"question": "Where?", "context": "Here."}]
    questions = read_questions(rows)
    assert questions.answers is None and questions.spans is None
    assert questions.ids == ["0", "1"] and questions.context_of.tolist() == [0, 1]
    assert read_questions(rows[:1]).texts == ["Who?"]


def test_one_question_in_a_file(tmp_path: Path) -> None:
    assert read_questions(write(tmp_path, {"question": "Who?", "context": "Me."})).texts == ["Who?"]


def test_some_of_the_questions(tmp_path: Path) -> None:
    some = read_questions(write(tmp_path, WHOLE)).take([2, 1])
    assert some.ids == ["c", "b"] and some.answers == [["Akerselva"], []]
    assert some.spans is not None and some.spans.tolist() == [[35, 44], [-1, -1]]


def test_answers_that_are_not_in_the_context(tmp_path: Path) -> None:
    file = write(tmp_path, qas(question("a", ("a city", 10)), question("b", ("river", 0)), question("c", ("x", 99))))
    with pytest.raises(SourceError, match=r"qas\[1\]: question 'b': expected the answer 'river' at character 0 of its"
                       r" context, of 45 characters, got 'Oslo '"):  # fmt: skip
        read_questions(file)
    questions = read_questions(file, skip_wrong_answers=True)
    assert questions.ids == ["a"] and questions.skipped == ("b", "c")
    with pytest.raises(SourceError, match="expected at least one question, got none beside 1 with wrong answers"):
        read_questions(write(tmp_path, qas(question("c", ("Oslo", -4)))), skip_wrong_answers=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"data": [', "line 1: expected JSON: Expecting value"),
        ("[" * 100_000, "nested too deeply|expected JSON"),
        ("3", "expected an object, got int"),
        ({"data": []}, "expected at least one question, got none"),
        ({"dta": []}, "expected 'data', got 'dta'"),
        ({"data": {}}, r"data: expected a list, got \{\}"),
        ({"data": [{"paragraphs": [3]}]}, r"data\[0\].paragraphs\[0\]: expected an object, got int"),
        (qas(question(), context=None), r"paragraphs\[0\].context: expected a string, got None"),
        (qas({"id": "1"}), r"qas\[0\]: expected 'question', got 'id'"),
        (qas(question(7)), r"qas\[0\].id: expected a string, got 7"),
        (qas(question("1", ("Oslo", "0"))), r"answers\[0\].answer_start: expected a whole number, got '0'"),
        (qas(question("1", ("Oslo", True))), r"answers\[0\].answer_start: expected a whole number, got True"),
        (qas(question("1", ("", 0))), "question '1': expected answers with text, got an empty one"),
        (qas(question(), question()), r"qas\[1\]: expected an id of its own for every question, got '1' twice"),
        (qas(question(), {"id": "2", "question": "Who?"}), r"qas\[1\]: expected answers, as other questions have them"),
        (qas(question(), context="\ud800"), "expected Unicode, got half of a surrogate pair"),
        (qas(question("\ud800")), r"qas\[0\]: expected Unicode, got half of a surrogate pair"),
        ([FLAT[0], 3], "row 1: expected an object, got int"),
        ([], "expected at least one row, got none"),
    ],
)  # fmt: skip
def test_wrong_files_say_where(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        read_questions(write(tmp_path, content))
    assert "file.json" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "Who?"}, "expected a column 'context'"),
        (FLAT[0] | {"answers": {"text": ["a"], "answer_start": []}}, "answers: expected an answer_start for each of 1"),
        (
            FLAT[0] | {"answers": {"text": "a city", "answer_start": [10]}},
            "text: expected a list, got 'a city'",
        ),
        (FLAT[0] | {"answers": "a city"}, "answers: expected a list, got str"),
        (FLAT[0] | {"question": 3}, "question: expected a string, got 3"),
    ],
)
def test_wrong_rows_say_where(row: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        read_questions([row])


@pytest.mark.parametrize("language", ["en", "zh"])
def test_real_answers_stand_in_their_contexts(shared_data: Path, language: str) -> None:
    questions = read_questions(shared_data / "question_answering" / f"xquad.{language}.json")
    assert len(questions) == 1190 and len(questions.contexts) == 240 and questions.skipped == ()
    assert questions.answers is not None and questions.spans is not None
    for index, (start, stop) in enumerate(questions.spans.tolist()):
        assert questions.contexts[questions.context_of[index]][start:stop] == questions.answers[index][0]
