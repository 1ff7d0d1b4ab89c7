"""Cases of attention with all that may be added: a bias of each head, relative positions."""

import torch
from torch import Tensor

from benchmarks.kernels.case import KernelCase, Problem, assert_gradients_close
from bert_fast.testing.attention import AttentionCase


def tolerances_of(device: torch.device) -> str:
    """The name under which the table of tolerances has attention's results on a device."""
    return "triton_attention_on_gpu" if device.type == "cuda" else "attention"


def with_extras(
    lengths: tuple[int, ...], num_heads: int, head_dim: int, dtype: torch.dtype, relative: str, dropout_p: float
) -> KernelCase:
    """A case with gradients of the bias and of the table of distances."""
    attention = AttentionCase(lengths, None, num_heads, head_dim, dropout_p, bias="AQK", relative=relative)
    shape, variant = f"{sum(lengths)}x{num_heads}x{head_dim}", f"{relative} bias p{dropout_p}"
    return KernelCase("attention", shape, dtype, variant, lambda device: make(attention, dtype, device))


def make(attention: AttentionCase, dtype: torch.dtype, device: torch.device) -> Problem:
    """The case's own tensors. eager is the torch back-end, and so is what errors are held against."""
    tensors = {name: t.to(device) for name, t in attention.inputs(dtype).items()}
    upstream = tensors.pop("dout")
    names, inputs = tuple(tensors), tuple(t.requires_grad_() for t in tensors.values())

    def fast(*given: Tensor) -> Tensor:
        return attention.attend(None, dict(zip(names, given, strict=True)))

    def eager(*given: Tensor) -> Tensor:
        backend = "reference" if given[0].dtype == torch.float64 else "torch"
        return attention.attend(backend, dict(zip(names, given, strict=True)))

    def verify() -> None:
        outputs = ("out", *(f"d{name}" for name in names))
        assert_gradients_close(tolerances_of(device), outputs, fast, eager, inputs, upstream)

    given, made = sum(t.nbytes for t in inputs), upstream.nbytes
    return Problem(
        inputs, upstream, fast, eager, verify=verify, bytes_moved={"fwd": given + made, "bwd": 2 * given + 2 * made}
    )
