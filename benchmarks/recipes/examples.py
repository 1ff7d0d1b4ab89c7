"""The files of the recipes read in the plainest way, for the side that is not ours."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Question:
    """A question, its context, the right answers and the first character of the first one."""

    question: str
    context: str
    answers: tuple[str, ...]
    answer_start: int


def columns(path: str, *names: str) -> list[tuple[str, ...]]:
    """Columns of a TSV file, by their names in its header or, of a file without one, by their numbers."""
    rows = [line.split("\t") for line in Path(path).read_text(encoding="utf-8").split("\n") if line]
    if all(name.isdigit() for name in names):
        places = [int(name) for name in names]
    else:
        header, *rows = rows
        places = [header.index(name) for name in names]
    return [tuple(row[place] for place in places) for row in rows]


def sentences(path: str, label_column: int) -> list[tuple[list[str], list[str]]]:
    """(words, tags) of the sentences of a CoNLL file."""
    blocks = Path(path).read_text(encoding="utf-8").rstrip("\n").split("\n\n")
    rows = [[line.split("\t") for line in block.split("\n")] for block in blocks]
    return [([row[0] for row in block], [row[label_column] for row in block]) for block in rows]


def questions(path: str) -> list[Question]:
    """The questions of a file as SQuAD 1.1 has it."""
    articles = json.loads(Path(path).read_text(encoding="utf-8"))["data"]
    return [
        Question(
            asked["question"],
            paragraph["context"],
            tuple(answer["text"] for answer in asked["answers"]),
            asked["answers"][0]["answer_start"],
        )
        for article in articles
        for paragraph in article["paragraphs"]
        for asked in paragraph["qas"]
    ]


def choices(path: str) -> list[tuple[str, list[str], int]]:
    """(first sentence, four ways on from it, number of the right one) of a SWAG file, CSV or JSON lines."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file)) if path.endswith(".csv") else [json.loads(line) for line in file]
    return [
        (row["sent1"], [f"{row['sent2']} {row[f'ending{k}']}" for k in range(4)], int(row["label"])) for row in rows
    ]
