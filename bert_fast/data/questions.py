"""Questions about texts: SQuAD's JSON, or rows as `datasets` has them.

    {"version": "v2.0", "data": [{"title": "Oslo", "paragraphs": [{"context": "Oslo is a city.", "qas": [
        {"id": "1", "question": "What is Oslo?", "answers": [{"text": "a city", "answer_start": 8}]},
        {"id": "2", "question": "Who is Oslo?", "is_impossible": true, "answers": []}]}]}]}

    {"id": "1", "question": "What is Oslo?", "context": "Oslo is a city.",
     "answers": {"text": ["a city"], "answer_start": [8]}}

A question whose list of answers is empty has none; where "answers" is missing, nobody answered yet.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from bert_fast.checks import check_flag
from bert_fast.data.tables import is_unicode, read_table
from bert_fast.data.text_files import read_text_file
from bert_fast.errors import SourceError
from bert_fast.files import path_name

__all__ = ["Questions", "read_questions"]

_SHOWN_CHARS = 60  # of a text in a message


@dataclass(frozen=True, eq=False)
class Questions:
    """Questions about texts, with their right answers or without any; `len(questions)` is their number.

    Attributes:
        name: of the file, for messages.
        ids: of the questions, no two the same.
        texts: the questions.
        contexts: the texts that they are about, each once.
        context_of (int64 [n]): a place in `contexts` for every question.
        answers: the right answers of every question, [] where there is none; None: nobody answered.
        spans (int64 [n, 2] or None): first character of the first answer in its context, and the one behind its last;
            -1 where there is none.
        skipped: ids of questions that were left out, as an answer does not stand where it should.
    """

    name: str
    ids: list[str]
    texts: list[str]
    contexts: list[str]
    context_of: np.ndarray
    answers: list[list[str]] | None
    spans: np.ndarray | None
    skipped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, indices: np.ndarray) -> "Questions":
        """Some of the questions (int [m]), in this order, about the same contexts."""
        chosen = np.asarray(indices).tolist()
        return replace(
            self,
            ids=[self.ids[index] for index in chosen],
            texts=[self.texts[index] for index in chosen],
            context_of=self.context_of[chosen],
            answers=None if self.answers is None else [self.answers[index] for index in chosen],
            spans=None if self.spans is None else self.spans[chosen],
        )


class _Question(NamedTuple):
    place: str  # for messages
    id: str
    text: str
    context: str
    answers: list[tuple[str, int]] | None  # texts, and where they begin


def read_questions(data: Any, *, skip_wrong_answers: bool = False) -> Questions:
    """Reads questions.

    Args:
        data: path of a JSON file as SQuAD has it, version 1.1 or 2.0; or rows with the columns question, context, and
            maybe id (default: the number of the row) and answers: a path of JSON lines or Parquet, a
            `datasets.Dataset`, or a list of mappings.
        skip_wrong_answers: leaves out questions with an answer that is not what stands in the context at its
            `answer_start`; otherwise they are an error.

    Raises:
        OSError: the file cannot be read.
        SourceError: a value is missing or of another kind, an answer is not in its context, two questions have one id,
            some questions have answers and others do not say, or there is no question at all; the message names the
            place in the file, and the question.
    """
    check_flag("skip_wrong_answers", skip_wrong_answers)
    is_path = isinstance(data, str | os.PathLike)
    name = path_name("data", data) if is_path else "rows"
    document = _json_document(name) if is_path and name.lower().endswith(".json") else None
    found = _of_rows(data) if document is None else _of_document(name, document)
    kept: list[_Question] = []
    skipped: list[str] = []
    seen: set[str] = set()
    for question in found:
        if question.id in seen:
            raise SourceError(
                f"{question.place}: expected an id of its own for every question, got {question.id!r} twice"
            )
        seen.add(question.id)
        problem = _problem(question)
        if problem is None:
            kept.append(question)
        elif skip_wrong_answers:
            skipped.append(question.id)
        else:
            raise SourceError(f"{question.place}: question {question.id!r}: {problem}")
    if not kept:
        left_out = f" beside {len(skipped)} with wrong answers" if skipped else ""
        raise SourceError(f"{name}: expected at least one question, got none{left_out}")
    return _collected(name, kept, tuple(skipped))


def _collected(name: str, questions: list[_Question], skipped: tuple[str, ...]) -> Questions:
    place_of: dict[str, int] = {}
    context_of = np.array([place_of.setdefault(question.context, len(place_of)) for question in questions])
    contexts, texts = list(place_of), [question.text for question in questions]
    try:
        "".join((*contexts, *texts, *(question.id for question in questions))).encode()
    except UnicodeEncodeError:
        wrong = next(one for one in questions if not all(map(is_unicode, (one.context, one.text, one.id))))
        raise SourceError(f"{wrong.place}: expected Unicode, got half of a surrogate pair") from None
    unanswered = [question for question in questions if question.answers is None]
    if unanswered and len(unanswered) < len(questions):
        raise SourceError(f"{unanswered[0].place}: expected answers, as other questions have them, got none")
    answers = spans = None
    if not unanswered:
        answers = [[text for text, _ in question.answers or ()] for question in questions]
        first = [(question.answers or [("", -1)])[0] for question in questions]
        spans = np.array([(start, start + len(text) if start >= 0 else -1) for text, start in first], dtype=np.int64)
    ids = [question.id for question in questions]
    return Questions(name, ids, texts, contexts, context_of.astype(np.int64), answers, spans, skipped)


def _problem(question: _Question) -> str | None:
    """What is wrong with the answers of a question."""
    for text, start in question.answers or ():
        there = question.context[start : start + len(text)] if start >= 0 else ""
        if not text:
            return "expected answers with text, got an empty one"
        if there != text:
            return (
                f"expected the answer {_shown(text)} at character {start} of its context, of "
                f"{len(question.context)} characters, got {_shown(there)}"
            )
    return None


def _shown(value: Any) -> str:
    return repr(value if not isinstance(value, str) or len(value) <= _SHOWN_CHARS else f"{value[:_SHOWN_CHARS]}...")


# SQuAD's JSON


def _json_document(name: str) -> Any:
    """What a JSON file holds; None for JSON lines."""
    text = read_text_file(name)
    try:
        return json.loads(text)
    except RecursionError:
        raise SourceError(f"{name}: is nested too deeply") from None
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text[: error.pos].lstrip().startswith("{"):
            return None
        raise SourceError(f"{name}: line {error.lineno}: expected JSON: {error.msg} (column {error.colno})") from None


def _of_document(name: str, document: Any) -> Iterator[_Question]:
    if isinstance(document, list):
        for row, record in enumerate(document):
            if not isinstance(record, Mapping):
                raise SourceError(f"{name}: row {row}: expected an object, got {type(record).__name__}")
        yield from _of_rows(document, name)
        return
    if isinstance(document, Mapping) and "data" not in document and "question" in document:
        yield from _of_rows([document], name)  # one row of JSON lines
        return
    articles = _entry(document, "data", list, name)
    for i, article in enumerate(articles):
        place = f"{name}: data[{i}]"
        for j, paragraph in enumerate(_entry(article, "paragraphs", list, place)):
            place = f"{name}: data[{i}].paragraphs[{j}]"
            context = _entry(paragraph, "context", str, place)
            for k, record in enumerate(_entry(paragraph, "qas", list, place)):
                yield _question(record, context, f"{place}.qas[{k}]", _entry(record, "id", str, f"{place}.qas[{k}]"))


def _question(record: Any, context: str, place: str, identifier: str) -> _Question:
    text = _entry(record, "question", str, place)
    answers = record.get("answers")
    if record.get("is_impossible"):  # answers that seem right, but are not, go by another name
        return _Question(place, identifier, text, context, [])
    return _Question(place, identifier, text, context, None if answers is None else _answers(answers, place))


def _answers(value: Any, place: str) -> list[tuple[str, int]]:
    """[{"text": ..., "answer_start": ...}, ...], or {"text": [...], "answer_start": [...]}."""
    if isinstance(value, Mapping):
        texts = _entry(value, "text", list, f"{place}.answers")
        starts = _entry(value, "answer_start", list, f"{place}.answers")
        if len(texts) != len(starts):
            raise SourceError(
                f"{place}.answers: expected an answer_start for each of {len(texts)} texts, got {len(starts)}"
            )
        value = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(value, list):
        raise SourceError(f"{place}.answers: expected a list, got {type(value).__name__}")
    places = [f"{place}.answers[{index}]" for index in range(len(value))]
    return [
        (_entry(answer, "text", str, where), _entry(answer, "answer_start", int, where))
        for answer, where in zip(value, places, strict=True)
    ]


def _entry(record: Any, key: str, kind: type, place: str) -> Any:
    if not isinstance(record, Mapping):
        raise SourceError(f"{place}: expected an object, got {type(record).__name__}")
    if key not in record:
        raise SourceError(f"{place}: expected {key!r}, got {', '.join(map(repr, record)) or 'an empty object'}")
    value = record[key]
    if kind is list and not isinstance(value, str) and hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, kind) or isinstance(value, bool):
        raise SourceError(f"{place}.{key}: expected {_KINDS[kind]}, got {_shown(value)}")
    return value


_KINDS = {list: "a list", str: "a string", int: "a whole number"}


# Rows


def _of_rows(data: Any, name: str | None = None) -> Iterator[_Question]:
    table = read_table(data, ("question", "context"), argument=name or "data")
    columns = {
        key: table.values(key)
        for key in ("question", "context", "id", "answers", "is_impossible")
        if key in table.names
    }
    for row in range(len(table)):
        place = table.place(row) if name is None else f"{name}: row {row}"
        record = {key: values[row] for key, values in columns.items()}
        identifier = record.get("id", row)
        yield _question(record, _entry(record, "context", str, place), place, str(identifier))
