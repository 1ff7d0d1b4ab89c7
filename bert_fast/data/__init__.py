"""From text to batches."""

from bert_fast.data.packed_collator import PackedCollator

__all__ = ["PackedCollator"]
