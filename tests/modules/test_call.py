"""The layout of the rows that a head reads, as on a device that nobody asks for values."""

import torch

from bert_fast.modules.call import Call, first_rows
from bert_fast.ops.packing import Packing


def test_queries_of_sequences_without_tokens_are_within_the_layout() -> None:
    """All but the first of these 40 sequences are empty and name the last token: 40 queries of a sequence of 3."""
    cu_seqlens = torch.full((41,), 3, dtype=torch.int32)
    cu_seqlens[0] = 0
    on_cpu = Packing(cu_seqlens, 3, torch.zeros(3, 2, dtype=torch.int32), None, None)
    packing = Packing(cu_seqlens.to("meta"), 3, on_cpu.coords.to("meta"), None, None)
    rows = first_rows(packing)
    layout = Call(packing).with_rows(rows).queries
    assert rows.shape == (40,) and layout.max_seqlen == 40
    assert Call(on_cpu).with_rows(torch.tensor([0] + [2] * 39)).queries.max_seqlen == 40
    assert Call(on_cpu).with_rows(first_rows(on_cpu)).queries.max_seqlen == 1
