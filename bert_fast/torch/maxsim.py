"""Late interaction from library products: similarities of a few tokens at a time, of which only maxima are kept.

On the CPU a product is of one document and as many tokens of queries as leave its similarities in a core's second
cache. Backward there is two weighted sums of rows (`embedding_bag`): of documents' tokens for a token of a query, where
there is one of each document; and of queries' tokens for a token of a document, once pairs are sorted by it.

Elsewhere offsets stay on the device: documents are padded, a few at a time, to the longest; and the gradient of
documents is a product with the one-hot rows of what was chosen, since adding to rows in any order does not repeat.
"""

from collections.abc import Iterator, Set
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_fast.reference.maxsim import EMPTY, Maxsim
from bert_fast.reference.precision import wide
from bert_fast.torch._gemm import matmul

# Similarities that are made at once. CPU: 1 MB of fp32 stays in the second cache. Elsewhere 256 MB.
_CPU_SIMILARITIES, _OTHER_SIMILARITIES = 2**18, 2**26


def maxsim_fwd(a: Maxsim) -> tuple[Tensor, Tensor]:
    """scores [Q, D], chosen [D, Tq], as `reference.maxsim`."""
    make = _fwd_on_cpu if a.queries.device.type == "cpu" else _fwd_elsewhere
    best, chosen = make(a)
    # [Tq, D] to [Q, D]. Neither a difference of running sums nor a product with 0 and 1 keeps infinities apart.
    scores = torch.segment_reduce(best.t().contiguous(), "sum", offsets=a.cu_seqlens_q.long(), axis=0, initial=0)
    return scores.masked_fill_(a.cu_seqlens_d.diff() == 0, EMPTY), chosen


