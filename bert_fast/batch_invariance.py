"""The same bits for a text in every batch: who asks for it, and what to say where it can't be had.

A product's sums run in an order that depends on its tile, attention's on how many keys a program takes at once; both
are chosen by how many tokens there are, so that none works for nothing. Within `batch_invariant` they are chosen by the
weights alone (`triton/_gemm_tiles.py`, `triton/attention.py`), and a text's results depend on nothing but itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from bert_fast.errors import BackendError

# Of this thread and asyncio task.
ASKED: ContextVar[bool] = ContextVar("bert_fast.batch_invariant", default=False)


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Within the context a text's results have the same bits in every batch, on a GPU.

    They depend neither on the other texts of the batch and their number, nor on order, padding or the longest text.
    That is so of hidden states and of what our heads make of them, in forward passes without dropout by Triton's
    kernels on one kind of GPU, in fp32, fp16 and bf16, whether gradients are recorded or not; not of losses and
    gradients. Products are then never the library's, small batches are worked on in tiles that they do not fill, short
    texts in the loop for long ones. Layers that are more than an `nn.Linear` (adapters, quantised ones), and heads and
    whole calls that a fused model leaves to transformers' code, promise nothing.

    On the CPU hidden states in evaluation, without gradients, are such anyway (docs/serving.md). Within the context
    they are with gradients too, and so is what our heads make of them, in fp32, where the C++ extension has AVX2 or
    AVX-512.

    The choice is that of a thread or asyncio task, when a kernel is launched; a CUDA graph keeps what it was captured
    with, and what `torch.compile` traced its heads'.

    Raises:
        BackendError: within the context, where products or attention on a GPU would be the back-end torch's.

    Example:
        >>> with bert_fast.batch_invariant():
        ...     y = ops.linear(torch.ones(2, 4), torch.ones(3, 4), None)
        >>> y.tolist()
        [[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]
    """
    token = ASKED.set(True)
    try:
        yield
    finally:
        ASKED.reset(token)


def is_asked() -> bool:
    """`ASKED`, for code that `torch.compile` traces, which cannot read it and takes what it holds as it traces."""
    return ASKED.get()


is_asked._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in `backend.py`


def refuse_on_gpu(op: str, x: Tensor) -> None:
    """BackendError where a caller asked for the same bits of an op that PyTorch's operators are to compute on a GPU."""
    if x.is_cuda and ASKED.get():
        raise BackendError(
            f"{op}: within batch_invariant() expected the back-end 'triton' on {x.device}, got 'torch', whose products "
            "depend on the number of rows; bert_fast.explain says why"
        )
