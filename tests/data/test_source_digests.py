"""Digests of sources: the same for the same examples, others for other tokens, labels or order."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_fast import BertTokenizer
from bert_fast.data import PretrainingSource, TokenStore, tokenize_files
from bert_fast.data.batches import source_digest
from bert_fast.data.classification import ClassificationSource
from bert_fast.data.multiple_choice import MultipleChoiceSource
from bert_fast.data.question_answering import QuestionAnsweringSource
from bert_fast.data.token_classification import TokenClassificationSource
from tests.training.toy import ToySource

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d", "who", "?", "."]


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    return BertTokenizer(WORDS)


def classify(tokenizer: BertTokenizer, texts: str = "a b|c|d", labels: str = "x|y|x", **options: Any) -> Any:
    rows = [{"text": text, "label": label} for text, label in zip(texts.split("|"), labels.split("|"), strict=True)]
    return ClassificationSource.read(rows, tokenizer, **options)


def pairs(tokenizer: BertTokenizer, second: str = "b c") -> Any:
    rows = [{"text": "a", "other": second, "label": "x"}, {"text": "b", "other": "d", "label": "y"}]
    return ClassificationSource.read(rows, tokenizer, text_pair="other")


def numbers(tokenizer: BertTokenizer, number: float = 0.5) -> Any:
    rows = [{"text": "a", "label": number}, {"text": "b", "label": 2}]
    return ClassificationSource.read(rows, tokenizer, regression=True)


def ner(tokenizer: BertTokenizer, words: str = "a b|c", tags: str = "O B-X|O") -> Any:
    both = zip(words.split("|"), tags.split("|"), strict=True)
    rows = [{"tokens": some.split(), "labels": theirs.split()} for some, theirs in both]
    return TokenClassificationSource.read(rows, tokenizer, label_column="labels", labels=["O", "B-X", "I-X"])


def qa(tokenizer: BertTokenizer, context: str = "a b c", answers: tuple[int, ...] = (0,)) -> Any:
    given = {"text": [context[start] for start in answers], "answer_start": list(answers)}
    rows = [{"id": "1", "question": "who ?", "context": context, "answers": given}]
    return QuestionAnsweringSource.read(rows, tokenizer)


def choice(tokenizer: BertTokenizer, ending: str = "b", label: int = 0) -> Any:
    rows = [{"sent1": "a", "sent2": "c", "ending0": ending, "ending1": "d", "label": label}]
    return MultipleChoiceSource.read(rows, tokenizer)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (
            classify,
            [{"texts": "a c|c|d"}, {"texts": "c|a b|d"}, {"texts": "a b|c d|"}, {"labels": "y|x|y"}, {"max_length": 3},
             {"labels": "x|x|y"}],
        ),
        (pairs, [{"second": "b d"}, {"second": "b"}]),
        (numbers, [{"number": 0.25}]),
        (ner, [{"words": "a c|c"}, {"words": "a|b c", "tags": "O|B-X O"}, {"tags": "O I-X|O"}]),
        (qa, [{"context": "a b d"}, {"answers": (2,)}, {"answers": (0, 2)}, {"answers": ()}]),
        (choice, [{"ending": "c"}, {"label": 1}]),
    ],
    ids=["classes", "pairs", "numbers", "words", "questions", "choices"],
)  # fmt: skip
def test_what_differs_has_another_digest(
    tokenizer: BertTokenizer, make: Callable[..., Any], changes: list[dict[str, Any]]
) -> None:
    assert source_digest(make(tokenizer)) == source_digest(make(tokenizer))
    found = {source_digest(make(tokenizer)), *(source_digest(make(tokenizer, **change)) for change in changes)}
    assert len(found) == len(changes) + 1


def test_pretraining(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    draw = random.Random(0)
    text = "".join(draw.choice(["a b c .\n", "d .\n", "\n"]) for _ in range(200))
    stores = []
    for name, content in (("1", text), ("2", text), ("3", text.replace("d", "a", 1))):
        (tmp_path / f"{name}.txt").write_text(content)
        stores.append(tokenize_files([tmp_path / f"{name}.txt"], tmp_path / name, tokenizer))
    first, same, other = (PretrainingSource(store, tokenizer, max_length=16).digest() for store in stores)
    assert first == same != other
    changes: list[dict[str, Any]] = [
        {"max_length": 17}, {"next_sentence": False}, {"whole_words": True}, {"mask_probability": 0.2}, {"seed": 1},
        {"short_sequence_probability": 0.2},
    ]  # fmt: skip
    found = {PretrainingSource(stores[0], tokenizer, **{"max_length": 16, **change}).digest() for change in changes}
    assert len({*found, first}) == len(changes) + 1

    info = json.loads((tmp_path / "1/store.json").read_text())  # as earlier versions wrote it
    del info["digests"], info["digest"]
    (tmp_path / "1/store.json").write_text(json.dumps(info))
    assert PretrainingSource(TokenStore.open(tmp_path / "1"), tokenizer, max_length=16).digest() not in {*found, first}


class Own(ToySource):
    """Somebody's source, without a digest."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.asked: list[int] = []

    def batch(self, epoch: int, indices: np.ndarray) -> Any:
        self.asked.append(len(indices))
        return super().batch(epoch, indices)


def test_sources_of_other_people() -> None:
    first = source_digest(Own(50))
    assert source_digest(Own(50)) == first != source_digest(Own(51))
    for change in range(3):
        other = Own(50)
        if change == 0:
            other.labels[49] ^= 1
        elif change == 1:
            other.sequences[0][0] += 1
        else:
            same_length = [index for index, one in enumerate(other.sequences) if len(one) == len(other.sequences[0])]
            a, b = same_length[:2]
            other.sequences[a], other.sequences[b] = other.sequences[b], other.sequences[a]
        assert source_digest(other) != first
    many = Own(5000)
    source_digest(many)
    assert many.asked == [1000]
