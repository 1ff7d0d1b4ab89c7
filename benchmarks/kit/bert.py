"""What the families of matrix products share: BERT's sizes, token counts, and tensors of the scale that a model has."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BASE", "CPU_TOKENS", "LABEL_SHARE", "LARGE", "MINILM", "SIZES", "TOKENS", "VOCAB_SIZE", "Size", "bias"]
__all__ += ["nbytes", "normal", "tolerances_of", "weight"]

TOKENS = (16384, 4096, 32768)  # the most telling first
CPU_TOKENS = 4096
VOCAB_SIZE = 30522
LABEL_SHARE = 0.15  # of tokens that masked-language-model training asks for (Devlin et al. 2019, section 3.1)


@dataclass(frozen=True)
class Size:
    """Widths of a published BERT."""

    name: str
    hidden: int
    intermediate: int


BASE = Size("base", 768, 3072)
LARGE = Size("large", 1024, 4096)
MINILM = Size("minilm", 384, 1536)
SIZES = (BASE, LARGE)


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


def tolerances_of(op: str, device: torch.device) -> str:
    """The name under which the table of tolerances has an op's results on a device."""
    return "product_on_cpu" if device.type == "cpu" else op
