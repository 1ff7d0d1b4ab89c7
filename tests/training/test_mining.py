"""Hard negatives: by brute force, as sentence-transformers mines them, what is left out, what is refused."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_fast import BertConfig, BertModel, BertTokenizer
from bert_fast.errors import SourceError
from bert_fast.models import BertForSequenceClassification
from bert_fast.testing.tolerances import ABSOLUTE
from bert_fast.training.recipes import CrossEncoder, Embedder, Index, Limits, embed_files, mine

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnop"]
TEXTS = [" ".join(texts) for texts in itertools.combinations("abcdefghij", 3)]  # 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, initializer_range=0.5,
    )  # fmt: skip
    BertModel(config).save_pretrained(path)
    BertTokenizer(WORDS).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Embedder:
    return Embedder.from_pretrained(folder)


def rows(count: int = 12) -> list[dict[str, Any]]:
    """Every query with the text that is nearest to it, but for one that has two."""
    made = [
        {"query": f"k {text}", "positive": text, "number": k} for k, text in enumerate(TEXTS[:: 120 // count][:count])
    ]
    return [*made, {"query": made[0]["query"], "positive": "p o n", "number": count}]


def negatives(row: dict[str, Any]) -> list[str]:
    return [row[f"negative_{k}"] for k in range(1, 1 + sum(name.startswith("negative_") for name in row))]


LIMITS: dict[str, dict[str, Any]] = {
    "nearest": {},
    "first": {"first": 3},
    "margin": {"margin": 0.03, "depth": 120},
    "depth": {"margin": 0.01, "depth": 50},
    "relative": {"relative_margin": 0.05, "depth": 120},
    "score": {"max_score": 0.85, "first": 2, "depth": 120},
    "all": {"margin": 0.01, "relative_margin": 0.02, "max_score": 0.9, "first": 1, "depth": 120},
}


@pytest.mark.parametrize("name", LIMITS)
def test_against_the_whole_matrix(name: str, embedder: Embedder) -> None:
    limits, table = Limits(**LIMITS[name]), rows()
    mined = mine(embedder, table, TEXTS, count=4, limits=limits)
    corpus = [*TEXTS, "p o n"]
    vectors, asked = embedder.embed(corpus), embedder.embed([row["query"] for row in table])
    unit = [one / np.linalg.norm(one, axis=1, keepdims=True) for one in (asked, vectors)]
    scores = unit[0].astype(np.float64) @ unit[1].T.astype(np.float64)
    assert mined.corpus == len(corpus)
    expected = {}
    for number, row in enumerate(table):
        own = {other["positive"] for other in table if other["query"] == row["query"]}
        lowest = min(scores[number, corpus.index(text)] for text in own)
        order = [k for k in np.argsort(-scores[number], kind="stable") if corpus[k] not in own]
        order = order[: limits.looked_at(4)]
        if limits.margin is not None:
            order = [k for k in order if scores[number, k] <= lowest - limits.margin]
        if limits.relative_margin is not None:
            order = [k for k in order if scores[number, k] <= lowest - abs(lowest) * limits.relative_margin]
        if limits.max_score is not None:
            order = [k for k in order if scores[number, k] <= limits.max_score]
        kept = [corpus[k] for k in order[limits.first :][:4]]
        if len(kept) == 4:
            expected[number] = kept
    assert [row["number"] for row in mined.rows] == [*expected] and len(expected) > 4
    for row in mined.rows:
        assert negatives(row) == expected[row["number"]]
        assert {name: row[name] for name in ("query", "positive", "number")} == table[row["number"]]
    assert mined.short == [f"rows[{k}]" for k in range(len(table)) if k not in expected]


@pytest.mark.parametrize("name", ["nearest", "first", "margin", "relative", "score"])
def test_as_sentence_transformers_mines_them(name: str, embedder: Embedder, folder: Path) -> None:
    """Of a table in which no positive belongs to two queries: there each would be the other's negative."""
    library, datasets = pytest.importorskip("sentence_transformers"), pytest.importorskip("datasets")
    util = pytest.importorskip("sentence_transformers.util")
    table = [{"query": row["query"], "positive": row["positive"]} for row in rows()]
    limits = LIMITS[name]
    names = {"first": "range_min", "depth": "range_max", "margin": "absolute_margin"}
    theirs = util.mine_hard_negatives(
        datasets.Dataset.from_list(table), library.SentenceTransformer(str(folder), device="cpu"), corpus=TEXTS,
        num_negatives=4, output_format="n-tuple", verbose=False,
        **{names.get(key, key): value for key, value in limits.items()},
    )  # fmt: skip
    ours = mine(embedder, table, TEXTS, count=4, limits=Limits(**limits))
    found = {(row["query"], row["positive"]): negatives(row) for row in ours.rows}
    expected = {(row["query"], row["positive"]): negatives(row) for row in theirs}
    assert found == expected and len(found) > 8


