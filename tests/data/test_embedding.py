"""EmbeddingSource: which texts belong together, batches, what is refused with its row."""

from typing import Any

import numpy as np
import pytest

from bert_fast.data.batches import Batches, source_digest
from bert_fast.data.embedding import EmbeddingSource
from bert_fast.errors import SourceError
from bert_fast.tokenization import BertTokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
ROWS = [
    {"query": "a", "positive": "b b", "negative": "c"},
    {"query": "a", "positive": "d", "negative": "e"},  # the query of row 0
    {"query": "f", "positive": "d", "negative": "b b"},  # the positive of row 1; its negative is that of row 0
    {"query": "g g g", "positive": "h", "negative": "c"},
]


def read(rows: list[dict[str, Any]] = ROWS, **options: Any) -> EmbeddingSource:
    return EmbeddingSource.read(rows, BertTokenizer(WORDS), **{"negatives": ["negative"]} | options)


def test_groups_join_rows_over_shared_texts() -> None:
    groups = read().groups
    assert len(set(groups[:3, 0])) == 1 and groups[3, 0] != groups[0, 0]
    assert (groups[:, 0] == groups[:, 1]).all()
    assert groups[2, 2] == groups[0, 0]  # somebody's positive
    assert groups[0, 2] == groups[3, 2] and groups[0, 2] not in groups[:, :2]  # nobody's
    assert groups[1, 2] not in (groups[0, 0], groups[3, 0], groups[0, 2])


def test_a_text_that_is_query_and_document_joins_nothing() -> None:
    groups = read([{"query": "a", "positive": "b"}, {"query": "b", "positive": "c"}], negatives=()).groups
    assert groups[0, 0] != groups[1, 0]


def test_batches_hold_the_texts_of_each_example() -> None:
    source = read()
    batch = source.batch(0, np.array([3, 0]))
    assert batch["num_texts"] == 3 and batch.num_sequences == 6
    words = [
        source.tokenizer.decode(ids.tolist()) for ids in np.split(batch["input_ids"].numpy(), batch["cu_seqlens"][1:-1])
    ]
    assert words == [f"[CLS] {text} [SEP]" for text in ("g g g", "h", "c", "a", "b b", "c")]
    assert batch["query_groups"].tolist() == source.groups[[3, 0], 0].tolist()
    assert batch["document_groups"].tolist() == source.groups[[3, 0], 1:].tolist()
    assert source.lengths(0).tolist() == [3 + 4 + 3, 9, 3 + 3 + 4, 5 + 3 + 3]
    seen = np.concatenate([Batches(source, max_tokens=20).plan(1).indices(k) for k in range(2)])
    assert sorted(seen.tolist()) == [0, 1, 2, 3]


def test_some_of_the_examples() -> None:
    source = read()
    some = source.take(np.array([2, 0]))
    assert some.texts == [["f", "a"], ["d", "b b"], ["b b", "c"]] and len(some) == 2
    assert np.array_equal(some.batch(0, np.array([1]))["input_ids"], source.batch(0, np.array([0]))["input_ids"])
    digests = {source_digest(one) for one in (source, some, read(max_length=3), read(negatives=()))}
    assert len(digests) == 4 and source_digest(read()) == source_digest(source)
    assert source.decode(0).splitlines() == ["? [CLS] a [SEP]", "+ [CLS] b b [SEP]", "- [CLS] c [SEP]"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": " ", "positive": "b", "negative": "c"}, r"source\[4\]: column 'query': expected a text, got ' '"),
        ({"query": "a", "positive": "", "negative": "c"}, r"source\[4\]: column 'positive': expected a text, got ''"),
        ({"query": "a", "positive": "c", "negative": "c"}, r"source\[4\]: column 'negative': expected a negative, got"),
        ({"query": "a", "positive": None, "negative": "c"}, r"source\[4\]: column 'positive': expected a string"),
        ({"query": "a", "positive": "b"}, r"source\[4\]: expected a field 'negative'"),
    ],
    ids=["empty query", "empty positive", "negative is positive", "no positive", "no negative"],
)
def test_what_is_wrong_has_its_row(row: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        read([*ROWS, row])


@pytest.mark.parametrize(
    ("value", "loss", "message"),
    [
        (1.5, "cosine_mse", r"source\[1\]: column 'near': expected a cosine, from -1 to 1, got 1.5"),
        (0.5, "contrastive", r"source\[1\]: column 'near': expected 1 or 0, got 0.5"),
        ("x", "cosent", r"source\[1\]: column 'near': expected a number, got 'x'"),
        (float("inf"), "margin_mse", r"source\[1\]: column 'near': expected a number, got inf"),
        (True, "contrastive", r"source\[1\]: column 'near': expected 1 or 0, got True"),
        (None, "cosent", r"source\[1\]: column 'near': expected a number, got None"),
    ],
    ids=["above", "between", "word", "infinite", "truth", "none"],
)
def test_a_wrong_score_has_its_row(value: Any, loss: Any, message: str) -> None:
    rows = [{"query": "a", "positive": "b", "near": near} for near in (1, value)]
    with pytest.raises(SourceError, match=message):
        read(rows, negatives=(), score="near", loss=loss)


def test_scores_go_with_their_rows() -> None:
    rows = [{"query": text, "positive": "h", "near": place / 4} for place, text in enumerate("abc")]
    source = read(rows, negatives=(), score="near", loss="cosent")
    assert source.batch(0, np.array([2, 0]))["scores"].tolist() == [0.5, 0.0]
    assert source.take(np.array([1])).batch(0, np.array([0]))["scores"].tolist() == [0.25]
    assert source.decode(1).splitlines()[-1] == "= 0.25"
    assert source_digest(source) != source_digest(read(rows, negatives=()))


def test_what_is_done_about_rows_is_noted() -> None:
    """Rows that share texts, also by way of others; texts that are cut, with their lengths before."""
    table = [
        {"query": "a", "positive": "b"},
        {"query": "c", "positive": "d"},
        {"query": "e", "positive": "d f"},
        {"query": "c", "positive": "d f"},
        {"query": "f", "positive": "a b c d"},
        {"query": "h", "positive": "h"},
    ]
    shared = (
        "source: 3 rows share a query or a positive with others, directly or through others, and are no negatives of "
        "them; the first: source[2], of the group of source[1]"
    )
    cut = "source: {} texts have more than {} tokens and are cut; the first: source[{}], column 'positive', {} tokens"
    assert read(table, negatives=(), max_length=None).notes == (shared,)
    assert read(table, negatives=(), max_length=6).notes == (shared,)
    assert read(table, negatives=(), max_length=5).notes == (shared, cut.format(1, 5, 4, 6))
    assert read(table, negatives=(), max_length=3).notes == (shared, cut.format(3, 3, 2, 4))
    assert read(table[4:], negatives=(), max_length=6).notes == ()
    near = [{**row, "near": 1} for row in table]
    assert read(near, negatives=(), score="near", loss="cosent", max_length=5).notes == (cut.format(1, 5, 4, 6),)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="expected different columns"):
        read(negatives=["positive"])
    with pytest.raises(TypeError, match="negatives"):
        read(negatives="negative")
    with pytest.raises(SourceError, match="expected a column 'document'"):
        read(positive="document")
