"""In-batch negatives as a module that sentence-transformers trains with."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.losses.cached import cached_loss
from bert_fast.losses.in_batch import in_batch_negatives

_Features = Mapping[str, Any]


class InBatchNegatives(nn.Module):
    """`in_batch_negatives` as a loss for `SentenceTransformerTrainer`, in place of `MultipleNegativesRankingLoss`.

    Value and gradient are those of that loss. The matrix of scores, [B, N], never exists. With `mini_batch_size` or
    `mini_batch_num_tokens` only some rows' activations are in memory at a time (`cached_loss`), as in
    `CachedMultipleNegativesRankingLoss`. Gradients are those of the whole batch, under dropout too.

    Args:
        model: makes "sentence_embedding" [B, D] of the features of a column of the dataset.
        scale: see `in_batch_negatives`.
        similarity: see `in_batch_negatives`.
        symmetric: see `in_batch_negatives`.
        gather_across_devices: documents of all processes are negatives.
        mini_batch_size: rows that are encoded at a time; None: all.
        mini_batch_num_tokens: tokens without padding, of all columns together, that are encoded at a time: as many rows
            as fit, in their order, and at least one. Short texts then share a forward pass, and memory has one bound
            for batches of any lengths. Instead of mini_batch_size.

    Columns of the dataset: queries, documents that answer them, and any number of columns of hard negatives.

    Raises:
        ValueError: the message names the argument.

    Example:
        >>> class Model(torch.nn.Module):  # in the place of a SentenceTransformer
        ...     def forward(self, features):
        ...         return {"sentence_embedding": features["input_ids"].float()}
        >>> columns = [{"input_ids": torch.eye(4)}] * 2  # queries, and documents that answer them
        >>> losses.InBatchNegatives(Model(), mini_batch_size=2)(columns).item() < 1e-3
        True
    """

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity: str = "cosine",
        *,
        symmetric: bool = False,
        gather_across_devices: bool = False,
        mini_batch_size: int | None = None,
        mini_batch_num_tokens: int | None = None,
    ) -> None:
        super().__init__()
        for name, number in (("mini_batch_size", mini_batch_size), ("mini_batch_num_tokens", mini_batch_num_tokens)):
            if number is not None and number < 1:
                raise ValueError(f"{name}: expected at least 1 or None, got {number}")
        if mini_batch_size is not None and mini_batch_num_tokens is not None:
            raise ValueError("mini_batch_num_tokens: expected None beside mini_batch_size, got both")
        self.model = model
        self.scale, self.similarity, self.symmetric = scale, similarity, symmetric
        self.gather_across_devices = gather_across_devices
        self.mini_batch_size, self.mini_batch_num_tokens = mini_batch_size, mini_batch_num_tokens

    def forward(self, sentence_features: Iterable[_Features], labels: Tensor | None = None) -> Tensor:
        """The loss (Tensor [], fp32) of a batch.

        sentence_features: of each column, "input_ids" [B, L] and what else the model takes. labels: not looked at.
        """
        columns = [dict(one) for one in sentence_features]
        if len(columns) < 2:
            raise ValueError(f"sentence_features: expected queries and documents, got {len(columns)} columns")
        if self.mini_batch_size is None and self.mini_batch_num_tokens is None:
            return self._loss(self._encode(columns))
        num_rows = len(columns[0]["input_ids"])
        parts = [[_rows(one, rows, num_rows) for one in columns] for rows in self._mini_batches(columns, num_rows)]
        return cached_loss(self._encode, parts, self._loss, no_sync=getattr(self.model, "no_sync", None))

    def get_config_dict(self) -> dict[str, Any]:
        """What a model card says of this loss."""
        names = "scale", "similarity", "symmetric", "gather_across_devices", "mini_batch_size", "mini_batch_num_tokens"
        return {name: getattr(self, name) for name in names}

    def _mini_batches(self, columns: list[dict[str, Any]], num_rows: int) -> list[slice]:
        if self.mini_batch_size is not None:
            return [slice(i, i + self.mini_batch_size) for i in range(0, num_rows, self.mini_batch_size)]
        assert self.mini_batch_num_tokens is not None
        masks: list[Tensor] = []
        for one in columns:
            if "attention_mask" not in one:
                raise ValueError("sentence_features: expected an attention_mask with mini_batch_num_tokens, got none")
            masks.append(_rows(one, slice(None), num_rows)["attention_mask"])
        boundaries, filled = [0], 0
        for row, num_tokens in enumerate(torch.stack([mask.sum(1) for mask in masks]).sum(0).tolist()):
            if row and filled + num_tokens > self.mini_batch_num_tokens:
                boundaries.append(row)
                filled = 0
            filled += num_tokens
        return [slice(*ends) for ends in itertools.pairwise((*boundaries, num_rows))]

    def _encode(self, columns: list[dict[str, Any]]) -> Tensor:
        """Embeddings of rows and columns [B, C, D]."""
        return torch.stack([self.model(dict(one))["sentence_embedding"] for one in columns], dim=1)

    def _loss(self, embeddings: Tensor) -> Tensor:
        queries, *documents = embeddings.unbind(1)
        return in_batch_negatives(
            queries, torch.cat(documents), scale=self.scale, similarity=self.similarity, symmetric=self.symmetric,
            gather=self.gather_across_devices,
        )  # fmt: skip


def _rows(features: _Features, rows: slice, num_rows: int) -> dict[str, Any]:
    """Rows of the features of a column; what is no tensor is of all rows."""
    for name, value in features.items():
        if isinstance(value, Tensor) and (value.dim() == 0 or len(value) != num_rows):
            raise ValueError(
                f"sentence_features: expected {name} of {num_rows} rows with mini-batches, got {list(value.shape)}: "
                f"texts that are flattened, or columns of other lengths"
            )
    return {name: value[rows] if isinstance(value, Tensor) else value for name, value in features.items()}
