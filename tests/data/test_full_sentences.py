"""Runs of whole sentences: as many as fit, of one document, nothing lost."""

from pathlib import Path

import numpy as np
import pytest

from bert_fast.data.pretraining_texts import Passages, Texts, full_sentences

from .corpora import make_store, random_documents, sentence_ends


def cut_by_hand(ends: list[list[int]], room: int) -> list[tuple[int, int]]:
    """The definition, one document and one sentence at a time."""
    examples = []
    for document in ends:
        start = document[0]
        while start < document[-1]:
            fitting = [end for end in document if start < end <= start + room]
            stop = fitting[-1] if fitting else min(start + room, document[-1])
            examples.append((start, stop))
            start = stop
    return examples


def pairs(found: Passages) -> list[tuple[int, int]]:
    return list(zip(found.starts.tolist(), found.stops.tolist(), strict=True))


@pytest.mark.parametrize("max_length", [3, 4, 17, 42, 60, 500, 65536])
def test_as_many_sentences_as_fit(tmp_path: Path, max_length: int) -> None:
    documents = random_documents(1, 50)
    store = make_store(tmp_path, documents)
    texts = Texts(store)
    # In one part each, as shorter documents are, whatever the room.
    texts.parts = lambda _: (texts.starts, texts.stops, np.arange(len(texts.starts)))  # type: ignore[method-assign]
    found = full_sentences(texts, max_length - 2)
    assert pairs(found) == cut_by_hand(sentence_ends(documents), max_length - 2)
    assert found.starts.dtype == found.stops.dtype == np.int64


def test_long_documents_in_parts(tmp_path: Path) -> None:
    documents = [[7, 5, 9] * 400, [3], [2000, 1, 2000], [1] * 3000]
    store = make_store(tmp_path, documents)
    texts = Texts(store)
    starts, stops, document = texts.parts(500)
    assert starts[0] == 0 and stops[-1] == len(store.tokens) and np.array_equal(starts[1:], stops[:-1])
    ends = sentence_ends(documents)
    between = set(starts.tolist()) - {end for some in ends for end in some}
    assert between and all(8403 < start < 12404 for start in between)  # within the sentences of 2,000 tokens
    for start, stop, number in zip(starts, stops, document, strict=True):
        assert ends[number][0] <= start < stop <= ends[number][-1]
    assert np.bincount(document).tolist() == [17, 1, 7, 6] and (stops - starts).max() <= 1000
    found = full_sentences(texts, 10)
    assert found.starts[0] == 0 and np.array_equal(found.starts[1:], found.stops[:-1])
    assert found.stops[-1] == len(store.tokens)
    # Parts begin where documents do, else the examples are those by hand.
    parts = zip(*(column.tolist() for column in texts.parts(64 * 10)), strict=True)
    by_hand = cut_by_hand([sorted({a, b}.union(end for end in ends[d] if a < end < b)) for a, b, d in parts], 10)
    assert pairs(found) == by_hand


def test_documents_without_sentences_are_one(tmp_path: Path) -> None:
    store = make_store(tmp_path, [[25], [0], [4], [0], [0], [10]], with_sentences=False)
    assert not store.has_sentences
    assert pairs(full_sentences(Texts(store), 10)) == [(0, 10), (10, 20), (20, 25), (25, 29), (29, 39)]


def test_stores_with_next_to_nothing(tmp_path: Path) -> None:
    store = make_store(tmp_path / "one", [[1]])
    assert pairs(full_sentences(Texts(store), 1)) == [(0, 1)]
    for documents in ([[0]], [[0], [0]]):
        empty = make_store(tmp_path / str(len(documents)), documents, with_sentences=False)
        assert pairs(full_sentences(Texts(empty), 126)) == []
