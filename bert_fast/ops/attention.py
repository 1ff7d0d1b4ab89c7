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
    """Returns dropout(softmax(scale * (q k^T + relative) + bias)) v, for every sequence on its own.

    Args:
        q (Tensor [Tq, A, D], floating): queries of packed sequences; any strides.
        k (Tensor [Tk, A, D], dtype of q): keys; any strides. Parts of a fused buffer [T, 3, A, D] are not copied.
        v (Tensor [Tk, A, D], dtype of q): values; any strides.
        cu_seqlens_q (Tensor [B + 1], int32): start of every sequence, then Tq.
        max_seqlen_q (int): an upper bound of the lengths.
        cu_seqlens_k (Tensor [B + 1], int32): the same of the keys; None: cu_seqlens_q.
        max_seqlen_k (int): the same of the keys; None: max_seqlen_q. Needed beside cu_seqlens_k.
        softmax_scale (float): None: 1 / sqrt(D).
        causal (bool): a query does not see keys at later positions.
        dropout_p (float): probability of dropping an attention probability.
        seed (Tensor [1], int64): needed for dropout, see `ops.dropout`.
        coords_q (Tensor [Tq, 2], int32): each token's row in the original batch and its position there; positions rise
            within a sequence, with holes where padding stood. Needed for dropout, which draws by them. causal, bias
            and the tables look tokens up by them; None: sequence, and index in it.
        coords_k (Tensor [Tk, 2], int32): the same of the keys; None: coords_q. Beside cu_seqlens_k both are needed for
            causal, bias and the tables.
        site (int): the place in the model, see `ops.dropout`.
        bias (Tensor [B or 1, A or 1, Sq or 1, Sk or 1], floating): added to the scaled scores by the row and positions
            of query and key; any strides. -inf removes a key from a query. B counts the rows of the original batch;
            Sq and Sk are greater than the largest positions.
        relative_keys (Tensor [2M - 1, A, D], dtype of q or fp32): a vector for each distance -(M - 1) .. M - 1 from a
            query to a key; any strides. relative = q . relative_keys of the distance + k . relative_queries of it. A
            table of all heads (BERT's relative_key) is `table[:, None].expand(-1, A, -1)`.
        relative_queries (Tensor [2M - 1, A, D], dtype of q or fp32): the vectors that keys are multiplied with; alone
            or beside relative_keys. BERT's relative_key_query is one table as both arguments; DeBERTa has two.
        sequence_order (Tensor [B], int32): the order to work on the sequences, longest first, see `Packing.order`; it
            changes the speed alone.
        backend (str): "triton", "torch" or "reference"; None: the first that can run the call.

    Returns:
        out (Tensor [Tq, A, D], dtype of q), contiguous; a query without keys gives exactly 0 and zero gradients.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; on the CPU (elsewhere with BERT_FAST_DEBUG=1) also
            offsets that do not rise from 0 to T, a sequence longer than its bound, coords that do not rise or that
            bias or the tables do not reach.
        BackendError: the forced back-end cannot run the call.

    Differentiable once, in q, k, v, bias and the tables. Deterministic; no device sync on a GPU with Triton. Softmax
    and every sum are fp32. Saves q, k, v, out and the log-sum-exp (4 T A D + T A elements), and what was given beside
    them. Saves dropout's mask, a bit a score, on an H100 or H200 in half precision for sequences of 129 to 2,048
    tokens; else it is drawn again. No probabilities are kept. Autocast: q, k and v are cast to the autocast dtype; bias
    keeps its own, tables too if they are fp32.

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
    """Returns `attention`, and the probabilities that v was multiplied with, after dropout.

    It is for looking at probabilities, and slow: the reference works sequence by sequence, keeps every [A, Sq, Sk] for
    backward, and waits for the device at least once. Not for `torch.compile`, because the number of outputs depends on
    the batch. Differentiable through all outputs, any number of times.

    Args:
        q (Tensor [Tq, A, D], floating): queries of packed sequences.
        k (Tensor [Tk, A, D], dtype of q): keys.
        v (Tensor [Tk, A, D], dtype of q): values.
        cu_seqlens_q (Tensor [B + 1], int32): start of every sequence, then Tq.
        max_seqlen_q (int): an upper bound of the lengths.
        cu_seqlens_k (Tensor [B + 1], int32): as in `attention`.
        max_seqlen_k (int): as in `attention`.
        softmax_scale (float): None: 1 / sqrt(D).
        causal (bool): a query does not see keys at later positions.
        dropout_p (float): probability of dropping an attention probability.
        seed (Tensor [1], int64): needed for dropout.
        coords_q (Tensor [Tq, 2], int32): row and position of every token, as in `attention`.
        coords_k (Tensor [Tk, 2], int32): as in `attention`.
        site (int): the place in the model.
        bias (Tensor [B or 1, A or 1, Sq or 1, Sk or 1], floating): added to the scaled scores, as in `attention`.
        relative_keys (Tensor [2M - 1, A, D], dtype of q or fp32): as in `attention`.
        relative_queries (Tensor [2M - 1, A, D], dtype of q or fp32): as in `attention`.

    Returns:
        out (Tensor [Tq, A, D], dtype of q), and for every sequence, in order, probabilities (Tensor [A, Sq, Sk], dtype
        of q).

    Raises:
        ValueError, TypeError: as `attention`; q is on meta.

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
    """Returns `attention` of a padded batch: packs, attends, unpacks. A token's coords are its row and column.

    Args:
        q (Tensor [B, Sq, A, D], floating): queries; any strides. If nothing is padded and batch and sequence can be
            viewed as one dimension, nothing is copied.
        k (Tensor [B, Sk, A, D], dtype of q): keys; any strides.
        v (Tensor [B, Sk, A, D], dtype of q): values; any strides.
        keep_mask (Tensor [B, Sq], bool or integer): nonzero marks a token, 0 padding, which may stand anywhere and hold
            anything, NaN too. None: nothing is padded.
        keep_mask_k (Tensor [B, Sk], bool or integer): the same of the keys; None: keep_mask if Sq = Sk, else nothing is
            padded. Needed beside keep_mask if Sq is not Sk.
        first_position (int): position of the queries' first column among the keys, as in decoding with Sk - Sq cached
            keys.
        softmax_scale (float): None: 1 / sqrt(D).
        causal (bool): a query does not see keys at later positions.
        dropout_p (float): probability of dropping an attention probability.
        seed (Tensor [1], int64): needed for dropout, see `ops.dropout`.
        site (int): the place in the model, see `ops.dropout`.
        bias (Tensor broadcastable to [B, A, Sq, Sk], floating): added to the scaled scores by columns, whatever
            first_position is; -inf removes a key from a query.
        relative_keys (Tensor [2M - 1, A, D], dtype of q or fp32): as in `attention`.
        relative_queries (Tensor [2M - 1, A, D], dtype of q or fp32): as in `attention`.
        backend (str): "triton", "torch" or "reference"; None: the first that can run the call.

    Returns:
        out (Tensor [B, Sq, A, D], dtype of q), exactly 0 on padding; gradients of padding are exactly 0. A batch with
        nothing padded gives the bits of the packed call.

    Raises:
        ValueError, TypeError, BackendError: as `attention`; a mask does not fit.

    Costs one device sync for every mask on a GPU. A mask on the CPU costs none, whatever device q is on.

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
