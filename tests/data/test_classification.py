"""ClassificationSource: labels, batches, subsets, and messages that say where."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from bert_fast.data import PackedCollator
from bert_fast.data.batches import Source
from bert_fast.data.classification import ClassificationSource
from bert_fast.errors import SourceError
from bert_fast.tokenization import BertTokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "東", "##s"]


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    return BertTokenizer(WORDS)


def rows(labels: list[Any]) -> list[dict[str, Any]]:
    texts = ["good film", "bad films 東", "", "good", "x bad bad film film film"]
    return [{"text": texts[k % 5], "label": label, "more": "good"} for k, label in enumerate(labels)]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["spam", "ham", "ham"], ["ham", "spam"]),
        (["10", "9", "-1", "9"], ["-1", "9", "10"]),
        ([1, 0, 2, 1], ["0", "1", "2"]),
        ([np.int64(1), np.int8(0)], ["0", "1"]),
        (["10", "9", "x"], ["10", "9", "x"]),
        ([True, False], ["False", "True"]),
        (["a b", "é", "東"], ["a b", "é", "東"]),
        ([1, True, 0, "1"], ["0", "1", "True"]),
    ],
)
def test_labels_are_numbered_in_order(tokenizer: BertTokenizer, labels: list[Any], names: list[str]) -> None:
    source = ClassificationSource.read(rows(labels), tokenizer)
    assert source.label_names == names
    assert source.labels is not None
    assert [names[number] for number in source.labels] == [str(label) for label in labels]


def test_labels_of_the_training_data_number_those_of_others(tokenizer: BertTokenizer) -> None:
    train = ClassificationSource.read(rows(["b", "a", "c"]), tokenizer)
    valid = ClassificationSource.read(rows(["c", "c"]), tokenizer, labels=train.label_names)
    assert valid.labels is not None
    assert (valid.label_names, valid.labels.tolist()) == (["a", "b", "c"], [2, 2])


def test_a_label_that_training_has_not_seen(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "dev.tsv"
    path.write_text("text\tlabel\ngood\tpos\nbad\tneutral\n")
    with pytest.raises(SourceError, match=r"dev.tsv: line 3: expected one of the labels 'neg', 'pos', got 'neutral'"):
        ClassificationSource.read(path, tokenizer, labels=["neg", "pos"])


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (["a", None], {}, r"source\[1\]: column 'label': expected a label .*got None"),
        (["a", ""], {}, r"source\[1\]: column 'label': expected a label, got an empty one: ''"),
        (["a", " \t"], {}, r"source\[1\]: .*expected a label, got an empty one: ' \\t'"),
        (["a", "b\ud800"], {}, r"source\[1\]: column 'label': expected Unicode, got half of a surrogate pair"),
        (["a", ["b"]], {}, r"source\[1\]: column 'label': expected a label .*got \['b'\]"),
        ([1.5, 2.5], {}, r"source\[0\]: .*got 1.5; are labels numbers to come close to \(regression=True\)\?"),
        (["a", "a"], {}, "source: column 'label': expected at least two labels, got only 'a'"),
        (["1", "x"], {"regression": True}, r"source\[1\]: column 'label': expected a number, got 'x'"),
        ([1, True], {"regression": True}, "expected a number, got True"),
        ([1, float("nan")], {"regression": True}, "expected a number, got nan"),
        ([1, "inf"], {"regression": True}, "expected a number, got 'inf'"),
        ([1, 10**400], {"regression": True}, "expected a number, got 1000"),
        (["5", "1_000"], {"regression": True}, "expected a number, got '1_000'"),
        (["5", "٣"], {"regression": True}, "expected a number, got '٣'"),
        (["5", "nan"], {"regression": True}, "expected a number, got 'nan'"),
        ([1, 1e39], {"regression": True}, r"expected a number, got 1e\+39"),
        ([1, None], {"regression": True}, "expected a number, got None"),
        (["a", "b"], {"label": "class"}, "expected a column 'class', got 'text', 'label', 'more'"),
        (["a", "b"], {"text_pair": "pair"}, "expected a column 'pair'"),
    ],
)
def test_labels_that_cannot_be_used(
    tokenizer: BertTokenizer, labels: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SourceError, match=message):
        ClassificationSource.read(rows(labels), tokenizer, **options)


def test_arguments_that_cannot_be_used(tokenizer: BertTokenizer) -> None:
    with pytest.raises(ValueError, match="labels: expected None with regression=True"):
        ClassificationSource.read(rows([1, 2]), tokenizer, labels=["1"], regression=True)
    with pytest.raises(ValueError, match="labels: expected at least two different ones"):
        ClassificationSource.read(rows(["a"]), tokenizer, labels=["a", "a"])
    with pytest.raises(TypeError, match="labels: expected a list of strings"):
        ClassificationSource.read(rows(["a"]), tokenizer, labels="ab")


def test_a_batch_is_the_tokenizers_rows_with_their_labels(tokenizer: BertTokenizer) -> None:
    source = ClassificationSource.read(rows(["a", "b", "b", "a", "b"]), tokenizer, text_pair="more", max_length=7)
    assert isinstance(source, Source)
    expected = tokenizer(source.texts, source.pairs, truncation=True, max_length=7)
    assert source.lengths(3).tolist() == [len(row) for row in expected["input_ids"]]
    assert source.lengths(0).max() == 7
    order = [4, 0, 2, 4]
    batch = source.batch(1, np.array(order))
    assert batch.input_ids.tolist() == [token for index in order for token in expected["input_ids"][index]]
    assert batch.token_type_ids.tolist() == [kind for index in order for kind in expected["token_type_ids"][index]]
    assert batch.labels.tolist() == [1, 0, 1, 1]
    assert batch.labels.dtype == torch.int64


def test_numbers_are_fp32(tokenizer: BertTokenizer) -> None:
    source = ClassificationSource.read(rows(["0.25", 3, "-1e3"]), tokenizer, regression=True)
    batch = source.batch(0, np.array([2, 0]))
    assert (batch.labels.tolist(), batch.labels.dtype) == ([-1000.0, 0.25], torch.float32)
    assert (source.label_names, source[1]["label"]) == ([], 3.0)


def test_without_labels(tokenizer: BertTokenizer) -> None:
    source = ClassificationSource.read([{"text": "good"}], tokenizer, label=None, labels=["a", "b"])
    assert (source.labels, source.label_names) == (None, ["a", "b"])
    assert "labels" not in source.batch(0, np.array([0]))
    assert set(source[0]) == {"input_ids", "token_type_ids"}
    assert source.decode(0) == "[CLS] good [SEP]"


def test_decode(tokenizer: BertTokenizer) -> None:
    source = ClassificationSource.read(rows(["no", "yes"]), tokenizer, text_pair="more")
    assert source.decode(1) == "[CLS] bad film ##s 東 [SEP] good [SEP] -> yes"
    numbers = ClassificationSource.read(rows([2.5, 3]), tokenizer, regression=True)
    assert numbers.decode(0) == "[CLS] good film [SEP] -> 2.5"


def test_take(tokenizer: BertTokenizer) -> None:
    source = ClassificationSource.read(rows(["a", "b", "b", "a", "b"]), tokenizer, text_pair="more")
    taken = source.take(np.array([3, 1]))
    assert (len(taken), taken.texts, taken.label_names) == (2, [source.texts[3], source.texts[1]], ["a", "b"])
    assert [taken.decode(0), taken.decode(1)] == [source.decode(3), source.decode(1)]


def test_single_examples_through_a_data_loader(tokenizer: BertTokenizer) -> None:
    source = ClassificationSource.read(rows(["a", "b", "b", "a", "b"]), tokenizer)
    batches = list(DataLoader(source, batch_size=3, collate_fn=PackedCollator()))  # type: ignore[arg-type]
    assert [len(batch["labels"]) for batch in batches] == [3, 2]
    expected = source.batch(0, np.arange(3))
    for name in ("input_ids", "token_type_ids", "cu_seqlens", "labels"):
        assert batches[0][name].tolist() == expected[name].tolist()
        assert batches[0][name].dtype == expected[name].dtype


def test_pickled_sources_make_the_same_batches(tokenizer: BertTokenizer) -> None:
    source = ClassificationSource.read(rows(["a", "b", "b"]), tokenizer)
    again = pickle.loads(pickle.dumps(source))
    assert again.batch(0, np.array([2, 1])).input_ids.tolist() == source.batch(0, np.array([2, 1])).input_ids.tolist()
    assert again.decode(1) == source.decode(1)


def test_the_cache_holds_what_would_be_made(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    def read(labels: list[Any], max_length: int) -> ClassificationSource:
        return ClassificationSource.read(
            rows(labels), tokenizer, text_pair="more", max_length=max_length, cache_dir=tmp_path
        )

    first, second = read(["a", "b"], 8), read(["a", "b"], 8)
    assert len(list(tmp_path.iterdir())) == 1
    assert first.decode(1) == second.decode(1)
    assert read(["b", "a"], 8).decode(0).endswith("-> b")  # labels are no features
    assert len(list(tmp_path.iterdir())) == 1
    assert read(["b", "a"], 5).lengths(0).max() == 5
    assert len(list(tmp_path.iterdir())) == 2


def test_formats_agree(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    examples = [{"text": "good film", "label": "a"}, {"text": "bad films 東", "label": "b"}]
    (tmp_path / "a.tsv").write_text("".join(f"{row['label']}\t{row['text']}\r\n" for row in examples), newline="")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in examples))
    sources = [
        ClassificationSource.read(tmp_path / "a.tsv", tokenizer, text="1", label="0"),
        ClassificationSource.read(tmp_path / "a.jsonl", tokenizer),
        ClassificationSource.read(examples, tokenizer),
    ]
    assert len({tuple(source.decode(index) for index in range(2)) for source in sources}) == 1


def test_real_files(shared_data: Path) -> None:
    tokenizer = BertTokenizer(shared_data / "vocab" / "bert-base-uncased" / "vocab.txt")
    folder = shared_data / "classification"
    sms = ClassificationSource.read(folder / "sms_spam" / "SMSSpamCollection.tsv", tokenizer, text="1", label="0")
    assert sms.labels is not None
    assert (sms.label_names, np.bincount(sms.labels).tolist()) == (["ham", "spam"], [4827, 747])
    pairs = folder / "question_sentence_pairs"
    train = ClassificationSource.read(pairs / "train.tsv", tokenizer, text="question", text_pair="sentence")
    valid = ClassificationSource.read(
        pairs / "dev.tsv", tokenizer, text="question", text_pair="sentence", labels=train.label_names
    )
    assert (len(train), len(valid), train.label_names) == (1833, 459, ["entailment", "not_entailment"])
    assert train.lengths(0).max() <= 128
    assert valid.decode(0).endswith("[SEP] -> not_entailment")
