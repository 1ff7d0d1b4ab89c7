"""CUDA graphs of whole training steps on packed batches.

A graph replays the kernels of one call, with the same shapes at the same addresses, so that the host's part of a step
shrinks to one launch. Packed batches have another number of tokens each time; a budget bounds them, and what a batch
does not use of it is filled with sequences that no label asks about:

    max_tokens = 8, max_seqlen = 3     input_ids  = [5, 6, 7, 8, 9 | 0, 0, 0]          labels = [.. | -100, -100, -100]
    batch: lengths 2, 3                cu_seqlens = [0, 2, 5 | 8, 8, ...]

    step = graphs.CapturedStep(train, [graphs.Budget(max_tokens=16384, max_sequences=128, max_seqlen=512)])
    for batch in loader:               # of `data.PackedCollator` or `tokenizer.pack`
        loss = step(batch)             # forward, backward and optimizer; fresh dropout every time
"""

from bert_fast.graphs.budgets import Budget, budgets_for
from bert_fast.graphs.buffers import TokenBuffers
from bert_fast.graphs.encoders import EncoderGraphs
from bert_fast.graphs.steps import CapturedStep, check_device

__all__ = ["Budget", "CapturedStep", "EncoderGraphs", "TokenBuffers", "budgets_for", "check_device"]
