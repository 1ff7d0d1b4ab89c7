"""Embedding from PyTorch's operators: lookups added in place, one LayerNorm, dropout; nothing kept but statistics."""

from collections.abc import Set

import torch
import torch.nn.functional as F
from torch import Tensor

from bert_fast.reference.dropout import dropout_threshold
from bert_fast.reference.embedding import LOOKED_UP, Embedding
from bert_fast.reference.precision import wide, wide_dtype
from bert_fast.torch._overflow import with_overflows
from bert_fast.torch._zeros import zeros_on_touch
from bert_fast.torch.dropout import dropout_bwd, dropout_fwd

# Bytes from which malloc takes fresh pages for every gradient, whatever came before (glibc's largest threshold): then
# writing zeros costs more than all sums, 0.1 to 0.3 s for 250,002 rows of 768.
_LARGE_TABLE = 2**25
_CHUNK_TOKENS = 512  # 1.5 MB of fp32 rows of 768: they stay in the second-level cache


def _is_on_cpu(t: Tensor) -> bool:
    return t.device.type == "cpu"


def _in_table(ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor | None]:
    """ids that may be looked up, and which of them were in range: None on the CPU, where the op has checked them.

    A device would answer an id out of range with an assertion that ends the process; here its row becomes NaN.
    """
    if _is_on_cpu(ids):
        return ids, None
    in_range = (ids >= 0) & (ids < len(table))
    return ids.where(in_range, 0), in_range


def _sum(a: Embedding) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """(h [T, H] in fp32 or fp64, the ids by table, whether each token's ids are all in range or None)."""
    words, work = a.words, wide_dtype(a.type_table.dtype)
    used: dict[str, Tensor] = {}
    exists: Tensor | None = None

    def checked(name: str, ids: Tensor, table: Tensor) -> Tensor:
        nonlocal exists
        used[name], in_range = _in_table(ids, table)
        if in_range is not None:
            exists = in_range if exists is None else exists & in_range
        return used[name]

    if words.is_floating_point():
        h = words.to(work)
        if h is words:
            h = words.clone(memory_format=torch.contiguous_format)
    else:
        assert a.word_table is not None
        h = F.embedding(checked("word_table", words, a.word_table), a.word_table).to(work)
    if a.token_type_ids is None:
        h += a.type_table[0]
    else:
        _add_rows(h, checked("type_table", a.token_type_ids, a.type_table), a.type_table)
    if a.position_table is not None:
        assert a.position_ids is not None
        _add_rows(h, checked("position_table", a.position_ids, a.position_table), a.position_table)
    return h, used, exists


def _add_rows(h: Tensor, ids: Tensor, table: Tensor) -> None:
    """h += table[ids]; on the CPU by chunks, so that what is looked up stays in the cache instead of fresh memory."""
    if len(h) <= _CHUNK_TOKENS or not _is_on_cpu(h):
        h += F.embedding(ids, table)
        return
    for part, part_ids in zip(h.split(_CHUNK_TOKENS), ids.split(_CHUNK_TOKENS), strict=True):
        part += F.embedding(part_ids, table)


def embedding_fwd(a: Embedding) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd), as `reference.embedding`. On a device a token with an id out of range gets a row of NaN."""
    h, _, exists = _sum(a)
    y, mean, rstd = torch.native_layer_norm(h, h.shape[-1:], wide(a.weight), wide(a.bias), a.eps)
    mean, rstd = mean.squeeze(-1), rstd.squeeze(-1)
    if rstd.is_cpu and not rstd.all():
        y, rstd = with_overflows(y, rstd)
    if dropout_threshold(a.dropout_p) > 0 and len(y):
        y = dropout_fwd(y, a.dropout_p, a.seed, a.coords, a.site)
    if exists is not None:
        y, mean, rstd = (t.masked_fill(~(exists[:, None] if t is y else exists), torch.nan) for t in (y, mean, rstd))
    return y.to(a.out_dtype), mean, rstd


def embedding_bwd(
    a: Embedding, dy: Tensor, mean: Tensor, rstd: Tensor, wants: Set[str] = LOOKED_UP
) -> dict[str, Tensor]:
    """Gradients by name, as `reference.embedding`; h is looked up again."""
    h, used, exists = _sum(a)
    dn = dy.to(h.dtype)
    if dropout_threshold(a.dropout_p) > 0 and len(dn):
        dn = dropout_bwd(dn, a.dropout_p, a.seed, a.coords, a.site)
    if exists is not None:  # what looked nothing up counts nowhere
        dn = dn.masked_fill(~exists[:, None], 0.0)
        mean, rstd = (t.masked_fill(~exists, 0.0) for t in (mean, rstd))
    wide_weight = wide(a.weight)
    dh, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dn, h, h.shape[-1:], mean.unsqueeze(1), rstd.unsqueeze(1), wide_weight, wide_weight, [True] * 3
    )
    del h, dn

    made = {"weight": dweight.to(a.weight.dtype), "bias": dbias.to(a.weight.dtype)}
    if "words" in wants and "word_table" not in used:
        made["words"] = dh.to(a.words.dtype)
    for name in wants & used.keys():
        padding_idx = a.padding_idx if name == "word_table" else None
        made[name] = _table_gradient(dh, used[name], getattr(a, name), padding_idx)
    if "type_table" in wants and a.token_type_ids is None:
        made["type_table"] = torch.zeros_like(a.type_table)
        made["type_table"][0] = dh.sum(0)
    return made


def _table_gradient(dh: Tensor, ids: Tensor, table: Tensor, padding_idx: int | None) -> Tensor:
    """Sum of dh (fp32 or fp64) over the tokens of each row, in the table's dtype; the same bits every run."""
    if _is_on_cpu(dh) and table.nbytes >= _LARGE_TABLE and table.dtype == dh.dtype:
        total = zeros_on_touch(table.shape, dh.dtype)
        rows, places = ids.unique(return_inverse=True)
        # One sum for a row that was looked up often, in the order of the tokens, as in a small table.
        sums = torch.ops.aten.embedding_dense_backward(dh, places, len(rows), -1, False)
        if padding_idx is not None:
            sums.masked_fill_((rows == padding_idx).unsqueeze(1), 0.0)
        total.index_copy_(0, rows.long(), sums)
    elif _is_on_cpu(dh):  # every thread owns some rows of the table
        padding = -1 if padding_idx is None else padding_idx
        total = torch.ops.aten.embedding_dense_backward(dh, ids, len(table), padding, False)
    else:  # index_put_ sorts the ids and adds in their order; index_add_ and the like add in any order
        total = torch.zeros(table.shape, dtype=dh.dtype, device=dh.device)
        total.index_put_((ids.long(),), dh, accumulate=True)
        if padding_idx is not None:
            total[padding_idx] = 0.0
    return total.to(table.dtype)
