"""Every argument of what the data package offers, given what it is not: the refusal names it."""

import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast.data import (
    Batches,
    PackedCollator,
    PretrainingSource,
    TokenStore,
    tokenize_files,
)
from bert_fast.data.batches import only
from bert_fast.data.files import read_rows
from bert_fast.data.masking import Masking
from bert_fast.data.pretraining import unigram_entropy
from bert_fast.data.question_answering import read_questions
from bert_fast.data.sequences import Sequences
from bert_fast.data.text_sources import ReadOptions
from bert_fast.errors import SourceError
from bert_fast.training.tasks import TASKS, task_named

from ..fuzzing.rules import objection
from .corpora import make_store, make_tokenizer

WRONG: tuple[Any, ...] = (
    *(object(), object, {"a", "b"}, b"abc", "a\0b", "\ud800", 1j, math.nan, math.inf, 2**64, -1, iter(())),
    *([[1], [1, 2]], [torch.zeros(2)], np.zeros(3), np.array("abc"), np.array(["a", "b"]), torch.zeros(0)),
    *(torch.zeros(2, 3, device="meta"), torch.zeros((), dtype=torch.int64, device="meta")),
    *(torch.zeros(2, 2).to_sparse(), torch._efficientzerotensor((3,))),
)
TOKENIZER = make_tokenizer()
ANSWERS = {"text": ["w4"], "answer_start": [3]}
ROWS: dict[str, list[dict[str, Any]]] = {
    "classify": [{"text": "w1 w2", "label": label} for label in "ab"],
    "ner": [{"tokens": ["w1", "w2"], "ner_tags": ["O", "B-PER"]}],
    "qa": [{"id": "a", "question": "w1 ?", "context": "w3 w4 w5", "answers": ANSWERS}],
    "choice": [{"sent1": "w1", "sent2": "w2", "ending0": "w3", "ending1": "w4", "label": 1}],
}


def task_of(name: str, **arguments: Any) -> Any:
    kind = task_named(name)
    return kind(kind.Arguments(**arguments), TOKENIZER)


Call = tuple[Callable[..., Any], dict[str, Any]]


def calls(folder: Path) -> Iterator[Call]:
    """Functions and methods, each with arguments that will do."""
    store = make_store(folder, [[3, 4], [5, 2]])
    masking = {"whole_words": False, "mask_probability": 0.15}
    pairs = {"next_sentence": True, "seed": 0, "short_sequence_probability": 0.1, "max_length": 16}
    for name in TASKS:
        yield task_of(name).read, {"data": ROWS[name]}
        yield task_named(name).Arguments, {"max_seq_length": 16}
    sizes = {"doc_stride": 1, "n_best_size": 2, "max_answer_length": 3, "null_score_diff_threshold": 0.5}
    yield task_named("qa").Arguments, sizes
    yield PretrainingSource, {"store": store, "tokenizer": TOKENIZER, **masking, **pairs}
    yield Masking, {"tokenizer": TOKENIZER, **masking}
    yield unigram_entropy, {"store": store, "tokenizer": TOKENIZER}
    yield TokenStore.open, {"directory": store.path, "tokenizer": TOKENIZER}
    yield store.sentences, {"index": 0}
    reading = {"format": "auto", "field": "text", "errors": "strict", "num_threads": 1, "block_bytes": 64}
    writing = {"directory": folder / "new", "tokenizer": TOKENIZER, "checkpoint_seconds": 5.0, "report": None}
    yield tokenize_files, {"files": [folder / "corpus.txt"], **writing, **reading}
    yield ReadOptions, {"field": "text", "errors": "strict", "block_bytes": 64}
    yield read_rows, {"data": ROWS["classify"]}
    yield read_questions, {"data": ROWS["qa"]}
    joined = {"pairs": ["w2"], "max_length": 8, "truncation": "longest_first"}
    yield Sequences.joined, {"tokenizer": TOKENIZER, "texts": ["w1"], **joined}
    source = task_of("classify").read(ROWS["classify"])
    yield source.batch, {"indices": [0]}
    yield source.take, {"indices": [0]}
    batches = Batches(source, batch_size=2)
    yield Batches, {"source": source, "batch_size": 2, "max_tokens": 16, "shuffle": True, "seed": 0}
    yield batches.plan, {"epoch": 0}
    yield batches.batch, {"epoch": 0, "number": 0}
    yield only, {"batches": [1]}
    yield PackedCollator, {"collator": None}
    yield PackedCollator(), {"features": [{"input_ids": [1]}]}


