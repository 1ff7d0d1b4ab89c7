"""The task embed: vectors of texts, near to one another where the texts belong together."""

import dataclasses
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bert_fast.data.batches import Batches, Source
from bert_fast.data.embedding import EmbeddingLoss, EmbeddingSource
from bert_fast.losses import contrastive, cosent, cosine_mse, in_batch_negatives, margin_mse, matryoshka, triplet
from bert_fast.models import BertForTextEmbedding, BertPreTrainedModel
from bert_fast.tokenization import Tokenizer
from bert_fast.tokenization.pack import PackedBatch
from bert_fast.training.config import SettingsError, TrainingConfig
from bert_fast.training.correlation import correlations
from bert_fast.training.retrieval import rankings, retrieval_metrics
from bert_fast.training.task import Predictions, Task
from bert_fast.training.tasks.base import FinetuneSettings, TaskSettings, check_sources, source_of_kind, write_table

__all__ = ["EmbedSettings", "EmbeddingTask"]

_OWN = ("num_texts", "query_groups", "document_groups", "scores")  # of a batch: not the model's
_OF_PAIRS = ("cosent", "cosine_mse", "contrastive")


@dataclass(frozen=True)
class EmbedSettings(FinetuneSettings):
    """Queries with documents that belong to them, or pairs of texts with scores."""

    summary: ClassVar[str] = "vectors for search: of queries, each with a document that answers it, and hard negatives"

    train: str  # TSV, CSV, JSON lines or Parquet
    valid: str | None = None  # the same, to judge by
    valid_share: float | None = None  # without valid: share of train, at random, kept to judge by
    query: str = "query"  # column; of a file without a header its number, from 0
    positive: str = "positive"  # column of documents that belong to the queries
    negatives: tuple[str, ...] | None = None  # columns of documents that do not
    label: str | None = None  # column of a number: how near query and positive are, or the margin of margin_mse
    loss: EmbeddingLoss | None = None  # default: in_batch; with label cosent, beside a negative margin_mse
    margin: float = 0.5  # of triplet and contrastive, between distances 1 - cosine
    dimensions: tuple[int, ...] | None = None  # the loss of the first so many entries of vectors, summed: Matryoshka
    pooling: Literal["mean", "cls", "max", "last", "weighted"] | None = None  # default: the model's, else mean
    normalize: bool = True  # vectors have length 1
    similarity: Literal["cosine", "dot"] = "cosine"  # of vectors, in the loss
    scale: float = 20.0  # of similarities, 1 / temperature
    symmetric: bool = False  # documents look for their queries, too
    part_size: int | None = None  # texts whose activations are in memory at a time, at up to a third more work
    max_length: int = 128  # tokens of a text; longer ones are cut

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.scale < float("inf"):
            raise ValueError(f"scale: expected a number above 0, got {self.scale}")
        if self.part_size is not None and self.part_size < 1:
            raise ValueError(f"part_size: expected at least 1, got {self.part_size}")
        if not 0 < self.margin <= 2:
            raise ValueError(f"margin: expected a number above 0, at most 2, got {self.margin}")
        sizes = self.dimensions
        if sizes is not None and (min(sizes) < 1 or len(set(sizes)) < len(sizes)):
            raise ValueError(f"dimensions: expected different numbers from 1 on, got {' '.join(map(str, sizes))}")
        self._check_columns()

    def _check_columns(self) -> None:
        """Sees that there are the columns that the loss needs, and no others."""
        loss, negatives = self.chosen_loss, len(self.negatives or ())
        needs_label = loss in ("cosent", "cosine_mse", "contrastive", "margin_mse")
        if needs_label and self.label is None:
            raise ValueError(f"label: expected a column of numbers for {loss}, got None")
        if self.label is not None and not needs_label:
            raise ValueError(f"label: expected None for {loss}, which takes no numbers, got {self.label!r}")
        wanted = {"triplet": 1, "margin_mse": 1}.get(loss, 0 if needs_label else negatives)
        if negatives != wanted:
            raise ValueError(f"negatives: expected {wanted or 'no'} column for {loss}, got {negatives}")
        if self.symmetric and loss != "in_batch":
            raise ValueError(f"symmetric: expected False for {loss}, got True")

    @property
    def chosen_loss(self) -> EmbeddingLoss:
        """`loss`, or its default."""
        if self.loss is not None:
            return self.loss
        return "in_batch" if self.label is None else "margin_mse" if self.negatives else "cosent"

    @property
    def model_class(self) -> type[BertPreTrainedModel]:
        """See `TaskSettings.model_class`."""
        return BertForTextEmbedding

    def make_task(self, train: Any, valid: Any) -> "EmbeddingTask":
        """See `TaskSettings.make_task`."""
        how = {"pooling": self.pooling, "normalize": self.normalize, "max_length": self.max_length}
        return EmbeddingTask(
            train, valid, similarity=self.similarity, scale=self.scale, symmetric=self.symmetric,
            part_size=self.part_size, text_embedding=how, loss=self.chosen_loss, margin=self.margin,
            dimensions=self.dimensions,
        )  # fmt: skip

    def phases(self, training: TrainingConfig) -> list[tuple[TaskSettings, TrainingConfig]]:
        """See `TaskSettings.phases`."""
        if training.graphs:
            raise SettingsError("graphs: expected False for embed, whose loss compares the texts of a batch, got True")
        if training.batch_size == 1 and self.chosen_loss == "in_batch" and not self.negatives:
            raise SettingsError("batch_size: expected at least 2 without negatives: others of the batch are, got 1")
        if training.batch_size == 1 and self.chosen_loss == "cosent":
            raise SettingsError("batch_size: expected at least 2 for cosent, which compares pairs, got 1")
        return super().phases(training)

    def read(
        self,
        examples: Any,
        tokenizer: Tokenizer,
        *,
        labels: Sequence[str] | None = None,
        is_labelled: bool = True,
        cache_dir: Path | None = None,
    ) -> EmbeddingSource:
        """See `TaskSettings.read`."""
        if not is_labelled:
            raise SettingsError("task: embed answers no questions: `bert-fast embed` writes vectors of texts")
        return EmbeddingSource.read(
            examples,
            tokenizer,
            query=self.query,
            positive=self.positive,
            negatives=self.negatives or (),
            score=self.label,
            loss=self.chosen_loss,
            max_length=self.max_length,
            cache_dir=cache_dir,
        )

    def _divisible(self, source: EmbeddingSource) -> tuple[int, Callable[[np.ndarray], EmbeddingSource]]:
        """Groups of rows, so that no text to learn from is one to judge by."""
        names, group_of = np.unique(source.groups[:, 0], return_inverse=True)
        return len(names), lambda groups: source.take(np.flatnonzero(np.isin(group_of, groups)))


