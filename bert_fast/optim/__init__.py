"""Optimizers: AdamW and LAMB as `torch.optim.Optimizer`s on the multi-tensor ops of `bert_fast.ops.optimizer`."""

from bert_fast.optim.adamw import AdamW
from bert_fast.optim.groups import weight_decay_groups
from bert_fast.optim.lamb import Lamb, make_lamb

__all__ = ["AdamW", "Lamb", "make_lamb", "weight_decay_groups"]
