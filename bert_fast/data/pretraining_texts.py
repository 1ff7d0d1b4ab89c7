"""Which tokens of a store are an example of pre-training: one text, or a pair of them for next-sentence prediction.

`full_sentences`: runs of whole sentences of one document, as many as fit.

    8 tokens fit beside [CLS] and [SEP]; sentences of a document with 3, 4, 5, 20 tokens:
    [3 + 4]  [5]  [8]  [8]  [4]      the fourth is longer than any example and is cut

`sentence_pairs`: two texts, of which the second follows the first or is from elsewhere.

    document    s1 s2 s3 s4 s5 s6 s7 ...        other    t1 t2 t3 t4 ...
    example 0   [CLS] s1 s2 [SEP] s3 [SEP]      follows: s1 to s3 are all that fit, A ends behind a random one of them
    example 1   [CLS] s4 [SEP] t3 t4 [SEP]      random: A ends likewise, B begins with a random sentence elsewhere
    example 2   [CLS] s5 ...                    what was not used goes on

Sources: Devlin et al. 2019 (arXiv:1810.04805), section 3.1 and appendix A.2; Liu et al. 2019 (arXiv:1907.11692),
section 4.2, "DOC-SENTENCES".
"""

from typing import NamedTuple

import numpy as np

from bert_fast.data.counter_random import CounterRandom, below
from bert_fast.data.token_store import TokenStore
from bert_fast.errors import StoreError

RANDOM = 0.5  # share of pairs whose second part is from elsewhere
_ATTEMPTS = 8  # at a sentence that fits
_PART_EXAMPLES = 64  # documents are planned in parts of about so many examples, all parts at the same time
_CHECKED_AT_ONCE = 1 << 20  # boundaries


