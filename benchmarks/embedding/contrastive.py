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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kit.clock import interleaved
from benchmarks.kit.results import DATA
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


@dataclass(frozen=True)
class Side:
    """A model, its losses of all pairs, at once and by parts, and the share of real tokens in its batch."""

    model: nn.Module
    whole: Callable[[], Tensor]
    cached: Callable[[], Tensor]
    fill: float = 1.0

    def step(self, loss: Callable[[], Tensor]) -> float:
        """Forward and backward; the loss."""
        self.model.zero_grad(set_to_none=True)
        found = loss()
        found.backward()
        return float(found.detach())


def in_batch(embeddings: Tensor) -> Tensor:
    """Our loss of [B, 2, H]."""
    return losses.in_batch_negatives(embeddings[:, 0], embeddings[:, 1])


def _ours(all_pairs: PackedBatch, parts: list[PackedBatch]) -> Side:
    model = BertForTextEmbedding.from_pretrained(minilm())

    def encode(batch: PackedBatch) -> Tensor:
        made = model(input_ids=batch.input_ids, cu_seqlens=batch.cu_seqlens, max_seqlen=batch.max_seqlen)
        return made.embeddings.unflatten(0, (-1, 2))  # [B, 2, H]

    return Side(model, lambda: in_batch(encode(all_pairs)), lambda: losses.cached_loss(encode, parts, in_batch))


def _theirs(pairs: list[tuple[str, str]], part: int) -> Side:
    """On the same pairs, padded to the longest of each column."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import (
        CachedMultipleNegativesRankingLoss,
        MultipleNegativesRankingLoss,
    )

    model = SentenceTransformer(str(minilm()), device="cpu")
    model.max_seq_length = MAX_LENGTH
    features = [model.preprocess(list(column)) for column in zip(*pairs, strict=True)]
    masks = [column["attention_mask"] for column in features]
    whole = MultipleNegativesRankingLoss(model)
    cached = CachedMultipleNegativesRankingLoss(model, mini_batch_size=part)
    return Side(
        model,
        lambda: whole([dict(column) for column in features], None),
        lambda: cached([dict(column) for column in features], None),
        float(sum(mask.sum() for mask in masks) / sum(mask.numel() for mask in masks)),
    )


def run_contrastive(num_pairs: int, part: int, threads: int, rounds: int) -> dict[str, Any]:
    """Times steps of so many pairs, in parts of `part` pairs."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pairs, tokenizer = pairs_of(num_pairs), BertTokenizer.from_pretrained(minilm())
        all_pairs, *parts = (
            tokenizer.pack([text for pair in some for text in pair], max_length=MAX_LENGTH)
            for some in (pairs, *(pairs[i : i + part] for i in range(0, len(pairs), part)))
        )
        ours, theirs = _ours(all_pairs, parts), _theirs(pairs, part)
        steps: dict[str, Callable[[], float]] = {
            "whole": lambda: ours.step(ours.whole),
            "cached": lambda: ours.step(ours.cached),
            "theirs": lambda: theirs.step(theirs.whole),
            "theirs_cached": lambda: theirs.step(theirs.cached),
        }
        for side in (ours, theirs):
            side.model.eval()
        found = {name: step() for name, step in steps.items()}
        if max(found.values()) - min(found.values()) > _AGREE:
            raise RuntimeError(f"contrastive: losses differ, {found}: nothing to time")
        for side in (ours, theirs):
            side.model.train()
        times = interleaved(steps, rounds, clock=time.process_time)
    finally:
        torch.set_num_threads(before)
    return {
        "case": f"contrastive/minilm/{num_pairs}x{part}/{threads}",
        "pairs": num_pairs,
        "part": part,
        "real_tokens": len(all_pairs.input_ids),
        "fill": round(theirs.fill, 4),
        **{f"{name}_cpu_s": round(taken.median, 4) for name, taken in times.items()},
        "cached_over_whole": round(times["whole"].speedup_over(times["cached"]), 3),
        "ratio": round(times["whole"].speedup_over(times["theirs"]), 3),
        "cached_ratio": round(times["cached"].speedup_over(times["theirs_cached"]), 3),
        "goal": round(0.9 / theirs.fill, 3),
        **{f"{name}_all_cpu_s": [round(s, 4) for s in taken.seconds] for name, taken in times.items()},
    }
