"""Cases of dropout: the pooled sequences and tokens that heads drop from."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.aot.case import AotCase, KernelFacts
from benchmarks.kernels.case import KernelCase, Problem, Use, dtype_name
from benchmarks.kit import bert
from bert_fast import ops
from bert_fast.reference.dropout import dropout_fwd
from bert_fast.testing.compare import assert_same_values

_P, _SITE = 0.1, 6


def cases() -> Iterator[KernelCase]:
    """A batch's first tokens, and all of its tokens; a few rows of an odd width, and of BERT's."""
    base = bert.BASE.hidden
    for uses, num_tokens in ((Use.GPU, 32), (Use.GPU | Use.SMOKE, bert.FEWEST_TOKENS), (Use.GPU, bert.TOKENS[0])):
        yield _case(uses, num_tokens, base, torch.bfloat16)
    yield _case(Use.CPU, bert.FEWEST_TOKENS, base, torch.float32)
    yield _case(Use.SMALL, bert.FEW_ROWS, 101, torch.float32)
    yield _case(Use.SMALL, bert.FEW_ROWS, base, torch.bfloat16)


def _case(uses: Use, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> KernelCase:
    make_it = partial(make, num_tokens, hidden_size, dtype)
    return KernelCase("dropout", f"{num_tokens}x{hidden_size}", dtype, f"p{_P}", make_it, uses)


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
        """What the reference makes of them on the Use.CPU, in every bit; PyTorch's own masks are others."""
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
    for dtype in bert.DTYPES:
        yield _aot_case(bert.BASE.hidden, dtype)
    yield _aot_case(bert.LARGE.hidden, torch.bfloat16)


def _aot_case(hidden_size: int, dtype: torch.dtype) -> AotCase:
    from bert_fast.triton import dropout as family

    def launch() -> None:
        x, coords = torch.zeros(64, hidden_size, dtype=dtype), torch.zeros(64, 2, dtype=torch.int32)
        family.dropout_fwd(x, _P, torch.zeros(1, dtype=torch.int64), coords, _SITE)

    facts = KernelFacts(8 * 32 * 16 // dtype.itemsize, 2 * dtype.itemsize)
    return AotCase(f"H={hidden_size} {dtype_name(dtype)}", launch, {"_dropout_kernel": facts})
