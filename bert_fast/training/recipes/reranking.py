"""Pairs of texts scored by a cross-encoder: both texts in one sequence, and one number of it.

Nogueira & Cho 2019 (arXiv:1901.04085), section 3: what a fast search found is ordered again by such a model.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bert_fast.checks import check_count
from bert_fast.data.arguments import check_tokenizer_kind
from bert_fast.files import path_name
from bert_fast.models import BertForSequenceClassification
from bert_fast.tokenization import Tokenizer, load_tokenizer

__all__ = ["CrossEncoder"]


@dataclass(frozen=True)
class CrossEncoder:
    """Pairs of texts to scores.

    Attributes:
        model: with one label, in evaluation mode.
        tokenizer: of the model.
        batch_tokens: of a batch; a single pair may have more. A pair is cut to what the model takes, longer text first.

    Raises: TypeError, ValueError naming the argument, what was expected and what came.
    """

    model: BertForSequenceClassification
    tokenizer: Tokenizer
    batch_tokens: int = 16384

    def __post_init__(self) -> None:
        if not isinstance(self.model, BertForSequenceClassification):
            raise TypeError(f"model: expected a BertForSequenceClassification, got {type(self.model).__name__}")
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

        Raises:
            CheckpointError: files are missing or broken. ValueError, TypeError: wrong options, another model.
        """
        name = path_name("path", path)
        model = BertForSequenceClassification.from_pretrained(name).to(device, dtype).eval()
        return cls(model, load_tokenizer(name), batch_tokens)

    def scores(self, texts: Sequence[str], pairs: Sequence[str]) -> np.ndarray:
        """The logits of (texts[i], pairs[i]): float32 [n]."""
        if len(texts) != len(pairs):
            raise ValueError(f"pairs: expected {len(texts)}, as many as texts, got {len(pairs)}")
        longest = min(self.model.config.max_position_embeddings, self.tokenizer.model_max_length)
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
                logits = self.model(  # which makes positions itself
                    input_ids=batch.input_ids, token_type_ids=batch.token_type_ids, cu_seqlens=batch.cu_seqlens,
                    max_seqlen=batch.max_seqlen,
                ).logits  # fmt: skip
                found = logits[:, 0].float().cpu().numpy()
                scores[rows[: len(found)]] = found
                done += len(found)
        return scores
