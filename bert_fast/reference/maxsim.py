"""Late interaction: how well a document answers a query, of one vector for each token of both.

For query i with tokens p and document j with tokens t:

    best[j, p]   = max over t of q_p . d_t              chosen[j, p]: the t of it, the first of several
    scores[i, j] = sum over p of best[j, p]             0 for a query without tokens, EMPTY for a document without

Backward, with g the gradient of scores:

    dq_p = sum over j of g[i, j] d_chosen[j, p]
    dd_t = sum over all (j, p) with chosen[j, p] = t of g[i, j] q_p

A document without tokens has the score that sentence-transformers gives it, and no gradient.

Source: Khattab and Zaharia 2020 (arXiv:2004.12832), section 3.3, equation 3. Precision: fp32 throughout (fp64 for fp64
inputs).
"""

from collections.abc import Set
from itertools import pairwise
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from bert_fast.reference.precision import wide

EMPTY = -1e9  # below every score of a document that has tokens, and its square is finite


class Maxsim(NamedTuple):
    """The arguments: tokens are packed, and of any strides."""

    queries: Annotated[Tensor, "x Tq H"]
    documents: Annotated[Tensor, "x Td H"]
    cu_seqlens_q: Annotated[Tensor, "int32 Q+1"]  # query i owns tokens cu_seqlens_q[i] .. cu_seqlens_q[i + 1] - 1
    cu_seqlens_d: Annotated[Tensor, "int32 D+1"]
    max_seqlen_d: int  # at least the longest document; not needed here, other back-ends size their grids by it


def maxsim_fwd(a: Maxsim) -> tuple[Tensor, Tensor]:
    """scores (Tensor [Q, D], fp32; fp64 for fp64), chosen (Tensor [D, Tq], int32; -1 of a document without tokens)."""
    queries, documents = wide(a.queries), wide(a.documents)
    of_queries, of_documents = a.cu_seqlens_q.tolist(), a.cu_seqlens_d.tolist()
    scores = queries.new_full((len(of_queries) - 1, len(of_documents) - 1), EMPTY)
    chosen = a.cu_seqlens_d.new_full((len(of_documents) - 1, len(queries)), -1)
    for j, (first, end) in enumerate(pairwise(of_documents)):
        if first == end:
            continue
        best, places = (queries @ documents[first:end].T).max(1)
        chosen[j] = first + places
        for i, (start, stop) in enumerate(pairwise(of_queries)):
            scores[i, j] = best[start:stop].sum()
    return scores, chosen


def maxsim_bwd(a: Maxsim, dscores: Tensor, chosen: Tensor, wants: Set[str]) -> dict[str, Tensor]:
    """Gradients by name, those that are wanted."""
    queries, documents = wide(a.queries), wide(a.documents)
    upstream = dscores.repeat_interleave(a.cu_seqlens_q.diff().long(), 0)  # [Tq, D]
    has_tokens = a.cu_seqlens_d.diff() > 0
    upstream, chosen = upstream[:, has_tokens], chosen[has_tokens].long().T  # [Tq, documents with tokens]
    made = {}
    if "queries" in wants:
        made["queries"] = (upstream[:, :, None] * documents[chosen]).sum(1).to(a.queries.dtype)
    if "documents" in wants:
        ddocuments = torch.zeros_like(documents)
        for t in range(len(documents)):
            p, j = (chosen == t).nonzero().unbind(1)  # no one-hot product: 0 times what is left out may be NaN
            ddocuments[t] = (upstream[p, j, None] * queries[p]).sum(0)
        made["documents"] = ddocuments.to(a.documents.dtype)
    return made
