"""One BERT layer on packed tokens: attention, then the MLP; parameters named as in Hugging Face's BertLayer."""

from typing import Any

import torch
from torch import Tensor, nn

from bert_fast.modules.activated_linear import activated_linear
from bert_fast.modules.attention import BertAttention, BertSelfOutput
from bert_fast.ops.dropout import DropoutSite
from bert_fast.ops.packing import Packing

__all__ = ["MLP_CHUNK_TOKENS", "BertIntermediate", "BertLayer"]

# Without gradients nothing of size [T, I] must survive, so on the CPU the MLP runs over chunks of tokens that stay in
# the cache: 4,096 tokens of BERT-base's MLP took 370 ms in chunks of 1,024, 376 ms of 512, 412 ms whole (one Zen 4
# core, 32 MB L3, medians of 7 interleaved rounds).
MLP_CHUNK_TOKENS = 1024


class BertIntermediate(nn.Module):
    """act(dense(x)): the widening half of the MLP."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.hidden_act = config.hidden_act

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] to [T, I]."""
        return activated_linear(x, self.dense, self.hidden_act)


class BertLayer(nn.Module):
    """x -> LN(x + attention(x)) -> LN(. + MLP(.)): post-LayerNorm, as published (Devlin et al. 2019)."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.attention = BertAttention(config, layer)
        self.intermediate = BertIntermediate(config)
        self.output = BertSelfOutput(config.intermediate_size, config, DropoutSite.MLP_OUTPUT, layer)

    def forward(self, x: Tensor, packing: Packing, seed: Tensor | None) -> Tensor:
        """[T, H] to [T, H]."""
        x = self.attention(x, packing, seed)
        # Compiled graphs must not depend on the number of chunks.
        is_whole = torch.is_grad_enabled() or x.device.type != "cpu" or torch.compiler.is_compiling()
        if is_whole or len(x) <= MLP_CHUNK_TOKENS:
            return self._mlp(x, packing.coords, seed)
        chunks = zip(x.split(MLP_CHUNK_TOKENS), packing.coords.split(MLP_CHUNK_TOKENS), strict=True)
        return torch.cat([self._mlp(chunk, coords, seed) for chunk, coords in chunks])

    def _mlp(self, x: Tensor, coords: Tensor, seed: Tensor | None) -> Tensor:
        return self.output(self.intermediate(x), x, coords, seed)
