"""Padding-free attention, with dropout, bias and relative positions, as one differentiable op.

The arguments of the registered ops are those of every back-end, `reference.attention.Attention`.
"""

from typing import Any

import torch
from torch import Tensor

from bert_fast.backend import requested
from bert_fast.checks import check_shape
from bert_fast.ops._attention_arguments import (
    check_mask,
    check_registered,
    check_values,
    complete,
    shape_of_mask,
    with_dense_heads,
)
from bert_fast.ops._attention_checks import check_heads, check_padded_bias, check_padded_mask
from bert_fast.ops._define import define
from bert_fast.ops.packing import Packing
from bert_fast.reference import attention as reference
from bert_fast.reference.attention import Attention


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    coords_q: Tensor | None = None,
    coords_k: Tensor | None = None,
    site: int = 0,
    bias: Tensor | None = None,
    relative_keys: Tensor | None = None,
    relative_queries: Tensor | None = None,
    sequence_order: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """out = dropout(softmax(scale * (q k^T + relative) + bias)) v, every sequence on its own.

    q (Tensor [Tq, A, D], floating), k, v (Tensor [Tk, A, D], dtype of q): packed sequences; strides are free, and the
        parts of a fused buffer [T, 3, A, D] are not copied.
    cu_seqlens_q, cu_seqlens_k (Tensor [B + 1], int32): start of every sequence, then T; k's default is q's.
    max_seqlen_q, max_seqlen_k (int): an upper bound of the lengths.
    softmax_scale (float): default 1 / sqrt(D). causal: a query does not see keys at later positions.
    dropout_p, seed (Tensor [1], int64), coords_q, coords_k (Tensor [T, 2], int32), site: as in `ops.dropout`;
        `reference/dropout.py` says which bit belongs to which query and key. A token's coords are its row in the
        original batch and its position there; positions rise within a sequence, with holes where padding stood.
        Dropout needs coords_q. causal, bias and the tables look tokens up by both; where k belongs to the same
        sequences as q (no cu_seqlens_k) they default to q's, and these to sequence and index in it.
    bias (Tensor [B or 1, A or 1, Sq or 1, Sk or 1], floating, any strides): added to the scaled scores by the row and
        positions of query and key; -inf removes a key from a query. B counts the rows of the original batch, Sq and Sk
        reach beyond the largest positions.
    relative_keys, relative_queries (Tensor [2M - 1, A, D], dtype of q or fp32, any strides; either or both): vectors of
        relative positions, for the distances -(M - 1) .. M - 1 from a query to a key. relative = q . relative_keys of
        the distance + k . relative_queries of it. One table of all heads (BERT's relative_key; as both arguments,
        relative_key_query) is `table[:, None].expand(-1, A, -1)`; DeBERTa has two. No tensor of all pairs is made.
    sequence_order (Tensor [B], int32): the order in which to work on the sequences, longest first, see
        `Packing.order`; it changes the speed alone.
    backend: "triton", "torch" or "reference"; None takes the first that can run the call.
    Returns: out (Tensor [Tq, A, D], dtype of q), contiguous; a query without keys gives exactly 0 and zero gradients.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; on the CPU (elsewhere with BERT_FAST_DEBUG=1) also
            offsets that do not rise from 0 to T, a sequence longer than its bound, coords that do not rise or that
            bias or the tables do not reach.
        BackendError: the forced back-end cannot run the call.

    Differentiable once, in q, k, v, bias and the tables. Deterministic; no device sync on a GPU with
    Triton. Precision: softmax and every sum in fp32. Saves q, k, v, out and the log-sum-exp (4 T A D + T A elements),
    and what was given beside them, no probabilities; with dropout on an H100 or H200, in half precision, for sequences
    of 129 to 2,048 tokens, the mask, a bit a score, which else is drawn again.
    Autocast: q, k and v are cast to the autocast dtype; bias keeps its own, tables too in fp32.
    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.1; backward by recomputation as in Dao et al. 2022
    (arXiv:2205.14135), appendix B; relative positions as in Shaw et al. 2018 (arXiv:1803.02155), Huang et al. 2020
    (arXiv:2009.13658), method 4, and He et al. 2020 (arXiv:2006.03654), equation 4.

    Example:
        >>> q, k, v = torch.randn(3, 5, 2, 8)  # five tokens, two heads
        >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)  # of two texts
        >>> ops.attention(q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=3).shape
        torch.Size([5, 2, 8])
    """
    given = Attention(  # what is None is put in by `complete`
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, dropout_p,  # type: ignore[arg-type]
        seed, coords_q, coords_k, site, causal, bias, relative_keys, relative_queries, sequence_order,
    )  # fmt: skip
    return _op(*complete(given), requested(backend))[0]