def test_what_belongs_together_is_no_negative(embedder: Embedder) -> None:
    """By a query, by a positive, by both; the query itself; one text twice, with spaces around it."""
    table = [
        {"query": "a b", "positive": "a c"},
        {"query": "a b ", "positive": "a d"},  # the query of the first
        {"query": "b a", "positive": " a d"},  # the positive of the second
        {"query": "e f", "positive": "f e"},
    ]
    corpus = ["a b", "a c", "a c ", "a d", "b", "b ", "c", "d d", "e f"]
    mined = mine(embedder, table, corpus, count=4)
    for row in mined.rows[:3]:
        found = negatives(row)
        assert len(set(found)) == 4 and not {"a c", "a d", row["query"].strip()} & {text.strip() for text in found}
    assert mined.rows[0]["positive"] == "a c" and mined.corpus == 8
    assert "e f" not in negatives(mined.rows[3])
    assert [negatives(row) for row in mined.rows[:2]] == [negatives(mined.rows[0])] * 2


def test_no_more_documents_are_looked_at_than_depth_says(embedder: Embedder) -> None:
    """Also where another query has more of its own: of two, the nearest is too near, and one is too few."""
    table = [{"query": "a b", "positive": text} for text in TEXTS[:9]] + [{"query": "k a", "positive": "k a b"}]
    corpus = TEXTS[9:]
    first = negatives(mine(embedder, table, corpus, count=1).rows[-1])[0]
    a, b = embedder.embed(["k a", first])
    below = float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) - 1e-4
    deep = mine(embedder, table, corpus, count=2, limits=Limits(max_score=below, depth=3)).rows[-1]
    assert deep["query"] == "k a" and first not in negatives(deep)
    with pytest.raises(SourceError, match="expected at least one row with 2 negatives"):
        mine(embedder, table, corpus, count=2, limits=Limits(max_score=below, depth=2))


def test_positives_of_others_are_a_corpus(embedder: Embedder) -> None:
    table = [{"query": text, "positive": f"k {text}"} for text in TEXTS[:6]]
    mined = mine(embedder, table, count=5)
    for number, row in enumerate(mined.rows):
        assert {*negatives(row)} == {f"k {text}" for text in TEXTS[:6]} - {table[number]["positive"]}


def write_index(embedder: Embedder, corpus: list[str], folder: Path, ending: str = "npy") -> Index:
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in corpus))
    embed_files(embedder, [folder / "corpus.jsonl"], folder / f"corpus.{ending}")
    return Index(folder / f"corpus.{ending}", "dot")


