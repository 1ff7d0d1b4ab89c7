"""Contrastive steps on a CPU: cached and uncached, ours beside sentence-transformers', forward and backward.

MiniLM's published weights in fp32, dropout 0.1, XQuAD's questions and the passages that answer them; no optimizer,
which costs all sides the same:

    whole    our model on packed batches, `losses.in_batch_negatives`, one backward of all pairs
    cached   the same by `losses.cached_loss`, in parts
    theirs   sentence-transformers' MultipleNegativesRankingLoss of the same pairs, padded
    theirs_cached   its CachedMultipleNegativesRankingLoss, mini-batches of as many pairs

They take turns, by CPU time of the process. Without dropout, all four must have the same loss, or there is no result.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kit.clock import interleaved
from benchmarks.kit.record import DATA
from benchmarks.recipes.data import minilm
from bert_fast import BertForTextEmbedding, BertTokenizer, losses
from bert_fast.tokenization import PackedBatch

MAX_LENGTH = 128
_AGREE = 1e-4  # of losses of about 1: the same formula, other orders of additions


def pairs_of(count: int) -> list[tuple[str, str]]:
    """Questions, each with its passage, one of a passage. OSError where they are not there."""
    squad = json.loads((DATA / "question_answering" / "xquad.en.json").read_text(encoding="utf-8"))
    paragraphs = [paragraph for article in squad["data"] for paragraph in article["paragraphs"]]
    return [(paragraph["qas"][0]["question"], paragraph["context"]) for paragraph in paragraphs][:count]


class Ours:
    """Our model on pairs that are packed already, `part` pairs at a time where it is asked to."""

    def __init__(self, pairs: list[tuple[str, str]], part: int) -> None:
        self.model = BertForTextEmbedding.from_pretrained(minilm())
        tokenizer = BertTokenizer.from_pretrained(minilm())

        def packed(some: list[tuple[str, str]]) -> PackedBatch:
            return tokenizer.pack([text for pair in some for text in pair], max_length=MAX_LENGTH)

        self.all = packed(pairs)
        self.parts = [packed(pairs[i : i + part]) for i in range(0, len(pairs), part)]

    def _encode(self, batch: PackedBatch) -> Tensor:
        made = self.model(input_ids=batch.input_ids, cu_seqlens=batch.cu_seqlens, max_seqlen=batch.max_seqlen)
        return made.embeddings.unflatten(0, (-1, 2))  # [B, 2, H]

    @staticmethod
    def _loss(embeddings: Tensor) -> Tensor:
        return losses.in_batch_negatives(embeddings[:, 0], embeddings[:, 1])

    def whole(self) -> float:
        """A step of all pairs at once; the loss."""
        self.model.zero_grad(set_to_none=True)
        loss = self._loss(self._encode(self.all))
        loss.backward()
        return float(loss.detach())

    def cached(self) -> float:
        """The same by parts."""
        self.model.zero_grad(set_to_none=True)
        loss = losses.cached_loss(self._encode, self.parts, self._loss)
        loss.backward()
        return float(loss.detach())


class Theirs:
    """sentence-transformers' model and losses on the same pairs, padded to the longest of each column."""

    def __init__(self, pairs: list[tuple[str, str]], part: int) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.losses import (
            CachedMultipleNegativesRankingLoss,
            MultipleNegativesRankingLoss,
        )

        self.model = SentenceTransformer(str(minilm()), device="cpu")
        self.model.max_seq_length = MAX_LENGTH
        self._features = [self.model.preprocess(list(column)) for column in zip(*pairs, strict=True)]
        self._losses = {
            "whole": MultipleNegativesRankingLoss(self.model),
            "cached": CachedMultipleNegativesRankingLoss(self.model, mini_batch_size=part),
        }

    @property
    def fill(self) -> float:
        """Share of real tokens in the padded batch."""
        masks = [features["attention_mask"] for features in self._features]
        return float(sum(mask.sum() for mask in masks) / sum(mask.numel() for mask in masks))

    def step(self, kind: str) -> float:
        """A step, "whole" or "cached"; the loss."""
        self.model.zero_grad(set_to_none=True)
        loss = self._losses[kind]([dict(features) for features in self._features], None)
        loss.backward()
        return float(loss.detach())


def run_contrastive(num_pairs: int, part: int, threads: int, rounds: int) -> dict[str, Any]:
    """Times steps of so many pairs, in parts of `part` pairs."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pairs = pairs_of(num_pairs)
        ours, theirs = Ours(pairs, part), Theirs(pairs, part)
        steps: dict[str, Callable[[], float]] = {
            "whole": ours.whole,
            "cached": ours.cached,
            "theirs": lambda: theirs.step("whole"),
            "theirs_cached": lambda: theirs.step("cached"),
        }
        for model in (ours.model, theirs.model):
            model.eval()
        found = {name: step() for name, step in steps.items()}
        if max(found.values()) - min(found.values()) > _AGREE:
            raise RuntimeError(f"contrastive: losses differ, {found}: nothing to time")
        for model in (ours.model, theirs.model):
            model.train()
        times = interleaved(steps, rounds, clock=time.process_time)
    finally:
        torch.set_num_threads(before)
    return {
        "case": f"contrastive/minilm/{num_pairs}x{part}/{threads}",
        "pairs": num_pairs,
        "part": part,
        "real_tokens": len(ours.all.input_ids),
        "fill": round(theirs.fill, 4),
        **{f"{name}_cpu_s": round(taken.median, 4) for name, taken in times.items()},
        "cached_over_whole": round(times["whole"].speedup_over(times["cached"]), 3),
        "ratio": round(times["whole"].speedup_over(times["theirs"]), 3),
        "cached_ratio": round(times["cached"].speedup_over(times["theirs_cached"]), 3),
        "goal": round(0.9 / theirs.fill, 3),
        **{f"{name}_all_cpu_s": [round(s, 4) for s in taken.seconds] for name, taken in times.items()},
    }
