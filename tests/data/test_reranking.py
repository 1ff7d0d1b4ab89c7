"""RerankingSource: rows of several kinds, batches, what is refused with its row."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_fast.data.batches import Batches, source_digest
from bert_fast.data.reranking import RerankingSource
from bert_fast.errors import SourceError
from bert_fast.tokenization import BertTokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
LISTS = [
    {"query": "a", "document": ["b", "c c", "d"], "label": [0, 1, 0.25]},
    {"query": "e e", "document": "f", "label": 0.5},  # a text of its own, a number of its own
    {"query": "a", "document": ["g", "h"], "label": [1, 0]},
]
NEGATIVES = [
    {"query": "a", "positive": "b", "n1": "c", "n2": "d", "teacher": [3.0, 1.0, -2.0], "margins": [2.0, 5.0]},
    {"query": "e", "positive": "c", "n1": "b", "n2": "f", "teacher": [0.5, 0.25, 0.0], "margins": [0.25, 0.5]},
]


def read(rows: Any = None, **options: Any) -> RerankingSource:
    return RerankingSource.read(LISTS if rows is None else rows, BertTokenizer(WORDS), **options)


def with_negatives(rows: Any = None, **options: Any) -> RerankingSource:
    options = {"negatives": ["n1", "n2"], "loss": "softmax"} | options
    return read(NEGATIVES if rows is None else rows, **options)


def words(source: RerankingSource, batch: Any) -> list[str]:
    parts = np.split(batch["input_ids"].numpy(), batch["cu_seqlens"][1:-1])
    return [source.tokenizer.decode(part.tolist()) for part in parts]


def test_batches_hold_the_documents_of_each_example() -> None:
    source = read()
    batch = source.batch(0, np.array([2, 0]))
    assert words(source, batch) == [f"[CLS] a [SEP] {text} [SEP]" for text in ("g", "h", "b", "c c", "d")]
    assert batch["cu_lists"].tolist() == [0, 2, 5] and batch["longest_list"] == 3
    assert batch["labels"].tolist() == [1, 0, 0, 1, 0.25]
    assert batch["token_type_ids"].tolist()[:5] == [0, 0, 0, 1, 1]
    assert source.is_relevant is not None and source.is_relevant.tolist() == [False, True, False, True, True, False]
    assert source.lengths(0).tolist() == [5 + 6 + 5, 6, 10]
    seen = np.concatenate([Batches(source, max_tokens=17).plan(1).indices(k) for k in range(2)])
    assert sorted(seen.tolist()) == [0, 1, 2]
    assert read(relevant_from=0.2).is_relevant.tolist() == [False, True, True, True, True, False]  # type: ignore[union-attr]


def test_some_of_the_examples() -> None:
    source = read()
    some = source.take(np.array([2, 0, 2]))
    assert some.queries == ["a"] * 3 and some.documents[1] == ["b", "c c", "d"] and len(some) == 3
    for one, other in ((0, 2), (1, 0), (2, 2)):
        ours, whole = some.batch(0, np.array([one])), source.batch(0, np.array([other]))
        assert all(np.array_equal(ours[name], whole[name]) for name in ("input_ids", "labels", "cu_lists"))
    unlike = [source, some, read(max_length=5), read(label=None), read(relevant_from=0.2)]
    assert len({source_digest(one) for one in unlike}) == 5 and source_digest(read()) == source_digest(source)
    assert source.decode(0).splitlines()[1:] == ["1 [CLS] a [SEP] c c [SEP]", "0.25 [CLS] a [SEP] d [SEP]"]
    assert read(label=None).decode(1) == "[CLS] e e [SEP] f [SEP]" and "labels" not in read(label=None).batch(0, [0])


def test_negatives_and_what_a_teacher_says_of_them() -> None:
    source = with_negatives()
    batch = source.batch(0, np.array([0, 1]))
    assert words(source, batch)[3:] == [f"[CLS] e [SEP] {text} [SEP]" for text in "cbf"]
    assert batch["labels"].tolist() == [1, 0, 0] * 2
    assert source.is_relevant is not None and source.is_relevant.tolist() == [True, False, False] * 2
    taught = with_negatives(teacher="teacher", loss="margin_mse")
    assert taught.labels is not None and taught.labels.tolist() == [3, 1, -2, 0.5, 0.25, 0]
    assert taught.is_relevant is not None and taught.is_relevant.tolist() == [True, False, False] * 2
    margins = with_negatives(teacher="margins", loss="margin_mse").labels
    assert margins is not None and margins.tolist() == [0, -2, -5, 0, -0.25, -0.5]
    single = with_negatives(
        [{"query": "a", "positive": "b", "n1": "c", "t": "1.5"}], negatives=["n1"], teacher="t", loss="margin_mse"
    )
    assert single.labels is not None and single.labels.tolist() == [0, -1.5]


def test_tables(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("query\tdocument\tlabel\na\tb\t1\na\tc c\t0.5\n")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LISTS))
    source = read(tmp_path / "a.tsv")
    assert source.documents == [["b"], ["c c"]] and source.labels is not None and source.labels.tolist() == [1, 0.5]
    assert source_digest(read(tmp_path / "a.jsonl")) == source_digest(read())
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [LISTS[0], LISTS[2]]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert source_digest(read(tmp_path / "a.parquet")) == source_digest(read(rows))


GOOD = {"query": "a", "document": ["b", "c"], "label": [1, 0]}
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "query": ({"query": " "}, {}, r"source\[1\]: column 'query': expected a text, got ' '"),
    "document": ({"document": ["b", ""]}, {}, r"source\[1\]: column 'document': expected a text, got ''"),
    "number": ({"document": 3}, {}, r"source\[1\]: column 'document': expected a text, got 3"),
    "none": ({"document": []}, {}, r"source\[1\]: column 'document': expected at least one text"),
    "twice": ({"document": ["b", "b"]}, {}, r"source\[1\]: column 'document': expected different texts, got 'b' twice"),
    "labels": ({"label": [1]}, {}, r"source\[1\]: column 'label': expected 2 numbers, one for each document, got 1"),
    "word": ({"label": [1, "x"]}, {}, r"source\[1\]: column 'label': expected a number, got 'x'"),
    "truth": ({"label": [1, True]}, {}, r"source\[1\]: column 'label': expected a number, got True"),
    "nan": ({"label": [1, float("nan")]}, {"loss": "mse"}, r"source\[1\]: column 'label': expected a number, got nan"),
    "above": ({"label": [1, 1.5]}, {}, r"source\[1\]: column 'label': expected a label from 0 to 1, got 1.5"),
    "below": ({"label": [-0.5, 1]}, {}, r"source\[1\]: column 'label': expected a label from 0 to 1, got -0.5"),
    "no positive": ({"label": [0, 0]}, {"loss": "softmax"}, r"source\[1\]: column 'label': expected labels from 0 on"),
    "one": (
        {"document": ["b"], "label": [1]}, {"loss": "list_net"},
        r"source\[1\]: column 'label': expected at least two documents, which list_net compares, got 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_has_its_row(name: str) -> None:
    changes, options, message = WRONG[name]
    with pytest.raises(SourceError, match=message):
        read([GOOD, GOOD | changes], **options)


PAIR = {"query": "a", "positive": "b", "n1": "c", "n2": "d", "teacher": [1, 2, 3]}
WRONG_NEGATIVES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "positive": ({"n1": "b"}, {}, r"source\[1\]: column 'n1': expected a negative, got the positive"),
    "other row": (
        {"positive": "e", "n2": "b"}, {},
        r"source\[1\]: column 'n2': expected a negative, got a positive of this query, source\[0\]",
    ),
    "twice": ({"n2": "c"}, {}, r"source\[1\]: column 'n2': expected a text that is not there already"),
    "empty": ({"positive": ""}, {}, r"source\[1\]: column 'positive': expected a text, got ''"),
    "missing": ({"positive": None}, {}, r"source\[1\]: column 'positive': expected a string, got None"),
    "teacher": (
        {"teacher": [1, 2]}, {"teacher": "teacher", "loss": "mse"},
        r"source\[1\]: column 'teacher': expected 3 scores, got 2",
    ),
    "margins": (
        {"teacher": [1]}, {"teacher": "teacher", "loss": "margin_mse"},
        r"source\[1\]: column 'teacher': expected 3 scores or 2 margins, got 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_NEGATIVES)
def test_wrong_negatives_have_their_row(name: str) -> None:
    changes, options, message = WRONG_NEGATIVES[name]
    with pytest.raises(SourceError, match=message):
        with_negatives([PAIR, PAIR | changes], **options)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="positive, negatives: expected different columns"):
        with_negatives(negatives=["positive"])
    with pytest.raises(TypeError, match="negatives"):
        with_negatives(negatives="n1")
    with pytest.raises(ValueError, match="loss: expected one of binary, softmax"):
        read(loss="hinge")
    with pytest.raises(SourceError, match="expected a column 'text'"):
        read(document="text")
