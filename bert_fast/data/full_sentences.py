"""Examples for masked words alone: runs of whole sentences of one document, as many as fit.

    max_length 10 leaves 8 tokens beside [CLS] and [SEP]; sentences of a document with 3, 4, 5, 20 tokens:
    [3 + 4]  [5]  [8]  [8]  [4]      the fourth is longer than any example and is cut

Sources: Devlin et al. 2019 (arXiv:1810.04805); Liu et al. 2019 (arXiv:1907.11692), section 4.2, "DOC-SENTENCES".
"""

from typing import NamedTuple

import numpy as np

from bert_fast.data.token_store import TokenStore
from bert_fast.errors import StoreError

__all__ = ["Passages", "Texts", "full_sentences", "last_end"]

_PART_EXAMPLES = 64  # documents are planned in parts of about so many examples, all parts at the same time
_CHECKED_AT_ONCE = 1 << 20  # boundaries


class Texts:
    """The documents of a store that have tokens, and their sentences.

    Attributes:
        store: the store.
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


def last_end(sentences: np.ndarray, starts: np.ndarray, room: np.ndarray | int, stops: np.ndarray) -> np.ndarray:
    """Where whole sentences from `starts` on end, as many as `room` tokens hold, not beyond `stops`: int64 [n].

    A sentence longer than the room is cut where the room ends.
    """
    limits = np.minimum(starts + room, stops)
    ends = sentences[np.searchsorted(sentences, limits, side="right") - 1]
    return np.where(ends > starts, ends, limits)


def full_sentences(texts: Texts, max_length: int) -> Passages:
    """Cuts all documents into examples of at most max_length - 2 tokens; every token is in exactly one.

    Examples are runs of whole sentences of one document, each with as many as fit; sentences that are longer are cut
    into pieces. Documents without sentences are one sentence. About 0.3 µs an example.

    Args:
        texts: of a store.
        max_length: tokens of an example with [CLS] and [SEP], at least 3.
    """
    room = max_length - 2
    position, stop, _ = texts.parts(_PART_EXAMPLES * room)
    starts, stops = [position[:0]], [position[:0]]
    while len(position):  # all parts make their next example at the same time
        ends = last_end(texts.sentences, position, room, stop)
        starts.append(position)
        stops.append(ends)
        goes_on = ends < stop
        position, stop = ends[goes_on], stop[goes_on]
    joined = np.concatenate(starts)
    order = np.argsort(joined, kind="stable")
    return Passages(joined[order], np.concatenate(stops)[order])
