"""The task qa: the span of a text that answers a question, or that there is none."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from bert_fast.checks import check_count, check_flag, check_number
from bert_fast.data.answers import best_answers, exact_match, f1
from bert_fast.data.batches import Source
from bert_fast.data.question_answering import QuestionAnsweringSource
from bert_fast.models import BertForQuestionAnswering, BertPreTrainedModel
from bert_fast.tokenization import Tokenizer
from bert_fast.tokenization.pack import PackedBatch
from bert_fast.training.task import Predictions, Task
from bert_fast.training.tasks.base import FinetuneSettings, check_sources, source_of_kind

__all__ = ["QaSettings", "QuestionAnsweringTask"]


@dataclass(frozen=True)
class QaSettings(FinetuneSettings):
    """Questions whose answer is a span of a text, as in SQuAD."""

    summary: ClassVar[str] = "the span of a text that answers a question: JSON as SQuAD has it"

    train: str  # JSON as SQuAD has it, version 1.1 or 2.0, or JSON lines
    valid: str | None = None  # the same, to judge by
    valid_share: float | None = None  # without valid: share of train, at random, kept to judge by
    max_length: int = 384  # tokens of question and window of the context
    stride: int = 128  # tokens that neighbouring windows share
    skip_wrong_answers: bool = False  # leave out answers that do not stand in the text; else they are errors
    max_answer_length: int = 30  # tokens
    may_abstain: bool | None = None  # there may be no answer; default: if that is so in train or valid
    null_threshold: float = 0.0  # with may_abstain: no answer must score so much better than the best one

    @property
    def model_class(self) -> type[BertPreTrainedModel]:
        """See `TaskSettings.model_class`."""
        return BertForQuestionAnswering

    def make_task(self, train: Any, valid: Any) -> "QuestionAnsweringTask":
        """See `TaskSettings.make_task`."""
        return QuestionAnsweringTask(
            train,
            valid,
            max_answer_length=self.max_answer_length,
            may_abstain=self.may_abstain,
            null_threshold=self.null_threshold,
        )

    def read(
        self,
        examples: Any,
        tokenizer: Tokenizer,
        *,
        labels: Sequence[str] | None = None,
        is_labelled: bool = True,
        cache_dir: Path | None = None,
    ) -> QuestionAnsweringSource:
        """See `TaskSettings.read`; answers are read where they are there."""
        return QuestionAnsweringSource.read(
            examples,
            tokenizer,
            max_length=self.max_length,
            stride=self.stride,
            skip_wrong_answers=self.skip_wrong_answers,
            cache_dir=cache_dir,
        )

    def parse_line(self, line: str, number: int) -> dict[str, Any]:
        """See `TaskSettings.parse_line`: an object; its id, where it has none, is the place of the line, from 0."""
        return {"id": str(number - 1)} | super().parse_line(line, number)

    def _divisible(self, source: Any) -> tuple[int, Callable[[np.ndarray], Any]]:
        return source.num_questions, source.take_questions  # a question may be several examples: it stays whole

    def completed(self, task: Task) -> "QaSettings":
        """See `TaskSettings.completed`: whether there may be no answer."""
        assert isinstance(task, QuestionAnsweringTask)
        return dataclasses.replace(self, may_abstain=task.may_abstain)


class QuestionAnsweringTask(Task):
    """The span of a text that answers a question, by a `BertForQuestionAnswering`: SQuAD 1.1 and 2.0.

    Metrics, from 0 to 1: exact_match and f1, means over questions by the rules of SQuAD's official script
    (`bert_fast.data.answers`). The best checkpoint is that of the greatest f1.

    Args:
        train: see `Task`.
        valid: likewise.
        max_answer_length: most tokens of an answer.
        n_best: how many answers to a question are written beside the best one.
        null_threshold: where there may be no answer, "" is said if that scores better than the best answer by more
            than this.
        may_abstain: whether there may be no answer at all; None: whether a question of `train` or `valid` has none.

    Raises:
        TypeError, ValueError: an argument of another kind; max_answer_length or n_best is below 1.
    """

    name = "qa"
    metric = "f1"
    higher_is_better = True

    def __init__(
        self,
        train: QuestionAnsweringSource | None = None,
        valid: QuestionAnsweringSource | None = None,
        *,
        max_answer_length: int = 30,
        n_best: int = 20,
        null_threshold: float = 0.0,
        may_abstain: bool | None = None,
    ) -> None:
        check_sources(QuestionAnsweringSource, train=train, valid=valid)
        self.train, self.valid = train, valid
        self.max_answer_length = check_count("max_answer_length", max_answer_length, 1)
        self.n_best = check_count("n_best", n_best, 1)
        is_infinite = isinstance(null_threshold, float) and math.isinf(null_threshold)
        self.null_threshold = null_threshold if is_infinite else check_number("null_threshold", null_threshold)
        if may_abstain is not None:
            check_flag("may_abstain", may_abstain)
        if may_abstain is None:
            may_abstain = any(source.has_unanswerable for source in (train, valid) if source is not None)
        self.may_abstain = may_abstain

    def label_counts(self, batch: PackedBatch) -> dict[str, int]:
        """See `Task.label_counts`: windows whose answer is known; the loss leaves out the others."""
        if "start_positions" not in batch:
            return {}
        return {"loss": int((batch["start_positions"] < torch.diff(batch["cu_seqlens"])).sum())}

    def predict(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """See `Task.predict`: start and end (fp32 [T]), the scores of every token to be an answer's first and last."""
        output = model(**batch)
        scores = {"start": output.start_logits.float(), "end": output.end_logits.float()}
        return {} if output.loss is None else {"loss": output.loss}, scores

    def score(self, source: Source, predictions: Predictions) -> dict[str, float]:
        """See `Task.score`.

        Raises:
            ValueError: the questions have no answers.
        """
        right = source_of_kind(QuestionAnsweringSource, source).questions.answers
        if right is None:
            raise ValueError("source: expected questions with answers, got none")
        pairs = list(zip(self.answers(source, predictions).values(), right, strict=True))
        return {
            "exact_match": sum(exact_match(answer, texts) for answer, texts in pairs) / len(pairs),
            "f1": sum(f1(answer, texts) for answer, texts in pairs) / len(pairs),
        }

    def answers(self, source: Source, predictions: Predictions) -> dict[str, str]:
        """The answer to every question, by its id; "" where the model says that there is none."""
        return {row["id"]: row["answer"] for row in self.rows(source, predictions)}

    def rows(self, source: Source, predictions: Predictions) -> Iterator[dict[str, Any]]:
        """What the model says, question by question.

        Yields:
            id, question; answer ("": there is none), and its probability among the candidates; candidates, best first:
            mappings of text, start (its first character in the context, -1 for no answer), score and probability.
        """
        source = source_of_kind(QuestionAnsweringSource, source)
        start, end = predictions.tokens("start")[0], predictions.tokens("end")[0]
        candidates = best_answers(
            source, start, end, count=self.n_best, max_length=self.max_answer_length, with_none=self.may_abstain
        )
        for identifier, question, found in zip(source.questions.ids, source.questions.texts, candidates, strict=True):
            best = next((one for one in found if one.start >= 0), found[0])
            none = next((one for one in found if one.start < 0), best)
            chosen = none if none.score - best.score > self.null_threshold else best
            yield {
                "id": identifier,
                "question": question,
                "answer": chosen.text,
                "probability": chosen.probability,
                "candidates": [one._asdict() for one in found],
            }

    def write_predictions(self, path: Path, source: Source, predictions: Predictions) -> list[Path]:
        """Writes path.json, {id: answer} as SQuAD's scripts read it, and path.nbest.json, {id: candidates}."""
        rows = list(self.rows(source, predictions))
        files = {
            path.with_name(f"{path.name}.json"): {row["id"]: row["answer"] for row in rows},
            path.with_name(f"{path.name}.nbest.json"): {row["id"]: row["candidates"] for row in rows},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            file.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        return list(files)

    def describe(self, source: Source, index: int) -> str:
        """See `Task.describe`."""
        return source_of_kind(QuestionAnsweringSource, source).decode(index)