class Texts:
    """The documents of a store that have tokens, and their sentences.

    Attributes:
        sentences (int64 [s + 1]): boundaries of all sentences in `store.tokens`; without sentences in the store, those
            of documents.
        starts, stops (int64 [d]): of the documents, in `store.tokens`; each is a boundary of sentences, too.
    """

    def __init__(self, store: TokenStore) -> None:
        self.store = store
        bounds = np.asarray(store.boundaries)
        _check_order(store, "documents", bounds)
        has_tokens = bounds[1:] > bounds[:-1]
        self.starts, self.stops = bounds[:-1][has_tokens], bounds[1:][has_tokens]
        sentences = store.sentence_boundaries
        if sentences is not None:
            _check_order(store, "sentences", sentences)
        self.sentences = np.append(self.starts, bounds[-1]) if sentences is None else sentences

    def parts(self, num_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Documents in parts of about `num_tokens` each: (starts, stops, document), int64 [p] each.

        A document of up to 1.5 times as many tokens is one part. Parts begin with a sentence, but for sentences longer
        than a part. So the longest document does not hold up all others, where parts are worked on side by side.
        """
        lengths = self.stops - self.starts
        counts = np.maximum(1, np.round(lengths / num_tokens).astype(np.int64))
        document = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
        ideal = self.starts[document] + number * lengths[document] // counts[document]
        next_sentence = self.sentences[np.searchsorted(self.sentences, ideal)]
        starts = np.unique(np.where(next_sentence - ideal > num_tokens, ideal, next_sentence))
        starts = starts[starts < self.sentences[-1]]
        document = np.searchsorted(self.starts, starts, side="right") - 1
        return starts, np.append(starts[1:], self.stops[-1:]), document


def _check_order(store: TokenStore, name: str, boundaries: np.ndarray) -> None:
    """What is planned from boundaries that do not ascend has no end, or no sense."""
    for start in range(0, len(boundaries), _CHECKED_AT_ONCE):
        part = boundaries[start : start + _CHECKED_AT_ONCE + 1]
        wrong = np.flatnonzero(part[1:] < part[:-1])
        if len(wrong):
            place = start + int(wrong[0]) + 1
            raise StoreError(
                f"{store.path}: {name}: expected ascending boundaries, got {boundaries[place]} behind "
                f"{boundaries[place - 1]} at place {place}: the store is damaged"
            )


class Passages(NamedTuple):
    """Examples of one text each: `store.tokens[starts[i]:stops[i]]`; int64 [n] each."""

    starts: np.ndarray
    stops: np.ndarray


def _last_end(sentences: np.ndarray, starts: np.ndarray, room: np.ndarray | int, stops: np.ndarray) -> np.ndarray:
    """Where whole sentences from `starts` on end, as many as `room` tokens hold, not beyond `stops`: int64 [n].

    A sentence longer than the room is cut where the room ends.
    """
    limits = np.minimum(starts + room, stops)
    ends = sentences[np.searchsorted(sentences, limits, side="right") - 1]
    return np.where(ends > starts, ends, limits)


def full_sentences(texts: Texts, room: int) -> Passages:
    """Cuts all documents into examples of at most `room` tokens; every token is in exactly one.

    Examples are runs of whole sentences of one document, each with as many as fit; sentences that are longer are cut
    into pieces. Documents without sentences are one sentence. About 0.3 µs an example.

    room: tokens of an example without special ones, at least 1.
    """
    position, stop, _ = texts.parts(_PART_EXAMPLES * room)
    starts, stops = [position[:0]], [position[:0]]
    while len(position):  # all parts make their next example at the same time
        ends = _last_end(texts.sentences, position, room, stop)
        starts.append(position)
        stops.append(ends)
        goes_on = ends < stop
        position, stop = ends[goes_on], stop[goes_on]
    joined = np.concatenate(starts)
    order = np.argsort(joined, kind="stable")
    return Passages(joined[order], np.concatenate(stops)[order])


class SentencePairs(NamedTuple):
    """Pairs of texts: A is `store.tokens[a_start:a_stop]`, B likewise; int64 [n] each, is_random is bool [n]."""

    a_start: np.ndarray
    a_stop: np.ndarray
    b_start: np.ndarray
    b_stop: np.ndarray
    is_random: np.ndarray


def sentence_pairs(
    texts: Texts, room: int, *, seed: int, epoch: int, short_sequence_probability: float = 0.1
) -> SentencePairs:
    """Plans the pairs of an epoch, in the order of the corpus.

    Every token is in exactly one A, or B that follows it, but for what a random B cuts off a document's last sentence.

    A pair holds at most `room` tokens, with short_sequence_probability at most a number drawn from 2 to that.
    From where its document is, it takes whole sentences, as many as fit; A ends behind a random one but the last. With
    probability 0.5 B is the rest. Else it is whole sentences from a random one on, of a document drawn from all others,
    and what would have been B is used by the next pair. B from elsewhere gets as much room as the rest of the document
    could have filled, and begins early enough to fill it where its document is long enough: so the lengths do not give
    the answer away.

    Where only one sentence fits (or there is but one), it is cut into A and B at a random token; B from elsewhere is
    then the end of a sentence, too. A sentence of a single token can only be followed by B from elsewhere. Sentences
    longer than a pair are cut and go on in the next one. Documents without sentences are one sentence. Documents of
    more than about 64 pairs are planned in parts.

    Chance depends on (seed, epoch, place in the corpus) alone. About 1 µs a pair.

    room: tokens of a pair without special ones, at least 2.

    Raises:
        StoreError: the store has fewer than two documents with tokens.
    """
    check_documents(texts)
    random = CounterRandom(seed, epoch, "sentence pairs")
    planner = _Planner(texts, room, short_sequence_probability, random)
    position, stop, document = texts.parts(_PART_EXAMPLES * room)
    steps = []
    while len(position):  # all parts make their next pair at the same time
        pairs, after = planner.next_pairs(position, stop, document)
        steps.append(pairs)
        goes_on = after < stop
        position, stop, document = after[goes_on], stop[goes_on], document[goes_on]
    joined = SentencePairs(*map(np.concatenate, zip(*steps, strict=True)))
    order = np.argsort(joined.a_start, kind="stable")
    return SentencePairs(*(column[order] for column in joined))


def check_documents(texts: Texts) -> None:
    """Raises StoreError unless there are two documents with tokens."""
    if len(texts.starts) < 2:
        raise StoreError(
            f"{texts.store.path}: next-sentence prediction needs at least 2 documents with tokens (the second sentence "
            f"of a random pair is from another), got {len(texts.starts)}; separate documents by empty lines, or train "
            "on masked words alone (next_sentence=False)"
        )


class _Chance:
    """What chance decides at each of many places: a row of random numbers for each question, keyed by the place."""

    QUESTIONS = (
        "is short", "short room", "cut", "inner sentence", "is random", "document", "token",
        *(f"sentence, attempt {number}" for number in range(_ATTEMPTS)),
    )  # fmt: skip

    def __init__(self, bits: np.ndarray) -> None:
        self._bits = bits  # uint64 [questions, places]

    @classmethod
    def at(cls, random: CounterRandom, places: np.ndarray) -> "_Chance":
        """All at once: a call for each question would cost more than the numbers where places are few."""
        return cls(random.bits(places, np.arange(len(cls.QUESTIONS))[:, None]))

    def only(self, some: np.ndarray) -> "_Chance":
        """That of some of the places."""
        return _Chance(self._bits[:, some])

    def is_so(self, question: str, share: float) -> np.ndarray:
        """True with probability `share`: bool [n]."""
        return self.number(question, 1 << 32) < share * 2.0**32

    def number(self, question: str, bound: np.ndarray | int) -> np.ndarray:
        """From 0 to below `bound`: int64 [n]."""
        return below(bound, self._bits[self.QUESTIONS.index(question)])


class _Planner:
    """Makes one pair at each of many places at a time."""

    def __init__(self, texts: Texts, room: int, short_share: float, random: CounterRandom) -> None:
        self._texts, self._room, self._short_share, self._random = texts, room, short_share, random
        self._first_sentence = np.searchsorted(texts.sentences, texts.starts)

    def next_pairs(
        self, position: np.ndarray, stop: np.ndarray, document: np.ndarray
    ) -> tuple[SentencePairs, np.ndarray]:
        """The pairs that begin at `position`, in parts that end at `stop`; and where the next ones begin."""
        sentences, chance = self._texts.sentences, _Chance.at(self._random, position)
        is_short = chance.is_so("is short", self._short_share)
        room = np.where(is_short, 2 + chance.number("short room", self._room - 1), self._room)
        end = _last_end(sentences, position, room, stop)
        first_inner = np.searchsorted(sentences, position, side="right")
        first_behind = np.searchsorted(sentences, end)
        num_inner = first_behind - first_inner  # boundaries of sentences between position and end
        has_sentences = num_inner > 0
        inner = first_inner + chance.number("inner sentence", np.maximum(num_inner, 1))
        cut = position + 1 + chance.number("cut", np.maximum(end - position - 1, 1))
        cut = np.minimum(np.where(has_sentences, sentences[inner], cut), end)
        is_random = chance.is_so("is random", RANDOM) | (cut == end)
        # B from elsewhere is as long as the rest, or fills the pair's room as the rest does where sentences come after.
        is_as_long = (cut < end) & (~has_sentences | (end == stop))
        room = np.where(is_as_long, end - cut, room - (cut - position))
        ends_sentence = sentences[first_behind] == end
        b_start, b_stop = cut.copy(), end.copy()
        some = np.flatnonzero(is_random)
        b_start[some], b_stop[some] = self._from_elsewhere(
            chance.only(some), document[some], room[some], has_sentences[some], ends_sentence[some]
        )
        # Of a text's last sentence nothing goes on: its pieces would be ever shorter pairs.
        goes_on = is_random & (has_sentences | (end < stop))
        return SentencePairs(position, cut, b_start, b_stop, is_random), np.where(goes_on, cut, end)

    def _from_elsewhere(
        self, chance: _Chance, document: np.ndarray, room: np.ndarray, has_sentences: np.ndarray,
        ends_sentence: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """(start, stop) of texts of up to `room` tokens out of random documents, none of `document`.

        They are like the rest that they stand for: whole sentences (has_sentences), the end of a sentence
        (ends_sentence alone), or any tokens.
        """
        texts, sentences = self._texts, self._texts.sentences
        other = chance.number("document", len(texts.starts) - 1)
        other += other >= document
        first, stop = texts.starts[other], texts.stops[other]
        latest = np.maximum(first, stop - room)  # what begins behind does not fill the room
        # A sentence to begin with, by `latest` and no longer than the room, or one to end with, no shorter than it.
        first_sentence = self._first_sentence[other]
        num_before = np.searchsorted(sentences, np.where(has_sentences, latest, stop - 1), side="right")
        drawn = self._sentences(chance, first_sentence, num_before - first_sentence, room, has_sentences)
        from_token = first + chance.number("token", latest - first + 1)
        start = np.where(has_sentences, sentences[drawn], from_token)
        end = np.where(has_sentences, _last_end(sentences, start, room, stop), np.minimum(start + room, stop))
        is_tail = ends_sentence & ~has_sentences
        end = np.where(is_tail, sentences[drawn + 1], end)
        return np.where(is_tail, np.maximum(first, end - room), start), end

    def _sentences(
        self, chance: _Chance, first: np.ndarray, count: np.ndarray, room: np.ndarray, must_fit: np.ndarray
    ) -> np.ndarray:
        """Numbers of random sentences, from `first` to first + count - 1: int64 [n].

        Those too long where they must fit, and those that would fit where they must not, are drawn again a few times,
        for the rest of the document that they stand for always fits, or is part of one sentence.
        """
        sentences = self._texts.sentences
        drawn = first + chance.number("sentence, attempt 0", count)
        for number in range(1, _ATTEMPTS):
            lengths = sentences[drawn + 1] - sentences[drawn]
            is_wrong = np.where(must_fit, lengths > room, lengths < room)
            if not is_wrong.any():
                break
            drawn = np.where(is_wrong, first + chance.number(f"sentence, attempt {number}", count), drawn)
        return drawn
