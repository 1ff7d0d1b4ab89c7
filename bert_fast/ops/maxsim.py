"""Late interaction (ColBERT) as one differentiable op: no similarities of all pairs of tokens are kept."""

from collections.abc import Set
from typing import Any

from torch import Tensor

from bert_fast.backend import requested
from bert_fast.checks import check_floating, check_ids, check_like, check_shape
from bert_fast.ops._attention_checks import check_cu_seqlens, check_num_tokens
from bert_fast.ops._autocast import autocast_operands
from bert_fast.ops._define import define
from bert_fast.ops.packing import as_length, check_offsets
from bert_fast.reference.maxsim import Maxsim


def maxsim(
    queries: Tensor,
    documents: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_d: Tensor,
    max_seqlen_d: int,
    backend: str | None = None,
) -> Tensor:
    """Returns scores[i, j] = sum over tokens p of query i of the maximum over tokens t of document j of q_p . d_t.

    Args:
        queries (Tensor [Tq, H], floating): packed tokens, any strides.
        documents (Tensor [Td, H], dtype of queries): packed tokens, any strides.
        cu_seqlens_q (Tensor [Q + 1], int32): start of every query, then Tq.
        cu_seqlens_d (Tensor [D + 1], int32): start of every document, then Td.
        max_seqlen_d (int): an upper bound of the lengths of documents.
        backend: "triton", "torch" or "reference"; None takes the first that can run the call.

    Returns:
        scores (Tensor [Q, D], fp32; fp64 for fp64): 0 for a query without tokens, -1e9, without a gradient, for a
        document without tokens. A NaN among a document's similarities to a token is that token's maximum.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices do not fit; on the CPU (elsewhere with BERT_FAST_DEBUG=1) also
            offsets that do not rise from 0 to the number of tokens, or a document longer than its bound.
        BackendError: the forced back-end cannot run the call.

    Differentiable once, in queries and documents: of tokens with the same similarity the first one gets the gradient.
    Deterministic: no atomics. No device sync on a GPU.
    Precision: products, maxima and sums in fp32 (fp64 for fp64); on a GPU products of fp32 follow
    `torch.backends.cuda.matmul.allow_tf32`.
    Saves queries, documents and, for every token of a query and every document, which token was chosen (4 Tq D bytes).
    Autocast: both are cast to the autocast dtype.
    Source: Khattab and Zaharia 2020 (arXiv:2004.12832), section 3.3.

    Example:
        >>> queries, documents = torch.randn(3, 8), torch.randn(6, 8)
        >>> q, d = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 2, 6], dtype=torch.int32)
        >>> ops.maxsim(queries, documents, cu_seqlens_q=q, cu_seqlens_d=d, max_seqlen_d=4).shape
        torch.Size([1, 2])
    """
    queries, documents = autocast_operands(queries, documents)
    check_shape("queries", queries, ("Tq", "H"))
    check_floating("queries", queries)
    check_like("documents", documents, ("Td", queries.shape[1]), "queries", queries)
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, "Q + 1", queries, "queries")
    check_cu_seqlens("cu_seqlens_d", cu_seqlens_d, "D + 1", queries, "queries")
    check_num_tokens("queries", queries)
    check_num_tokens("documents", documents)
    max_seqlen_d = as_length("max_seqlen_d", max_seqlen_d)
    return _op(queries, documents, cu_seqlens_q, cu_seqlens_d, max_seqlen_d, requested(backend))[0]


def _check_values(a: Maxsim) -> None:
    num_queries_tokens = len(a.queries)
    check_offsets("cu_seqlens_q", a.cu_seqlens_q, "queries", num_queries_tokens, num_queries_tokens)
    check_offsets("cu_seqlens_d", a.cu_seqlens_d, "max_seqlen_d", a.max_seqlen_d, len(a.documents))


def _check_values_of_backward(a: Maxsim, dscores: Tensor, chosen: Tensor, wants: Set[str]) -> None:
    _check_values(a)
    check_ids("chosen", chosen + 1, len(a.documents) + 1)


def _forward(module: Any, a: Maxsim) -> tuple[Tensor, Tensor]:
    _check_values(a)  # here, not in `maxsim`: a compiled call passes by here too
    return module.maxsim_fwd(a)


_op = define(
    "maxsim",
    Maxsim,
    outputs={"scores": "s Q D", "chosen": "int32 D Tq"},
    backward="dscores queries documents chosen cu_seqlens_q cu_seqlens_d max_seqlen_d",
    gradients="queries? documents?",
    copies=("cu_seqlens_q", "cu_seqlens_d"),  # a loader may fill its buffer again
    run=_forward,
    check_values=_check_values_of_backward,
)
