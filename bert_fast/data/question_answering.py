"""Questions about texts, in SQuAD's JSON or in rows, and the windows of tokens in which a model looks for the answers.

    {"version": "v2.0", "data": [{"title": "Oslo", "paragraphs": [{"context": "Oslo is a city.", "qas": [
        {"id": "1", "question": "What is Oslo?", "answers": [{"text": "a city", "answer_start": 8}]},
        {"id": "2", "question": "Who is Oslo?", "is_impossible": true, "answers": []}]}]}]}

    {"id": "1", "question": "What is Oslo?", "context": "Oslo is a city.",
     "answers": {"text": ["a city"], "answer_start": [8]}}

A context that does not fit beside its question becomes several windows. Here 5 of its tokens fit, and windows share 2:

    [CLS] who ran ? [SEP] john mary ran to oslo [SEP]    the answer is "oslo": start 9, end 9
    [CLS] who ran ? [SEP] to oslo in may [SEP]           start 6, end 6
"""

import json
import os
import re
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from bert_fast.data.examples import Examples
from bert_fast.data.files import read_rows
from bert_fast.data.records import read_text
from bert_fast.data.sequences import Sequences, ranges
from bert_fast.errors import SourceError
from bert_fast.tokenization import Tokenizer

_MAX_QUESTION_TOKENS = 64  # Devlin et al. 2018 (arXiv:1810.04805), in the scripts beside the paper
_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character: no Unicode


def read_questions(data: Any, is_labelled: bool = True, may_lack_answers: bool = True) -> list[dict[str, Any]]:
    """Returns questions as mappings of id, question, context and answers: {"text": [...], "answer_start": [...]}.

    Args:
        data: path of JSON as SQuAD has it, version 1.1 or 2.0; or rows with the columns question, context, answers and
            maybe id (default: the number of the row), as `read_rows` takes them.
        is_labelled: False: answers are not looked at, and questions come without them.
        may_lack_answers: whether the answers of a question may be none.

    Raises:
        OSError: the file cannot be read.
        SourceError: there is no question, a value is missing or of another kind, two questions have one id, or an
            answer is not what stands in its context at answer_start; the message names file and question.
    """
    name = os.fspath(data) if isinstance(data, str | os.PathLike) else "data"
    rows = _squad_rows(name) if name.lower().endswith(".json") else None
    if rows is None:
        columns = ["question", "context", *(["answers"] if is_labelled else [])]
        rows = read_rows(data, columns, optional=("id", "is_impossible")).to_list()
    questions: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(rows):
        question = {"id": str(row.get("id", number)), "question": row.get("question"), "context": row.get("context")}
        place = f"{name}: question {question['id']!r}"
        if question["id"] in questions:
            raise SourceError(f"{place}: expected an id of its own for every question, got this one twice")
        for column, text in question.items():
            if not isinstance(text, str) or _SURROGATE.search(text):
                raise SourceError(f"{place}: {column}: expected a string, got {reprlib.repr(text)}")
        if is_labelled:
            question["answers"] = _answers(row, f"{place}: answers")
            if not question["answers"]["text"] and not may_lack_answers:
                raise SourceError(f"{place}: answers: expected one, got none; version_2_with_negative allows that")
        questions[question["id"]] = question
    if not questions:
        raise SourceError(f"{name}: expected at least one question, got none")
    return list(questions.values())