class EmbeddingTask(Task):
    """Vectors by which a query finds its document among those of its batch, by a `BertForTextEmbedding`.

    The loss of a batch is `losses.in_batch_negatives`; batches of more examples are harder, and better. Metrics are
    those of `training.retrieval`: every query looks among all different documents of the examples. The best checkpoint
    is that of the greatest ndcg@10. Of pairs with scores ("cosent", "cosine_mse", "contrastive"), metrics are how well
    cosines and scores go together: spearman, by which the best checkpoint is chosen, and pearson.

    Args:
        train, valid: see `Task`.
        similarity, scale, symmetric: see `losses.in_batch_negatives`.
        part_size: see `BertForTextEmbedding.forward`.
        loss: a function of `losses` by its name; "in_batch": `in_batch_negatives`.
        margin: of "triplet", with cosines, and "contrastive".
        dimensions: see `losses.matryoshka`; None: the loss of whole vectors.
        text_embedding: of the model, see `models.sentence_folder.TextEmbedding`; entries that are None are the model's.
    """

    train: EmbeddingSource | None
    valid: EmbeddingSource | None
    name = "embed"
    metric = "ndcg@10"
    higher_is_better = True

    def __init__(
        self,
        train: EmbeddingSource | None = None,
        valid: EmbeddingSource | None = None,
        *,
        similarity: str = "cosine",
        scale: float = 20.0,
        symmetric: bool = False,
        part_size: int | None = None,
        loss: EmbeddingLoss = "in_batch",
        margin: float = 0.5,
        dimensions: Sequence[int] | None = None,
        text_embedding: Mapping[str, Any] | None = None,
    ) -> None:
        check_sources(EmbeddingSource, train=train, valid=valid)
        self.train, self.valid = train, valid
        self.similarity, self.scale, self.symmetric, self.part_size = similarity, scale, symmetric, part_size
        self.loss, self.margin, self.dimensions = loss, margin, dimensions
        self.text_embedding = dict(text_embedding or {})
        if loss in _OF_PAIRS:
            self.metric = "spearman"

    def model_config(self) -> dict[str, Any]:
        """See `Task.model_config`."""
        return {"text_embedding": self.text_embedding}

    def fitted(self, model: Any) -> Any:
        """See `Task.fitted`."""
        most = model.config.hidden_size
        if self.dimensions is not None and max(self.dimensions) > most:
            raise ValueError(f"dimensions: expected at most the model's {most}, got {max(self.dimensions)}")
        return model

    def notes(self, batches: Batches) -> list[str]:
        """See `Task.notes`: rows that belong together, texts that are cut, batches in which nothing is compared."""
        source = source_of_kind(EmbeddingSource, batches.source)
        notes = list(source.notes)
        if self.loss == "cosent" or (self.loss == "in_batch" and source.num_texts == 2):
            plan = batches.plan(0)
            alone = np.flatnonzero(np.diff(plan.cu_batches) == 1)
            if len(alone):
                query = source.texts[0][int(plan.indices(int(alone[0]))[0])]
                notes.append(
                    f"batches: {len(alone):,} of {len(plan):,} in the first epoch have one example, which nothing is "
                    f"compared with; the first: query {reprlib.repr(query)}"
                )
        return notes

    def label_counts(self, batch: PackedBatch) -> dict[str, int]:
        """See `Task.label_counts`: one for a query, whose texts are several sequences."""
        return {"loss": batch.num_sequences // batch["num_texts"]}

    def loss_parts(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """See `Task.loss_parts`."""
        return {"loss": self._loss(self._embeddings(model, batch), batch)}

    def predict(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """See `Task.predict`: embeddings (fp32 [B, C, H]). The loss depends on how many examples a batch has."""
        embeddings = self._embeddings(model, batch)
        return {"loss": self._loss(embeddings, batch)}, {"embeddings": embeddings}

    def _embeddings(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """[B, C, H]."""
        inputs = {name: value for name, value in batch.items() if name not in _OWN}
        if self.part_size is not None and torch.is_grad_enabled():
            inputs["part_size"] = self.part_size
        embeddings: Tensor = model(**inputs).embeddings
        return embeddings.unflatten(0, (-1, batch["num_texts"]))

    def _loss(self, embeddings: Tensor, batch: Mapping[str, Any]) -> Tensor:
        texts = embeddings.unbind(1)
        if self.dimensions is None:
            return self._whole_loss(batch, *texts)
        return matryoshka(lambda *parts: self._whole_loss(batch, *parts), *texts, dims=self.dimensions)

    def _whole_loss(self, batch: Mapping[str, Any], *texts: Tensor) -> Tensor:
        """Of queries [B, H], positives, negatives, ..."""
        first, second, *others = texts
        if self.loss == "cosent":
            return cosent(first, second, batch["scores"], scale=self.scale)
        if self.loss == "cosine_mse":
            return cosine_mse(first, second, batch["scores"])
        if self.loss == "contrastive":
            return contrastive(first, second, batch["scores"], margin=self.margin)
        if self.loss == "triplet":
            return triplet(first, second, others[0], margin=self.margin, distance="cosine")
        if self.loss == "margin_mse":
            return margin_mse(first, second, others[0], batch["scores"])
        return in_batch_negatives(
            first, torch.cat([second, *others]), scale=self.scale, similarity=self.similarity, symmetric=self.symmetric,
            query_groups=batch["query_groups"], document_groups=batch["document_groups"].T.flatten(),
        )  # fmt: skip

    def score(self, source: Source, predictions: Predictions) -> dict[str, float]:
        """See `Task.score`."""
        source = source_of_kind(EmbeddingSource, source)
        if self.loss in _OF_PAIRS:
            assert source.scores is not None
            return correlations(source.scores, _cosines(predictions))
        found = self._found(source, predictions)
        return retrieval_metrics(found.ranked, found.relevant)

    def rows(self, source: Source, predictions: Predictions) -> Iterator[dict[str, Any]]:
        """What each different query finds first; of pairs with scores, their cosines.

        Yields:
            index; rank (place of the first document that belongs to it, 0 beyond the first ten); score (of what is
            found first); query; found; positive (one that belongs to it). Of a pair: index; score (its cosine); gold;
            query; positive.
        """
        source = source_of_kind(EmbeddingSource, source)
        if self.loss in _OF_PAIRS:
            assert source.scores is not None
            pairs = zip(_cosines(predictions).tolist(), source.scores.tolist(), *source.texts, strict=True)
            for index, (score, gold, query, positive) in enumerate(pairs):
                yield {"index": index, "score": score, "gold": gold, "query": query, "positive": positive}
            return
        found = self._found(source, predictions)
        for index, (query, relevant) in enumerate(zip(found.queries, found.relevant, strict=True)):
            ranked = found.ranked[index].tolist()
            rank = next((place for place, row in enumerate(ranked, 1) if row in relevant), 0)
            yield {
                "index": index, "rank": rank, "score": float(found.scores[index, 0]), "query": query,
                "found": found.documents[ranked[0]], "positive": found.documents[min(relevant)],
            }  # fmt: skip

    def write_predictions(self, path: Path, source: Source, predictions: Predictions) -> list[Path]:
        """Writes `rows` as a table: path.tsv."""
        file = path.with_name(f"{path.name}.tsv")
        write_table(file, self.rows(source, predictions))
        return [file]

    def describe(self, source: Source, index: int) -> str:
        """See `Task.describe`."""
        return source_of_kind(EmbeddingSource, source).decode(index)

    def _found(self, source: EmbeddingSource, predictions: Predictions) -> "_Found":
        embeddings = predictions.rows("embeddings")
        queries: dict[str, int] = {}
        documents: dict[str, int] = {}
        vectors: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        relevant: list[set[int]] = []
        for row, texts in enumerate(zip(*source.texts, strict=True)):
            for place, text in enumerate(texts):
                known, of_known = (documents, vectors[1]) if place else (queries, vectors[0])
                if text not in known:
                    known[text] = len(known)
                    of_known.append(embeddings[row, place])
            if queries[texts[0]] == len(relevant):
                relevant.append(set())
            relevant[queries[texts[0]]].add(documents[texts[1]])
        ranked, scores = rankings(np.stack(vectors[0]), np.stack(vectors[1]), 10, similarity=self.similarity)
        return _Found(list(queries), list(documents), relevant, ranked, scores)


def _cosines(predictions: Predictions) -> np.ndarray:
    """Of the two texts of each pair, fp32 [n]."""
    first, second = torch.from_numpy(predictions.rows("embeddings")).unbind(1)
    return torch.nn.functional.cosine_similarity(first, second).numpy()


@dataclasses.dataclass(frozen=True)
class _Found:
    """Different queries and documents; which belong together, and what was found: see `rankings`."""

    queries: list[str]
    documents: list[str]
    relevant: list[set[int]]
    ranked: np.ndarray
    scores: np.ndarray