def problems(call: Call, place: str) -> Iterator[str]:
    """What is wrong with how each argument of the wrong kind was refused."""
    function, arguments = call
    for name in arguments:
        for value in WRONG:
            parameters = inspect.signature(function).parameters
            given = {"epoch": 0} if "epoch" in parameters else {"columns": ["text"]} if "columns" in parameters else {}
            known = [name, place, value] if isinstance(value, str) else [name, place]
            try:
                function(**given | arguments | {name: value})
            except SourceError:
                continue  # a file or row that is not there, by the name that was given
            except Exception as error:
                if isinstance(error, IndexError) and "expected" in str(error):
                    continue  # as sequences of examples raise it
                problem = objection(error, known)
                if problem is not None:
                    yield f"{name}={type(value).__name__}: {problem}"


def test_every_argument_of_the_wrong_kind_is_named(tmp_path: Path) -> None:
    for function, arguments in calls(tmp_path):
        found = list(problems((function, arguments), str(tmp_path)))
        assert not found, f"{function}: {found}"


# --- what numbers and batches may be ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
def test_budgets_of_any_size(shuffle: bool) -> None:
    source = task_of("classify").read(ROWS["classify"])
    plan = Batches(source, max_tokens=2**63 - 1, batch_size=2**63 - 1, shuffle=shuffle).plan(0)
    assert len(plan) == 1
    assert len(plan.indices(0)) == 2


def test_lengths_that_are_none() -> None:
    class Source:
        def __init__(self, lengths: Any) -> None:
            self.found = lengths

        def lengths(self, epoch: int) -> Any:
            return self.found

        def batch(self, epoch: int, indices: np.ndarray) -> Any:
            return None

    with pytest.raises(ValueError, match="source: expected lengths from 0 on, got -1"):
        Batches(Source(np.array([3, -1])), max_tokens=8, shuffle=False).plan(0)
    for lengths in ([0.5], [[1]], torch.zeros(2, device="meta")):
        with pytest.raises(TypeError, match=r"source: lengths: expected whole numbers \[n\], got"):
            Batches(Source(lengths), max_tokens=8).plan(0)


def test_words_of_a_sentence_that_nothing_limits() -> None:
    short, long = (task_of("ner", max_seq_length=size).read(ROWS["ner"]) for size in (16, 2**63 - 1))
    assert long.lengths(0).tolist() == short.lengths(0).tolist() == [4]


def test_examples_of_another_epoch(tmp_path: Path) -> None:
    source = PretrainingSource(make_store(tmp_path, [[3, 4], [5, 2]]), TOKENIZER, max_length=16)
    count = len(source.lengths(3))
    with pytest.raises(IndexError, match=f"indices: expected 0 to {count - 1} in epoch 3, got {count}"):
        source.batch(3, np.array([count]))


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        ({3: 4, "input_ids": [1]}, r"features\[0\]: expected names as keys, got 3"),
        ({"input_ids": [1], "max_seqlen": 1}, r"features\[0\]: expected a batch without cu_seqlens and max_seqlen"),
        ({"input_ids": torch.zeros(2, device="meta")}, r"\['input_ids'\]: expected numbers, got a Tensor on meta"),
        ({"input_ids": torch.zeros(2).to_sparse()}, r"\['input_ids'\]: expected a dense Tensor"),
        ({"input_ids": torch._efficientzerotensor((2, 1))}, r"\['input_ids'\]: expected one sequence of integers"),
        ({"input_ids": [1], "label": [2**64]}, r"\['label'\]: expected numbers, got list"),
    ],
)  # fmt: skip
def test_features_that_hold_something_else(feature: dict[Any, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        PackedCollator()([feature])


def test_batches_of_a_collator_that_hold_something_else() -> None:
    mask = torch.tensor([[1, 0]])
    for batch, message in (
        ({"attention_mask": mask.to("meta")}, "attention_mask: expected numbers, got a Tensor on meta"),
        ({"attention_mask": mask, "x": mask.to_sparse()}, "x: expected a dense Tensor"),
        ({"attention_mask": mask, "cu_seqlens": mask}, "expected a batch without cu_seqlens and max_seqlen"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"collator: {message}"):
            PackedCollator(lambda features, batch=batch: batch)([{"input_ids": [1]}])