def split_into_windows(questions: list[dict[str, Any]], tokenizer: Tokenizer, max_length: int, stride: int) -> Examples:
    """Tokenizes questions and contexts, each context once, and cuts contexts that are too long into windows.

    The sequences are those of `tokenizer(question, context, truncation="only_second", max_length=..., stride=...,
    return_overflowing_tokens=True)`; of a question at most 64 tokens stay, and no more than half of the window.

    Args:
        questions: of `read_questions`.
        tokenizer: as the model's.
        max_length: most tokens of a window, question and special tokens counted; 8 or more.
        stride: tokens that neighbouring windows share; half of what fits of the context, where no more than that fits.

    Returns:
        An example per window; `row_of` is its question, and those of a question follow one another. Detail "characters"
        (int32 [N, 2]): first character in the context, and the one behind the last, of each token; -1 for tokens of the
        question and special ones. If questions have answers, labels start_positions and end_positions (int64 [n]):
        first and last token of the first answer, counted in the sequence. Both are 0 where the window does not hold the
        answer as a whole, and the length of the sequence, which the loss leaves out, where no token of it is left.
    """
    form = tokenizer.form
    contexts = {text: place for place, text in enumerate(dict.fromkeys(one["context"] for one in questions))}
    context_of = np.array([contexts[one["context"]] for one in questions])
    asked = tokenizer.encode_ragged([one["question"] for one in questions], add_special_tokens=False)
    given = tokenizer.encode_ragged(list(contexts), add_special_tokens=False, return_offsets_mapping=True)

    # 1. Which tokens of its context each window holds: `length` of them, from `first` on.
    room = max_length - form.num_special(True)
    question_lengths = np.minimum(np.diff(asked.cu_seqlens), min(_MAX_QUESTION_TOKENS, room // 2))
    context_lengths = np.diff(given.cu_seqlens)[context_of]
    rooms = room - question_lengths
    step = rooms - np.where(stride < rooms, stride, rooms // 2)
    counts = 1 + -(-np.maximum(context_lengths - rooms, 0) // step)  # rounded up
    row_of = np.repeat(np.arange(len(questions)), counts)
    first = ranges(np.zeros_like(counts), counts) * step[row_of]
    length = np.minimum(rooms[row_of], context_lengths[row_of] - first)

    # 2. Question and part of the context as one sequence.
    begins = given.cu_seqlens[context_of[row_of]] + first
    starts = np.stack([asked.cu_seqlens[row_of], begins + len(asked.ids)], axis=1)
    lengths = np.stack([question_lengths[row_of], length], axis=1)
    sequences = Sequences.of(form.join(np.concatenate([asked.ids, given.ids]), starts, lengths, dtype=np.int32))
    offset = question_lengths[row_of] + form.before_second
    characters = np.full((len(sequences.ids), 2), -1, dtype=np.int32)
    characters[ranges(sequences.boundaries[:-1] + offset, length)] = given.offsets[ranges(begins, length)]

    # 3. The answer's tokens, counted in the context, then in the sequence.
    labels = {}
    if "answers" in questions[0]:
        spans = np.split(given.offsets, given.cu_seqlens[1:-1])
        tokens = [_answer_tokens(one, spans[place]) for one, place in zip(questions, context_of, strict=True)]
        first_token, last_token = np.array(tokens)[row_of].T
        is_inside = (first <= first_token) & (last_token < first + length)
        for name, token in (("start_positions", first_token), ("end_positions", last_token)):
            inside = np.where(is_inside, token + offset - first, 0)
            labels[name] = np.where(first_token > last_token, sequences.lengths, inside)
    details = {"characters": characters}
    return Examples(sequences, labels, rows=questions, row_of=row_of, details=details, per_token=tuple(details))


def _answer_tokens(question: dict[str, Any], spans: np.ndarray) -> tuple[int, int]:
    """The first and last token of the first answer; (-1, -1) if there is none; first > last if no token is left."""
    for text, start in zip(*question["answers"].values(), strict=True):
        first = np.searchsorted(spans[:, 1], start, side="right")
        return int(first), int(np.searchsorted(spans[:, 0], start + len(text), side="left")) - 1
    return -1, -1


def _squad_rows(name: str) -> list[dict[str, Any]] | None:
    """The questions of SQuAD's JSON, each with its context; None if the file holds an object a line."""
    try:
        document = json.loads(read_text(name))
    except (json.JSONDecodeError, RecursionError) as error:
        if str(error).startswith("Extra data"):
            return None
        raise SourceError(f"{name}: expected JSON: {error}") from None  # names the line
    if isinstance(document, Mapping) and "question" in document:
        return None
    try:
        paragraphs = [paragraph for article in document["data"] for paragraph in article["paragraphs"]]
        return [{**one, "context": paragraph["context"]} for paragraph in paragraphs for one in paragraph["qas"]]
    except (KeyError, TypeError) as error:
        raise SourceError(f"{name}: expected data, paragraphs, context and qas as SQuAD has them: {error!r}") from None


def _answers(row: Mapping[str, Any], place: str) -> dict[str, list[Any]]:
    """The answers as lists; files may have them as [{"text": ..., "answer_start": ...}, ...], too."""
    # Answers of a question without any, which only seem right, go by another name.
    value: Any = [] if row.get("is_impossible") else row.get("answers")
    context = row["context"]
    try:
        if not isinstance(value, Mapping):
            value = {key: [answer[key] for answer in value] for key in ("text", "answer_start")}
        pairs = list(zip(value["text"], value["answer_start"], strict=True))
        wrong = [pair for pair in pairs if not pair[0] or pair[1] < 0 or not context.startswith(*pair)]
    except (KeyError, TypeError, ValueError):
        raise SourceError(f"{place}: expected text and answer_start of each, got {reprlib.repr(value)}") from None
    for text, start in wrong:
        got = reprlib.repr(context[max(start, 0) :][: len(text)])
        raise SourceError(f"{place}: expected {reprlib.repr(text)} at character {start} of the context, got {got}")
    return {"text": list(value["text"]), "answer_start": list(value["answer_start"])}
