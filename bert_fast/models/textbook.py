"""The slow path: what the fused ops do not compute runs on the reference model, on the same parameters.

That is head_mask, attention masks of three or four dimensions, and attention probabilities. Results and gradients are
the reference's; dropout masks are the same for the same seed.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn

from bert_fast.modules.attention import BertSelfAttention
from bert_fast.reference.model import ReferenceBertModel

if TYPE_CHECKING:
    from bert_fast.models.bert import BertModel

__all__ = ["textbook"]


def textbook(model: "BertModel") -> ReferenceBertModel:
    """A reference model whose parameters are those of `model`, by identity, in the same mode.

    Made anew for every call (a few milliseconds, no memory): parameters that were replaced meanwhile stay in step.
    """
    with torch.device("meta"):
        reference = ReferenceBertModel(model.config, add_pooling_layer=model.pooler is not None)
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        owner: nn.Module = reference.get_submodule(path)
        setattr(owner, leaf, parameter)
    for name, module in model.named_modules():
        if isinstance(module, BertSelfAttention):  # fewer heads than the configuration says, where some are pruned
            reference.get_submodule(name).num_heads = module.num_heads  # type: ignore[assignment]
    return reference.train(model.training)
