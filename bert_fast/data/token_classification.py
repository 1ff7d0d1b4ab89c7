"""Labelled words as labelled tokens: the first sub-word of a word carries its label, the others none.

    words     Johnson       lives  in  U+200B  Oslo     (a space of width 0, of which no token is left)
    labels    B-PER         O      O   O       B-LOC
    tokens    [CLS]  john   ##son  lives  in   oslo   [SEP]
    labels    -100   B-PER  -100   O      O    B-LOC  -100

What a model says about tokens becomes labels of all words again by `TokenClassificationSource.word_labels`.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bert_fast.checks import check_count, check_flag
from bert_fast.data.arguments import check_tokenizer_kind, row_index, row_indices, texts_of, whole_numbers
from bert_fast.data.conll import LabelledSentences, check_rows, read_conll, sentences_from_rows
from bert_fast.data.digests import data_digest
from bert_fast.data.sequences import Sequences, ranges
from bert_fast.errors import SourceError
from bert_fast.files import path_name
from bert_fast.tokenization import Tokenizer
from bert_fast.tokenization.form import SequenceForm
from bert_fast.tokenization.pack import PackedBatch

__all__ = ["TokenClassificationSource"]

_IGNORED = -100


class TokenClassificationSource:
    """A `Source` of sentences whose words carry labels, and a data set of single examples for other loops.

    Batches have labels (int64 [T]) where the sentences have them. `source[i]` is one example: input_ids,
    token_type_ids and labels (int64 [S]).

    A sentence of more than max_length - 2 tokens becomes several examples, divided between words; or, with `truncate`,
    it loses the words that do not fit. Of a word that is longer than that by itself only the first sub-words are kept.

    Args:
        sentences: see `bert_fast.data.conll`.
        tokenizer: splits all words in one call; they get the ids of `tokenizer(words, is_split_into_words=True)`.
        labels: all labels, in the order of the model's outputs, as the source of the training data has them; None:
            those of these sentences.
        max_length: most tokens of an example, [CLS] and [SEP] counted.
        truncate: see above.

    Attributes:
        label_names: the labels in the order of a model's outputs.
        sentences, tokenizer: as given.
        word_tokens (int64 [W]): which token, counted over all examples, is the first of each word; -1 where none is
            left of it.

    Raises:
        SourceError: a label is not among `labels`; the message names its line.
        TypeError, ValueError: an argument of another kind; there are neither labels nor names of them, or max_length
            leaves no room for a word.
    """

    def __init__(
        self,
        sentences: LabelledSentences,
        tokenizer: Tokenizer,
        *,
        labels: Sequence[str] | None = None,
        max_length: int = 128,
        truncate: bool = False,
    ) -> None:
        if not isinstance(sentences, LabelledSentences):
            raise TypeError(f"sentences: expected LabelledSentences, got {type(sentences).__name__}")
        labels, max_length = _checked_options(tokenizer, labels, max_length, truncate)
        if labels is None and sentences.label_ids is None:
            raise ValueError("labels: expected the names of the labels, as the sentences have none, got None")
        self.sentences, self.tokenizer = sentences, tokenizer
        self.label_names = list(sentences.label_names if labels is None else labels)
        words = tokenizer.encode_ragged((sentences.buffer, sentences.word_boundaries), add_special_tokens=False)
        room = min(max_length - tokenizer.form.num_special(False), len(words.ids) + 1)
        starts, stops = _divide(words.cu_seqlens, sentences.boundaries, room, truncate)
        self._sequences, self.word_tokens = _examples(words.ids, words.cu_seqlens, starts, stops, room, tokenizer.form)
        self._labels: np.ndarray | None = None
        if sentences.label_ids is not None:
            word_labels = _renumbered(sentences, self.label_names)
            has_token = self.word_tokens >= 0
            self._labels = np.full(len(self._sequences.ids), _IGNORED, dtype=np.int32)
            self._labels[self.word_tokens[has_token]] = word_labels[has_token]

    @classmethod
    def read(
        cls,
        data: Any,
        tokenizer: Tokenizer,
        *,
        labels: Sequence[str] | None = None,
        max_length: int = 128,
        truncate: bool = False,
        **columns: Any,
    ) -> "TokenClassificationSource":
        """The source of a file in CoNLL columns, a `datasets.Dataset`, or a list of mappings.

        Args:
            data: path or rows.
            tokenizer: see the class, as for `labels`, `max_length` and `truncate`.
            labels: all labels.
            max_length: most tokens of an example.
            truncate: whether long sentences are cut, not divided.
            columns: `word_column` and `label_column`: numbers for `read_conll`, names for `sentences_from_rows`.
                label_column=None: there are no labels, as of sentences to predict.
        """
        labels, max_length = _checked_options(tokenizer, labels, max_length, truncate)
        if isinstance(data, str | os.PathLike):
            sentences = read_conll(path_name("data", data), **columns)
        else:
            check_rows("data", data)
            sentences = sentences_from_rows(data, name="data", **columns)
        return cls(sentences, tokenizer, labels=labels, max_length=max_length, truncate=truncate)

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index = row_index(index, len(self))
        example = self._sequences[index]
        if self._labels is None:
            return example
        start, stop = self._sequences.boundaries[index], self._sequences.boundaries[index + 1]
        return example | {"labels": self._labels[start:stop].astype(np.int64)}

    @property
    def is_labelled(self) -> bool:
        """Whether the words have labels."""
        return self._labels is not None

    def lengths(self, epoch: int) -> np.ndarray:
        """Tokens of every example, the same in every epoch: int32 [n]."""
        return self._sequences.lengths

    def batch(self, epoch: int, indices: np.ndarray) -> PackedBatch:
        """See `Source.batch`; labels (int64 [T]): a place in `label_names` for first sub-words, else -100."""
        indices = row_indices(indices, len(self))
        batch = self._sequences.gather(indices)
        if self._labels is not None:
            places, _ = self._sequences.places(indices)
            batch["labels"] = torch.from_numpy(self._labels[places].astype(np.int64))
        return batch

    def word_labels(self, token_labels: np.ndarray) -> np.ndarray:
        """Labels of tokens as labels of words: places in `label_names`, int64 [W], in the order of `sentences`.

        Words of which no token is left get "O"; the first label, where there is no "O".

        Args:
            token_labels (int [N]): a label for every token of all examples, in their order.
        """
        token_labels = whole_numbers("token_labels", token_labels)
        if len(token_labels) != len(self._sequences.ids):
            raise ValueError(f"token_labels: expected {len(self._sequences.ids)}, one a token, got {len(token_labels)}")
        none = self.label_names.index("O") if "O" in self.label_names else 0
        found = np.append(token_labels, none)  # word_tokens is -1 where there is no token: the last
        return found[self.word_tokens].astype(np.int64)

    def digest(self) -> str:
        """See `source_digest`."""
        return data_digest(*self._sequences.arrays().values(), self._labels, self.word_tokens)

    def decode(self, index: int) -> str:
        """An example as text: its tokens, each with its label behind a slash if it has one."""
        example = self[index]
        tokens = self.tokenizer.convert_ids_to_tokens(example["input_ids"].tolist())
        if self._labels is None:
            return " ".join(tokens)
        labels = ["" if label == _IGNORED else f"/{self.label_names[label]}" for label in example["labels"].tolist()]
        return " ".join(token + label for token, label in zip(tokens, labels, strict=True))

    def true_word_labels(self) -> np.ndarray | None:
        """The given labels of all words, likewise; None where nobody labelled them."""
        return None if self._labels is None else _renumbered(self.sentences, self.label_names)


def _checked_options(tokenizer: Any, labels: Any, max_length: Any, truncate: Any) -> tuple[list[str] | None, int]:
    """labels and max_length, if all are of the right kind."""
    check_tokenizer_kind(tokenizer)
    check_flag("truncate", truncate)
    if check_count("max_length", max_length, 0) < 3:
        raise ValueError(f"max_length: expected at least 3, room for a word and 2 special tokens, got {max_length}")
    names = None if labels is None else texts_of("labels", labels)
    if names is not None and not names:
        raise ValueError("labels: expected at least one, got none")
    return names, int(max_length)


def _renumbered(sentences: LabelledSentences, names: list[str]) -> np.ndarray:
    """The labels of all words as places in another list of names: int64 [W]."""
    assert sentences.label_ids is not None
    place = {name: index for index, name in enumerate(names)}
    table = np.array([place.get(name, -1) for name in sentences.label_names], dtype=np.int64)
    labels = table[sentences.label_ids] if len(table) else np.empty(0, dtype=np.int64)
    unknown = np.flatnonzero(labels < 0)
    if len(unknown):
        name = sentences.label_names[sentences.label_ids[unknown[0]]]
        raise SourceError(f"{sentences.place(int(unknown[0]))}: expected one of {', '.join(names)}, got {name!r}")
    return labels


def _divide(cu_words: np.ndarray, boundaries: np.ndarray, room: int, truncate: bool) -> tuple[np.ndarray, np.ndarray]:
    """The first word of every example and the one behind its last (int64 [n] each), in the order of the sentences.

    Args:
        cu_words (int64 [W + 1]): tokens before each word.
        boundaries (int64 [n + 1]): words before each sentence.
        room: most tokens of an example; a word that has more stands alone.
        truncate: only the first example of a sentence is kept.
    """
    # All sentences that are not finished yet get their next example at the same time.
    sentence, start, end = np.arange(len(boundaries) - 1), boundaries[:-1], boundaries[1:]
    rounds = []
    while len(sentence):
        fitting = np.searchsorted(cu_words, cu_words[start] + room, side="right") - 1
        stop = np.minimum(np.maximum(fitting, start + 1), end)
        rounds.append((sentence, start, stop))
        goes_on = (stop < end) & (not truncate)
        sentence, start, end = sentence[goes_on], stop[goes_on], end[goes_on]
    sentences, starts, stops = (np.concatenate(parts) for parts in zip(*rounds, strict=True))
    order = np.lexsort((starts, sentences))
    return starts[order], stops[order]


def _examples(
    ids: np.ndarray, cu_words: np.ndarray, starts: np.ndarray, stops: np.ndarray, room: int, form: SequenceForm
) -> tuple[Sequences, np.ndarray]:
    """The words of every example, and the place of the first token of every word: int64 [W]; -1: none."""
    lengths = np.minimum(cu_words[stops] - cu_words[starts], room)
    joined = form.join(ids, cu_words[starts][:, None], lengths[:, None], dtype=np.int32)
    shift = joined.boundaries[:-1] + 1 - cu_words[starts]  # of an example's tokens, from `ids` to their new place
    words = ranges(starts, stops - starts)
    example = np.repeat(np.arange(len(starts)), stops - starts)
    is_there = np.diff(cu_words)[words] > 0
    word_tokens = np.full(len(cu_words) - 1, -1, dtype=np.int64)
    word_tokens[words[is_there]] = (cu_words[words] + shift[example])[is_there]
    return Sequences.of(joined), word_tokens
