"""From text to batches."""

from bert_fast.data.packed_collator import PackedCollator
from bert_fast.data.token_store import TokenStore
from bert_fast.data.tokenize_files import tokenize_files

__all__ = ["PackedCollator", "TokenStore", "tokenize_files"]
