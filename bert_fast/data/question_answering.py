"""Questions and the texts that answer them as sequences of a limited length: windows over the text.

    question   who ran ?              max_length = 11, so that 5 tokens of the text fit; stride = 2 of them are shared
    context    john mary ran to oslo in may          answer: "oslo"
    window 0   [CLS] who ran ? [SEP] john mary ran to oslo [SEP]    start 9, end 9
    window 1   [CLS] who ran ? [SEP] to oslo in may [SEP]           start 6, end 6

A window that does not hold the answer as a whole says so by pointing to its [CLS]: start 0, end 0.
"""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_fast.checks import check_count
from bert_fast.data.arguments import check_tokenizer_kind, optional_folder, row_index, row_indices
from bert_fast.data.digests import data_digest
from bert_fast.data.feature_cache import cached_arrays, feature_key
from bert_fast.data.questions import Questions, read_questions
from bert_fast.data.sequences import Sequences, ranges
from bert_fast.tokenization import Tokenizer
from bert_fast.tokenization.pack import PackedBatch

__all__ = ["QuestionAnsweringSource", "Windows"]

_MAX_QUESTION_TOKENS = 64  # Devlin et al. 2018 (arXiv:1810.04805), in the scripts beside the paper
_MIN_LENGTH = 8


class QuestionAnsweringSource:
    """A `Source` of windows over the contexts of questions, and a data set of single windows for other loops.

    Windows are those of `tokenizer(question, context, truncation="only_second", max_length=..., stride=...,
    return_overflowing_tokens=True)`. Where the questions have answers, batches have start_positions and end_positions
    (int64 [B], counted in the sequence): the tokens of the first answer; 0 where the window does not hold it; and where
    tokenization leaves nothing of it, the length of the sequence, which the loss leaves out. `source[i]` is one window,
    as `PackedCollator` joins them.

    Args:
        questions: see `bert_fast.data.questions`.
        tokenizer: splits every context once.
        max_length: most tokens of a window, question and special tokens counted. Of a question at most 64 tokens are
            kept, and no more than half of the window.
        stride: tokens that neighbouring windows share; half of what fits of the context, where less than that fits.
        cache_dir: where tokens are kept from one run to the next; None: nowhere.

    Attributes:
        questions, tokenizer: as given.
        windows: which tokens of which context each window holds.
        context_tokens (int64 [c + 1]): tokens before each context in `context_spans`.
        context_spans (int32 [N, 2]): first character, and the one behind the last, of all tokens of all contexts.

    Raises:
        TypeError, ValueError: an argument of another kind; max_length is below 8, or stride below 0.
    """

    def __init__(
        self,
        questions: Questions,
        tokenizer: Tokenizer,
        *,
        max_length: int = 384,
        stride: int = 128,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(questions, Questions):
            raise TypeError(f"questions: expected Questions, got {type(questions).__name__}")
        check_tokenizer_kind(tokenizer)
        max_length, stride = _checked_sizes(max_length, stride)
        cache_dir = optional_folder("cache_dir", cache_dir)
        self.questions, self.tokenizer = questions, tokenizer
        self._options: dict[str, Any] = {"max_length": max_length, "stride": stride, "cache_dir": cache_dir}
        tokens = cached_arrays(
            cache_dir,
            "" if cache_dir is None else feature_key(tokenizer, questions.texts, questions.contexts, task="qa"),
            lambda: _tokenized(questions, tokenizer),
        )
        self.context_tokens, self.context_spans = tokens["context_tokens"], tokens["context_spans"]

        form = tokenizer.form
        room = max_length - form.num_special(True)
        self.windows = Windows.plan(
            np.minimum(np.diff(tokens["question_tokens"]), min(_MAX_QUESTION_TOKENS, room // 2)),
            np.diff(self.context_tokens)[questions.context_of],
            room,
            stride,
            form.before_second,
        )
        self._sequences = self._joined(tokens)
        self._positions = None if questions.spans is None else self._answer_positions(questions.spans)

    @classmethod
    def read(
        cls,
        data: Any,
        tokenizer: Tokenizer,
        *,
        max_length: int = 384,
        stride: int = 128,
        skip_wrong_answers: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> "QuestionAnsweringSource":
        """The source of a file or rows: see `bert_fast.data.questions.read_questions` and the class.

        Raises:
            OSError, SourceError, TypeError, ValueError: see there.
        """
        check_tokenizer_kind(tokenizer)
        max_length, stride = _checked_sizes(max_length, stride)
        cache_dir = optional_folder("cache_dir", cache_dir)
        questions = read_questions(data, skip_wrong_answers=skip_wrong_answers)
        return cls(questions, tokenizer, max_length=max_length, stride=stride, cache_dir=cache_dir)

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = row_index(index, len(self))
        example: dict[str, Any] = dict(self._sequences[index])
        if self._positions is None:
            return example
        start, end = self._positions[index].tolist()
        return example | {"start_positions": start, "end_positions": end}

    @property
    def num_questions(self) -> int:
        """How many questions the windows belong to."""
        return len(self.questions)

    @property
    def is_labelled(self) -> bool:
        """Whether the questions have answers, or say that there is none."""
        return self._positions is not None

    @property
    def has_unanswerable(self) -> bool:
        """Whether a question says that there is no answer."""
        return self.questions.spans is not None and bool((self.questions.spans[:, 0] < 0).any())

    def lengths(self, epoch: int) -> np.ndarray:
        """Tokens of every window, the same in every epoch: int32 [n]."""
        return self._sequences.lengths

    def batch(self, epoch: int, indices: np.ndarray) -> PackedBatch:
        """See `Source.batch`; start_positions and end_positions are there where the questions have answers."""
        indices = row_indices(indices, len(self))
        if self._positions is None:
            return self._sequences.gather(indices)
        start, end = self._positions[indices].T.copy()
        return self._sequences.gather(indices, start_positions=start, end_positions=end)

    def digest(self) -> str:
        """See `source_digest`; all answers of a question count, though only the first is learned."""
        return data_digest(*self._sequences.arrays().values(), self._positions, self.questions.answers)

    def take_questions(self, indices: np.ndarray) -> "QuestionAnsweringSource":
        """A source of the windows of some questions (int [m], counted in `questions`), in this order."""
        indices = row_indices(indices, self.num_questions)
        return QuestionAnsweringSource(self.questions.take(indices), self.tokenizer, **self._options)

    def decode(self, index: int) -> str:
        """A window as text: its tokens, the answer in angle brackets."""
        example = self[index]
        tokens = self.tokenizer.convert_ids_to_tokens(example["input_ids"].tolist())
        start, end = example.get("start_positions", 0), example.get("end_positions", 0)
        if 0 < start <= end < len(tokens):
            tokens[start] = f"<{tokens[start]}"
            tokens[end] += ">"
        return " ".join(tokens)

    def _joined(self, tokens: dict[str, np.ndarray]) -> Sequences:
        """Question and part of the context for every window."""
        windows, form = self.windows, self.tokenizer.form
        contexts = self.context_tokens[self.questions.context_of[windows.question]] + windows.first
        asked = tokens["question_ids"]
        starts = np.stack([tokens["question_tokens"][windows.question], contexts + len(asked)], axis=1)
        lengths = np.stack([windows.offset - form.before_second, windows.length], axis=1)
        ids = np.concatenate([asked, tokens["context_ids"]])
        return Sequences.of(form.join(ids, starts, lengths, dtype=np.int32))

    def _answer_positions(self, spans: np.ndarray) -> np.ndarray:
        """start_positions and end_positions of every window, from the characters of every answer: int64 [n, 2]."""
        windows, lengths = self.windows, self._sequences.lengths
        first, last = self._tokens_of(spans)
        has_answer, first, last = (spans[:, 0] >= 0)[windows.question], first[windows.question], last[windows.question]
        is_inside = (first >= windows.first) & (last < windows.first + windows.length)
        tokens = np.column_stack([first, last]) + (windows.offset - windows.first)[:, None]
        positions = np.where((has_answer & is_inside)[:, None], tokens, 0)
        is_lost = has_answer & (first > last)
        return np.where(is_lost[:, None], lengths[:, None], positions).astype(np.int64)

    def _tokens_of(self, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first and last token of spans of characters, counted in the contexts: int64 [n]; first > last: none."""
        contexts = self.questions.context_of
        # All contexts as one text, so that one binary search finds the tokens of all answers.
        before = np.cumsum([0, *(len(context) + 1 for context in self.questions.contexts)])
        shifts = np.repeat(before[:-1], np.diff(self.context_tokens))
        first = np.searchsorted(self.context_spans[:, 1] + shifts, before[contexts] + spans[:, 0], side="right")
        last = np.searchsorted(self.context_spans[:, 0] + shifts, before[contexts] + spans[:, 1], side="left") - 1
        starts = self.context_tokens[contexts]
        return first - starts, last - starts


@dataclass(frozen=True)
class Windows:
    """Which tokens of which context every window holds; those of a question follow one another.

    Attributes (int64 [n]):
        question: number of the question.
        first: first token of its context in the window, counted in the context.
        offset: where that token stands in the sequence.
        length: how many tokens of the context follow from there.
    """

    question: np.ndarray
    first: np.ndarray
    offset: np.ndarray
    length: np.ndarray

    @classmethod
    def plan(
        cls, question_lengths: np.ndarray, context_lengths: np.ndarray, room: int, stride: int, before_second: int
    ) -> "Windows":
        """The windows of questions and contexts of so many tokens (int [q] each): see `QuestionAnsweringSource`.

        room: tokens of question and context in a window; before_second: special ones in front of the context.
        """
        rooms = room - question_lengths
        step = rooms - np.where(stride < rooms, stride, rooms // 2)
        counts = 1 + -(-np.maximum(context_lengths - rooms, 0) // step)  # rounded up
        question = np.repeat(np.arange(len(counts)), counts)
        first = ranges(np.zeros_like(counts), counts) * step[question]
        length = np.minimum(rooms[question], context_lengths[question] - first)
        return cls(question, first, question_lengths[question] + before_second, length)


def _checked_sizes(max_length: Any, stride: Any) -> tuple[int, int]:
    return check_count("max_length", max_length, _MIN_LENGTH), check_count("stride", stride, 0)


def _tokenized(questions: Questions, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """The tokens of all questions and contexts, and the tokens before each of them (int64, one more)."""
    asked = tokenizer.encode_ragged(questions.texts, add_special_tokens=False)
    texts = tokenizer.encode_ragged(questions.contexts, add_special_tokens=False, return_offsets_mapping=True)
    return {
        "question_ids": asked.ids,
        "question_tokens": asked.cu_seqlens,
        "context_ids": texts.ids,
        "context_tokens": texts.cu_seqlens,
        "context_spans": texts.offsets,
    }
