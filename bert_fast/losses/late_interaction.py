"""Scores of late interaction (ColBERT), for the losses of sentence-transformers' `MultiVectorEncoder`."""

from typing import Any

from torch import Tensor

from bert_fast.checks import check_floating, check_like, check_shape
from bert_fast.ops.maxsim import maxsim
from bert_fast.ops.packing import Packing


def colbert_scores(
    queries_embeddings: Tensor,
    documents_embeddings: Tensor,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """Returns the MaxSim scores of every query and every document of a batch, as sentence-transformers' function does.

        loss = MultiVectorMultipleNegativesRankingLoss(model, similarity_fct=bert_fast.losses.colbert_scores)

    Value and gradient are those of `sentence_transformers.multi_vector_encoder.scoring.colbert_scores`. The
    similarities of all pairs of tokens, [Q, D, Sq, Sd], never exist (`ops.maxsim`), and padding is not multiplied.

    Args:
        queries_embeddings (Tensor [Q, Sq, H], floating): tokens of the queries.
        documents_embeddings (Tensor [D, N, Sd, H], dtype of queries): tokens of N documents for each of D queries.
        queries_mask (Tensor [Q, Sq], bool or number): nonzero marks a token that counts, 0 one that does not, which may
            stand anywhere and hold anything. None: tokens whose elements are all 0 do not count. Unlike theirs, a
            number that is not 0 or 1 is no weight.
        documents_mask (Tensor [D, N, Sd], bool or number): like `queries_mask`.
        chunk_elements: accepted and not needed, since memory does not grow with the similarities.
        length_normalize: whether scores are divided by the number of the query's tokens, at least 1.

    Returns:
        scores (Tensor [Q, D * N], fp32): document n of query j in column j * N + n. -1e9 for a document without tokens,
        0 for a query without.

    Raises:
        TypeError, ValueError: the message names the argument.

    On a GPU two device syncs, which count the tokens. Otherwise as `ops.maxsim`.
    Source: Khattab and Zaharia 2020 (arXiv:2004.12832), section 3.3.

    Example:
        >>> queries, documents = torch.randn(3, 5, 8), torch.randn(3, 1, 7, 8)
        >>> losses.colbert_scores(queries, documents).shape
        torch.Size([3, 3])
    """
    check_shape("queries_embeddings", queries_embeddings, ("Q", "Sq", "H"))
    check_floating("queries_embeddings", queries_embeddings)
    given = "queries_embeddings", queries_embeddings
    check_like("documents_embeddings", documents_embeddings, ("D", "N", "Sd", queries_embeddings.shape[2]), *given)
    queries, of_queries = _packed("queries_mask", queries_embeddings, queries_mask)
    documents, of_documents = _packed("documents_mask", documents_embeddings, documents_mask)
    scores = maxsim(
        queries, documents, cu_seqlens_q=of_queries.cu_seqlens, cu_seqlens_d=of_documents.cu_seqlens,
        max_seqlen_d=of_documents.max_seqlen,
    ).float()  # fmt: skip
    if length_normalize:
        scores = scores / of_queries.cu_seqlens.diff().clamp(min=1)[:, None]
    return scores


def mean_colbert_scores(
    queries_embeddings: Tensor,
    documents_embeddings: Tensor,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
) -> Tensor:
    """Returns `colbert_scores` divided by the number of the query's tokens.

    Args:
        queries_embeddings (Tensor [Q, Sq, H], floating): this and the others as for `colbert_scores`.
        documents_embeddings (Tensor [D, N, Sd, H], dtype of queries): as there.
        queries_mask (Tensor [Q, Sq], bool or number): as there.
        documents_mask (Tensor [D, N, Sd], bool or number): as there.
        chunk_elements: as there.
        length_normalize: as there.

    Returns:
        scores (Tensor [Q, D * N], fp32).

    Raises:
        TypeError, ValueError: the message names the argument.

    Example:
        >>> queries, documents = torch.randn(3, 5, 8), torch.randn(3, 1, 7, 8)
        >>> mean, whole = losses.mean_colbert_scores(queries, documents), losses.colbert_scores(queries, documents)
        >>> torch.allclose(mean, whole / 5)
        True
    """
    return colbert_scores(
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, chunk_elements, length_normalize
    )


def _packed(name: str, embeddings: Tensor, mask: Tensor | None) -> tuple[Tensor, Packing]:
    """Tokens that count [T, H], and where they are."""
    if mask is None:
        mask = embeddings.detach().any(-1)
    check_shape(name, mask, embeddings.shape[:-1])
    shape: Any = (-1, embeddings.shape[-2])
    packing = Packing.from_keep_mask(mask.reshape(shape), embeddings.device)
    return packing.pack(embeddings.reshape(*shape, embeddings.shape[-1])), packing
