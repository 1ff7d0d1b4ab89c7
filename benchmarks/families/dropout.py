"""Cases of dropout: the pooled sequences and tokens that heads drop from."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.case import AotCase, KernelCase, Problem, dtype_name
from benchmarks.kit import bert
from bert_fast import ops
from bert_fast.reference.dropout import dropout_fwd
from bert_fast.testing.compare import assert_same_values

_P, _SITE = 0.1, 6


def cases() -> Iterator[KernelCase]:
    """bf16: a batch's first tokens, and all of its tokens."""
    for num_tokens in (32, 4096, 16384):
        yield _case(num_tokens, 768, torch.bfloat16)


def smoke_cases() -> Iterator[KernelCase]:
    """BERT-base."""
    yield _case(4096, 768, torch.bfloat16)


def small_cases() -> Iterator[KernelCase]:
    """A few rows: a width that is no multiple of anything, and BERT's."""
    yield _case(37, 101, torch.float32)
    yield _case(37, 768, torch.bfloat16)


def cpu_cases() -> Iterator[KernelCase]:
    """A training batch of BERT-base."""
    yield _case(bert.CPU_TOKENS, 768, torch.float32)


def _case(num_tokens: int, hidden_size: int, dtype: torch.dtype) -> KernelCase:
    return KernelCase(
        "dropout", f"{num_tokens}x{hidden_size}", dtype, f"p{_P}",
        lambda device: make(num_tokens, hidden_size, dtype, device),
    )  # fmt: skip


def make(num_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Problem:
    """[T, H], every token of a row of its own."""
    x = bert.normal(num_tokens, hidden_size, dtype=dtype, device=device).requires_grad_()
    upstream = bert.normal(num_tokens, hidden_size, dtype=dtype, device=device)
    seed = torch.tensor([77], device=device)
    row = torch.arange(num_tokens, dtype=torch.int32, device=device)
    coords = torch.stack((row, torch.zeros_like(row)), 1)

    def fast(x: Tensor) -> Tensor:
        return ops.dropout(x, _P, seed=seed, coords=coords, site=_SITE)

    def verify() -> None:
        """What the reference makes of them on the CPU, in every bit; PyTorch's own masks are others."""
        y = fast(x)
        (dx,) = torch.autograd.grad(y, x, upstream)
        for name, actual, given in (("y", y, x), ("dx", dx, upstream)):
            expected = dropout_fwd(given.detach().cpu(), _P, seed.cpu(), coords.cpu(), _SITE)
            assert_same_values("dropout", name, actual, expected)

    moved = 2 * x.nbytes + coords.nbytes
    return Problem(
        (x,), upstream, fast, lambda x: F.dropout(x, _P), verify=verify, bytes_moved={"fwd": moved, "bwd": moved}
    )


def aot_cases() -> Iterator[AotCase]:
    """BERT's widths."""
    from bert_fast.triton import dropout as family

    shapes = [(768, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    for hidden_size, dtype in [*shapes, (1024, torch.bfloat16)]:

        def launch(h: int = hidden_size, dtype: torch.dtype = dtype) -> None:
            x, coords = torch.zeros(64, h, dtype=dtype), torch.zeros(64, 2, dtype=torch.int32)
            family.dropout_fwd(x, _P, torch.zeros(1, dtype=torch.int64), coords, _SITE)

        live = {"_dropout_kernel": 8 * 32 * 16 // dtype.itemsize}
        name = f"H={hidden_size} {dtype_name(dtype)}"
        yield AotCase(name, None, launch, live, {}, {"_dropout_kernel": 2 * dtype.itemsize})
