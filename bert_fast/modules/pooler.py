"""The pooled sequence: tanh(dense(first token))."""

from typing import Any

from torch import Tensor, nn

from bert_fast.modules.call import Call
from bert_fast.modules.fusable import activated_linear


class PackedPooler:
    """The computation of BertPooler, for any module that has its linear layer."""

    dense: nn.Linear

    def forward_packed(self, first_tokens: Tensor, *, call: Call) -> Tensor:
        """[B, H] to [B, H]."""
        return activated_linear(first_tokens, self.dense, "tanh")


class BertPooler(PackedPooler, nn.Module):
    """tanh(dense(first token)); parameters named as in Hugging Face's BertPooler."""

    forward = PackedPooler.forward_packed

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
