"""The task choice: the best of several answers to a question."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from bert_fast.data.batches import Source
from bert_fast.data.multiple_choice import MultipleChoiceSource
from bert_fast.models import BertForMultipleChoice, BertPreTrainedModel
from bert_fast.tokenization import Tokenizer
from bert_fast.tokenization.pack import PackedBatch
from bert_fast.training.task import Predictions, Task
from bert_fast.training.tasks.base import FinetuneSettings, check_sources, probabilities, source_of_kind, write_table

__all__ = ["ChoiceSettings", "MultipleChoiceTask"]


@dataclass(frozen=True)
class ChoiceSettings(FinetuneSettings):
    """Questions with several answers to choose from, as in SWAG and COPA."""

    summary: ClassVar[str] = (
        "the right one of several answers or endings: CSV or JSON lines, as SWAG and COPA have them"
    )

    train: str  # CSV or JSON lines
    valid: str | None = None  # the same, to judge by
    valid_share: float | None = None  # without valid: share of train, at random, kept to judge by
    label: str = "label"  # column
    max_length: int = 128  # tokens of a choice with its context

    @property
    def model_class(self) -> type[BertPreTrainedModel]:
        """See `TaskSettings.model_class`."""
        return BertForMultipleChoice

    def make_task(self, train: Any, valid: Any) -> "MultipleChoiceTask":
        """See `TaskSettings.make_task`."""
        return MultipleChoiceTask(train, valid)

    def read(
        self,
        examples: Any,
        tokenizer: Tokenizer,
        *,
        labels: Sequence[str] | None = None,
        is_labelled: bool = True,
        cache_dir: Path | None = None,
    ) -> MultipleChoiceSource:
        """See `TaskSettings.read`."""
        return MultipleChoiceSource.read(
            examples,
            tokenizer,
            label=self.label if is_labelled else None,
            max_length=self.max_length,
            cache_dir=cache_dir,
        )


class MultipleChoiceTask(Task):
    """The best of several answers to a question, by a `BertForMultipleChoice`. The metric is accuracy.

    Args:
        train: see `Task`.
        valid: likewise. Its questions may have another number of choices: a choice is scored by itself.
    """

    train: MultipleChoiceSource | None
    valid: MultipleChoiceSource | None
    name = "choice"
    metric = "accuracy"
    higher_is_better = True

    def __init__(self, train: MultipleChoiceSource | None = None, valid: MultipleChoiceSource | None = None) -> None:
        check_sources(MultipleChoiceSource, train=train, valid=valid)
        self.train, self.valid = train, valid

    def label_counts(self, batch: PackedBatch) -> dict[str, int]:
        """See `Task.label_counts`: one label for a question, whose choices are several sequences."""
        return {"loss": batch.num_sequences // batch["num_choices"]}

    def predict(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """See `Task.predict`: logits (fp32 [B, C])."""
        output = model(**batch)
        return {} if output.loss is None else {"loss": output.loss}, {"logits": output.logits.float()}

    def score(self, source: Source, predictions: Predictions) -> dict[str, float]:
        """See `Task.score`. Raises ValueError if the right choices are not known."""
        labels = source_of_kind(MultipleChoiceSource, source).labels
        if labels is None:
            raise ValueError("source: expected examples with labels, got none")
        return {"accuracy": float((predictions.rows("logits").argmax(axis=1) == labels).mean())}

    def rows(self, source: Source, predictions: Predictions) -> Iterator[dict[str, Any]]:
        """What the model says, question by question.

        Yields:
            index; label (the number of its choice, from 0); gold (the right one, where it is known);
            probability_<number> for every choice; context; choice (the text of its choice).
        """
        source = source_of_kind(MultipleChoiceSource, source)
        logits = predictions.rows("logits")
        shares = probabilities(logits).tolist()
        for index, answer in enumerate(logits.argmax(axis=1).tolist()):
            row = {"index": index, "label": answer}
            if source.labels is not None:
                row["gold"] = int(source.labels[index])
            row |= {f"probability_{number}": share for number, share in enumerate(shares[index])}
            yield row | {"context": source.contexts[index], "choice": source.choices[answer][index]}

    def write_predictions(self, path: Path, source: Source, predictions: Predictions) -> list[Path]:
        """Writes `rows` as a table: path.tsv."""
        file = path.with_name(f"{path.name}.tsv")
        write_table(file, self.rows(source, predictions))
        return [file]

    def describe(self, source: Source, index: int) -> str:
        """See `Task.describe`."""
        return source_of_kind(MultipleChoiceSource, source).decode(index)
