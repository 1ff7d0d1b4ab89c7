"""Losses of embeddings: contrastive training on the negatives of the batch, whatever its size.

    queries, documents = encode(questions), encode(passages)           # [B, D] each, row i to row i
    loss = losses.in_batch_negatives(queries, documents, scale=20.0)

The scores of all queries and all documents, [B, N], never exist: they are made, used and dropped a block of rows at a
time. With `cached_backward` neither do the activations of all texts, only those of a part of them.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_fast.checks import check_dtype, check_floating, check_same_device, check_shape
from bert_fast.ops.linear_cross_entropy import linear_cross_entropy
from bert_fast.reference.precision import wide

__all__ = ["cached_backward", "in_batch_negatives"]

_Part = TypeVar("_Part")
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

    queries (Tensor [B, D], B >= 1), documents (Tensor [N, D], N >= B): of one floating dtype and device. Document i < B
        belongs to query i; those from B on are negatives of all queries, as hard ones are.
    scale: 1 / temperature; a Tensor [] may be learned.
    similarity: "cosine", or "dot".
    symmetric: the mean of that and of the same loss with documents i < B asking and queries answering.
    query_groups (Tensor [B]), document_groups (Tensor [N]), int64 or int32, both or neither: a document of a query's
        group that is not its own is no negative of it: duplicates, several passages of one answer.
    gather: documents of all processes of `process_group` (default: all there are) are negatives, and queries where
        symmetric. Every process needs the same B and N. Gradients go back to where a document was encoded, so that
        their mean over processes, as DistributedDataParallel takes it, is that of the mean of the processes' losses.
    backend: as for ops.
    Returns: loss (Tensor [], fp32; fp64 for fp64).
    Raises: TypeError, ValueError naming the argument.
    Precision: in fp32 (fp64 for fp64), under autocast too: a score of 20 has steps of 0.125 in bf16. On a GPU products
        follow `torch.backends.cuda.matmul.allow_tf32`.
    Memory: blocks of scores of a fixed size, and a copy of queries and documents with their gradients.
    Source: Henderson et al. 2017 (arXiv:1705.00652), section 4.4; van den Oord et al. 2018 (arXiv:1807.03748).
    """
    _check(queries, documents, similarity, query_groups, document_groups)
    num_queries, (first_query, first_document) = len(queries), (0, 0)
    with torch.autocast(queries.device.type, enabled=False):
        asking, answering = (_ready(t, similarity) for t in (queries, documents[:num_queries]))
        all_queries, all_documents = asking, torch.cat((answering, _ready(documents[num_queries:], similarity)))
        all_query_groups, all_document_groups = query_groups, document_groups
        if gather:
            rank = torch.distributed.get_rank(process_group)
            first_query, first_document = rank * num_queries, rank * len(documents)
            all_documents = _gathered(all_documents, process_group)
            if document_groups is not None:
                all_document_groups = _gathered(document_groups, process_group)
            if symmetric:
                all_queries = _gathered(all_queries, process_group)
                if query_groups is not None:
                    all_query_groups = _gathered(query_groups, process_group)
        places = torch.arange(num_queries, device=queries.device)
        loss = linear_cross_entropy(
            asking * scale, all_documents, None, places + first_document, row_groups=query_groups,
            class_groups=all_document_groups, backend=backend,
        )  # fmt: skip
        if not symmetric:
            return loss
        groups = None if document_groups is None else document_groups[:num_queries]
        back = linear_cross_entropy(
            answering * scale, all_queries, None, places + first_query, row_groups=groups,
            class_groups=all_query_groups, backend=backend,
        )  # fmt: skip
        return (loss + back) / 2


def cached_backward(
    encode: Callable[[_Part], Tensor],
    parts: Sequence[_Part],
    loss: Callable[[Tensor], Tensor],
    *,
    no_sync: Callable[[], AbstractContextManager[Any]] | None = None,
) -> Tensor:
    """Backward of `loss` of the embeddings of all parts, with the activations of one part at a time.

    Every part is encoded twice: without a graph, for the loss and the gradient of its embeddings; then once more, with
    the same dropout, and this gradient goes back through it. So a step costs about 4/3 of one that keeps everything.

        parts = [pairs[i : i + 64] for i in range(0, 4096, 64)]   # encoded to [64, 2, D]
        losses.cached_backward(encode, parts, lambda e: losses.in_batch_negatives(e[:, 0], e[:, 1]))

    encode: a part to its embeddings [n, ...], any n; what it draws, it draws from PyTorch's generators of the CPU and
        of the current GPU: these are set back for the second time. It may not depend on anything else that changes.
    parts: at least one. loss: of the embeddings of all parts, one behind the other [B, ...], a Tensor []; parameters in
        it get their gradients too.
    no_sync: of a model whose backward exchanges gradients (`DistributedDataParallel.no_sync`); entered for all parts
        but the one that goes last.
    Returns: the loss, without a graph.
    Raises: ValueError, TypeError naming the argument; RuntimeError if a part comes out with another shape the second
        time.
    Parameters without a gradient get the one that `loss(torch.cat([encode(part) for part in parts])).backward()` gives
    them, to the last bit where `encode` uses a parameter once: parts go back from the last to the first, as autograd
    takes them. (Where it uses one twice, queries apart from documents, say, sums are taken in another order.)
    Source: Gao et al. 2021 (arXiv:2101.06983).
    """
    if not len(parts):
        raise ValueError("parts: expected at least one, got none")
    states, made = [], []
    with torch.no_grad():
        for part in parts:
            states.append(_generators())
            made.append(encode(part))
            check_floating("encode(part)", made[-1])
    end = _generators()
    embeddings = torch.cat(made).requires_grad_()
    value = loss(embeddings)
    check_shape("loss(embeddings)", value, ())
    value.backward()
    gradients = embeddings.grad
    if gradients is None:
        raise ValueError("loss: expected a loss that depends on the embeddings, got one that does not")
    shapes = [t.shape for t in made]
    pieces = gradients.split([len(t) for t in made])
    del made, embeddings
    for index in reversed(range(len(parts))):
        _set_generators(states[index])
        with nullcontext() if no_sync is None or index == 0 else no_sync():
            again = encode(parts[index])
            if again.shape != shapes[index]:
                raise RuntimeError(
                    f"encode: expected {list(shapes[index])} again from part {index}, got {list(again.shape)}"
                )
            again.backward(pieces[index])
    _set_generators(end)
    return value.detach()


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


def _gathered(t: Tensor, process_group: Any) -> Tensor:
    made: Tensor = _Gathered.apply(t.contiguous(), process_group)
    return made


def _generators() -> tuple[Tensor, Tensor | None]:
    """States of the generators of the CPU and, where there is one in use, of the current GPU."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def _set_generators(states: tuple[Tensor, Tensor | None]) -> None:
    cpu, gpu = states
    torch.set_rng_state(cpu)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu)