def _fwd_on_cpu(a: Maxsim) -> tuple[Tensor, Tensor]:
    """(maxima [D, Tq], chosen [D, Tq])."""
    queries, offsets = wide(a.queries), a.cu_seqlens_d.tolist()
    shape = len(offsets) - 1, len(queries)
    best = torch.zeros(shape, dtype=queries.dtype)
    chosen = torch.full(shape, -1, dtype=torch.int32)
    places = torch.empty(len(queries), dtype=torch.int64)
    for j, (first, end) in enumerate(pairwise(offsets)):
        if first == end:
            continue
        document = wide(a.documents[first:end]).t()
        step = max(1, _CPU_SIMILARITIES // (end - first))
        for tokens in map(slice, range(0, len(queries), step), range(step, len(queries) + step, step)):
            torch.max(matmul(queries[tokens], document), 1, out=(best[j, tokens], places[tokens]))
        torch.add(places, first, out=chosen[j])
    return best, chosen


def _fwd_elsewhere(a: Maxsim) -> tuple[Tensor, Tensor]:
    """(maxima [D, Tq], chosen [D, Tq])."""
    queries, shape = wide(a.queries), (len(a.cu_seqlens_d) - 1, len(a.queries))
    best = torch.zeros(shape, dtype=queries.dtype, device=queries.device)
    chosen = torch.full(shape, -1, dtype=torch.int32, device=queries.device)
    for some, first, is_token, tokens in _padded(a):
        similarities = queries @ wide(a.documents)[tokens].transpose(1, 2)  # [n, Tq, max_seqlen_d]
        found = similarities.masked_fill_(~is_token[:, None], -torch.inf).max(2)
        best[some] = found.values
        chosen[some] = torch.where(is_token[:, :1], found.indices + first, -1).int()
    return best, chosen


def maxsim_bwd(a: Maxsim, dscores: Tensor, chosen: Tensor, wants: Set[str]) -> dict[str, Tensor]:
    """Gradients by name, as `reference.maxsim`."""
    owners = torch.arange(len(dscores), device=dscores.device)
    owners = owners.repeat_interleave(a.cu_seqlens_q.diff(), output_size=len(a.queries))
    upstream = dscores.t().index_select(1, owners)  # [D, Tq]
    on_cpu = a.queries.device.type == "cpu"
    made = (_bwd_on_cpu if on_cpu else _bwd_elsewhere)(a, upstream, chosen, wants)
    return {name: gradient.to(a.queries.dtype) for name, gradient in made.items()}


def _bwd_on_cpu(a: Maxsim, upstream: Tensor, chosen: Tensor, wants: Set[str]) -> dict[str, Tensor]:
    has_tokens = a.cu_seqlens_d.diff() > 0
    if not has_tokens.all():
        upstream, chosen = upstream[has_tokens], chosen[has_tokens]
    made = {}
    if "queries" in wants:
        made["queries"] = _weighted_sums(chosen.t().contiguous(), upstream.t().contiguous(), wide(a.documents))
    if "documents" in wants:
        # Pairs by the token of a document that was chosen; those of one token in the order of documents and queries.
        tokens, pairs = chosen.reshape(-1).sort(stable=True)
        starts = torch.searchsorted(tokens, torch.arange(len(a.documents), dtype=tokens.dtype))
        weights = upstream.reshape(-1)[pairs]
        made["documents"] = _weighted_sums(pairs.remainder_(max(1, len(a.queries))), weights, wide(a.queries), starts)
    return made


def _weighted_sums(rows: Tensor, weights: Tensor, table: Tensor, starts: Tensor | None = None) -> Tensor:
    """Sums of rows of a table [N, H], each times its weight: of every line of `rows`, or from each start to the next.

    The operator wants rows: of a table without columns or lines without elements nothing is summed.
    """
    num_sums = len(rows) if starts is None else len(starts)
    if rows.numel() == 0 or table.numel() == 0:
        return table.new_zeros(num_sums, table.shape[1])
    return F.embedding_bag(rows, table.contiguous(), starts, mode="sum", per_sample_weights=weights)


def _bwd_elsewhere(a: Maxsim, upstream: Tensor, chosen: Tensor, wants: Set[str]) -> dict[str, Tensor]:
    queries, documents = wide(a.queries), wide(a.documents)
    made = {}
    if "queries" in wants:
        made["queries"] = torch.zeros_like(queries)
    if "documents" in wants:
        made["documents"] = documents.new_zeros(len(documents) + 1, documents.shape[1])  # the last is of padding
    for some, first, is_token, tokens in _padded(a):
        places, weights = chosen[some] - first, upstream[some]
        if "queries" in made:
            rows = documents[chosen[some].clamp(min=0)].masked_fill_(~is_token[:, :1, None], 0.0)  # [n, Tq, H]
            made["queries"] += torch.einsum("np,nph->ph", weights, rows)
        if "documents" in made:
            one_hot = weights.new_zeros(len(places), a.max_seqlen_d, len(queries))
            one_hot.scatter_(1, places.clamp_(min=0)[:, None], weights[:, None])
            made["documents"][torch.where(is_token, tokens, -1)] = one_hot @ queries
    if "documents" in made:
        made["documents"] = made["documents"][:-1]
    return made


def _padded(a: Maxsim) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Some documents at a time: which, their first tokens [n, 1], which places are tokens [n, max_seqlen_d], and whose.

    Places that are none name token 0.
    """
    if not (len(a.queries) and len(a.documents)):
        return
    places = torch.arange(a.max_seqlen_d, device=a.cu_seqlens_d.device)
    at_once = max(1, _OTHER_SIMILARITIES // (max(a.max_seqlen_d, a.documents.shape[1]) * len(a.queries)))
    for start in range(0, len(a.cu_seqlens_d) - 1, at_once):
        some = slice(start, start + at_once)
        first = a.cu_seqlens_d[:-1][some, None].long()
        tokens = first + places
        is_token = tokens < a.cu_seqlens_d[1:][some, None]
        yield some, first, is_token, torch.where(is_token, tokens, 0)
