"""Losses of embeddings: contrastive training on the negatives of the batch, whatever its size; scored pairs, margins.

    queries, documents = encode(questions), encode(passages)           # [B, D] each, row i to row i
    loss = losses.in_batch_negatives(queries, documents, scale=20.0)

The scores of all queries and all documents, [B, N], never exist: they are made, used and dropped a block of rows at a
time. With `cached_backward` neither do the activations of all texts, only those of a part of them.

Losses of a cross-encoder's scores: of single documents, and of the documents of a query beside one another.
"""

from bert_fast.losses.cached import cached_backward
from bert_fast.losses.in_batch import in_batch_negatives
from bert_fast.losses.lists import list_margin_mse, list_softmax, score_cross_entropy, score_mse
from bert_fast.losses.margins import margin_mse, triplet
from bert_fast.losses.matryoshka import matryoshka
from bert_fast.losses.pairs import contrastive, cosent, cosine_mse

__all__ = [
    "cached_backward",
    "contrastive",
    "cosent",
    "cosine_mse",
    "in_batch_negatives",
    "list_margin_mse",
    "list_softmax",
    "margin_mse",
    "matryoshka",
    "score_cross_entropy",
    "score_mse",
    "triplet",
]
