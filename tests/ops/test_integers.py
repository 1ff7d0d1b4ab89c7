"""Integer arguments of public ops: integers of any kind are taken as they are, nothing else is made one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bert_fast import ops

X, WEIGHT, TABLE, IDS = torch.randn(4, 8), torch.randn(8), torch.randn(4, 8), torch.tensor([1, 2, 0, 3])
COORDS, CU, QKV = torch.zeros(4, 2, dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32), torch.randn(4, 3, 2, 4)
DROPOUT: dict[str, Any] = dict(dropout_p=0.5, seed=torch.tensor([1]), coords=COORDS)
PADDED = QKV.unsqueeze(0)


def coords_of(packing: ops.Packing) -> Tensor:
    return packing.coords


# name -> (a call with the integer, its argument, an integer that fits)
CALLS: dict[str, tuple[Callable[[Any], Tensor], str, int]] = {
    "dropout": (lambda n: ops.dropout(X, site=n, **DROPOUT), "site", 3),
    "dropout_add_layer_norm": (
        lambda n: ops.dropout_add_layer_norm(X, X, WEIGHT, WEIGHT, site=n, **DROPOUT), "site", 3
    ),
    "without dropout": (lambda n: ops.dropout_add_layer_norm(X, X, WEIGHT, WEIGHT, site=n), "site", 3),
    "embedding": (lambda n: ops.embedding(IDS, TABLE, TABLE, WEIGHT, WEIGHT, site=n, **DROPOUT), "site", 3),
    "padding_idx": (lambda n: ops.embedding(IDS, TABLE, TABLE, WEIGHT, WEIGHT, padding_idx=n), "padding_idx", 2),
    "attention": (
        lambda n: ops.attention(*QKV.unbind(1), cu_seqlens_q=CU, max_seqlen_q=n), "max_seqlen_q", 4
    ),
    "attention_qkv": (lambda n: ops.attention_qkv(QKV, cu_seqlens=CU, max_seqlen=n), "max_seqlen", 4),
    "attention_qkv: site": (
        lambda n: ops.attention_qkv(QKV, cu_seqlens=CU, max_seqlen=4, site=n, **DROPOUT), "site", 3
    ),
    "attention_padded": (
        lambda n: ops.attention_padded(*PADDED.unbind(2), first_position=n, causal=True), "first_position", 0
    ),
    "cross_entropy": (lambda n: ops.cross_entropy(X, IDS, ignore_index=n), "ignore_index", -100),
    "linear_cross_entropy": (
        lambda n: ops.linear_cross_entropy(X, TABLE, None, IDS, ignore_index=n), "ignore_index", 3
    ),
    "max_seqlen": (lambda n: coords_of(ops.Packing.from_cu_seqlens(CU, n, 4)), "max_seqlen", 4),
    "num_tokens": (lambda n: coords_of(ops.Packing.from_cu_seqlens(CU, 4, n)), "num_tokens", 4),
    "length": (lambda n: coords_of(ops.Packing.full(2, n, torch.device("cpu"))), "length", 3),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_numpy_integers_are_integers(name: str) -> None:
    call, _, fits = CALLS[name]
    for kind in (np.int64, np.int32, np.int8):
        assert torch.equal(call(kind(fits)), call(fits))


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_integer_is_refused(name: str) -> None:
    call, argument, fits = CALLS[name]
    for wrong in (fits + 0.5, float(fits), True, str(fits), np.float32(fits), None):
        if wrong is None and name == "padding_idx":
            continue
        with pytest.raises(TypeError, match=rf"^{argument}: expected an int, got {type(wrong).__name__}$"):
            call(wrong)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("bits", [64, 100])
def test_integers_of_too_many_bits_are_refused(name: str, bits: int) -> None:
    call, argument, _ = CALLS[name]
    for number in (2**bits, -(2**bits)):
        with pytest.raises(ValueError, match=rf"^{argument}: expected an int of at most 64 bits, got {number}$"):
            call(number)
