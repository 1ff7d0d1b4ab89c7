"""Examples for next-sentence prediction: two texts, of which the second follows the first or is from elsewhere.

    document    s1 s2 s3 s4 s5 s6 s7 ...        other    t1 t2 t3 t4 ...
    example 0   [CLS] s1 s2 [SEP] s3 [SEP]      follows: s1 to s3 are all that fit, A ends behind a random one of them
    example 1   [CLS] s4 [SEP] t3 t4 [SEP]      random: A ends likewise, B begins with a random sentence elsewhere
    example 2   [CLS] s5 ...                    what was not used goes on

Source: Devlin et al. 2019 (arXiv:1810.04805), section 3.1 and appendix A.2.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bert_fast.data.counter_random import CounterRandom
from bert_fast.data.full_sentences import Texts, last_end
from bert_fast.errors import StoreError

__all__ = ["SentencePairs", "check_documents", "sentence_pairs"]

RANDOM = 0.5  # share of pairs whose second part is from elsewhere
_ATTEMPTS = 8  # at a sentence that fits
_PART_EXAMPLES = 64  # documents are planned in parts of about so many examples, all parts at the same time


class SentencePairs(NamedTuple):
    """Pairs of texts: A is `store.tokens[a_start:a_stop]`, B likewise; int64 [n] each, is_random is bool [n]."""

    a_start: np.ndarray
    a_stop: np.ndarray
    b_start: np.ndarray
    b_stop: np.ndarray
    is_random: np.ndarray


def sentence_pairs(
    texts: Texts, max_length: int, *, seed: int, epoch: int, short_sequence_probability: float = 0.1
) -> SentencePairs:
    """Plans the pairs of an epoch, in the order of the corpus.

    Every token is in exactly one A, or B that follows it, but for what a random B cuts off a document's last sentence.

    A pair holds at most max_length - 3 tokens, with short_sequence_probability at most a number drawn from 2 to that.
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

    Args:
        texts: of a store.
        max_length: tokens of a pair with [CLS] and twice [SEP], at least 5.
        seed: of chance.
        epoch: of chance.
        short_sequence_probability: share of pairs that are made shorter, so that a model sees short ones.

    Raises:
        StoreError: the store has fewer than two documents with tokens.
    """
    check_documents(texts)
    room = max_length - 3
    planner = _Planner(texts, room, short_sequence_probability, seed, epoch)
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


@dataclass
class _Planner:
    """Makes one pair at each of many places at a time; what chance decides there is keyed by the place."""

    texts: Texts
    room: int
    short_sequence_probability: float
    seed: int
    epoch: int

    def __post_init__(self) -> None:
        self._first_sentence = np.searchsorted(self.texts.sentences, self.texts.starts)
        self._draws: dict[str, CounterRandom] = {}

    def next_pairs(
        self, position: np.ndarray, stop: np.ndarray, document: np.ndarray
    ) -> tuple[SentencePairs, np.ndarray]:
        """The pairs that begin at `position`, in parts that end at `stop`; and where the next ones begin."""
        sentences = self.texts.sentences
        room = self._rooms(position)
        end = last_end(sentences, position, room, stop)
        first_inner = np.searchsorted(sentences, position, side="right")
        num_inner = np.searchsorted(sentences, end) - first_inner  # boundaries between position and end
        has_sentences = num_inner > 0
        cut = position + 1 + self._draw("cut", np.maximum(end - position - 1, 1), position)
        behind = first_inner + self._draw("sentence", np.maximum(num_inner, 1), position)
        cut = np.where(has_sentences, sentences[np.minimum(behind, len(sentences) - 1)], cut)
        cut = np.minimum(cut, end)
        is_random = (self._uniform("is random", position) < RANDOM) | (cut == end)
        b_start, b_stop = cut.copy(), end.copy()
        # B from elsewhere is as long as the rest, or fills the pair's room as the rest does where sentences come after.
        is_as_long = (cut < end) & (~has_sentences | (end == stop))
        room_left = np.where(is_as_long, end - cut, room - (cut - position))
        ends_sentence = sentences[np.searchsorted(sentences, end)] == end
        some = np.flatnonzero(is_random)
        b_start[some], b_stop[some] = self._from_elsewhere(
            position[some], document[some], room_left[some], has_sentences[some], ends_sentence[some]
        )
        # Of a text's last sentence nothing goes on: its pieces would be ever shorter pairs.
        goes_on = is_random & (has_sentences | (end < stop))
        return SentencePairs(position, cut, b_start, b_stop, is_random), np.where(goes_on, cut, end)

    def _rooms(self, position: np.ndarray) -> np.ndarray:
        """Tokens that each pair may hold: int64 [n]."""
        is_short = self._uniform("is short", position) < self.short_sequence_probability
        return np.where(is_short, 2 + self._draw("short room", self.room - 1, position), self.room)

    def _from_elsewhere(
        self, position: np.ndarray, document: np.ndarray, room: np.ndarray, has_sentences: np.ndarray,
        ends_sentence: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """(start, stop) of texts of up to `room` tokens out of random documents, none of `document`.

        They are like the rest that they stand for: whole sentences (has_sentences), the end of a sentence
        (ends_sentence alone), or any tokens.
        """
        texts, sentences = self.texts, self.texts.sentences
        other = self._draw("document", len(texts.starts) - 1, position)
        other += other >= document
        first, stop = texts.starts[other], texts.stops[other]
        latest = np.maximum(first, stop - room)  # what begins behind does not fill the room
        start = first + self._draw("first token", latest - first + 1, position)
        end = np.minimum(start + room, stop)
        # A sentence to begin with, by `latest` and no longer than the room, or one to end with, no shorter than it.
        first_sentence = self._first_sentence[other]
        num_before = np.searchsorted(sentences, np.where(has_sentences, latest, stop - 1), side="right")
        drawn = self._sentences(position, first_sentence, num_before - first_sentence, room, has_sentences)
        start = np.where(has_sentences, sentences[drawn], start)
        end = np.where(has_sentences, last_end(sentences, start, room, stop), end)
        is_end = ends_sentence & ~has_sentences
        end = np.where(is_end, sentences[drawn + 1], end)
        return np.where(is_end, np.maximum(first, end - room), start), end

    def _sentences(
        self, position: np.ndarray, first: np.ndarray, count: np.ndarray, room: np.ndarray, must_fit: np.ndarray
    ) -> np.ndarray:
        """Numbers of random sentences, from `first` to first + count - 1: int64 [n].

        Those too long where they must fit, and those that would fit where they must not, are drawn again a few times,
        for the rest of the document that they stand for always fits, or is part of one sentence.
        """
        sentences = self.texts.sentences
        drawn = first + self._draw("sentence elsewhere", count, position)
        for attempt in range(1, _ATTEMPTS):
            lengths = sentences[drawn + 1] - sentences[drawn]
            again = np.flatnonzero(np.where(must_fit, lengths > room, lengths < room))
            if not len(again):
                break
            drawn[again] = first[again] + self._draw(f"sentence elsewhere, {attempt}", count[again], position[again])
        return drawn

    def _uniform(self, what: str, position: np.ndarray) -> np.ndarray:
        return self._stream(what).uniform(position)

    def _draw(self, what: str, bound: np.ndarray | int, position: np.ndarray) -> np.ndarray:
        return self._stream(what).integers(bound, position)

    def _stream(self, what: str) -> CounterRandom:
        if what not in self._draws:
            self._draws[what] = CounterRandom(self.seed, self.epoch, f"sentence pairs: {what}")
        return self._draws[what]
