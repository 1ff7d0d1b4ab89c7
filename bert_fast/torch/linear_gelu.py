"""act(x W^T + b): one library GEMM and PyTorch's activation; backward: its derivative and two GEMMs."""

from collections.abc import Set

from torch import Tensor

from bert_fast.reference.bias_gelu import BiasGelu
from bert_fast.reference.linear_gelu import LinearGelu
from bert_fast.torch._gemm import linear
from bert_fast.torch.bias_gelu import bias_gelu_bwd, bias_gelu_fwd
from bert_fast.torch.linear import linear_bwd


def linear_gelu_fwd(a: LinearGelu) -> tuple[Tensor, Tensor | None]:
    """(y, pre), as `reference.linear_gelu`, of pre as rounded to the dtype of x."""
    pre = linear(a.x, a.weight, a.bias)
    return bias_gelu_fwd(BiasGelu(pre, None, a.hidden_act)), pre if a.save_pre else None


def linear_gelu_bwd(a: LinearGelu, dy: Tensor, pre: Tensor | None, wants: Set[str]) -> dict[str, Tensor]:
    """Gradients by name, as `reference.linear_gelu`."""
    if pre is None:
        pre = linear(a.x, a.weight, a.bias)
    dpre = bias_gelu_bwd(BiasGelu(pre, None, a.hidden_act), dy)["x"]
    return linear_bwd(a.product, dpre, wants)
