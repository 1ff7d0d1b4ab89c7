"""What cases of BERT share: published sizes, token counts, and tensors of the scale that a model has."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FEWEST_TOKENS = 4096  # of a training batch; what is timed on a CPU, and launched by the smoke run
TOKENS = (16384, FEWEST_TOKENS, 32768)  # the most telling first
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FEW_ROWS = 37  # what a CPU gets through in moments
KERNEL_ROWS = 130  # few, but as many as our kernel of matrix products asks for
VOCAB_SIZE = 30522
LABEL_SHARE = 0.15  # of tokens that masked-language-model training asks for (Devlin et al. 2019, section 3.1)


@dataclass(frozen=True)
class Size:
    """Widths of a BERT; layers and heads, where whole models are made of it."""

    name: str
    hidden: int
    intermediate: int
    layers: int = 0
    heads: int = 0

    @property
    def encoder_flops_per_token(self) -> int:
        """Forward flops of the matrix products of one token, without attention scores: 2 per parameter."""
        return 2 * self.layers * (4 * self.hidden**2 + 2 * self.hidden * self.intermediate)

    def training_flops(self, lengths: list[int], num_labels: int, vocab_size: int) -> int:
        """Flops of the matrix products of masked words on sequences without padding: forward, and twice that backward.

        num_labels: words to predict, on which alone the head runs.
        """
        encoder = sum(lengths) * self.encoder_flops_per_token
        scores = sum(length**2 for length in lengths) * 4 * self.hidden * self.layers
        words = num_labels * 2 * self.hidden * (self.hidden + vocab_size)
        return 3 * (encoder + scores + words)

    def config(self, kind: Any, **options: Any) -> Any:
        """Configuration of a model, ours or transformers'."""
        sizes = dict(
            vocab_size=VOCAB_SIZE, hidden_size=self.hidden, intermediate_size=self.intermediate,
            num_hidden_layers=self.layers, num_attention_heads=self.heads,
        )  # fmt: skip
        return kind(**sizes | options)


BASE = Size("base", 768, 3072, 12, 12)
BASE6 = Size("base6", 768, 3072, 6, 12)  # 6 of its layers, as DistilBERT has
LARGE = Size("large", 1024, 4096, 24, 16)
MINILM = Size("minilm", 384, 1536, 6, 12)
TINY = Size("tiny", 32, 64, 2, 2)
SIZES = (BASE, LARGE)
HIDDEN_SIZES = (MINILM.hidden, BASE.hidden, LARGE.hidden)
WIDEST = (2048, 4096, 8192)  # hidden sizes beyond BERT's, up to the widest that rows' kernels take
BY_NAME = {size.name: size for size in (MINILM, BASE, BASE6, LARGE, TINY)}


def normal(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal values, drawn in fp32 and rounded."""
    return torch.randn(*shape, device=device).to(dtype)


def weight(n: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[N, K] that gives outputs of size 1 for inputs of size 1; wants a gradient."""
    return (torch.randn(n, k, device=device) / math.sqrt(k)).to(dtype).requires_grad_()


def bias(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[N], a tenth of the outputs' size; wants a gradient."""
    return (0.1 * torch.randn(n, device=device)).to(dtype).requires_grad_()


def nbytes(*tensors: Tensor) -> int:
    """Bytes of all of them together."""
    return sum(tensor.nbytes for tensor in tensors)


def product_bytes(inputs: tuple[Tensor, ...], upstream: Tensor, kept: int = 0) -> dict[str, int]:
    """Floor of matrix products of these inputs, forward and backward; kept: bytes written by one, read by the other."""
    matrices = [t for t in inputs if t.dim() == 2]
    return {
        "fwd": nbytes(*inputs, upstream) + kept,
        "bwd": nbytes(*inputs, *matrices, upstream) + kept,  # operands are read, all gradients written
    }


def tolerances_of(op: str, device: torch.device) -> str:
    """The name under which the table of tolerances has an op's results on a device."""
    return "product_on_cpu" if device.type == "cpu" else op
