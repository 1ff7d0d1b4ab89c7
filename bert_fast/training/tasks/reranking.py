"""The task rerank: a score for a query and a document, read together, by which documents are put in order."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from bert_fast.data.batches import Source
from bert_fast.data.reranking import RerankingLoss, RerankingSource
from bert_fast.losses import list_margin_mse, list_softmax, score_cross_entropy, score_mse
from bert_fast.models import BertForSequenceClassification, BertPreTrainedModel
from bert_fast.reference.precision import wide
from bert_fast.tokenization import Tokenizer
from bert_fast.tokenization.pack import PackedBatch
from bert_fast.training.config import SettingsError, TrainingConfig
from bert_fast.training.ordering import ordering_metrics
from bert_fast.training.task import Predictions, Task
from bert_fast.training.tasks.base import FinetuneSettings, TaskSettings, check_sources, source_of_kind, write_table

__all__ = ["RerankSettings", "RerankingTask"]

_OWN = ("cu_lists", "longest_list", "labels")  # of a batch: not the model's
# What sentence-transformers does to scores: nothing, so that they are ours.
_ACTIVATION = {"activation_fn": "torch.nn.modules.linear.Identity"}


@dataclass(frozen=True)
class RerankSettings(FinetuneSettings):
    """Queries with documents and labels; or with one that answers them and others that do not."""

    summary: ClassVar[str] = "a score for a query and a document, by which what a search found is put in order"

    train: str  # TSV, CSV, JSON lines or Parquet
    valid: str | None = None  # the same, to judge by
    valid_share: float | None = None  # without valid: share of train's queries, at random, kept to judge by
    query: str = "query"  # column; of a file without a header its number, from 0
    document: str = "document"  # without negatives: column of documents, a text or a list of them
    label: str = "label"  # then: column of a number for each document
    positive: str = "positive"  # with negatives: column of documents that belong to the queries
    negatives: tuple[str, ...] | None = None  # columns of documents that do not
    teacher: str | None = None  # with negatives: column of another model's scores, in their order, or of its margins
    loss: RerankingLoss | None = None  # default: softmax with negatives, margin_mse with a teacher, else binary
    relevant_from: float = 0.5  # a document of at least this label belongs to its query, for metrics
    max_length: int = 256  # tokens of query and document; the longer one is cut first

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher is not None and not self.negatives:
            raise ValueError(f"teacher: goes with negatives; without them label holds its scores, got {self.teacher!r}")
        if self.loss == "margin_mse" and self.negatives and self.teacher is None:
            raise ValueError("teacher: expected the column of the margins that margin_mse learns, got None")

    @property
    def model_class(self) -> type[BertPreTrainedModel]:
        """See `TaskSettings.model_class`."""
        return BertForSequenceClassification

    @property
    def chosen_loss(self) -> RerankingLoss:
        """`loss`, or its default."""
        if self.loss is not None:
            return self.loss
        return "margin_mse" if self.teacher is not None else "softmax" if self.negatives else "binary"

    def make_task(self, train: Any, valid: Any) -> "RerankingTask":
        """See `TaskSettings.make_task`."""
        return RerankingTask(train, valid, loss=self.chosen_loss)

    def phases(self, training: TrainingConfig) -> list[tuple[TaskSettings, TrainingConfig]]:
        """See `TaskSettings.phases`."""
        if training.graphs:
            raise SettingsError("graphs: expected False for rerank, whose lists differ in length, got True")
        return super().phases(training)

    def fitted(self, tokenizer: Tokenizer) -> Tokenizer:
        """See `TaskSettings.fitted`: whoever opens the model cuts pairs as they were cut in training."""
        tokenizer.model_max_length = self.max_length
        return tokenizer

    def read(
        self,
        examples: Any,
        tokenizer: Tokenizer,
        *,
        labels: Sequence[str] | None = None,
        is_labelled: bool = True,
        cache_dir: Path | None = None,
    ) -> RerankingSource:
        """See `TaskSettings.read`; without labels, examples are queries with documents."""
        return RerankingSource.read(
            examples,
            tokenizer,
            query=self.query,
            document=self.document,
            label=self.label if is_labelled else None,
            positive=self.positive,
            negatives=(self.negatives or ()) if is_labelled else (),
            teacher=self.teacher,
            loss=self.chosen_loss,
            relevant_from=self.relevant_from,
            max_length=self.max_length,
            cache_dir=cache_dir,
        )

    def parse_line(self, line: str, number: int) -> dict[str, Any]:
        """See `TaskSettings.parse_line`: a query and a document with a tab between them."""
        parts = line.split("\t")
        if len(parts) != 2:
            raise ValueError(f"expected a query and a document with a tab between them, got {len(parts)} texts")
        return {self.query: parts[0], self.document: parts[1]}

    def _divisible(self, source: RerankingSource) -> tuple[int, Callable[[np.ndarray], RerankingSource]]:
        """Queries with all their rows, so that none to learn from is one to judge by."""
        names, query_of = np.unique(np.array(source.queries, object), return_inverse=True)
        return len(names), lambda queries: source.take(np.flatnonzero(np.isin(query_of, queries)))


class RerankingTask(Task):
    """A score for a query and a document, read together, by a `BertForSequenceClassification` with one label.

    Metrics are those of `training.ordering`: all documents that the examples have of a query are put in order. The best
    checkpoint is that of the greatest ndcg@10.

    Args:
        train, valid: see `Task`.
        loss: "binary", "mse": of every document by itself, see `losses.score_cross_entropy`, `losses.score_mse`;
            "softmax", "list_net": of the documents of an example, see `losses.list_softmax` (targets "share",
            "softmax"); "margin_mse": see `losses.list_margin_mse`.

    Raises:
        ValueError: valid has no document that belongs to its query.
    """

    train: RerankingSource | None
    valid: RerankingSource | None
    name = "rerank"
    metric = "ndcg@10"
    higher_is_better = True

    def __init__(
        self,
        train: RerankingSource | None = None,
        valid: RerankingSource | None = None,
        *,
        loss: RerankingLoss = "binary",
    ) -> None:
        check_sources(RerankingSource, train=train, valid=valid)
        if valid is not None and valid.is_relevant is not None and not valid.is_relevant.any():
            raise ValueError("valid: expected documents that belong to their queries (relevant_from), got none")
        self.train, self.valid, self.loss = train, valid, loss

    def model_config(self) -> dict[str, Any]:
        """See `Task.model_config`."""
        return {"num_labels": 1, "problem_type": "regression"}

    def fitted(self, model: Any) -> Any:
        """See `Task.fitted`: sentence-transformers' `CrossEncoder` gives the scores as they are."""
        model.config.sentence_transformers = dict(_ACTIVATION)
        return model

    def label_counts(self, batch: PackedBatch) -> dict[str, int]:
        """See `Task.label_counts`: documents, lists, or documents that are compared with the first of a list."""
        documents, lists = batch.num_sequences, len(batch["cu_lists"]) - 1
        return {"loss": {"binary": documents, "mse": documents, "margin_mse": documents - lists}.get(self.loss, lists)}

    def loss_parts(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """See `Task.loss_parts`."""
        scores = self._scores(model, batch)
        return {"loss": self._loss(scores, batch)}

    def predict(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """See `Task.predict`: scores (fp32 [B, L]), NaN where an example has fewer documents than the longest."""
        scores = self._scores(model, batch)
        parts = {"loss": self._loss(scores, batch)} if "labels" in batch else {}
        matrix, mask = _matrix(scores, batch)
        return parts, {"scores": matrix.float().masked_fill(~mask, torch.nan)}

    @staticmethod
    def _scores(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Logits [N]."""
        scores: Tensor = model(**{name: value for name, value in batch.items() if name not in _OWN}).logits[:, 0]
        return scores

    def _loss(self, scores: Tensor, batch: Mapping[str, Any]) -> Tensor:
        labels = batch["labels"]
        if self.loss == "binary":
            return score_cross_entropy(scores, labels)
        if self.loss == "mse":
            return score_mse(scores, labels)
        (matrix, mask), (wanted, _) = _matrix(scores, batch), _matrix(labels, batch)
        if self.loss == "margin_mse":
            return list_margin_mse(matrix, wanted, mask)
        return list_softmax(matrix, wanted, mask, targets="share" if self.loss == "softmax" else "softmax")

    def score(self, source: Source, predictions: Predictions) -> dict[str, float]:
        """See `Task.score`. Raises ValueError if it is not known which documents belong to their queries."""
        source = source_of_kind(RerankingSource, source)
        if source.is_relevant is None:
            raise ValueError("source: expected examples with labels, got none")
        found = list(_by_query(source, predictions).values())
        return ordering_metrics([one.scores for one in found], [one.is_relevant for one in found])

    def rows(self, source: Source, predictions: Predictions) -> Iterator[dict[str, Any]]:
        """What the model says, document by document, in the order of the examples.

        Yields:
            index (of the example); score; rank (among all documents of the query); relevant (1 or 0, where it is
            known); query; document.
        """
        source = source_of_kind(RerankingSource, source)
        of_query = _by_query(source, predictions)
        places = {query: dict(zip(one.documents, one.places(), strict=True)) for query, one in of_query.items()}
        flat = iter(_flat_scores(source, predictions))
        for index, (query, documents) in enumerate(zip(source.queries, source.documents, strict=True)):
            for number, document in enumerate(documents):
                row = {"index": index, "score": next(flat), "rank": places[query][document]}
                if source.is_relevant is not None:
                    row["relevant"] = int(source.is_relevant[source.cu_lists[index] + number])
                yield row | {"query": query, "document": document}

    def write_predictions(self, path: Path, source: Source, predictions: Predictions) -> list[Path]:
        """Writes `rows` as a table: path.tsv."""
        file = path.with_name(f"{path.name}.tsv")
        write_table(file, self.rows(source, predictions))
        return [file]

    def describe(self, source: Source, index: int) -> str:
        """See `Task.describe`."""
        return source_of_kind(RerankingSource, source).decode(index)


def _matrix(values: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(values [N] as a row for each example [B, L], 0 where it has no more; where it has, bool [B, L])."""
    starts, ends = batch["cu_lists"][:-1, None], batch["cu_lists"][1:, None]
    places = starts + torch.arange(batch["longest_list"], device=values.device)
    mask = places < ends
    # An entry that is there is read once, the last one by all others too, with nothing to add to its gradient.
    taken = wide(values).index_select(0, places.clamp(max=len(values) - 1).flatten()).view(places.shape)
    return taken.masked_fill(~mask, 0.0), mask


@dataclasses.dataclass
class _Documents:
    """Of a query: different texts, the score of each, and whether it belongs to the query."""

    documents: list[str]
    scores: list[float]
    is_relevant: list[bool]

    def places(self) -> list[int]:
        """From 1; of equal scores, the first document comes first."""
        order = np.argsort(-np.array(self.scores), kind="stable")
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(1, len(order) + 1)
        return [int(place) for place in places]


def _flat_scores(source: RerankingSource, predictions: Predictions) -> list[float]:
    scores = predictions.rows("scores")
    counts = np.diff(source.cu_lists)
    kept: list[float] = scores[np.arange(scores.shape[1]) < counts[:, None]].tolist()
    return kept


def _by_query(source: RerankingSource, predictions: Predictions) -> dict[str, _Documents]:
    """Documents of all examples with the same query; a text that is there twice counts once, and where it belongs."""
    scores, found, number = _flat_scores(source, predictions), dict[str, _Documents](), 0
    known: dict[tuple[str, str], int] = {}
    for query, documents in zip(source.queries, source.documents, strict=True):
        of_query = found.setdefault(query, _Documents([], [], []))
        for document in documents:
            belongs = source.is_relevant is not None and bool(source.is_relevant[number])
            place = known.setdefault((query, document), len(of_query.documents))
            if place == len(of_query.documents):
                of_query.documents.append(document)
                of_query.scores.append(scores[number])
                of_query.is_relevant.append(belongs)
            of_query.is_relevant[place] |= belongs
            number += 1
    return found
