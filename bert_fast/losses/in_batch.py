"""In-batch negatives: the scores of all queries and all documents, [B, N], a block of rows at a time."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_fast.checks import check_dtype, check_floating, check_same_device, check_shape
from bert_fast.ops.linear_cross_entropy import linear_cross_entropy
from bert_fast.reference.precision import wide

_SIMILARITIES = ("cosine", "dot")


def in_batch_negatives(
    queries: Tensor,
    documents: Tensor,
    *,
    scale: float | Tensor = 20.0,
    similarity: str = "cosine",
    symmetric: bool = False,
    query_groups: Tensor | None = None,
    document_groups: Tensor | None = None,
    process_group: Any = None,
    gather: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Mean over queries i of lse over documents j of s_ij, less s_ii; s_ij: the scaled similarity of the two.

    Args:
        queries (Tensor [B, D], floating): B >= 1.
        documents (Tensor [N, D], dtype of queries): N >= B. Document i < B belongs to query i; those from B on are
            negatives of all queries, as hard ones are.
        scale: 1 / temperature; a Tensor [] may be learned.
        similarity: "cosine", or "dot".
        symmetric: the mean of that and of the same loss with documents i < B asking and queries answering.
        query_groups (Tensor [B], int64 or int32): a document of a query's group that is not its own is no negative of
            it: duplicates, several passages of one answer. With document_groups, or neither.
        document_groups (Tensor [N], int64 or int32): the group of each document.
        gather: documents of all processes of `process_group` (default: all there are) are negatives, and queries where
            symmetric. Every process needs the same B and N. Gradients go back to where a document was encoded, so that
            their mean over processes, as DistributedDataParallel takes it, is that of the mean of the processes'
            losses.
        process_group: whose documents are gathered; None: all processes.
        backend: as for ops.

    Returns:
        loss (Tensor [], fp32; fp64 for fp64).

    Raises:
        TypeError, ValueError: the message names the argument.

    Precision:
        in fp32 (fp64 for fp64), under autocast too: a score of 20 has steps of 0.125 in bf16. On a GPU products follow
        `torch.backends.cuda.matmul.allow_tf32`.

    Memory: blocks of scores of a fixed size, and a copy of queries and documents with their gradients.
    Source: Henderson et al. 2017 (arXiv:1705.00652), section 4.4; van den Oord et al. 2018 (arXiv:1807.03748).

    Example:
        >>> queries, documents = torch.eye(3), torch.eye(3)  # each query has its document
        >>> losses.in_batch_negatives(queries, documents, scale=20.0).item() < 1e-6
        True
    """
    _check(queries, documents, similarity, query_groups, document_groups)
    num_queries, rank = len(queries), torch.distributed.get_rank(process_group) if gather else 0

    def all_of(t: Any) -> Any:
        return _Gathered.apply(t.contiguous(), process_group) if gather and t is not None else t

    with torch.autocast(queries.device.type, enabled=False):
        asking, answering = (_ready(t, similarity) for t in (queries, documents[:num_queries]))
        answers = torch.cat((answering, _ready(documents[num_queries:], similarity)))
        places = torch.arange(num_queries, device=queries.device)
        loss = linear_cross_entropy(
            asking * scale, all_of(answers), None, places + rank * len(documents), row_groups=query_groups,
            class_groups=all_of(document_groups), backend=backend,
        )  # fmt: skip
        if not symmetric:
            return loss
        groups = None if document_groups is None else document_groups[:num_queries]
        back = linear_cross_entropy(
            answering * scale, all_of(asking), None, places + rank * num_queries, row_groups=groups,
            class_groups=all_of(query_groups), backend=backend,
        )  # fmt: skip
        return (loss + back) / 2


def _check(
    queries: Tensor, documents: Tensor, similarity: str, query_groups: Tensor | None, document_groups: Tensor | None
) -> None:
    check_floating("queries", queries)
    check_shape("queries", queries, ("B", "D"))
    check_dtype("documents", documents, (queries.dtype,))
    check_shape("documents", documents, ("N", queries.shape[1]))
    check_same_device("documents", documents, "queries", queries)
    if not len(queries):
        raise ValueError("queries: expected at least one row, got none")
    if len(documents) < len(queries):
        raise ValueError(f"documents: expected at least {len(queries)} rows, one for each query, got {len(documents)}")
    if similarity not in _SIMILARITIES:
        raise ValueError(f"similarity: expected one of {', '.join(_SIMILARITIES)}, got {similarity!r}")
    for name, groups, of, like in (
        ("query_groups", query_groups, "queries", queries), ("document_groups", document_groups, "documents", documents)
    ):  # fmt: skip
        if (query_groups is None) != (document_groups is None) and groups is None:
            raise ValueError(f"{name}: expected a tensor beside the other groups, got None")
        if groups is not None:
            check_dtype(name, groups, (torch.int64, torch.int32))
            check_shape(name, groups, (len(like),))
            check_same_device(name, groups, of, like)


def _ready(embeddings: Tensor, similarity: str) -> Tensor:
    """In fp32 or wider; of length 1 for cosines."""
    embeddings = wide(embeddings)
    return F.normalize(embeddings, dim=1) if similarity == "cosine" else embeddings


class _Gathered(torch.autograd.Function):
    """Rows of all processes, in the order of their ranks; gradients go back to where rows came from, summed up."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.shape = group, t.shape
        parts = [torch.empty_like(t) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, t, group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        own = grads[0].new_empty(ctx.shape)
        torch.distributed.reduce_scatter(own, list(grads[0].contiguous().split(len(own))), group=ctx.group)
        return own, None