def attention_with_probabilities(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    coords_q: Tensor | None = None,
    coords_k: Tensor | None = None,
    site: int = 0,
    bias: Tensor | None = None,
    relative_keys: Tensor | None = None,
    relative_queries: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """`attention`, and the probabilities that v was multiplied with: after dropout.

    It is for looking at them: the reference itself, sequence by sequence in plain tensor arithmetic, with every
    [A, Sq, Sk] kept for backward and one device sync or more. Not for `torch.compile`: the number of outputs depends on
    the batch. Differentiable through all outputs, any number of times.

    Returns: out (Tensor [Tq, A, D]), and for every sequence, in order, probabilities (Tensor [A, Sq, Sk], dtype of q).

    Example:
        >>> q, k, v = torch.randn(3, 5, 2, 8)
        >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> out, probabilities = ops.attention_with_probabilities(q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=3)
        >>> [list(of_text.shape) for of_text in probabilities]
        [[2, 2, 2], [2, 3, 3]]
    """
    given = Attention(  # what is None is put in by `complete`
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, dropout_p,  # type: ignore[arg-type]
        seed, coords_q, coords_k, site, causal, bias, relative_keys, relative_queries, None,
    )  # fmt: skip
    a = complete(given)
    if q.is_meta:
        raise ValueError(
            "q: expected a Tensor with values, since the number of outputs depends on them, got one on meta"
        )
    check_values(a)
    with torch.autocast(q.device.type, enabled=False):
        out, _, probabilities = reference.attention_with_probabilities(a)
    return out, probabilities


def attention_padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    keep_mask: Tensor | None = None,
    keep_mask_k: Tensor | None = None,
    first_position: int = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    site: int = 0,
    bias: Tensor | None = None,
    relative_keys: Tensor | None = None,
    relative_queries: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """`attention` of a padded batch: packs, attends, unpacks. A token's coords are its row and column.

    q (Tensor [B, Sq, A, D], floating), k, v (Tensor [B, Sk, A, D], dtype of q): strides are free; where nothing is
        padded and batch and sequence can be viewed as one dimension, nothing is copied.
    keep_mask (Tensor [B, Sq], bool or integer, or None): nonzero marks a token, 0 padding, which may stand anywhere
        and hold anything, NaN too. keep_mask_k (Tensor [B, Sk]): the same of the keys; default: keep_mask where
        Sq = Sk, else nothing is padded.
    first_position (int): of the queries' first column among the keys, as in decoding with Sk - Sq cached keys.
    bias (Tensor broadcastable to [B, A, Sq, Sk], floating): by columns, whatever first_position is.
    The rest: as in `attention`.
    Returns: out (Tensor [B, Sq, A, D], dtype of q), exactly 0 on padding; gradients of padding are exactly 0.
    Costs one device sync for every mask, and none for one on the CPU, where it may be wherever q is. A batch with
    nothing padded gives the bits of the packed call.

    Example:
        >>> q, k, v = torch.randn(3, 2, 4, 2, 8)  # two rows of four columns, two heads
        >>> keep = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
        >>> out = ops.attention_padded(q, k, v, keep_mask=keep)
        >>> out[1, 2:].abs().max().item()  # padding
        0.0
    """
    check_shape("q", q, ("B", "Sq", "A", "D"))
    check_heads(q, k, v, ("B", "Sq"), (q.shape[0], "Sk"))
    batch_size, num_queries, num_heads = q.shape[:3]
    num_keys = k.shape[1]
    check_padded_mask("keep_mask", keep_mask, batch_size, num_queries, q)
    check_padded_mask("keep_mask_k", keep_mask_k, batch_size, num_keys, q)
    first_position = check_padded_bias(bias, (batch_size, num_heads, num_queries, num_keys), first_position)
    if keep_mask is not None and keep_mask_k is None and num_queries != num_keys:
        raise ValueError(
            f"keep_mask_k: expected a Tensor [B, Sk] beside keep_mask where Sk ({num_keys}) is not Sq ({num_queries}), "
            "got None"
        )
    queries = _packing(keep_mask, batch_size, num_queries, q.device)
    if (keep_mask_k is None or keep_mask_k is keep_mask) and num_queries == num_keys:
        keys = queries
    else:
        keys = _packing(keep_mask_k, batch_size, num_keys, q.device)
    coords_q = queries.coords
    if first_position:
        coords_q = torch.stack((coords_q[:, 0], coords_q[:, 1] + first_position), dim=1)
        bias = _shifted(bias, first_position)
    out = attention(
        queries.pack(q), keys.pack(k), keys.pack(v), cu_seqlens_q=queries.cu_seqlens, max_seqlen_q=queries.max_seqlen,
        cu_seqlens_k=keys.cu_seqlens, max_seqlen_k=keys.max_seqlen, softmax_scale=softmax_scale, causal=causal,
        dropout_p=dropout_p, seed=seed, coords_q=coords_q, coords_k=keys.coords, site=site, bias=bias,
        relative_keys=relative_keys, relative_queries=relative_queries, sequence_order=queries.order, backend=backend,
    )  # fmt: skip
    return queries.unpack(out)


def _packing(keep_mask: Tensor | None, batch_size: int, length: int, device: torch.device) -> Packing:
    return Packing.full(batch_size, length, device) if keep_mask is None else Packing.from_keep_mask(keep_mask, device)


def _shifted(bias: Tensor | None, first_position: int) -> Tensor | None:
    """[B, A, Sq, Sk] of columns as one of positions; what stands before the first query is never looked up."""
    if bias is None or bias.shape[2] == 1:
        return bias
    return torch.nn.functional.pad(bias, (0, 0, first_position, 0))


def _forward(module: Any, a: Attention) -> tuple[Tensor, Tensor, Tensor | None]:
    check_values(a)  # here, not in `attention`: a compiled call passes by here too
    return module.attention_fwd(with_dense_heads(a))


_op = define(
    "attention",
    Attention,
    outputs={"out": "x Tq A D", "lse": "s A Tq", "mask": "int32 _ _ _"},
    perhaps={"mask": shape_of_mask},
    backward="dout q k v out lse mask? ...",
    gradients="q k v bias? relative_keys? relative_queries?",
    copies=("cu_seqlens_q", "cu_seqlens_k"),  # a loader may fill its buffer again
    last_dimension="head_dim",
    run=_forward,
    run_backward=lambda module, a, *rest: module.attention_bwd(with_dense_heads(a), *rest),
    check=check_registered,
    check_backward=lambda a, out, lse, mask, *_: check_mask(a, mask),
    check_values=lambda a, *_: check_values(a),
)
