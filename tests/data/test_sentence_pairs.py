"""Sentence pairs: every token once, the shares that are defined, and lengths that do not give the answer away."""

from bisect import bisect_right
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from bert_fast.data.pretraining_texts import SentencePairs, Texts, sentence_pairs
from bert_fast.errors import StoreError

from .corpora import make_store, random_documents, sentence_ends

LEAST_P = 1e-4


def plan(texts: Texts, max_length: int = 64, short: float = 0.1, seed: int = 0, epoch: int = 0) -> SentencePairs:
    return sentence_pairs(texts, max_length - 3, seed=seed, epoch=epoch, short_sequence_probability=short)


def document_of(texts: Texts, place: np.ndarray) -> np.ndarray:
    return np.searchsorted(texts.starts, place, side="right") - 1


def part_stops(texts: Texts, max_length: int) -> np.ndarray:
    return texts.parts(64 * (max_length - 3))[1]


def check(texts: Texts, pairs: SentencePairs, max_length: int) -> None:
    """What holds of every plan."""
    a_sizes, b_sizes = pairs.a_stop - pairs.a_start, pairs.b_stop - pairs.b_start
    assert a_sizes.min() > 0 and b_sizes.min() > 0 and (a_sizes + b_sizes).max() <= max_length - 3
    assert pairs.is_random.dtype == np.bool_ and all(column.dtype == np.int64 for column in pairs[:4])
    follows = ~pairs.is_random
    assert np.array_equal(pairs.a_stop[follows], pairs.b_start[follows])
    # Every token is once in an A or in a B that follows, in the order of the corpus, but for parts of last sentences.
    ends = np.where(follows, pairs.b_stop, pairs.a_stop)
    begins = np.append(pairs.a_start[1:], texts.stops[-1])
    assert pairs.a_start[0] == 0 and (begins >= ends).all()
    assert pairs.is_random[begins > ends].all() and np.isin(begins[begins > ends], part_stops(texts, max_length)).all()
    next_sentence = texts.sentences[np.searchsorted(texts.sentences, ends)]
    assert (begins <= next_sentence).all()
    for column, stop in ((pairs.a_start, ends), (pairs.b_start, pairs.b_stop)):
        assert np.array_equal(document_of(texts, column), document_of(texts, stop - 1))
    same = document_of(texts, pairs.a_start) == document_of(texts, pairs.b_start)
    assert np.array_equal(same, follows)


@pytest.mark.parametrize("max_length", [5, 6, 7, 20, 64, 128, 5000])
@pytest.mark.parametrize("short", [0.0, 0.1, 1.0])
def test_plans_of_random_documents(tmp_path: Path, max_length: int, short: float) -> None:
    texts = Texts(make_store(tmp_path, random_documents(2, 60)))
    for epoch in range(3):
        check(texts, plan(texts, max_length, short, epoch=epoch), max_length)


CORPORA = {
    "single tokens": [[1], [1], [1]],
    "one token and a long document": [[1], [50] * 200],
    "one sentence each": [[9], [30], [2], [500], [1]],
    "one sentence longer than all": [[3, 5000, 3], [5, 5]],
    "two documents": [[3] * 100, [4] * 50],
}


@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize("with_sentences", [True, False])
def test_plans_of_odd_corpora(tmp_path: Path, name: str, with_sentences: bool) -> None:
    documents = CORPORA[name]
    if not with_sentences:  # empty documents between the others
        documents = [one for document in documents for one in ([0], document, [0])]
    texts = Texts(make_store(tmp_path, documents, with_sentences=with_sentences))
    for max_length in (5, 40, 512):
        for seed in range(5):
            check(texts, plan(texts, max_length, seed=seed), max_length)


def test_one_document_is_not_enough(tmp_path: Path) -> None:
    for documents, found in (([[5, 5, 5]], 1), ([[0], [7], [0]], 1), ([[0]], 0)):
        store = make_store(tmp_path / f"{len(documents)}{found}", documents, with_sentences=found == len(documents))
        message = rf"store: next-sentence prediction needs at least 2 documents .* got {found}; .*next_sentence=False"
        with pytest.raises(StoreError, match=message):
            plan(Texts(store))


def test_chance_is_fixed_by_seed_and_epoch(tmp_path: Path) -> None:
    texts = Texts(make_store(tmp_path, random_documents(3, 40)))
    first = plan(texts)
    assert all(np.array_equal(a, b) for a, b in zip(first, plan(texts), strict=True))
    for other in (plan(texts, seed=1), plan(texts, epoch=1)):
        assert not np.array_equal(first.b_start[:20], other.b_start[:20])


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    """Documents like chapters: 20 to 80 sentences of about 20 tokens."""
    draw = np.random.default_rng(4)
    documents = [np.clip(draw.gamma(2.0, 10.0, draw.integers(20, 81)), 1, 200).astype(int).tolist() for _ in range(150)]
    return Texts(make_store(tmp_path_factory.mktemp("books"), documents))


@pytest.fixture(scope="module")
def epochs(books: Texts) -> list[SentencePairs]:
    return [plan(books, 128, 0.0, epoch=epoch) for epoch in range(12)]


def test_half_of_the_pairs_are_random(epochs: list[SentencePairs]) -> None:
    is_random = np.concatenate([pairs.is_random for pairs in epochs])
    assert stats.binomtest(int(is_random.sum()), len(is_random), 0.5).pvalue > LEAST_P
    neighbours = np.bincount(2 * is_random[:-1] + is_random[1:], minlength=4).reshape(2, 2)
    assert stats.chi2_contingency(neighbours).pvalue > LEAST_P


