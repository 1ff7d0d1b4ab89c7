"""MultipleChoiceSource: the sequences of both shapes of tables, batches of questions, and messages that say where."""

import csv
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast.data.batches import Source
from bert_fast.data.multiple_choice import MultipleChoiceSource
from bert_fast.errors import SourceError
from bert_fast.tokenization import BertTokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "he", "rides", "stops", "falls", "rain", "wet", "東"]
SWAG = [
    {"sent1": "rain", "sent2": "he", "ending0": "stops", "ending1": "falls rides rides", "ending2": "東", "label": 2},
    {"sent1": "he rides", "sent2": "", "ending0": "", "ending1": "rides", "ending2": "stops stops", "label": 0},
]
COPA = [
    {"premise": "wet", "question": "cause", "choice1": "rain", "choice2": "he falls", "label": 0},
    {"premise": "rain", "question": "effect", "choice1": "he rides", "choice2": "wet", "label": 1},
]


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    return BertTokenizer(WORDS)


def test_endings_follow_the_second_sentence(tokenizer: BertTokenizer) -> None:
    source = MultipleChoiceSource.read(SWAG, tokenizer)
    assert isinstance(source, Source)
    assert source.decode(0).split("\n") == [
        "  0: [CLS] rain [SEP] he stops [SEP]",
        "  1: [CLS] rain [SEP] he falls rides rides [SEP]",
        "* 2: [CLS] rain [SEP] he 東 [SEP]",
    ]
    assert source.decode(1).split("\n")[0] == "* 0: [CLS] he rides [SEP] [SEP]"
    assert source.contexts == ["rain he", "he rides"]


def test_cause_comes_before_effect(tokenizer: BertTokenizer) -> None:
    source = MultipleChoiceSource.read(COPA, tokenizer)
    assert source.decode(0).split("\n") == ["* 0: [CLS] rain [SEP] wet [SEP]", "  1: [CLS] he falls [SEP] wet [SEP]"]
    assert source.decode(1).split("\n") == ["  0: [CLS] rain [SEP] he rides [SEP]", "* 1: [CLS] rain [SEP] wet [SEP]"]


def test_a_batch_holds_all_choices_of_its_questions(tokenizer: BertTokenizer) -> None:
    source = MultipleChoiceSource.read(SWAG, tokenizer, max_length=7)
    expected = tokenizer(
        ["he rides"] * 3 + ["rain"] * 3,
        ["", "rides", "stops stops", "he stops", "he falls rides rides", "he 東"],
        truncation=True,
        max_length=7,
    )
    batch = source.batch(5, np.array([1, 0]))
    assert batch.input_ids.tolist() == [token for row in expected["input_ids"] for token in row]
    assert batch.token_type_ids.tolist() == [kind for row in expected["token_type_ids"] for kind in row]
    assert batch.cu_seqlens.diff().tolist() == [len(row) for row in expected["input_ids"]]
    assert (batch.num_choices, batch.labels.tolist(), batch.labels.dtype) == (3, [0, 2], torch.int64)
    lengths = [sum(len(row) for row in rows) for rows in (expected["input_ids"][3:], expected["input_ids"][:3])]
    assert source.lengths(0).tolist() == lengths
    assert (source.lengths(0).dtype, batch.max_seqlen) == (np.int32, 7)


def test_a_label_may_name_its_column(tokenizer: BertTokenizer) -> None:
    source = MultipleChoiceSource.read([row | {"label": f"choice{row['label'] + 1}"} for row in COPA], tokenizer)
    assert source.labels is not None
    assert source.labels.tolist() == [0, 1]


def test_take_and_pickle(tokenizer: BertTokenizer) -> None:
    source = MultipleChoiceSource.read(SWAG, tokenizer)
    taken = pickle.loads(pickle.dumps(source.take(np.array([1, 1, 0]))))
    assert [taken.decode(k) for k in range(3)] == [source.decode(k) for k in (1, 1, 0)]
    assert taken.choices == [["", "", "stops"], ["rides", "rides", "falls rides rides"], ["stops stops"] * 2 + ["東"]]
    assert len(taken) == 3


