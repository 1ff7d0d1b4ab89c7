"""MultipleChoice: the sequences of both shapes of tables, answers, and messages that say where."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast.data.examples import Examples
from bert_fast.errors import SourceError
from bert_fast.models import BertConfig, BertForMultipleChoice
from bert_fast.tokenization import BertTokenizer
from bert_fast.training.tasks.multiple_choice import MultipleChoice, MultipleChoiceArguments
from tests.data.corpora import rows_of

pytest.importorskip("datasets")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "he", "rides", "stops", "falls", "rain", "wet", "東"]
SWAG: list[dict[str, Any]] = [
    {"sent1": "rain", "sent2": "he", "ending0": "stops", "ending1": "falls rides rides", "ending2": "東", "label": 2},
    {"sent1": "he rides", "sent2": "", "ending0": "", "ending1": "rides", "ending2": "stops stops", "label": 0},
]
COPA: list[dict[str, Any]] = [
    {"premise": "wet", "question": "cause", "choice1": "rain", "choice2": "he falls", "label": 0},
    {"premise": "rain", "question": "effect", "choice1": "he rides", "choice2": "wet", "label": 1},
]


def task_of(**arguments: Any) -> MultipleChoice:
    return MultipleChoice(MultipleChoiceArguments(**arguments), BertTokenizer(WORDS))


def texts(examples: Examples) -> list[str]:
    tokenizer = BertTokenizer(WORDS)
    return [" ".join(tokenizer.convert_ids_to_tokens(row)) for row in rows_of(examples.sequences)]


def test_endings_follow_the_second_sentence() -> None:
    examples = task_of().read(SWAG)
    assert (len(examples), examples.num_choices, examples.labels["labels"].tolist()) == (2, 3, [2, 0])
    assert texts(examples)[:4] == [
        "[CLS] rain [SEP] he stops [SEP]",
        "[CLS] rain [SEP] he falls rides rides [SEP]",
        "[CLS] rain [SEP] he 東 [SEP]",
        "[CLS] he rides [SEP] [SEP]",
    ]


def test_cause_comes_before_effect() -> None:
    assert texts(task_of().read(COPA)) == [
        "[CLS] rain [SEP] wet [SEP]", "[CLS] he falls [SEP] wet [SEP]",
        "[CLS] rain [SEP] he rides [SEP]", "[CLS] rain [SEP] wet [SEP]",
    ]  # fmt: skip


def test_a_batch_holds_all_choices_of_its_questions() -> None:
    examples = task_of(max_seq_length=7).read(SWAG)
    expected = BertTokenizer(WORDS)(
        ["he rides"] * 3 + ["rain"] * 3,
        ["", "rides", "stops stops", "he stops", "he falls rides rides", "he 東"],
        truncation=True,
        max_length=7,
    )
    batch = examples.batch(5, np.array([1, 0]))
    assert batch.input_ids.tolist() == [token for row in expected["input_ids"] for token in row]
    assert batch.token_type_ids.tolist() == [kind for row in expected["token_type_ids"] for kind in row]
    assert batch.cu_seqlens.diff().tolist() == [len(row) for row in expected["input_ids"]]
    assert (batch.num_choices, batch.labels.tolist(), batch.labels.dtype) == (3, [0, 2], torch.int64)


def test_a_label_may_name_its_column() -> None:
    for start, given in ((1, COPA), (0, SWAG)):
        kind = "choice" if given is COPA else "ending"
        named = [row | {"label": f"{kind}{row['label'] + start}"} for row in given]
        assert task_of().read(named).labels["labels"].tolist() == [row["label"] for row in given]


def changed(rows: list[dict[str, Any]], **values: Any) -> list[dict[str, Any]]:
    return [rows[0], rows[1] | values]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (changed(SWAG, label=3), r"data\[1\]: column 'label': expected a choice from 0 to 2, or its column, got 3"),
        (changed(SWAG, label=-1), "expected a choice from 0 to 2, or its column, got -1"),
        (changed(SWAG, label=None), "expected a choice from 0 to 2, or its column, got None"),
        (changed(SWAG, label=1.0), r"expected a choice from 0 to 2, or its column, got 2\.0"),
        (changed(SWAG, ending1=None), r"data\[1\]: column 'ending1': expected a string, got None"),
        (changed(COPA, question="Cause"), r"data\[1\]: column 'question': expected 'cause' or 'effect', got 'Cause'"),
        ([{"text": "a", "label": 0}], "expected a column 'sent1', got 'text', 'label'"),
        ([{"sent1": "a", "sent2": "b", "ending0": "c", "label": 0}], "expected a column 'ending1'"),
        ([COPA[0], {"premise": "a", "label": 0}], r"data\[1\]: column 'question': expected a string, got None"),
        ([{"premise": "a"}], "expected a column 'label', got 'premise'"),
    ],
)
def test_tables_that_cannot_be_used(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        task_of().read(rows)


def test_answers() -> None:
    task, logits = task_of(), np.array([[0.0, math.log(2), 0.0], [900.0, 0.0, 0.0]], dtype=np.float32)
    examples = task.read(SWAG)
    assert task.metrics(examples, logits, examples.labels["labels"]) == {"accuracy": 0.5}
    said = list(task.rows(examples, logits))
    shares = pytest.approx([0.25, 0.5, 0.25])
    assert said[0] == SWAG[0] | {"label": 1, "gold": 2, "probabilities": shares}
    assert (said[1]["label"], said[1]["probabilities"]) == (0, [1.0, 0.0, 0.0])
    bare = [{name: value for name, value in row.items() if name != "label"} for row in SWAG]
    unlabelled = task.read(bare, is_labelled=False)
    assert "labels" not in unlabelled.batch(0, np.array([0]))
    assert next(task.rows(unlabelled, logits)) == bare[0] | {"label": 1, "probabilities": shares}


def test_a_model_learns_which_choice_is_right() -> None:
    torch.set_num_threads(1)
    task = task_of()
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **task.config(),
    )  # fmt: skip
    model, examples = BertForMultipleChoice(config), task.read(SWAG)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        output = model(**examples.batch(0, np.arange(2)))
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    scores = task.metrics(examples, output.logits.detach().numpy(), examples.labels["labels"])
    assert scores == {"accuracy": 1.0}


def test_swag_files(shared_data: Path) -> None:
    tokenizer = BertTokenizer(shared_data / "vocab" / "bert-base-uncased" / "vocab.txt")
    for name, length in (("transformers_sample.jsonl", 10), ("allennlp_fixture.csv", 11)):
        path = shared_data / "multiple_choice" / "swag" / name
        examples = MultipleChoice(MultipleChoiceArguments(), tokenizer).read(path)
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file)) if name.endswith("csv") else [json.loads(line) for line in file]
        assert (len(examples), examples.num_choices, len(rows)) == (length, 4, length)
        assert examples.labels["labels"].tolist() == [int(row["label"]) for row in rows]
        expected = tokenizer(
            [row["sent1"] for row in rows for _ in range(4)],
            [f"{row['sent2']} {row[f'ending{k}']}" for row in rows for k in range(4)],
        )["input_ids"]
        batch = examples.batch(0, np.arange(length))
        assert batch.input_ids.tolist() == [token for row in expected for token in row]


def test_all_xcopa_files(shared_data: Path) -> None:
    tokenizer = BertTokenizer(shared_data / "vocab" / "bert-base-multilingual-cased" / "vocab.txt", do_lower_case=False)
    files = sorted((shared_data / "multiple_choice" / "xcopa").glob("*.jsonl"))
    task = MultipleChoice(MultipleChoiceArguments(), tokenizer)
    assert {len(task.read(path)) for path in files} == {100, 500}
