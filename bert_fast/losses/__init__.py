"""Contrastive losses on the negatives of a batch, whatever its size.

    queries, documents = encode(questions), encode(passages)           # [B, D] each, row i to row i
    loss = losses.in_batch_negatives(queries, documents, scale=20.0)

The scores of all queries and all documents, [B, N], never exist: they are made, used and dropped a block of rows at a
time. With `cached_loss` neither do the activations of all texts, only those of a part of them. `InBatchNegatives` is
both as a module for sentence-transformers, whose library has all other losses. Late interaction (ColBERT) keeps those
losses and takes its scores from `colbert_scores` or `mean_colbert_scores`.
"""

from bert_fast.losses.cached import cached_loss
from bert_fast.losses.in_batch import in_batch_negatives
from bert_fast.losses.late_interaction import colbert_scores, mean_colbert_scores
from bert_fast.losses.sentence_training import InBatchNegatives

__all__ = ["InBatchNegatives", "cached_loss", "colbert_scores", "in_batch_negatives", "mean_colbert_scores"]
