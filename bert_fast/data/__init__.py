"""From text to batches."""

from bert_fast.data.batches import Batches, Source
from bert_fast.data.examples import Examples
from bert_fast.data.packed_collator import PackedCollator
from bert_fast.data.pretraining import PretrainingSource
from bert_fast.data.token_store import TokenStore
from bert_fast.data.tokenize_files import tokenize_files

__all__ = [
    "Batches",
    "Examples",
    "PackedCollator",
    "PretrainingSource",
    "Source",
    "TokenStore",
    "tokenize_files",
]
