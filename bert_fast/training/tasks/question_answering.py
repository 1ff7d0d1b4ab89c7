"""The span of a text that answers a question, or that there is none: SQuAD 1.1 and 2.0."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bert_fast.checks import check_count, check_flag, check_number
from bert_fast.data.examples import Examples
from bert_fast.data.question_answering import read_questions, split_into_windows
from bert_fast.models import BertForQuestionAnswering
from bert_fast.training.tasks.task import Task, TaskArguments

_WORST = -1e30  # in place of a score that is no number; two of them added are still one


@dataclass
class QuestionAnsweringArguments(TaskArguments):
    """Questions about texts, with answers: JSON as SQuAD has it, or JSON lines or Parquet of its columns."""

    max_seq_length: int = field(default=384, metadata={"help": "Most tokens of question and window of the context."})
    doc_stride: int = field(default=128, metadata={"help": "Tokens that neighbouring windows share."})
    n_best_size: int = field(default=20, metadata={"help": "How many possible answers to a question are listed."})
    max_answer_length: int = field(default=30, metadata={"help": "Most tokens of an answer."})
    version_2_with_negative: bool = field(default=False, metadata={"help": "Some questions have no answer."})
    null_score_diff_threshold: float = field(
        default=0.0,
        metadata={"help": "There is no answer if that scores better than the best answer by more than this."},
    )

    def __post_init__(self) -> None:
        for name, least in (("max_seq_length", 8), ("doc_stride", 0), ("n_best_size", 1), ("max_answer_length", 1)):
            check_count(name, getattr(self, name), least)
        check_flag("version_2_with_negative", self.version_2_with_negative)
        check_number("null_score_diff_threshold", self.null_score_diff_threshold)


class QuestionAnswering(Task):
    """Finds the answer to a question in a text (`BertForQuestionAnswering`).

    An example is a window over the context of a question.

    Metrics, from 0 to 1: exact_match and f1 (of words), means over questions by the rules of SQuAD's scripts. They do
    not know where words end in text without spaces: an answer in Chinese is one word.
    """

    Arguments = QuestionAnsweringArguments
    model_class = BertForQuestionAnswering
    metric_for_best_model = "f1"

    def read(self, data: Any, is_labelled: bool = True) -> Examples:
        """Returns the windows of questions: see `split_into_windows`.

        Raises:
            OSError, SourceError, TypeError: see `read_questions`; a question has no answer, and version_2_with_negative
                is False.
        """
        options = self.arguments
        questions = read_questions(data, is_labelled, options.version_2_with_negative)
        return split_into_windows(questions, self.tokenizer, options.max_seq_length, options.doc_stride)

    def metrics(self, examples: Examples, predictions: Any, label_ids: Any = None) -> dict[str, float]:
        """Returns the metrics of predictions, see `rows`; the right answers are those of the examples, not `label_ids`.

        Raises ImportError without torchmetrics.
        """
        try:
            from torchmetrics.functional.text import squad
        except ImportError as error:
            raise ImportError(f"metrics need torchmetrics: pip install bert_fast[train] ({error})") from None
        answers = {question["id"]: question["answers"]["text"] for question in examples.rows}
        said = [{"id": row["id"], "prediction_text": row["answer"]} for row in self.rows(examples, predictions)]
        # torchmetrics wants a right answer: where there is none, it is "".
        right = [{"id": row["id"], "answers": {"text": answers[row["id"]] or [""]}} for row in said]
        return {name: float(value) / 100 for name, value in squad(said, right).items()}

    def rows(self, examples: Examples, predictions: Any) -> Iterator[dict[str, Any]]:
        """Yields what the model says about each question, in the order of `examples.rows`.

        Args:
            examples: windows, in any order.
            predictions: start_logits and end_logits (float [T]), T all tokens of all windows. Scores that are NaN or
                infinite count as the worst.

        Yields:
            id, question; answer ("": there is none), and its probability among the candidates; candidates, best first:
            mappings of text, start (its first character in the context, -1 for no answer), score and probability.
        """
        bounds, characters = examples.sequences.boundaries, examples.details["characters"]
        start, end = (np.nan_to_num(np.asarray(one, np.float32), True, _WORST, _WORST, _WORST) for one in predictions)
        if not len(start) == len(end) == len(characters):
            raise ValueError(f"predictions: expected scores of {len(characters)} tokens, got {len(start)}, {len(end)}")
        by_question = np.argsort(examples.row_of, kind="stable")
        for windows in np.split(by_question, np.flatnonzero(np.diff(examples.row_of[by_question])) + 1):
            question = examples.rows[examples.row_of[windows[0]]]
            scores: dict[tuple[int, int], float] = {}
            for window in windows:
                tokens = bounds[window] + np.flatnonzero(characters[bounds[window] : bounds[window + 1], 0] >= 0)
                for first, last, score in self._best_spans(start[tokens], end[tokens]):
                    place = int(characters[tokens[first], 0]), int(characters[tokens[last], 1])
                    scores[place] = max(score, scores.get(place, score))  # windows may share a span
            # [CLS] as start and end, the least of all windows: each of them has to look as if there was no answer.
            none = float((start[bounds[windows]] + end[bounds[windows]]).min())
            candidates = self._candidates(question["context"], scores, none)
            best = next((one for one in candidates if one["text"]), candidates[0])
            chosen = next((one for one in candidates if not one["text"]), best)
            if chosen["score"] - best["score"] <= self.arguments.null_score_diff_threshold:
                chosen = best
            said = {"answer": chosen["text"], "probability": chosen["probability"], "candidates": candidates}
            yield {"id": question["id"], "question": question["question"]} | said

    def _best_spans(self, start: np.ndarray, end: np.ndarray) -> Iterator[tuple[int, int, float]]:
        """First token, last token and score of a window's n_best_size best spans; of equal ones the first."""
        width = min(self.arguments.max_answer_length, len(start))
        if not width:
            return
        reach = np.concatenate([end, np.full(width - 1, -np.inf, np.float32)])
        scores = (start[:, None] + np.lib.stride_tricks.sliding_window_view(reach, width)).ravel()
        count = min(self.arguments.n_best_size, len(scores))
        places = np.flatnonzero((scores >= np.partition(scores, -count)[-count]) & (scores > -np.inf))
        for place in places[np.argsort(-scores[places], kind="stable")][:count].tolist():
            first, more = divmod(place, width)
            yield first, first + more, float(scores[place])

    def _candidates(self, context: str, scores: dict[tuple[int, int], float], none: float) -> list[dict[str, Any]]:
        """Answers, best first, with their share of the softmax over scores; no text twice, and at least one answer."""
        best = sorted(scores.items(), key=lambda one: (-one[1], one[0]))[: self.arguments.n_best_size]
        found: dict[str, dict[str, Any]] = {}
        for (start, stop), score in best:
            text = context[start:stop].lstrip()  # a Unigram token may take the space in front of it along
            if text:
                found.setdefault(text.rstrip(), {"text": text.rstrip(), "start": stop - len(text), "score": score})
        if self.arguments.version_2_with_negative or not found:
            found[""] = {"text": "", "start": -1, "score": none}
        logits = np.array([answer["score"] for answer in found.values()])
        weights = np.exp(logits - logits.max())
        for answer, share in zip(found.values(), weights / weights.sum(), strict=True):
            answer["probability"] = float(share)
        return sorted(found.values(), key=lambda answer: -answer["score"])