def test_other_documents_are_equally_likely(tmp_path: Path) -> None:
    texts = Texts(make_store(tmp_path, [[5] * count for count in (300, 20, 40, 4, 150)]))
    counts = np.zeros((5, 5), dtype=int)
    for epoch in range(60):
        pairs = plan(texts, 64, epoch=epoch)
        own, other = (document_of(texts, column[pairs.is_random]) for column in (pairs.a_start, pairs.b_start))
        np.add.at(counts, (own, other), 1)
    for number, row in enumerate(counts):
        assert row[number] == 0
        assert row.sum() < 100 or stats.chisquare(np.delete(row, number)).pvalue > LEAST_P


def test_b_from_elsewhere_begins_at_any_sentence(tmp_path: Path) -> None:
    texts = Texts(make_store(tmp_path, [[6] * 400, [6] * 30]))
    starts = []
    for epoch in range(40):
        pairs = plan(texts, 33, 0.0, epoch=epoch)  # room for 5 sentences, B has 1 to 4
        chosen = pairs.is_random & (document_of(texts, pairs.a_start) == 0) & (pairs.b_stop - pairs.b_start == 12)
        starts.append((pairs.b_start[chosen] - 2400) // 6)
    counts = np.bincount(np.concatenate(starts), minlength=30)
    assert counts[29:].sum() == 0  # two sentences begin no later than the 29th
    assert stats.chisquare(counts[:29]).pvalue > LEAST_P


def test_a_ends_behind_any_sentence_but_the_last(tmp_path: Path) -> None:
    texts = Texts(make_store(tmp_path, [[6] * 50] * 40))
    sizes = []
    for epoch in range(10):
        pairs = plan(texts, 33, 0.0, epoch=epoch)
        is_whole = pairs.a_stop - pairs.a_start + pairs.b_stop - pairs.b_start == 30
        sizes.append((pairs.a_stop - pairs.a_start)[is_whole] // 6)
    counts = np.bincount(np.concatenate(sizes))
    assert len(counts) == 5 and counts[0] == 0 and stats.chisquare(counts[1:]).pvalue > LEAST_P


def test_short_pairs(books: Texts) -> None:
    room = 125
    texts = Texts(books.store)
    texts.sentences = np.arange(texts.stops[-1] + 1)  # sentences of one token: every pair fills its room
    sizes = []
    for epoch in range(4):
        pairs = plan(texts, room + 3, 0.3, epoch=epoch)
        is_far_from_end = texts.stops[document_of(texts, pairs.a_start)] - pairs.a_start > 2 * room
        sizes.append((pairs.a_stop - pairs.a_start + pairs.b_stop - pairs.b_start)[is_far_from_end])
    inner = np.concatenate(sizes)
    is_short = inner < room
    share = 0.3 * (room - 2) / (room - 1)
    assert stats.binomtest(int(is_short.sum()), len(inner), share).pvalue > LEAST_P
    counts = np.bincount(inner[is_short], minlength=room)
    assert counts[:2].sum() == 0 and stats.chisquare(counts[2:room]).pvalue > LEAST_P


def test_whole_sentences_unless_they_do_not_fit(books: Texts, epochs: list[SentencePairs]) -> None:
    ends = set(books.sentences.tolist())
    inside = sorted(ends)
    for pairs in epochs[:2]:
        for a_start, a_stop, b_start, b_stop, is_random in zip(*(column.tolist() for column in pairs), strict=True):
            whole = bisect_right(inside, a_start + 125) - bisect_right(inside, a_start)
            stop = books.stops[document_of(books, np.array(a_start))]
            sentences_left = bisect_right(inside, min(a_start + 125, stop)) - bisect_right(inside, a_start)
            assert sentences_left <= whole
            if sentences_left > 1:
                assert a_stop in ends and (is_random or b_stop in ends) and (not is_random or b_start in ends)


def test_lengths_do_not_give_the_answer_away(epochs: list[SentencePairs]) -> None:
    """No threshold on the length of A, of B or of both tells random pairs from others for more than 54 of 100."""
    for sizes in (
        lambda pairs: pairs.a_stop - pairs.a_start,
        lambda pairs: pairs.b_stop - pairs.b_start,
        lambda pairs: pairs.a_stop - pairs.a_start + pairs.b_stop - pairs.b_start,
    ):
        values = np.concatenate([sizes(pairs) for pairs in epochs])
        is_random = np.concatenate([pairs.is_random for pairs in epochs])
        distance = stats.ks_2samp(values[is_random], values[~is_random]).statistic
        assert distance < 0.08  # of the two distributions; half of it is gained over guessing


def test_sentences_by_hand(tmp_path: Path) -> None:
    """One document, room for exactly two sentences: pairs are known but for chance."""
    documents = [[5] * 10, [7, 3] * 4]
    texts = Texts(make_store(tmp_path, documents))
    first, second = sentence_ends(documents)
    for epoch in range(20):
        pairs = plan(texts, 13, 0.0, epoch=epoch)
        for a_start, a_stop, b_start, b_stop, is_random in zip(*(column.tolist() for column in pairs), strict=True):
            own, other = (first, second) if a_start < 50 else (second, first)
            if a_start in own[:-2]:  # two sentences are left
                assert a_stop == own[own.index(a_start) + 1]
                assert b_stop - b_start <= 10 - (a_stop - a_start)
                if not is_random:
                    assert b_stop == own[own.index(a_start) + 2]
                else:
                    assert other[0] <= b_start < b_stop <= other[-1]
