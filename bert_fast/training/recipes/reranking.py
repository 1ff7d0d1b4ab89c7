"""Pairs of texts scored by a cross-encoder: both texts in one sequence, and one number of it.

Nogueira & Cho 2019 (arXiv:1901.04085), section 3: what a fast search found is ordered again by such a model.
"""

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bert_fast.checks import check_count
from bert_fast.data.arguments import check_tokenizer_kind
from bert_fast.files import path_name
from bert_fast.models import BertForSequenceClassification
from bert_fast.tokenization import PackedBatch, Tokenizer, load_tokenizer
from bert_fast.training.recipes.families import is_bert, load_other, longest_text

__all__ = ["CrossEncoder"]


@dataclass(frozen=True)
class CrossEncoder:
    """Pairs of texts to scores.

    Attributes:
        model: with one label, in evaluation mode; of another family than BERT a fused model of transformers.
        tokenizer: of the model.
        batch_tokens: of a batch; a single pair may have more. A pair is cut to what the model takes, longer text first.

    Raises: TypeError, ValueError naming the argument, what was expected and what came.
    """

    model: Any
    tokenizer: Tokenizer
    batch_tokens: int = 16384

    def __post_init__(self) -> None:
        if not self._is_packed and not hasattr(self.model, "fused_family"):
            kind = type(self.model).__name__
            raise TypeError(
                f"model: expected a BertForSequenceClassification, or a fused one of transformers, got {kind}"
            )
        if self.model.num_labels != 1:
            raise ValueError(f"model: expected num_labels 1, got {self.model.num_labels}")
        check_tokenizer_kind(self.tokenizer)
        object.__setattr__(self, "batch_tokens", check_count("batch_tokens", self.batch_tokens, 1))

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        batch_tokens: int = 16384,
    ) -> "CrossEncoder":
        """Of a checkpoint directory with its tokenizer.

        What is not BERT, but of a family that `bert_fast.fuse` takes (docs/families.md), is transformers' model, fused.

        Raises:
            CheckpointError: files are missing or broken. ValueError, TypeError: wrong options, another model.
        """
        name = path_name("path", path)
        model = BertForSequenceClassification.from_pretrained(name) if is_bert(name) else load_other(name, num_labels=1)
        return cls(model.to(device, dtype).eval(), load_tokenizer(name), batch_tokens)

    def scores(self, texts: Sequence[str], pairs: Sequence[str]) -> np.ndarray:
        """The logits of (texts[i], pairs[i]): float32 [n]."""
        if len(texts) != len(pairs):
            raise ValueError(f"pairs: expected {len(texts)}, as many as texts, got {len(pairs)}")
        model = self.model if self._is_packed else getattr(self.model, self.model.fused_family.inner)
        longest = min(longest_text(model), self.tokenizer.model_max_length)
        limit = max(self.batch_tokens, longest)
        # Longest first, about: memory is asked for once, and sequences of a batch are about as long.
        order = np.argsort([-len(a) - len(b) for a, b in zip(texts, pairs, strict=True)], kind="stable")
        scores, done = np.empty(len(texts), np.float32), 0
        with torch.inference_mode():
            while done < len(order):
                rows = order[done : done + limit]
                batch = self.tokenizer.pack(
                    [texts[row] for row in rows], [pairs[row] for row in rows], max_tokens=limit, max_length=longest
                ).to(self.model.device)
                found = self._logits(batch)[:, 0].float().cpu().numpy()
                scores[rows[: len(found)]] = found
                done += len(found)
        return scores

    @property
    def _is_packed(self) -> bool:
        return isinstance(self.model, BertForSequenceClassification)

    def _logits(self, batch: PackedBatch) -> torch.Tensor:
        """Of all sequences: [B, 1]. Models make positions themselves."""
        if self._is_packed:
            names = ("input_ids", "token_type_ids", "cu_seqlens", "max_seqlen")
            return self.model(**{name: batch[name] for name in names}).logits
        # Heads of other families take padded input: not all of them hand packed input on.
        lengths, pad_id = batch.cu_seqlens.diff(), self.tokenizer.pad_token_id
        keep_mask = torch.arange(batch.max_seqlen, device=lengths.device) < lengths[:, None]
        inputs = {"attention_mask": keep_mask.long()}
        takes_types = "token_type_ids" in inspect.signature(self.model.forward).parameters
        for name, fill in {"input_ids": pad_id or 0, "token_type_ids": 0}.items():
            if name == "input_ids" or takes_types:
                padded = torch.full(keep_mask.shape, fill, device=lengths.device)
                inputs[name] = padded.masked_scatter(keep_mask, batch[name])
        return self.model(**inputs).logits
