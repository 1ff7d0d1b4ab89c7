"""BERTs of Hugging Face's `transformers` on the kernels of bert_fast, in place; nothing here loads it before a call."""

from bert_fast.huggingface.attention import register_attention
from bert_fast.huggingface.fusing import fuse, unfuse, why_not
from bert_fast.huggingface.patching import Patch, patch_transformers

__all__ = ["Patch", "fuse", "patch_transformers", "register_attention", "unfuse", "why_not"]