def test_without_labels(tokenizer: BertTokenizer) -> None:
    source = MultipleChoiceSource.read(COPA, tokenizer, label=None)
    assert source.labels is None
    assert "labels" not in source.batch(0, np.array([0]))
    assert "*" not in source.decode(0)


def test_the_cache_holds_what_would_be_made(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    first = MultipleChoiceSource.read(SWAG, tokenizer, cache_dir=tmp_path)
    second = MultipleChoiceSource.read(SWAG, tokenizer, cache_dir=tmp_path)
    assert first.decode(0) == second.decode(0)
    assert len(list(tmp_path.iterdir())) == 1


def changed(rows: list[dict[str, Any]], **values: Any) -> list[dict[str, Any]]:
    return [rows[0], rows[1] | values]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (changed(SWAG, label=3), r"source\[1\]: column 'label': expected a choice from 0 to 2, or its column, got 3"),
        (changed(SWAG, label=-1), "expected a choice from 0 to 2, or its column, got -1"),
        (changed(SWAG, label=None), "expected a choice from 0 to 2, or its column, got None"),
        (changed(SWAG, label=True), "expected a choice from 0 to 2, or its column, got True"),
        (changed(SWAG, label="1.0"), "expected a choice from 0 to 2, or its column, got '1.0'"),
        (changed(SWAG, ending1=None), r"source\[1\]: column 'ending1': expected a string, got None"),
        (changed(COPA, question="Cause"), r"source\[1\]: column 'question': expected 'cause' or 'effect', got 'Cause'"),
        ([{"text": "a", "label": 0}], "expected columns sent1, sent2, ending0, .*, got 'text', 'label'"),
        ([{"sent1": "a", "sent2": "b", "ending0": "c", "label": 0}], "expected columns sent1"),
        ([COPA[0], {"premise": "a", "label": 0}], r"source\[1\]: expected a field"),
        ([{"premise": "a"}], "expected a column 'label', got 'premise'"),
    ],
)
def test_tables_that_cannot_be_used(tokenizer: BertTokenizer, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        MultipleChoiceSource.read(rows, tokenizer)


def test_no_room_for_two_texts(tokenizer: BertTokenizer) -> None:
    with pytest.raises(ValueError, match="max_length: 2 leaves no room"):
        MultipleChoiceSource.read(COPA, tokenizer, max_length=2)


def test_swag_files(shared_data: Path) -> None:
    tokenizer = BertTokenizer(shared_data / "vocab" / "bert-base-uncased" / "vocab.txt")
    for name, length in (("transformers_sample.jsonl", 10), ("allennlp_fixture.csv", 11)):
        path = shared_data / "multiple_choice" / "swag" / name
        source = MultipleChoiceSource.read(path, tokenizer)
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file)) if name.endswith("csv") else [json.loads(line) for line in file]
        assert (len(source), source.num_choices, len(rows)) == (length, 4, length)
        assert source.labels is not None
        assert source.labels.tolist() == [int(row["label"]) for row in rows]
        expected = tokenizer(
            [row["sent1"] for row in rows for _ in range(4)],
            [f"{row['sent2']} {row[f'ending{k}']}" for row in rows for k in range(4)],
        )["input_ids"]
        batch = source.batch(0, np.arange(length))
        assert batch.input_ids.tolist() == [token for row in expected for token in row]


def test_all_xcopa_files(shared_data: Path) -> None:
    tokenizer = BertTokenizer(shared_data / "vocab" / "bert-base-multilingual-cased" / "vocab.txt", do_lower_case=False)
    files = sorted((shared_data / "multiple_choice" / "xcopa").glob("*.jsonl"))
    lengths = {path.name: len(MultipleChoiceSource.read(path, tokenizer)) for path in files}
    assert set(lengths.values()) == {100, 500}
    source = MultipleChoiceSource.read(shared_data / "multiple_choice/xcopa/val.zh.jsonl", tokenizer)
    assert source.decode(0).split("\n")[1].startswith("* 1: [CLS] 那 人 打 开 水")