@pytest.mark.parametrize("ending", ["npy", "parquet"])
@pytest.mark.parametrize("name", ["nearest", "all"])
def test_an_index_gives_the_same_negatives(
    name: str, ending: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a corpus with empty texts, with one text often, without some of the positives; embedded once."""
    pytest.importorskip("pyarrow")
    as_indexed = Embedder.from_pretrained(folder, pooling="max", normalize=True, max_length=5)
    corpus = ["", *TEXTS[:40], " ", *[f" {TEXTS[2]}"] * 30, *TEXTS[43:], "", TEXTS[0]]
    index, limits = write_index(as_indexed, corpus, tmp_path, ending), Limits(**LIMITS[name])
    expected = mine(as_indexed, rows(), corpus, count=4, limits=limits)
    tokenized: list[str] = []
    tokenize = Embedder.tokenize

    def noted(self: Embedder, texts: list[str]) -> Any:
        tokenized.extend(texts)
        return tokenize(self, texts)

    monkeypatch.setattr(Embedder, "tokenize", noted)
    found = mine(Embedder.from_pretrained(folder), rows(), corpus, index=index, count=4, limits=limits)
    assert found == expected and len(found.rows) > 4 and found.corpus == 119
    # Queries, positives that are not in the corpus, and rows of the index that are looked at.
    assert TEXTS[40] in tokenized and "p o n" in tokenized and TEXTS[2] not in tokenized
    assert len(tokenized) <= 12 + 2 + 16


def test_what_is_not_the_index_of_the_corpus(embedder: Embedder, folder: Path, tmp_path: Path) -> None:
    index = write_index(embedder, TEXTS, tmp_path)
    with pytest.raises(ValueError, match="index: expected as many vectors as the corpus has texts, 119, got 120"):
        mine(embedder, rows(), TEXTS[1:], index=index)
    said = "index: row 0: expected the vector of the text there in the corpus, 'h i j', got one of another text"
    with pytest.raises(ValueError, match=said):
        mine(embedder, rows(), TEXTS[::-1], index=index)
    torch.manual_seed(9)
    BertModel(embedder.model.config).save_pretrained(tmp_path / "other")
    embedder.tokenizer.save_pretrained(tmp_path / "other")
    other = Embedder.from_pretrained(tmp_path / "other")
    with pytest.raises(
        ValueError, match=f"index: expected vectors of MODEL .*other, got ones of another model, {folder}"
    ):
        mine(other, rows(), TEXTS, index=index)


def test_a_teacher_scores_positive_and_negatives(embedder: Embedder) -> None:
    torch.manual_seed(1)
    model = BertForSequenceClassification(
        BertConfig.from_dict(embedder.model.config.to_dict() | {"id2label": {0: "x"}})
    )
    teacher = CrossEncoder(model.eval(), embedder.tokenizer)
    mined = mine(embedder, rows(), TEXTS, count=2, teacher=teacher)
    row = mined.rows[3]
    texts = [row["positive"], *negatives(row)]
    scores = teacher.scores([row["query"]] * 3, texts)
    np.testing.assert_allclose(row["teacher"], scores, rtol=0, atol=ABSOLUTE["minilm_embeddings"])
    assert len(set(scores.tolist())) == 3


WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "query": ([{"query": " ", "positive": "a"}], {}, SourceError, r"rows\[0\]: column 'query': expected a text"),
    "positive": (
        [*rows(), {"query": "a", "positive": None}], {}, SourceError, r"rows\[13\]: column 'positive': expected a str"
    ),
    "no positive": ([{"query": "a"}], {}, SourceError, r"rows: expected a column 'positive'"),
    "there": (
        [{"query": "a", "positive": "b", "negative_2": "c"}], {}, SourceError, r"rows: expected no column 'negative_2'"
    ),
    "few": (rows(2), {"count": 3}, SourceError, r"rows: expected at least one row with 3 negatives among 3 texts"),
    "count": (rows(), {"count": 0}, ValueError, "count: expected at least 1, got 0"),
    "same": (rows(), {"positive": "query"}, ValueError, "query, positive: expected different columns"),
    "depth": (rows(), {"limits": Limits(first=2, depth=4)}, ValueError, "depth: expected at least first"),
    "file": ("none.jsonl", {}, OSError, "none.jsonl"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str, embedder: Embedder) -> None:
    table, options, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        mine(embedder, table, **options)


def test_limits_that_are_none() -> None:
    for name, value in (("margin", -0.1), ("relative_margin", 2), ("max_score", 1.5), ("margin", float("nan"))):
        with pytest.raises(ValueError, match=f"{name}: expected a (number from|finite number)"):
            Limits(**{name: value})
    with pytest.raises(ValueError, match="first: expected at least 0"):
        Limits(first=-1)
    assert Limits().looked_at(3) == 3 and Limits(first=2, margin=0.1).looked_at(3) == 32
